"""Scoreboard: ranking metrics of one subject (a model or a baseline), accumulated over chunks of held-out events.

It stores one rank per event. Of the recommended lists it stores only the sums of the list metrics, whose size does not grow with
the number of lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from nonet.atomic import open_file
from nonet.models.ranking.kinds import ListCatalogue
from nonet.models.ranking.metrics import make_accumulators, summarise

# Shapes: P held-out events, C of them in a chunk, W recommended items.


class Scoreboard:
    """Accumulates the ranks and lists of one subject, and computes its metrics by group of events.

    Args:
        metrics: Names of the metrics.
        catalogue: Facts about the items that list metrics need.
        groups: Mask of the member events [P] by name of a group.
    """

    def __init__(self, metrics: Sequence[str], catalogue: ListCatalogue, groups: Mapping[str, np.ndarray]):
        self._metrics, self._groups = metrics, groups
        self._lists = {name: make_accumulators(metrics, catalogue) for name in groups}
        self._ranks: list[np.ndarray] = []
        self._events = 0

    def add(self, ranks_C: np.ndarray, lists_CW: np.ndarray | None = None) -> None:
        """Add the ranks of the next events and, if a list metric is requested, their lists of items (-1 for no item)."""
        events = slice(self._events, self._events + len(ranks_C))
        if lists_CW is not None:
            for name, is_member_P in self._groups.items():
                for accumulator in self._lists[name].values():
                    accumulator.add(lists_CW[is_member_P[events]])
        self._ranks.append(ranks_C)
        self._events = events.stop

    def absorb(self, other: Scoreboard) -> None:
        """Append the ranks and lists of another board with the same groups; its events come after the present ones."""
        self._groups = {
            name: np.concatenate([is_member_P, other._groups[name]])
            for name, is_member_P in self._groups.items()
        }
        for name, accumulators in self._lists.items():
            for kind, accumulator in accumulators.items():
                accumulator.absorb(other._lists[name][kind])
        self._ranks += other._ranks
        self._events += other._events

    def __len__(self) -> int:
        """Return the number of events."""
        return self._events

    @property
    def ranks(self) -> np.ndarray:
        """Ranks [P] int64, in the order in which they were added."""
        return np.concatenate(self._ranks)

    def summarise(self) -> dict[str, dict[str, float]]:
        """Compute the metrics by name for each group; groups without events are left out."""
        ranks = self.ranks
        return {
            name: summarise(ranks[is_member_P], self._metrics, self._lists[name])
            for name, is_member_P in self._groups.items()
            if is_member_P.any()
        }


def read_test_ranks(file: Path) -> np.ndarray:
    """Read the ranks [P] of a subject's test events from its results file: those of exhaustive scoring, else of beam search."""
    with open_file(file) as source, np.load(source) as arrays:
        return arrays["test.exhaustive" if "test.exhaustive" in arrays else "test.beam"]
