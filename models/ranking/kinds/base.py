"""The interface of recommendation metrics: event metrics have a value per event, list metrics one value for all lists.

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
    """Facts about the items of the catalogue that list metrics need.

    Attributes:
        occurs_I: Number of events of each item.
        categories: Categories of the items; None if the item table has none.
    """

    occurs_I: np.ndarray
    categories: ItemCategories | None = None


class ListAccumulator(Protocol):
    """Sums over lists, created by a `ListMetric` for each group of events."""

    def add(self, lists_PW: np.ndarray) -> None:
        """Add lists of item indices, best first; -1 stands for no item."""
        ...

    def absorb(self, other: Any) -> None:
        """Add the sums of another accumulator, which another worker made from other events."""
        ...

    def compute(self, k: int | None) -> float:
        """Return the metric over the first k items of each list, or over whole lists if k is None."""
        ...


@dataclass(frozen=True)
class RankingMetric:
    """Base class of `EventMetric` and `ListMetric`."""


@dataclass(frozen=True)
class EventMetric(RankingMetric):
    """A metric with one value per held-out event.

    Attributes:
        compute: (ranks [P], k) -> the value of each event [P] float64. The best rank is 0, and `MISSED` is the rank of
            an item that is not in the list.
    """

    compute: Callable[[np.ndarray, int], np.ndarray]


@dataclass(frozen=True)
class ListMetric(RankingMetric):
    """A metric of all recommended lists together.

    Attributes:
        make: The class of accumulators, constructed with a `ListCatalogue`.
        needs_k: Whether scenarios must name it with the number of items that count.
    """

    make: Callable[[ListCatalogue], ListAccumulator]
    needs_k: bool = True


def _compute_values(ranks: np.ndarray, k: int) -> np.ndarray:
    """Signature of `EventMetric.compute`, which plug-ins are checked against."""
    raise NotImplementedError


METRICS = PluginRegistry(
    "metric",
    RankingMetric,
    "nonet.models.ranking.kinds",
    contract={"compute": _compute_values, "make": ListAccumulator},
)
