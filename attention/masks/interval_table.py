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
    """Row intervals in K slots, in positions of the token's own sequence; a slot of a row is empty where start >= stop.

    A slot has the same meaning in all rows (for example, slot 0 is the history and slot 1 the own group). Otherwise tiles would
    have few keys that all their rows see, and few blocks could be computed without a mask.

    Attributes:
        start: The first key of each interval, at least 0, int32 [K, T].
        stop: The key past the last of each interval, at most the number of keys of the sequence, int32 [K, T].
        cu_q: Cuts of the queries, from 0 to T, int32 [B + 1].
        cu_k: Cuts of the keys, from 0 to S, int32 [B + 1].
        max_q: The number of queries of the longest sequence, or an upper bound.
        max_k: The number of keys of the longest sequence, or an upper bound.
        column_start: The first query row that may see each key, int32 [S].
        column_stop: The query row past the last that may see each key, int32 [S].
        sees: The class bits that each query may see, int32 [T].
        word: The class bits of each key, int32 [S].
    """

    start: Tensor
    stop: Tensor
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    column_start: Tensor | None = None
    column_stop: Tensor | None = None
    sees: Tensor | None = None
    word: Tensor | None = None
