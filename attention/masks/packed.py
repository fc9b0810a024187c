"""The geometry of one packed batch, and the rows that a mask computes for it.

Queries are the newest n_q positions of their sequence: query row i of a sequence is at place i + n_k - n_q, so that
the few queries of a decoding step see what the same rows of a whole pass would. All arithmetic uses tensors on the
device of the cuts: no value is copied to the host, and shapes come from the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from nonet.errors import ConfigError

# Shapes: T packed query tokens, S packed key tokens, B sequences, K slots a row.
PerSequence: TypeAlias = int | Tensor  # One number for all sequences, or one per sequence [B].


@dataclass(frozen=True, slots=True, eq=False)
class MaskRows:
    """Slots of (start [T], stop [T]) in key places, disjoint in every row; the rest as in IntervalTable."""

    slots: tuple[tuple[Tensor, Tensor], ...]
    column: tuple[Tensor, Tensor] | None = None
    words: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PackedGeometry:
    """The place of each token of a packed batch in its sequence."""

    cu_q: Tensor  # [B + 1] int64
    cu_k: Tensor
    tokens_q: int
    tokens_k: int
    sequence_T: Tensor  # sequence of each query
    place_T: (
        Tensor  # Its position among the keys of its sequence; negative if there are more queries than keys.
    )
    keys_T: Tensor  # number of keys of its sequence

    @classmethod
    def from_cuts(cls, cu_q: Tensor, cu_k: Tensor, tokens_q: int, tokens_k: int) -> PackedGeometry:
        """Compute the geometry of sequences cut at cu_q and cu_k [B + 1]."""
        cu_q, cu_k = cu_q.long(), cu_k.long()
        token_T = torch.arange(tokens_q, device=cu_q.device)
        sequence_T = torch.searchsorted(cu_q[1:].contiguous(), token_T, right=True)
        keys_B = cu_k.diff()
        ahead_B = keys_B - cu_q.diff() - cu_q[:-1]
        return cls(
            cu_q, cu_k, tokens_q, tokens_k, sequence_T, token_T + ahead_B[sequence_T], keys_B[sequence_T]
        )

    def expand_to_queries(self, value: PerSequence, name: str) -> PerSequence:
        """Return a number unchanged, or a per-sequence number at each query [T]."""
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
        """Return a number per sequence as int64, expanding a scalar."""
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
