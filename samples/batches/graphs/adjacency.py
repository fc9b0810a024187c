"""Adjacency: the edges of a graph sorted by node and time, of which those before a time are found and drawn from.

Weights are whole numbers, so that sums and draws have the same bits on every machine and for every division into batches.
"""

# Shapes: E edges, S nodes that edges lead from, P rows (a node and a time), C candidate edges, M drawn neighbours.

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nonet.ranges import expand_ranges
from nonet.types import Jagged

WEIGHT_1 = 1 << 20
"""The whole number that stands for a weight of 1."""
_DTYPES = {"target": "<i4", "time": "<i8", "weight": "<i4"}
_SORTED_EDGES, _SHARE_BITS = 1 << 22, 30
_STEPS_PER_HALF_LIFE, _HALF_LIVES = 16, 20
# The weight of an edge by its age in sixteenths of the half-life. The last one is 1 and stays, so no edge is without weight.
_DECAY = np.rint(
    WEIGHT_1 * 0.5 ** (np.arange(_STEPS_PER_HALF_LIFE * _HALF_LIVES + 1) / _STEPS_PER_HALF_LIFE)
).astype(np.int64)


@dataclass(frozen=True)
class Edges:
    """Edges in any order.

    Attributes:
        source: Index of the node that each edge leads from [E].
        target: Index of the node that it leads to [E].
        time: Unix seconds [E] at which it became known.
        weight: Weights [E], whole numbers from 1 to `WEIGHT_1`.
    """

    source: np.ndarray
    target: np.ndarray
    time: np.ndarray
    weight: np.ndarray

    def __len__(self) -> int:
        return len(self.source)

    def reverse(self) -> Edges:
        """Return the edges in the other direction."""
        return Edges(self.target, self.source, self.time, self.weight)

    def select(self, index: np.ndarray) -> Edges:
        """Return the edges with these indices, or where a mask is True."""
        return Edges(self.source[index], self.target[index], self.time[index], self.weight[index])

    @staticmethod
    def concatenate(parts: Sequence[Edges]) -> Edges:
        """Return the edges of all parts."""
        fields = ("source", "target", "time", "weight")
        return Edges(*(np.concatenate([getattr(part, name) for part in parts]) for name in fields))


