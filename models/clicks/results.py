"""HeldOutClicks and ClickResults: labels of held-out events, and metrics of the probabilities that subjects predict for them."""

# Shapes: P held-out events, summed over the target and the tasks; S subjects of the same kind, such as one stage with S seeds.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nonet.atomic import open_file
from nonet.errors import DataError
from nonet.models.clicks.metrics import (
    METRICS,
    compare_clicks,
    is_defined,
    measure_calibration,
    split_metric,
    summarise_clicks,
)
from nonet.samples.sequences import TEST, TRAIN, VALID, Sequences, find_tasks
from nonet.suggest import join_names

Predictions = Mapping[str, np.ndarray]
"""Probabilities of the held-out events by task, "" for the target; [P_task] each, or [S, P_task] of S subjects."""
LabelCounts = Mapping[str, Mapping[str, Sequence[int]]]
"""Numbers [events with a label, events with the label 1] by name of a target and by split."""
_SPLITS = {"training": TRAIN, "validation": VALID, "test": TEST}


class HeldOutClicks:
    """The events of a split whose label is known, for the target of a stage and for each of its tasks.

    Args:
        seq: The sequences.
        target: The stage whose target labels the events; None for the first one.
        split: The split.
        seed: Seed of the bootstrap.
        select: Function that returns which events with these users are used, as a mask; None for all.

    Attributes:
        index_by_task: Indices of the events in the sequences, by task; "" is the target.
        user_by_task: Indices of their users.
        label_by_task: Their labels.
    """

    def __init__(
        self,
        seq: Sequences,
        target: str | None,
        split: int,
        seed: int,
        select: Callable[[np.ndarray], np.ndarray] | None = None,
    ):
        target = target or next(iter(seq.targets), "")
        self._seed, events = seed, seq.find_split_events(split)
        self.index_by_task, self.user_by_task, self.label_by_task = {}, {}, {}
        for task, name in {"": target, **find_tasks(target, seq.targets)}.items():
            index = events[seq.find_labelled(name, events)]
            user = seq.find_users(index)
            if select is not None:
                is_selected = select(user)
                index, user = index[is_selected], user[is_selected]
            self.index_by_task[task], self.user_by_task[task] = index, user
            self.label_by_task[task] = np.asarray(seq.targets[name])[index]

    def predict(self, predict_events: Callable[[np.ndarray], np.ndarray]) -> dict[str, np.ndarray]:
        """Return predictions from a function that predicts the probabilities [P, T] of events for the target and all tasks."""
        union = np.unique(np.concatenate(list(self.index_by_task.values())))
        probability_PT = predict_events(union)
        return {
            task: probability_PT[np.searchsorted(union, index), column]
            for column, (task, index) in enumerate(self.index_by_task.items())
        }

    def summarise(self, metrics: Sequence[str], predictions: Predictions) -> dict[str, float | None]:
        """Compute metrics of one subject: None where one is not defined; those of tasks that it does not predict are left out.

        Raises:
            DataError: A prediction is not finite.
        """
        summary = {}
        for metric in metrics:
            name, task = split_metric(metric)
            if task in predictions:
                self._check_finite(task, predictions[task])
                summary |= {
                    metric: summarise_clicks(predictions[task], self.label_by_task[task], [name])[name]
                }
        return summary

    def _check_finite(self, task: str, chances: np.ndarray) -> None:
        """Raise DataError if a predicted probability of a task is not finite."""
        if n_bad := int((~np.isfinite(chances)).sum()):
            label = f"the task {task!r}" if task else "the target"
            raise DataError(
                f"{n_bad} of {len(chances)} predicted probabilities of {label} are not finite; lower the learning rate"
            )

    def measure_calibration(self, predictions: Predictions) -> dict[str, dict[str, Any]]:
        """Measure the calibration of one subject, by task."""
        return {
            task: measure_calibration(chances, self.label_by_task[task])
            for task, chances in predictions.items()
            if len(chances)
        }

    def compare(self, metrics: Sequence[str], a: Predictions, b: Predictions) -> dict[str, dict[str, float]]:
        """Compare two subjects, or the means of S each, by defined metrics of tasks that both predict (`compare_clicks`)."""
        metrics_by_task: dict[str, list[str]] = {}
        for name, task in map(split_metric, metrics):
            if task in a and task in b:
                metrics_by_task.setdefault(task, []).append(name)
        differences = {
            task: compare_clicks(
                a[task],
                b[task],
                self.label_by_task[task],
                self.user_by_task[task],
                self._seed,
                metrics=names,
            )
            for task, names in metrics_by_task.items()
        }
        parts = {metric: split_metric(metric) for metric in metrics}
        return {
            metric: differences[task][name]
            for metric, (name, task) in parts.items()
            if name in differences.get(task, ())
        }


def check_labels(seq: Sequences, target: str) -> None:
    """Raise DataError if no test event has a label of a stage's target, so that nothing can be measured."""
    if not len(HeldOutClicks(seq, target, TEST, seed=0).label_by_task[""]):
        raise DataError(
            f"stages.{target}.target: no test event has a label, so that nothing can be measured; change the condition, or hold "
            "out more events with data.split"
        )


