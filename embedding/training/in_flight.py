"""The rows of the batches in flight, kept by the trainer; they are exact, so no row is stale.

There is one trainer with k batches in flight. A row that an earlier batch in flight has is not fetched again: the
trainer has it with its optimizer state and applies the same optimizer step as the owner, with the same code, so
both have the same bits. Batch b is fetched when the gradients of batch b - k have reached the owners, and only for
keys that none of the k - 1 batches in between has.
"""

# Shapes: N requested keys, U distinct keys, D width.

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from nonet.embedding.exchange import Codec, KeyRoute
from nonet.embedding.tables import TableSpec, make_table, put_packed
from nonet.embedding.training.sharded_tables import ShardedTables


def can_carry_rows(world: ShardedTables) -> bool:
    """Return whether rows can be carried: one trainer, and tables that neither refuse nor evict rows."""
    plain = all(spec.admits_all and not spec.evicts for spec in world.specs.values())
    return plain and len(world.layout.trainers) == 1


class FetchPlan:
    """The route of a batch, the keys that it must fetch, and the keys that leave with it."""

    __slots__ = ("fetch", "leave", "route")

    def __init__(self, route: KeyRoute, fetch: KeyRoute, leave: np.ndarray):
        self.route, self.fetch, self.leave = route, fetch, leave


class FetchPlanner:
    """Decides which keys each batch fetches, from the keys alone, in the order of the batches."""

    def __init__(self, depth: int):
        self._recent: deque[np.ndarray] = deque(maxlen=depth)  # sorted

    def plan(self, route: KeyRoute) -> FetchPlan:
        """Plan the next batch."""
        recent, now = list(self._recent), np.sort(route.keys)
        full = len(recent) == self._recent.maxlen
        left, between = (recent[0], recent[1:]) if full else (np.empty(0, np.int64), recent)
        fetch = route.select_keys(_find_absent(route.keys, between))
        leave = left[_find_absent(left, [*between, now])]
        self._recent.append(now)
        # A key of this batch and the leaving one, but of none in between, is fetched again: its owner has it by then.
        return FetchPlan(route, fetch, leave)


class InFlightRows:
    """The rows of one table that the batches in flight use."""

    def __init__(self, name: str, spec: TableSpec, codec: Codec):
        self._table, self._codec = make_table(name, spec, 0), codec
        # Rows are added by the communication thread, and the NumPy table has no lock of its own.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._table)

    def enter(self, plan: FetchPlan, data: Tensor) -> None:
        """Add the fetched rows, bytes [fetched, B], and remove those that leave."""
        with self._lock:
            if len(plan.leave):
                self._table._delete(plan.leave)
            put_packed(self._table, plan.fetch.keys, data)

    def read_rows(self, route: KeyRoute) -> Tensor:
        """Return the current rows [N, D] of a batch, encoded and decoded by the codec."""
        with self._lock:
            rows = self._table.lookup(route.keys, train=False)
        return route.spread_rows(self.round_trip(rows))

    def apply(self, route: KeyRoute, grads: Tensor, step: int, lr: float | None) -> None:
        """Apply the optimizer step that the owner applies.

        Args:
            route: The route of the batch.
            grads: Summed gradients [U, D].
            step: The step.
            lr: A learning rate that overrides the spec's.
        """
        sent = self.round_trip(grads)
        with self._lock:
            self._table.step = min(self._table.step, step)
            self._table.apply(route.keys, sent, step, lr)

    def round_trip(self, rows: Tensor) -> Tensor:
        """Encode and decode rows with the codec."""
        if self._codec.name == "fp32":
            return rows
        return self._codec.decode(self._codec.encode(rows), rows.shape[1])


def _find_absent(keys: np.ndarray, others: Iterable[np.ndarray]) -> np.ndarray:
    """Return which keys [N] are in none of these sorted arrays; 3,800 keys take 0.2 ms, with np.isin 1 ms."""
    absent = np.ones(len(keys), dtype=bool)
    for other in others:
        if len(other) and len(keys):
            at = np.minimum(np.searchsorted(other, keys), len(other) - 1)
            absent &= other[at] != keys
    return absent


def sum_gradients(route: KeyRoute, grads: Tensor) -> Tensor:
    """Sum gradients [N, D] over equal keys and return [U, D]."""
    return route.sum_gradients(grads.detach().to(torch.float32))
