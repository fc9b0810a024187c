"""The interface of metrics of recommendations: those of single events, and those of whole lists.

A scenario names a metric with the number of items that count, such as `recall@10` or `mine.py:HITS@10`.
"""

# Shapes: P held-out events, W recommended items, I items of the catalogue.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from nonet.models.ranking.kinds._categories import ItemCategories
from nonet.plugins import PluginRegistry

MISSED = 1 << 30
"""Rank of a target that is not in a list; larger than any number of items."""


@dataclass(frozen=True, slots=True)
class ListCatalogue:
    """The input of a list metric: numbers of events and categories of the items.

    Attributes:
        occurs_I: Number of events of each item.
        categories: Categories of the items; None if the item table has none.
    """

    occurs_I: np.ndarray
    categories: ItemCategories | None = None


class ListAccumulator(Protocol):
    """Sums over lists, created by a `ListMetric` for each group of events."""

    def add(self, lists_PW: np.ndarray) -> None:
        """Add lists of item indices, best first; -1 is none."""
        ...

    def absorb(self, other: Any) -> None:
        """Add the sums of another worker, which ranked other events."""
        ...

    def compute(self, k: int | None) -> float:
        """Return the metric of the first k items of the lists; None counts whole lists."""
        ...


@dataclass(frozen=True)
class RankingMetric:
    """One kind of metric; see the two subclasses."""


@dataclass(frozen=True)
class EventMetric(RankingMetric):
    """A metric with a value for each held-out event.

    Attributes:
        compute: (ranks [P], k) -> the value of each event [P] float64. The best rank is 0, and `MISSED` is the rank of
            an item that a list does not have.
    """

    compute: Callable[[np.ndarray, int], np.ndarray]


@dataclass(frozen=True)
class ListMetric(RankingMetric):
    """A metric of all recommended lists together.

    Attributes:
        make: The class of accumulators, constructed with a `ListCatalogue`.
        needs_k: Whether its name must say how many items of a list count.
    """

    make: Callable[[ListCatalogue], ListAccumulator]
    needs_k: bool = True


def _compute_values(ranks: np.ndarray, k: int) -> np.ndarray:
    """Declare the arguments of `EventMetric.compute`."""
    raise NotImplementedError


METRICS = PluginRegistry(
    "metric",
    RankingMetric,
    "nonet.models.ranking.kinds",
    contract={"compute": _compute_values, "make": ListAccumulator},
)
