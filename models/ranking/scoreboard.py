"""Scoreboard: ranking metrics of one subject, accumulated over chunks of held-out events.

It stores one rank per event and one place per item, which is what coverage needs, however many lists there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from nonet.models.ranking.metrics import CoverageCounter, summarise

# Shapes: P held-out events, C of them in a chunk, W recommended items.


class Scoreboard:
    """`groups`: name -> [P] bool, the events that are summed up together; `metrics` by name."""

    def __init__(self, metrics: Sequence[str], n_items: int, groups: Mapping[str, np.ndarray]):
        self._metrics, self._groups = metrics, groups
        self._reach = {name: CoverageCounter(n_items) for name in groups}
        self._ranks: list[np.ndarray] = []
        self._events = 0

    def add(self, ranks_C: np.ndarray, lists_CW: np.ndarray | None = None) -> None:
        """Add the ranks of the next events and, if coverage is requested, their lists (-1 is none)."""
        part = slice(self._events, self._events + len(ranks_C))
        if lists_CW is not None:
            for name, member in self._groups.items():
                self._reach[name].add(lists_CW[member[part]])
        self._ranks.append(ranks_C)
        self._events = part.stop

    def absorb(self, other: Scoreboard) -> None:
        """Add a board of the same groups, whose events follow all of these."""
        self._groups = {
            name: np.concatenate([member, other._groups[name]]) for name, member in self._groups.items()
        }
        for name, reach in self._reach.items():
            reach.absorb(other._reach[name])
        self._ranks += other._ranks
        self._events += other._events

    def __len__(self) -> int:
        """Return the number of events."""
        return self._events

    @property
    def ranks(self) -> np.ndarray:
        """[P] int64, in the order they came."""
        return np.concatenate(self._ranks)

    def summarise(self) -> dict[str, dict[str, float]]:
        """Compute the metrics by name for each group; a group without events is left out."""
        ranks = self.ranks
        return {
            name: summarise(ranks[member], self._metrics, self._reach[name])
            for name, member in self._groups.items()
            if member.any()
        }


def read_test_ranks(file: Path) -> np.ndarray:
    """Read the ranks of a subject's test events from its results file: exhaustive ones, or those by beam if there are none."""
    with np.load(file) as arrays:
        return arrays["test.exhaustive" if "test.exhaustive" in arrays else "test.beam"]
