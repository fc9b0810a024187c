"""RankResults: what the subjects of a run that ranks items predicted for its test events, read after the run."""

# Shapes: P held-out test events, S subjects of the same kind, such as one stage with S seeds.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from nonet.models.ranking.metrics import compare_paired, compute_per_event, select_event_metrics
from nonet.models.ranking.scoreboard import read_test_ranks
from nonet.samples.batches import locate_events, sample_prompts
from nonet.samples.sequences import TEST, Sequences


class RankResults:
    """The test events of a run, and metrics of the ranks that were stored for them.

    Args:
        seq: The sequences of the run.
        target: The stage whose target labels events; ranks have no labels.
        max_users: The number of users that were ranked at most; None for all.
        seed: The run's seed.

    Attributes:
        index: The index of each test event in the sequences [P].
        user: The user row of each test event [P].
        labels_by_task: Empty, because ranks have no labels.
    """

    noun = "ranks"
    labels_by_task: ClassVar[Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}

    def __init__(self, seq: Sequences, target: str | None, max_users: int | None, seed: int):
        self.user, positions = sample_prompts(seq, TEST, max_users, seed)
        self.index, self._seed = locate_events(seq, self.user, positions), seed

    @staticmethod
    def select_metrics(metrics: Sequence[str]) -> list[str]:
        """Return the metrics by which subjects can be compared: those that are defined for single events."""
        return select_event_metrics(metrics)

    def read(self, file: Path) -> np.ndarray:
        """Read the ranks [P] of a subject from its results file."""
        return read_test_ranks(file)

    def compute(self, metric: str, ranks_SP: np.ndarray) -> np.ndarray:
        """Compute a metric of each subject, [S] float64."""
        return np.array([compute_per_event(metric, ranks).mean() for ranks in ranks_SP])

    def compare(
        self, metrics: Sequence[str], a_SP: np.ndarray, b_SP: np.ndarray
    ) -> dict[str, dict[str, float]]:
        """Compare the mean over S subjects with that of S others, paired over users, as `compare_paired` does by metric."""

        def average(metric: str, ranks_SP: np.ndarray) -> np.ndarray:
            return np.mean([compute_per_event(metric, ranks) for ranks in ranks_SP], 0)

        return {
            metric: compare_paired(average(metric, a_SP), average(metric, b_SP), self.user, self._seed)
            for metric in metrics
        }
