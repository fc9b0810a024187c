"""The geometry of one packed batch, and the rows that a mask computes for it.

A place is a position among the keys of a sequence. Queries are the newest n_q positions of their sequence: query row i is at
place i + n_k - n_q, so that the few queries of a decoding step see the same keys as these rows of a complete pass would. All
arithmetic uses tensors on the device of the cuts: no value is copied to the host, and shapes come from the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from nonet.errors import ConfigError

# Shapes: T packed query tokens, S packed key tokens, B sequences.
PerSequence: TypeAlias = int | Tensor  # One number for all sequences, or one per sequence [B].


@dataclass(frozen=True, slots=True, eq=False)
class MaskRows:
    """The rows that a mask computes for a packed batch, from which an `IntervalTable` is built.

    Attributes:
        slots: Intervals of key places as (start [T], stop [T]), disjoint in every row.
        column: For each key, the interval of query rows that may see it, as (start [S], stop [S]); None for no restriction.
        words: Class bits of the queries [T] and of the keys [S], which must share one; None for no restriction.
    """

    slots: tuple[tuple[Tensor, Tensor], ...]
    column: tuple[Tensor, Tensor] | None = None
    words: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PackedGeometry:
    """The sequences of a packed batch, and the place of each query in its sequence.

    Attributes:
        cu_q: Cuts of the queries [B + 1] int64.
        cu_k: Cuts of the keys [B + 1] int64.
        tokens_q: The number of packed queries T.
        tokens_k: The number of packed keys S.
        sequence_T: The sequence of each query.
        place_T: The place of each query; negative if there are more queries than keys.
        keys_T: The number of keys of each query's sequence.
    """

    cu_q: Tensor
    cu_k: Tensor
    tokens_q: int
    tokens_k: int
    sequence_T: Tensor
    place_T: Tensor
    keys_T: Tensor

    @classmethod
    def from_cuts(cls, cu_q: Tensor, cu_k: Tensor, tokens_q: int, tokens_k: int) -> PackedGeometry:
        """Compute the geometry of sequences cut at cu_q and cu_k [B + 1]."""
        cu_q, cu_k = cu_q.long(), cu_k.long()
        token_T = torch.arange(tokens_q, device=cu_q.device)
        sequence_T = torch.searchsorted(cu_q[1:].contiguous(), token_T, right=True)
        keys_B = cu_k.diff()
        shift_B = keys_B - cu_q.diff() - cu_q[:-1]  # From a query's packed index to its place.
        return cls(
            cu_q, cu_k, tokens_q, tokens_k, sequence_T, token_T + shift_B[sequence_T], keys_B[sequence_T]
        )

    def expand_to_queries(self, value: PerSequence, name: str) -> PerSequence:
        """Return an int unchanged, and a tensor of one number per sequence as one number per query [T]."""
        return value if isinstance(value, int) else self._check_numbers(value, name)[self.sequence_T]

    def locate_keys(self) -> tuple[Tensor, Tensor]:
        """Compute the sequence and the place [S] of every key."""
        token_S = torch.arange(self.tokens_k, device=self.cu_k.device)
        sequence_S = torch.searchsorted(self.cu_k[1:].contiguous(), token_S, right=True)
        return sequence_S, token_S - self.cu_k[sequence_S]

    def check_tokens(self, value: Tensor, count: int, name: str) -> Tensor:
        """Check that `value` has one entry per token and is on the device of the cuts, and return it."""
        if value.ndim != 1 or len(value) != count:
            raise ConfigError(
                f"{name} has shape {list(value.shape)}; this batch wants [{count}], one number a packed token."
            )
        return self._check_device(value, name)

    def _check_numbers(self, value: Tensor, name: str) -> Tensor:
        """Check numbers per sequence and return them as int64 [B], expanding a scalar."""
        sequences = len(self.cu_q) - 1
        if value.ndim == 0:
            value = value.expand(sequences)
        if value.ndim != 1 or len(value) != sequences:
            raise ConfigError(
                f"{name} has shape {list(value.shape)}; this batch wants [{sequences}], one number per sequence, or one int."
            )
        return self._check_device(value, name).long()

    def _check_device(self, value: Tensor, name: str) -> Tensor:
        if value.device != self.cu_q.device:
            raise ConfigError(
                f"{name} is on {value.device}, the cuts are on {self.cu_q.device}; move it there with .to()."
            )
        return value