def count_labels(seq: Sequences) -> dict[str, dict[str, list[int]]]:
    """Count the events with a label, and those with the label 1, by name of a target or task and by split."""
    counts: dict[str, dict[str, list[int]]] = {}
    for name, labels in seq.targets.items():
        is_labelled, label = seq.find_labelled(name), np.asarray(labels)
        counts[name] = {
            split: [
                int((selected := is_labelled & (seq.split == code)).sum()),
                int((label[selected] > 0).sum()),
            ]
            for split, code in _SPLITS.items()
            if (seq.split == code).any()
        }
    return counts


def describe_undefined_metrics(counts: LabelCounts, target: str, metrics: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each split in which labels of a stage's target or of a task are all the same, or there are none.

    Args:
        counts: The result of `count_labels`.
        target: The stage whose target labels the events.
        metrics: The metrics of the scenario, of which the undefined ones are named.
    """
    for task, name in {"": target, **find_tasks(target, counts)}.items():
        for split, (n_labelled, n_clicked) in counts[name].items():
            if 0 < n_clicked < n_labelled:
                continue
            state = f"every {split} event has the label {int(n_clicked > 0)}"
            state = state if n_labelled else f"no {split} event has a label"
            label = np.repeat([1, 0], [n_clicked, n_labelled - n_clicked])
            asked = [metric for metric in metrics if split_metric(metric)[1] == task]
            undefined = [metric for metric in asked if not is_defined(split_metric(metric)[0], label)]
            if split == "training":
                yield f"stages.{name}.target: {state}, so that a model learns nothing from it"
            elif undefined:
                verb = "is" if len(undefined) == 1 else "are"
                yield f"stages.{name}.target: {state}, so that {join_names(undefined)} {verb} not defined there"


def name_array(array: str, task: str) -> str:
    """Return the name of an array of predictions ("valid", "test" or "chances") for a task, in a file of results."""
    return f"{array}@{task}" if task else array


def read_predictions(file: Path, array: str) -> dict[str, np.ndarray]:
    """Read the predictions of a subject by task from the arrays of a name in a file of results (`name_array`)."""
    with open_file(file) as source, np.load(source) as arrays:
        return {
            split_metric(name)[1]: arrays[name] for name in arrays.files if split_metric(name)[0] == array
        }


class ClickResults:
    """The labelled test events of a run, and metrics of the click probabilities that were stored for them.

    A subject's probabilities are one array [P], task after task, with NaN for tasks that it does not predict.

    Args:
        seq: The sequences of the run.
        target: The stage whose target labels the events.
        max_users: Not used: a click model is tested on the events of all users.
        seed: The run's seed.

    Attributes:
        index: The index of each test event in the sequences.
        user: The user row of each test event.
        labels_by_task: The indices of the labelled test events, their user rows, and their labels, by task.
    """

    noun = "predictions"

    def __init__(self, seq: Sequences, target: str | None, max_users: int | None, seed: int):
        self._held_out = HeldOutClicks(seq, target, TEST, seed)
        held_out, index_by_task = self._held_out, self._held_out.index_by_task
        self.labels_by_task = {
            task: (index, held_out.user_by_task[task], held_out.label_by_task[task])
            for task, index in index_by_task.items()
        }
        self.index, self.user = index_by_task[""], self._held_out.user_by_task[""]
        stops = np.cumsum([len(index) for index in index_by_task.values()])
        self._stops = dict(zip(index_by_task, stops, strict=True))

    @staticmethod
    def select_metrics(metrics: Sequence[str]) -> list[str]:
        """Return the metrics by which subjects can be compared, which are all metrics of clicks."""
        return [metric for metric in metrics if split_metric(metric)[0] in METRICS]

    def read(self, file: Path) -> np.ndarray:
        """Read the click probabilities [P] of a subject from its results file, which may be that of another run."""
        predictions, parts = read_predictions(file, "test"), []
        for task, index in self._held_out.index_by_task.items():
            chances = predictions.get(task, ())
            # A task of the same name in another run may have labels of other events.
            is_predicted = len(chances) == len(index)
            parts.append(chances if is_predicted else np.full(len(index), np.nan, np.float32))
        return np.concatenate(parts)

    def compute(self, metric: str, probabilities_SP: np.ndarray) -> np.ndarray:
        """Compute a metric of each subject, [S] float64; NaN where it is not defined, or for a task without predictions."""
        summaries = [
            self._held_out.summarise([metric], self._split_by_task(probabilities))
            for probabilities in probabilities_SP
        ]
        return np.array([summary.get(metric) for summary in summaries], np.float64)

    def compare(
        self, metrics: Sequence[str], a_SP: np.ndarray, b_SP: np.ndarray
    ) -> dict[str, dict[str, float]]:
        """Compare the mean over S subjects with that of S others, paired over users, as `compare_clicks` does by metric."""
        return self._held_out.compare(metrics, self._split_by_task(a_SP), self._split_by_task(b_SP))

    def _split_by_task(self, probabilities: np.ndarray) -> dict[str, np.ndarray]:
        """Return the predictions of probabilities [..., P], without the tasks that are not predicted."""
        parts = np.split(probabilities, list(self._stops.values())[:-1], axis=-1)
        by_task = dict(zip(self._stops, parts, strict=True))
        return {task: part for task, part in by_task.items() if not np.isnan(part).any()}
