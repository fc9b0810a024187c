"""ClickEvaluator: measures how well checkpoints of a click model and two baselines predict the labels of held-out events.

The metrics are AUC and log loss of the predicted probabilities. A probability is predicted from the user's earlier events only.
Probabilities are stored in one file per subject, so that any two subjects can be compared by a paired bootstrap over users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nonet.atomic import write_arrays
from nonet.models.clicks import ClickModel, compare_clicks, predict_baseline, summarise_clicks
from nonet.samples.sequences import TEST, VALID, Sequences
from nonet.workers import select_validation_events
from nonet.workers.roles import RunSetup
from nonet.workers.roles.click.data import ClickData
from nonet.workers.roles.evaluation import Evaluate
from nonet.workers.runtime import DistributeWorker, Replicate, method

# Shapes: P held-out events.

_SPLITS = {"valid": VALID, "test": TEST}


class ClickEvaluator(DistributeWorker):
    """Rank 0 of the evaluator group of a click model's run."""

    def __init__(self, run: RunSetup, options: Evaluate):
        self.run, self.options = run, options

    @method(folders=Replicate)
    def open(self, folders: Mapping[str, str], results: str) -> None:
        """Load the sequences and the labels of their events.

        Args:
            folders: Folders of the artifacts.
            results: Folder in which predicted probabilities are stored.
        """
        self.corpus, self._results = ClickData(self.run, folders), Path(results)
        self._results.mkdir(parents=True, exist_ok=True)
        self._fitted = self._clicks = self.corpus.label_events(self.run.target)

    def set_events(self, seq: Sequences) -> None:
        """Evaluate on the held-out events of other sequences over the same items from now on; baselines stay as fitted."""
        self.corpus = self.corpus.replace_events(seq)
        self._clicks = self.corpus.label_events(self.run.target)

    @method(while_offloaded=True)
    def join_counts(self) -> dict[str, dict[str, float]]:
        """Return how many rows were looked up and found since the last call, for each join in `data.join`."""
        return self.corpus.joins.pop_counts() if self.corpus.joins else {}

    @method(collect="first")
    def evaluate_baseline(self, name: str) -> dict[str, Any]:
        """Fit a baseline on the training events and evaluate it.

        Returns:
            {"detail": {split: {"exhaustive": {"all": metrics}}}, "shown": []}.
        """
        rows_by_split = {split: self._clicks.find_rows(code) for split, code in _SPLITS.items()}
        rows = np.concatenate(list(rows_by_split.values()))
        probabilities = predict_baseline(name, self._clicks, rows, self._fitted)
        n_valid = len(rows_by_split["valid"])
        return self._store_probabilities(
            name, {"valid": probabilities[:n_valid], "test": probabilities[n_valid:]}
        )

    @method(collect="first")
    def evaluate(self, name: str, folder: str) -> dict[str, Any]:
        """Evaluate the model of a checkpoint.

        Args:
            name: Name of the subject.
            folder: Folder of the checkpoint.

        Returns:
            As `evaluate_baseline`.
        """
        model = ClickModel(Path(folder))
        probabilities = {
            split: model.predict_events(self._clicks, self._clicks.find_rows(code))
            for split, code in _SPLITS.items()
        }
        return self._store_probabilities(name, probabilities)

    @method(collect="first")
    def validate(self, name: str, folder: str) -> dict[str, Any]:
        """Evaluate a checkpoint of the running stage on the validation events of at most 2,000 users, and store the result.

        Args:
            name: Name of the stage.
            folder: Folder of the checkpoint.

        Returns:
            {"metrics": the metrics of the options, "nats": mean log loss, "events": number of events}.
        """
        rows = self._clicks.find_rows(VALID)
        rows = rows[select_validation_events(self._clicks.seq.user[rows], self.run.seed)]
        probabilities = ClickModel(Path(folder)).predict_events(self._clicks, rows)
        file = self._results / f"{name}.valid.{Path(folder).name}.npz"
        write_arrays(file, chances=probabilities, rows=rows)
        all_metrics = summarise_clicks(probabilities, self._clicks.label[rows])
        metrics = {metric: all_metrics[metric] for metric in self.options.metrics}
        return {"metrics": metrics, "nats": all_metrics["log_loss"], "events": len(rows)}

    @method(collect="first")
    def compare_validated(self, name: str, a: str, b: str) -> dict[str, dict[str, float]]:
        """Compare two checkpoints of a stage on the validation events, as `Evaluator.compare_validated` does."""
        files = [self._results / f"{name}.valid.{folder}.npz" for folder in (a, b)]
        if not all(file.exists() for file in files):
            return {}
        stored_a, stored_b = (dict(np.load(file)) for file in files)
        rows = stored_a["rows"]
        if not np.array_equal(rows, stored_b["rows"]):
            return {}
        label, user = self._clicks.label[rows], self._clicks.seq.user[rows]
        return compare_clicks(stored_a["chances"], stored_b["chances"], label, user, self.run.seed)

    @method(collect="first", pairs=Replicate)
    def compare(self, pairs: Sequence[tuple[str, str]]) -> dict[str, dict[str, dict[str, float]]]:
        """Compare pairs of subjects on all test events by a paired bootstrap over users.

        Returns:
            {"a-b": {metric: {diff, low, high}}} for each pair (a, b).
        """
        rows = self._clicks.find_rows(TEST)
        label, user = self._clicks.label[rows], self._clicks.seq.user[rows]
        differences = {}
        for a, b in pairs:
            probabilities_a, probabilities_b = (
                np.load(self._results / f"{name}.npz")["test"] for name in (a, b)
            )
            all_metrics = compare_clicks(probabilities_a, probabilities_b, label, user, self.run.seed)
            differences[f"{a}-{b}"] = {metric: all_metrics[metric] for metric in self.options.metrics}
        return differences

    @method(collect="first")
    def list_shown_users(self) -> list[dict[str, Any]]:
        """Return an empty list, because a click model recommends no items."""
        return []

    def _store_probabilities(self, name: str, probabilities: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Store the predicted probabilities of a subject by split, and return its metrics as `evaluate_baseline` does."""
        arrays: dict[str, Any] = dict(probabilities)
        write_arrays(self._results / f"{name}.npz", **arrays)
        detail = {}
        for split, split_probabilities in probabilities.items():
            if len(split_probabilities):
                label = self._clicks.label[self._clicks.find_rows(_SPLITS[split])]
                all_metrics = summarise_clicks(split_probabilities, label)
                metrics = {metric: all_metrics[metric] for metric in self.options.metrics}
                detail[split] = {"exhaustive": {"all": metrics}}
        return {"detail": detail, "shown": []}
