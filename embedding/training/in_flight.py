"""The trainer's copies of the rows of the batches in flight, which equal the owners' rows bit for bit.

The design is for one trainer with k batches in flight. A row that an earlier batch in flight uses is not fetched again:
the trainer keeps a copy with its optimizer state and applies the same optimizer steps as the owner, with the same code.
The rows of batch b are fetched after the gradients of batch b - k have reached the owners, and only those that none of
the k - 1 batches in between uses.
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
    """Return whether rows can be kept between batches: there is one trainer, and no table refuses or evicts rows."""
    keeps_all_rows = all(spec.admits_all and not spec.evicts for spec in world.specs.values())
    return keeps_all_rows and len(world.layout.trainers) == 1


class FetchPlan:
    """The keys that a batch adds to and removes from the rows in flight.

    Attributes:
        route: The route of all keys of the batch.
        fetch: The route of the keys whose rows must be fetched.
        leave: The keys whose rows are removed when the fetched rows are added.
    """

    __slots__ = ("fetch", "leave", "route")

    def __init__(self, route: KeyRoute, fetch: KeyRoute, leave: np.ndarray):
        self.route, self.fetch, self.leave = route, fetch, leave


class FetchPlanner:
    """Decides which keys each batch fetches; batches are planned in order, from their keys alone.

    Args:
        depth: Maximum number of batches in flight.
    """

    def __init__(self, depth: int):
        self._recent: deque[np.ndarray] = deque(
            maxlen=depth
        )  # Sorted keys of each batch in flight, the oldest first.

    def plan(self, route: KeyRoute) -> FetchPlan:
        """Plan the next batch, which has this route."""
        recent_keys, current_keys = list(self._recent), np.sort(route.keys)
        is_full = len(recent_keys) == self._recent.maxlen
        # The oldest batch leaves when this one enters; the batches between the two stay in flight.
        leaving_keys, keys_between = (
            (recent_keys[0], recent_keys[1:]) if is_full else (np.empty(0, np.int64), recent_keys)
        )
        fetch = route.select_keys(_find_absent(route.keys, keys_between))
        leave = leaving_keys[_find_absent(leaving_keys, [*keys_between, current_keys])]
        self._recent.append(current_keys)
        # A key that is in this batch and the leaving one, but in none in between, is fetched again. The owner's row is up to
        # date by then.
        return FetchPlan(route, fetch, leave)


class InFlightRows:
    """The trainer's copies of the rows of one table that the batches in flight use."""

    def __init__(self, name: str, spec: TableSpec, codec: Codec):
        self._table, self._codec = make_table(name, spec, 0), codec
        # Rows are added by the communication thread, and the NumPy table has no lock of its own.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._table)

    def enter(self, plan: FetchPlan, data: Tensor) -> None:
        """Remove the rows that leave, and add the fetched rows.

        Args:
            plan: The plan of the batch.
            data: Packed rows of the keys in `plan.fetch`, uint8 [fetched keys, B].
        """
        with self._lock:
            if len(plan.leave):
                self._table._delete(plan.leave)
            put_packed(self._table, plan.fetch.keys, data)

    def read_rows(self, route: KeyRoute) -> Tensor:
        """Return the current rows [N, D] of a batch with the rounding of the codec, as if they had been fetched."""
        with self._lock:
            rows = self._table.lookup(route.keys, train=False)
        return route.spread_rows(self.round_trip(rows))

    def apply(self, route: KeyRoute, grads: Tensor, step: int, lr: float | None) -> None:
        """Apply the same optimizer step as the owner, to the gradients as the owner receives them.

        Args:
            route: The route of the batch.
            grads: Summed gradients [U, D].
            step: The training step.
            lr: The learning rate; None for that of the spec.
        """
        received_grads = self.round_trip(grads)
        with self._lock:
            # Fetching rows may have advanced the table's step, which must not be above the step of an `apply`.
            self._table.step = min(self._table.step, step)
            self._table.apply(route.keys, received_grads, step, lr)

    def round_trip(self, rows: Tensor) -> Tensor:
        """Encode and decode rows with the codec, which rounds them as a transfer does."""
        if self._codec.name == "fp32":
            return rows
        return self._codec.decode(self._codec.encode(rows), rows.shape[1])


def _find_absent(keys: np.ndarray, others: Iterable[np.ndarray]) -> np.ndarray:
    """Return a mask [N] of the keys that are in none of the sorted arrays `others`; this is 5 times as fast as `np.isin`."""
    absent = np.ones(len(keys), dtype=bool)
    for sorted_keys in others:
        if len(sorted_keys) and len(keys):
            positions = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
            absent &= sorted_keys[positions] != keys
    return absent


def sum_gradients(route: KeyRoute, grads: Tensor) -> Tensor:
    """Convert gradients [N, D] to float32 without history, sum them over equal keys, and return [U, D]."""
    return route.sum_gradients(grads.detach().to(torch.float32))
