"""The interval table of one packed batch: O(N) integers, the only form of a mask that plans and kernels read.

A query sees a key of its own sequence if the key is in one of the query's K row intervals, the query is in the
key's column interval, and both share a bit of their class words; the last two are optional. A dense mask is O(N^2).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Shapes: T packed query tokens, S packed key tokens, B sequences, K <= 4 slots.


@dataclass(frozen=True, slots=True, eq=False)
class IntervalTable:
    """Slot-major int32 intervals in positions of the token's own sequence; a slot is empty where start >= stop.

    A slot keeps its meaning over rows (slot 0 the history, slot 1 the own group, ...), else the unmasked cores of
    tiles collapse. `stop` never passes the sequence's keys, `start` is never negative.
    """

    start: Tensor  # [K, T]
    stop: Tensor  # [K, T]
    cu_q: Tensor  # [B + 1] int32, from 0 to T
    cu_k: Tensor  # [B + 1] int32, from 0 to S
    max_q: int  # Length of the longest query run.
    max_k: int
    column_start: Tensor | None = (
        None  # [S] first query position that may see this key; column_stop is past the last
    )
    column_stop: Tensor | None = None  # [S]
    sees: Tensor | None = None  # [T] int32 class bits a query may see
    word: Tensor | None = None  # [S] int32 class bits of a key
