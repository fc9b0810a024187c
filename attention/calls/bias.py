"""Relative position and time bias of attention scores, from O(N) tables.

score[h, q, k] += position[h, clamp(k - p, -(P - 1), P - 1) + P - 1] + time[h, bucket_of(t_q - t_k)], where p is the query's
position among the keys (its own position, aligned at the newest token if there are fewer queries than keys). A dense bias and its
gradient need O(N^2) memory; these tables have 2 P - 1 and some tens of numbers per head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.errors import ConfigError

# Shapes: H query heads, P reach of positions, C time buckets, T packed query tokens, S packed key tokens.


@dataclass(frozen=True, slots=True, eq=False)
class RelativeBias:
    """Tables of a bias; either may be None. A table has one row per head, or one row that all heads share."""

    position: Tensor | None = None  # [H or 1, 2 P - 1]
    time: Tensor | None = None  # [H or 1, C]
    time_q: Tensor | None = None  # [T] int32, for example seconds from any origin within 2^31
    time_k: Tensor | None = None  # [S] int32
    steps: float = 2.0  # buckets per doubling of the time between two tokens

    def check(self, heads: int, queries: int, keys: int) -> None:
        """Raise ConfigError unless the tables fit these heads and tokens."""
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

    octave is log2(max(1, |difference|)), linearly interpolated between powers of two and read from the bits of the float32. So no
    logarithm is computed, and the bucket is the same on every device.
    """
    bits = between.abs().clamp_min(1).to(torch.float32).view(torch.int32)
    octave = ((bits - 0x3F800000) >> 8).to(torch.float32)
    return (octave * (torch.tensor(steps) * (1.0 / 32768.0))).long().clamp_max(buckets - 1)
