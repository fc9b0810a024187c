"""ClickEvaluator: how well commits of a click model tell liked events from others, beside its two baselines.

AUC and log loss of the held-out events' chances, each asked of what its user did before it. Chances are kept a file a
subject, so that any two subjects can be compared by a paired bootstrap over users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nonet.models.deepfm import ClickModel, compare_clicks, predict_baseline, summarise_clicks
from nonet.models.generation import read_items
from nonet.samples.batches import ClickRows
from nonet.samples.sequences import TEST, VALID, Sequences
from nonet.workers import select_validation_events
from nonet.workers.roles import RunSetup
from nonet.workers.roles.evaluation import EvaluateSetup
from nonet.workers.runtime import DistributeWorker, Replicate, method

# Shapes: P held-out events.

_SPLITS = {"valid": VALID, "test": TEST}


class ClickEvaluator(DistributeWorker):
    """Rank 0 of the evaluator group of a click model's run."""

    def __init__(self, run: RunSetup, setup: EvaluateSetup):
        self.run, self.ask = run, setup

    @method(folders=Replicate)
    def open(self, folders: Mapping[str, str], results: str) -> None:
        """Open the events; chances go to the folder `results`."""
        seq, self._results = Sequences.load(folders["sequences"]), Path(results)
        self._results.mkdir(parents=True, exist_ok=True)
        label = seq.targets[self.ask.target or ""]
        self._clicks = ClickRows.from_labels(
            seq, read_items(folders), label, list(self.run.features), self.run.history
        )

    @method(collect="first")
    def baseline(self, name: str) -> dict[str, Any]:
        """Fit a baseline on the training events and ask it: {"detail": {split: ...}, "shown": []}."""
        index = {split: self._clicks.find_rows(code) for split, code in _SPLITS.items()}
        chances = predict_baseline(name, self._clicks, np.concatenate(list(index.values())))
        cut = len(index["valid"])
        return self._summary(name, {"valid": chances[:cut], "test": chances[cut:]})

    @method(collect="first")
    def evaluate(self, name: str, folder: str) -> dict[str, Any]:
        """The same for the model of a commit."""
        model = ClickModel(Path(folder))
        chances = {
            split: model.predict_events(self._clicks, self._clicks.find_rows(code))
            for split, code in _SPLITS.items()
        }
        return self._summary(name, chances)

    @method(collect="first")
    def validate(self, name: str, folder: str) -> dict[str, Any]:
        """Ask a commit of the stage `name` about the validation events of at most 2,000 users, while the stage goes on:
        {"metrics", "nats": mean log loss, "events": how many}."""
        rows = self._clicks.find_rows(VALID)
        rows = rows[select_validation_events(self._clicks.seq.user[rows], self.run.seed)]
        chances = ClickModel(Path(folder)).predict_events(self._clicks, rows)
        np.savez(self._results / f"{name}.valid.{Path(folder).name}.npz", chances=chances, rows=rows)
        every = summarise_clicks(chances, self._clicks.label[rows])
        metrics = {metric: every[metric] for metric in self.ask.metrics}
        return {"metrics": metrics, "nats": every["log_loss"], "events": len(rows)}

    @method(collect="first")
    def compare_validated(self, name: str, a: str, b: str) -> dict[str, dict[str, float]]:
        """Compare two checkpoints of a stage on the validation events, as `Evaluator.compare_validated` does."""
        files = [self._results / f"{name}.valid.{folder}.npz" for folder in (a, b)]
        if not all(file.exists() for file in files):
            return {}
        ours, theirs = (dict(np.load(file)) for file in files)
        rows = ours["rows"]
        if not np.array_equal(rows, theirs["rows"]):
            return {}
        label, user = self._clicks.label[rows], self._clicks.seq.user[rows]
        return compare_clicks(ours["chances"], theirs["chances"], label, user, self.run.seed)

    @method(collect="first", pairs=Replicate)
    def compare(self, pairs: Sequence[tuple[str, str]]) -> dict[str, dict[str, dict[str, float]]]:
        """Paired bootstrap over users on all test events, for each (a, b): {"a-b": {metric: {diff, low, high}}}."""
        rows = self._clicks.find_rows(TEST)
        label, user = self._clicks.label[rows], self._clicks.seq.user[rows]
        differences = {}
        for a, b in pairs:
            ours, theirs = (np.load(self._results / f"{name}.npz")["test"] for name in (a, b))
            every = compare_clicks(ours, theirs, label, user, self.run.seed)
            differences[f"{a}-{b}"] = {metric: every[metric] for metric in self.ask.metrics}
        return differences

    @method(collect="first")
    def shown(self) -> list[dict[str, Any]]:
        """Nobody: a click model recommends no lists."""
        return []

    def _summary(self, name: str, chances: Mapping[str, np.ndarray]) -> dict[str, Any]:
        arrays: dict[str, Any] = dict(chances)
        np.savez(self._results / f"{name}.npz", **arrays)
        detail = {}
        for split, split_chances in chances.items():
            if len(split_chances):
                every = summarise_clicks(
                    split_chances, self._clicks.label[self._clicks.find_rows(_SPLITS[split])]
                )
                metrics = {metric: every[metric] for metric in self.ask.metrics}
                detail[split] = {"exhaustive": {"all": metrics}}
        return {"detail": detail, "shown": []}
