"""ClickResults: what the subjects of a click model's run predicted for its test events, read after the run."""

# Shapes: P held-out test events, S subjects of the same kind, such as one stage with S seeds.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nonet.models.clicks.metrics import METRICS, compare_clicks, summarise_clicks
from nonet.samples.sequences import TEST, Sequences


class ClickResults:
    """The labelled test events of a run, and metrics of the click probabilities that were stored for them.

    Args:
        seq: The sequences of the run.
        target: The stage whose target labels the events.
        max_users: Not used: a click model is tested on the events of all users.
        seed: The run's seed.

    Attributes:
        index: The index of each test event in the sequences [P].
        user: The user row of each test event [P].
    """

    noun = "predictions"

    def __init__(self, seq: Sequences, target: str | None, max_users: int | None, seed: int):
        self.index, self._seed = seq.find_split_events(TEST), seed
        self.user = seq.find_users(self.index)
        self._label_P = np.asarray(seq.targets[target or ""])[self.index]

    @staticmethod
    def select_metrics(metrics: Sequence[str]) -> list[str]:
        """Return the metrics by which subjects can be compared, which are all metrics of clicks."""
        return [metric for metric in metrics if metric in METRICS]

    def read(self, file: Path) -> np.ndarray:
        """Read the click probabilities [P] of a subject from its results file."""
        with np.load(file) as arrays:
            return arrays["test"]

    def compute(self, metric: str, probabilities_SP: np.ndarray) -> np.ndarray:
        """Compute a metric of each subject, [S] float64."""
        return np.array(
            [summarise_clicks(probabilities, self._label_P)[metric] for probabilities in probabilities_SP]
        )

    def compare(
        self, metrics: Sequence[str], a_SP: np.ndarray, b_SP: np.ndarray
    ) -> dict[str, dict[str, float]]:
        """Compare the mean over S subjects with that of S others, paired over users, as `compare_clicks` does by metric."""
        differences = compare_clicks(a_SP, b_SP, self._label_P, self.user, self._seed)
        return {metric: differences[metric] for metric in metrics}
