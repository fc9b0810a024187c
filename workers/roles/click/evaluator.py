"""ClickEvaluator: measures how well checkpoints of a click model and baselines predict the labels of held-out events.

The metrics are AUC, log loss and calibration of the predicted probabilities, for the target and for each task. A probability is
predicted from the user's earlier events only. Probabilities are stored in one file per subject, so that any two subjects can be
compared by a paired bootstrap over users. A metric is None where the labels do not define it, such as AUC if all are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nonet.atomic import write_arrays
from nonet.models import NATS
from nonet.models.clicks import (
    ClickModel,
    HeldOutClicks,
    name_array,
    predict_baseline,
    read_predictions,
)
from nonet.samples.sequences import TEST, VALID, Sequences
from nonet.storage import put
from nonet.workers import select_validation_events
from nonet.workers.roles import RunSetup, make_ranks_name
from nonet.workers.roles.click.data import ClickData
from nonet.workers.roles.evaluation import Evaluate
from nonet.workers.runtime import DistributeWorker, Replicate, method

# Shapes: P held-out events, T tasks with the target.

_SPLITS = {"valid": VALID, "test": TEST}
_NATS_METRIC = "log_loss"  # The metric that a validation stores as nats.
_VALIDATED = "chances"  # The arrays of a file with the probabilities of a validation.


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
        self._held_out = self._find_held_out()

    def set_events(self, seq: Sequences) -> None:
        """Evaluate on the held-out events of other sequences over the same items from now on; baselines stay as fitted."""
        self.corpus = self.corpus.replace_events(seq)
        self._clicks = self.corpus.label_events(self.run.target)
        self._held_out = self._find_held_out()

    def _find_held_out(self) -> dict[str, HeldOutClicks]:
        """Find the events of each split."""
        return {
            split: HeldOutClicks(self.corpus.seq, self.run.target, code, self.run.seed)
            for split, code in _SPLITS.items()
        }

    @method(while_offloaded=True)
    def join_counts(self) -> dict[str, dict[str, float]]:
        """Return how many rows were looked up and found since the last call, for each join in `data.join`."""
        return self.corpus.joins.pop_counts() if self.corpus.joins else {}

    @method(collect="first")
    def evaluate_baseline(self, name: str) -> dict[str, Any]:
        """Fit a baseline on the training events of the target and of each task, and evaluate it.

        Returns:
            {"detail": {split: {"exhaustive": {"all": metrics}}}, "calibration": {split: calibration by task}, "shown": []}.
        """
        predictions: dict[str, dict[str, np.ndarray]] = {split: {} for split in _SPLITS}
        for task in ("", *self._clicks.tasks):
            rows = {split: held_out.index_by_task[task] for split, held_out in self._held_out.items()}
            probabilities = predict_baseline(
                name,
                self._clicks.select_task(task),
                np.concatenate(list(rows.values())),
                self._fitted.select_task(task),
            )
            n_valid = len(rows["valid"])
            predictions["valid"][task], predictions["test"][task] = (
                probabilities[:n_valid],
                probabilities[n_valid:],
            )
        return self._store_predictions(name, predictions)

    @method(collect="first")
    def evaluate(self, name: str, folder: str) -> dict[str, Any]:
        """Evaluate the model of a checkpoint.

        Args:
            name: Name of the subject.
            folder: Folder of the checkpoint.

        Returns:
            As `evaluate_baseline`.
        """
        predict = partial(ClickModel(Path(folder)).predict_events, self._clicks)
        predictions = {split: held_out.predict(predict) for split, held_out in self._held_out.items()}
        return self._store_predictions(name, predictions)

    @method(collect="first")
    def validate(self, name: str, folder: str) -> dict[str, Any]:
        """Evaluate a checkpoint of the running stage on the validation events of at most 2,000 users, and store the result.

        Args:
            name: Name of the stage.
            folder: Folder of the checkpoint.

        Returns:
            {"metrics": the metrics of the options, "nats": mean log loss of the target, "events": number of events}.
        """
        held_out = self._validation_events
        predictions = held_out.predict(partial(ClickModel(Path(folder)).predict_events, self._clicks))
        file = self._results / make_ranks_name(name, Path(folder).name)
        write_arrays(file, **{name_array(_VALIDATED, task): chances for task, chances in predictions.items()})
        put(file)
        metrics = held_out.summarise([*self.options.metrics, _NATS_METRIC], predictions)
        return {
            "metrics": {metric: metrics[metric] for metric in self.options.metrics},
            "nats": metrics[_NATS_METRIC],
            "events": len(predictions[""]),
        }

    @property
    def _validation_events(self) -> HeldOutClicks:
        """The validation events of at most 2,000 users."""
        select = partial(select_validation_events, seed=self.run.seed)
        return HeldOutClicks(self.corpus.seq, self.run.target, VALID, self.run.seed, select)

    @method(collect="first")
    def compare_validated(self, name: str, a: str, b: str) -> dict[str, dict[str, float]]:
        """Compare two checkpoints of a stage on the validation events, as `Evaluator.compare_validated` does.

        Metrics that the labels do not define are left out.
        """
        files = [self._results / make_ranks_name(name, folder) for folder in (a, b)]
        if not all(file.exists() for file in files):
            return {}
        predictions_a, predictions_b = (read_predictions(file, _VALIDATED) for file in files)
        metrics = [*self.options.metrics, _NATS_METRIC]
        differences = self._validation_events.compare(metrics, predictions_a, predictions_b)
        nats = {NATS: differences[_NATS_METRIC]} if _NATS_METRIC in differences else {}
        return differences | nats

    @method(collect="first", pairs=Replicate)
    def compare(self, pairs: Sequence[tuple[str, str]]) -> dict[str, dict[str, dict[str, float]]]:
        """Compare pairs of subjects on all test events by a paired bootstrap over users.

        Returns:
            {"a-b": {metric: {diff, low, high}}} for each pair (a, b), without metrics that the labels do not define.
        """
        differences = {}
        for a, b in pairs:
            predictions_a, predictions_b = (
                read_predictions(self._results / f"{name}.npz", "test") for name in (a, b)
            )
            differences[f"{a}-{b}"] = self._held_out["test"].compare(
                self.options.metrics, predictions_a, predictions_b
            )
        return differences

    @method(collect="first")
    def list_shown_users(self) -> list[dict[str, Any]]:
        """Return an empty list, because a click model recommends no items."""
        return []

    def _store_predictions(
        self, name: str, predictions: Mapping[str, Mapping[str, np.ndarray]]
    ) -> dict[str, Any]:
        """Store the predictions of a subject by split and task, and return its metrics as `evaluate_baseline` does."""
        arrays: dict[str, Any] = {
            name_array(split, task): chances
            for split, by_task in predictions.items()
            for task, chances in by_task.items()
        }
        write_arrays(self._results / f"{name}.npz", **arrays)
        put(self._results / f"{name}.npz")
        detail, calibration = {}, {}
        for split, by_task in predictions.items():
            if any(map(len, by_task.values())):
                held_out = self._held_out[split]
                detail[split] = {"exhaustive": {"all": held_out.summarise(self.options.metrics, by_task)}}
                calibration[split] = held_out.measure_calibration(by_task)
        return {"detail": detail, "calibration": calibration, "shown": []}