@dataclass(frozen=True)
class Adjacency:
    """Edges sorted by node, time, target and weight.

    Attributes:
        offsets: First edge of each node [S + 1] int64.
        target: Index of the node that each edge leads to [E] int32.
        time: Unix seconds [E] int64 at which each edge became known.
        weight: Weights [E] int32.
    """

    offsets: np.ndarray
    target: np.ndarray
    time: np.ndarray
    weight: np.ndarray

    @classmethod
    def build(
        cls,
        parts: Callable[[], Iterable[Edges]],
        n_nodes: int,
        allocate: Callable[[str, int, str], np.ndarray] = lambda name, size, dtype: np.empty(size, dtype),
    ) -> Adjacency:
        """Sort edges, with memory for one part of them beside the result.

        Args:
            parts: Function that makes the edges, part by part; it is called twice.
            n_nodes: Number of nodes that edges may lead from.
            allocate: Function of a field's name, its size and its dtype that returns an array for the result.
        """
        counts = np.zeros(n_nodes, np.int64)
        for edges in parts():
            counts += np.bincount(edges.source, minlength=n_nodes)
        offsets = allocate("offsets", n_nodes + 1, "<i8")
        offsets[0], offsets[1:] = 0, np.cumsum(counts)
        fields = {name: allocate(name, int(offsets[-1]), dtype) for name, dtype in _DTYPES.items()}
        place = np.array(offsets[:-1])  # where the next edge of each node is written
        for edges in parts():
            order = np.argsort(edges.source, kind="stable")
            source = edges.source[order]
            index = place[source] + np.arange(len(source)) - np.searchsorted(source, source)
            for name, values in fields.items():
                values[index] = getattr(edges, name)[order]
            place += np.bincount(edges.source, minlength=n_nodes)
        adjacency = cls(offsets, **fields)
        adjacency._sort_nodes(counts)
        return adjacency

    def _sort_nodes(self, counts: np.ndarray) -> None:
        """Sort the edges of each node, for as many nodes at once as have about `_SORTED_EDGES` edges."""
        start = 0
        while start < self.n_nodes:
            limit = int(self.offsets[start]) + _SORTED_EDGES
            stop = max(start + 1, int(np.searchsorted(self.offsets, limit, "right")) - 1)
            edges = slice(int(self.offsets[start]), int(self.offsets[stop]))
            node = np.repeat(np.arange(start, stop), counts[start:stop])
            order = np.lexsort((self.weight[edges], self.target[edges], self.time[edges], node))
            for values in (self.target, self.time, self.weight):
                values[edges] = values[edges][order]
            start = stop

    @property
    def n_nodes(self) -> int:
        """Number of nodes that edges may lead from."""
        return len(self.offsets) - 1

    def list_edges(self) -> Edges:
        """Return the edges in their order."""
        source = np.repeat(np.arange(self.n_nodes), np.diff(self.offsets))
        return Edges(source, self.target, self.time, self.weight)

    def find_known(self, node: np.ndarray, time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the range [P], [P] of the edges of each node [P] that became known before a time [P], in whole seconds.

        The node -1 is unknown and has no edges.
        """
        is_known = node >= 0
        index = np.where(is_known, node, 0)
        begin = np.where(is_known, self.offsets[index], 0) if self.n_nodes else np.zeros(len(node), np.int64)
        low, high = begin, np.where(is_known, self.offsets[index + 1], 0) if self.n_nodes else begin
        last = len(self.time) - 1
        for _ in range(int((high - low).max(initial=0)).bit_length()):  # a binary search of all rows at once
            middle = (low + high) >> 1
            is_older = (middle < high) & (self.time[np.minimum(middle, last)] < time)
            low, high = np.where(is_older, middle + 1, low), np.where(is_older, high, middle)
        return begin, low


@dataclass(frozen=True)
class Candidates:
    """The edges that neighbours of P rows are drawn from, those of a row by time, target and weight.

    Attributes:
        target: Index of the node that each edge leads to [C].
        time: Unix seconds [C], before those of the row.
        weight: Weights [C].
        offsets: First candidate of each row [P + 1].
    """

    target: np.ndarray
    time: np.ndarray
    weight: np.ndarray
    offsets: np.ndarray

    @classmethod
    def gather(cls, adjacency: Adjacency, begin: np.ndarray, end: np.ndarray, newest: int) -> Candidates:
        """Take the `newest` last edges of each range [P]."""
        index, offsets = expand_ranges(np.maximum(begin, end - newest), end)
        return cls(adjacency.target[index], adjacency.time[index], adjacency.weight[index], offsets)

    def add(self, row: np.ndarray, edges: Edges, newest: int) -> Candidates:
        """Add edges to rows, and keep the `newest` last ones of each row.

        Args:
            row: The row that each edge belongs to [A].
            edges: The edges [A].
            newest: Maximum number of edges of a row.
        """
        counts = np.diff(self.offsets)
        is_changed = np.bincount(row, minlength=len(counts)) > 0
        changed = np.flatnonzero(is_changed)
        index, offsets = expand_ranges(self.offsets[changed], self.offsets[changed + 1])
        rows = np.r_[np.repeat(np.arange(len(changed)), np.diff(offsets)), np.searchsorted(changed, row)]
        pairs = ((self.weight, edges.weight), (self.target, edges.target), (self.time, edges.time))
        order = np.lexsort([*(np.r_[values[index], added] for values, added in pairs), rows])
        end = np.cumsum(np.bincount(rows, minlength=len(changed)), dtype=np.int64)
        begin = np.r_[0, end][:-1]
        kept, offsets = expand_ranges(np.maximum(begin, end - newest), end)
        is_unchanged = np.repeat(~is_changed, counts)
        counts[changed] = np.diff(offsets)
        is_copied = np.repeat(~is_changed, counts)

        def merge(values: np.ndarray, added: np.ndarray) -> np.ndarray:
            merged = np.empty(len(is_copied), values.dtype)
            merged[is_copied] = values[is_unchanged]
            merged[~is_copied] = np.r_[values[index], added][order[kept]]
            return merged

        weight, target, time = (merge(values, added) for values, added in pairs)
        return Candidates(target, time, weight, np.r_[0, np.cumsum(counts)])

    def draw(self, k: int, half_life_s: float | None, now: np.ndarray, numbers: np.ndarray) -> Jagged:
        """Draw k neighbours of each row with probabilities in proportion to the decayed weights.

        This is systematic sampling: one random point and the points at equal distances from it, on the sum of the weights. So
        the expected number of times that a neighbour is drawn is k times its share of the weights, and one with a share of 1/k
        is always drawn. Neighbours of one node may be equal.

        Args:
            k: Number of neighbours of a row that has candidates.
            half_life_s: Age in seconds at which an edge has half of its weight; None for no decay.
            now: Unix seconds of the rows [P].
            numbers: Random numbers of the rows [P] uint64.

        Returns:
            Neighbours by row, int64: k of a row with candidates, by the order of its candidates; none of others.
        """
        counts = np.diff(self.offsets)
        weight = self.weight.astype(np.int64)
        if half_life_s is not None:
            age = np.repeat(now, counts) - self.time
            step = age * _STEPS_PER_HALF_LIFE // int(half_life_s)
            weight *= _DECAY[np.minimum(step, len(_DECAY) - 1)]
        cumulative = np.concatenate([np.zeros(1, np.int64), np.cumsum(weight)])
        before = cumulative[self.offsets[:-1]]
        total = cumulative[self.offsets[1:]] - before
        has_candidates = counts > 0
        before, total = before[has_candidates, None], total[has_candidates, None]
        # The share of the sum at which the first point is, in units of 2^-30; the product is split so that it fits 64 bits.
        share = (numbers[has_candidates, None] >> np.uint64(64 - _SHARE_BITS)).astype(np.int64)
        start = (total >> _SHARE_BITS) * share + ((total & ((1 << _SHARE_BITS) - 1)) * share >> _SHARE_BITS)
        point = before + (start + np.arange(k) * total) // k
        index = np.searchsorted(cumulative, point.ravel(), "right") - 1
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.where(has_candidates, k, 0))])
        return Jagged(self.target[index].astype(np.int64), offsets)
