"""Transformer blocks over packed sequences, and their rotary position embeddings.

Blocks are pre-norm with ReLU (GELU's erf takes a fifth of a training step on a CPU and improves nothing here). Position
embeddings are rotary, that is relative: windows begin anywhere in a history, so absolute positions carry no information
(recall@10 after ten epochs is 0.114 with relative and 0.101 with absolute positions).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from nonet.attention import uni_attention
from nonet.attention.masks import UniMask

# Shapes: T packed positions, B sequences, D width, H heads, E = D / H.
_ROTARY_BASE = 1000.0  # Base of the rotary frequencies; the lowest rotates by 0.05 radians over 50 events.


class AttentionBlock(nn.Module):
    """Causal self-attention and a two-layer perceptron, each with pre-norm and a residual connection.

    Attributes:
        tensor_plan: Styles of tensor parallelism by layer, named as in transformers. A rank then has some of the heads.
        packed: By layer, the number of matrices that are stacked in its weight.
    """

    tensor_plan: ClassVar[Mapping[str, str]] = {
        "qkv": "colwise",
        "merge": "rowwise",
        "widen": "colwise",
        "narrow": "rowwise",
    }
    packed: ClassVar[Mapping[str, int]] = {"qkv": 3}

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.head_width, self.dropout = width // heads, dropout
        self.attend_norm, self.think_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(
        self,
        x_TD: Tensor,
        cuts_B1: Tensor,
        rotation: tuple[Tensor, Tensor],
        past: PastKeyValues | None = None,
    ) -> Tensor:
        """Return the states [T, D] after the block.

        Args:
            x_TD: Packed states.
            cuts_B1: Offsets of the sequences in them.
            rotation: Cosines and sines of the positions, from `compute_rotary`.
            past: Stored keys and values that precede those of x in each sequence; None if there are none.
        """
        q, k, v = self.qkv(self.attend_norm(x_TD)).unflatten(-1, (3, -1, self.head_width)).unbind(1)
        q, k, cuts_k = rotate(q, rotation), rotate(k, rotation), None
        if past is not None:
            k, v, cuts_k = past.append_new(k, v)
        attended_THE = uni_attention(
            q, k, v, mask=UniMask.causal(), cu_seqlens_q=cuts_B1, cu_seqlens_k=cuts_k
        )
        x_TD = x_TD + functional.dropout(self.merge(attended_THE.flatten(1)), self.dropout, self.training)
        hidden_TD = self.narrow(functional.relu(self.widen(self.think_norm(x_TD))))
        return x_TD + functional.dropout(hidden_TD, self.dropout, self.training)


class PastKeyValues:
    """Keys and values of stored positions, which each block extends by those of its new positions.

    Attributes:
        kv_by_block: Keys and values of stored and new positions, for each block that has been applied.
    """

    def __init__(self, kv: Tensor | None, row_S: Tensor, row_T: Tensor, cuts_B1: Tensor):
        self._kv, self._row_S, self._row_T, self._cuts_B1, self._block = kv, row_S, row_T, cuts_B1, 0
        self.kv_by_block: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def from_offsets(cls, kv_JSHE: Tensor | None, past_cuts_B1: Tensor, new_cuts_B1: Tensor) -> PastKeyValues:
        """Build from the keys and values [J, 2, S, H, E] of J blocks, and the sequences' offsets in stored and new positions."""
        index_S = torch.arange(int(past_cuts_B1[-1]), device=past_cuts_B1.device)
        index_T = torch.arange(int(new_cuts_B1[-1]), device=new_cuts_B1.device)
        row_S = index_S + new_cuts_B1[torch.repeat_interleave(past_cuts_B1.diff())]
        row_T = index_T + past_cuts_B1[torch.repeat_interleave(new_cuts_B1.diff()) + 1]
        return cls(kv_JSHE, row_S, row_T, past_cuts_B1 + new_cuts_B1)

    def select_block(self, number: int) -> PastKeyValues:
        """Select the block whose keys and values `append_new` extends, and return this object."""
        self._block = number
        return self

    def join(self, past: Tensor, new: Tensor) -> Tensor:
        """Interleave stored [S, ..] and new [T, ..] positions to [S + T, ..]: each sequence's stored ones, then its new ones."""
        both = new.new_empty(len(past) + len(new), *new.shape[1:])
        both.index_copy_(0, self._row_S, past)
        return both.index_copy_(0, self._row_T, new)

    def append_new(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append the selected block's keys and values of new positions to `kv_by_block`, each sequence's after its stored ones.

        Returns:
            Keys, values and their offsets; None for the offsets if nothing is stored: they equal those of the new positions.
        """
        if self._kv is None:
            self.kv_by_block.append((keys, values))
            return keys, values, None
        keys = self.join(self._kv[self._block, 0], keys)
        values = self.join(self._kv[self._block, 1], values)
        self.kv_by_block.append((keys, values))
        return keys, values, self._cuts_B1


def compute_rotary(position_T: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Compute cosines and signed sines [T, 1, width] of positions [T], as input of `rotate`; width is even."""
    half = width // 2
    frequency = _ROTARY_BASE ** (-torch.arange(half, device=position_T.device) / half)
    angle = position_T[:, None] * frequency
    cosine, sine = angle.cos(), angle.sin()
    return torch.cat([cosine, cosine], -1)[:, None], torch.cat([-sine, sine], -1)[:, None]


def rotate(x_THE: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair of dimensions (i, i + E / 2) by its angle at the position."""
    cosine, sine = (t.to(x_THE.dtype) for t in rotation)
    return x_THE * cosine + x_THE.roll(x_THE.shape[-1] // 2, -1) * sine
