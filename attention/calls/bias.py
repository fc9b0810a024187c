"""Relative position and time bias of attention scores, computed from small tables.

score[h, q, k] += position[h, clamp(k - p, -(P - 1), P - 1) + P - 1] + time[h, compute_bucket(t_q - t_k)]

p is the position of the query among the keys of its sequence. If there are fewer queries than keys, the last query is aligned
with the last key. A dense bias and its gradient need O(N^2) memory; these tables have 2 P - 1 and some tens of entries per head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.errors import ConfigError

# Shapes: H query heads, P relative positions per direction (with 0), C time buckets, T packed query tokens, S packed key tokens.


@dataclass(frozen=True, slots=True, eq=False)
class RelativeBias:
    """The tables of a relative bias. `position` or `time` may be None; a table has one row per head or one shared row.

    Attributes:
        position: The bias by relative position, [H or 1, 2 P - 1].
        time: The bias by bucket of the time difference, [H or 1, C].
        time_q: The time of each query, for example in seconds since any origin, int32 [T].
        time_k: The time of each key, int32 [S].
        steps: The number of time buckets per doubling of the time difference.
    """

    position: Tensor | None = None
    time: Tensor | None = None
    time_q: Tensor | None = None
    time_k: Tensor | None = None
    steps: float = 2.0

    def check(self, heads: int, queries: int, keys: int) -> None:
        """Raise ConfigError if the shapes or dtypes of the tables do not fit these numbers of heads, queries and keys."""
        for name, table in (("position", self.position), ("time", self.time)):
            if table is not None and (table.ndim != 2 or table.shape[0] not in (1, heads)):
                raise ConfigError(f"bias.{name} is {tuple(table.shape)}; it must be [{heads} or 1, entries].")
        if self.position is not None and self.position.shape[1] % 2 == 0:
            raise ConfigError(
                f"bias.position has {self.position.shape[1]} entries per head; it takes an odd number, 2 P - 1: "
                "from P - 1 keys before the query to P - 1 behind it."
            )
        if self.time is None:
            return
        for name, times, tokens in (("time_q", self.time_q, queries), ("time_k", self.time_k, keys)):
            if times is None or times.shape != (tokens,) or times.dtype != torch.int32:
                got = None if times is None else f"{tuple(times.shape)} {times.dtype}"
                raise ConfigError(
                    f"bias.{name} is {got}; a time bias takes [{tokens}] int32, one time per token."
                )


def compute_bucket(between: Tensor, steps: float, buckets: int) -> Tensor:
    """Compute the bucket of a time difference: floor(steps * octave), at most buckets - 1.

    octave is log2(max(1, |difference|)), linearly interpolated between powers of two. It is read from the bits of the float32,
    not computed as a logarithm, so the bucket is the same on every device.
    """
    bits = between.abs().clamp_min(1).to(torch.float32).view(torch.int32)
    # 0x3F800000 are the bits of 1.0. A float32 has 23 bits of mantissa, so after the shift by 8 an octave is 2^15 = 32768.
    octave = ((bits - 0x3F800000) >> 8).to(torch.float32)
    return (octave * (torch.tensor(steps) * (1.0 / 32768.0))).long().clamp_max(buckets - 1)
