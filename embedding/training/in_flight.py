"""The rows of the batches in flight, kept where they are trained: exact, so nothing is stale.

One trainer, k batches in flight. A row that an earlier batch in flight has is not fetched again: the trainer holds it with its
optimizer state and takes the same step on it as its owner will, by the same code, so both have the same bits. Batch b
is fetched when the gradients of b - k are at the owners, and then only its keys that none of the k - 1 batches between has.
"""

# Shapes: N keys asked for, U distinct ones, D width.

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
    """Whether rows can be carried: one trainer, and tables that neither refuse nor forget rows."""
    plain = all(spec.admits_all and not spec.evicts for spec in world.specs.values())
    return plain and len(world.layout.trainers) == 1


class FetchPlan:
    """Where a batch's keys go, which of them it must fetch, and which keys leave with it."""

    __slots__ = ("fetch", "leave", "route")

    def __init__(self, route: KeyRoute, fetch: KeyRoute, leave: np.ndarray):
        self.route, self.fetch, self.leave = route, fetch, leave


class FetchPlanner:
    """Which keys each batch fetches; pure bookkeeping over keys, in the order of the batches."""

    def __init__(self, depth: int):
        self._recent: deque[np.ndarray] = deque(maxlen=depth)  # sorted

    def plan(self, route: KeyRoute) -> FetchPlan:
        """The plan of the next batch."""
        recent, now = list(self._recent), np.sort(route.keys)
        full = len(recent) == self._recent.maxlen
        left, between = (recent[0], recent[1:]) if full else (np.empty(0, np.int64), recent)
        fetch = route.select_keys(_find_absent(route.keys, between))
        leave = left[_find_absent(left, [*between, now])]
        self._recent.append(now)
        # A key of the batch that leaves and of this one, and of none between, is fetched again: it is at its owner by then.
        return FetchPlan(route, fetch, leave)


class InFlightRows:
    """The rows of one table that batches in flight have."""

    def __init__(self, name: str, spec: TableSpec, codec: Codec):
        self._table, self._codec = make_table(name, spec, 0), codec
        # Rows enter on the wire's thread, and the core's twin has no lock of its own.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._table)

    def enter(self, plan: FetchPlan, data: Tensor) -> None:
        """Take the fetched rows, bytes [fetched, B], in; let the leaving ones go."""
        with self._lock:
            if len(plan.leave):
                self._table._delete(plan.leave)
            put_packed(self._table, plan.fetch.keys, data)

    def read_rows(self, route: KeyRoute) -> Tensor:
        """The rows [N, D] of a batch as they are, having been over the wire."""
        with self._lock:
            rows = self._table.lookup(route.keys, train=False)
        return route.spread_rows(self.round_trip(rows))

    def apply(self, route: KeyRoute, grads: Tensor, step: int, lr: float | None) -> None:
        """Take the step that the owner takes with these summed gradients [U, D]."""
        sent = self.round_trip(grads)
        with self._lock:
            self._table.step = min(self._table.step, step)
            self._table.apply(route.keys, sent, step, lr)

    def round_trip(self, rows: Tensor) -> Tensor:
        """What comes out of the wire's codec."""
        if self._codec.name == "fp32":
            return rows
        return self._codec.decode(self._codec.encode(rows), rows.shape[1])


def _find_absent(keys: np.ndarray, others: Iterable[np.ndarray]) -> np.ndarray:
    """Which of the keys [N] are in none of these sorted arrays; a batch of 3,800 in 0.2 ms, where np.isin takes 1."""
    absent = np.ones(len(keys), dtype=bool)
    for other in others:
        if len(other) and len(keys):
            at = np.minimum(np.searchsorted(other, keys), len(other) - 1)
            absent &= other[at] != keys
    return absent


def sum_gradients(route: KeyRoute, grads: Tensor) -> Tensor:
    """Gradients [N, D] as [U, D]."""
    return route.sum_gradients(grads.detach().to(torch.float32))
