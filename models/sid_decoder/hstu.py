"""HSTU block (Zhai et al. 2024, "Actions speak louder than words"): gated pointwise attention over packed sequences.

u, v, q, k = silu(W x); y = W'(norm(attention(q, k, v)) * u) + x, where attention weights are silu(score + bias) / length:
no softmax, so an event's weight does not depend on how many others there are. `length` is the longest sequence
that the model is built for, not that of the batch: a divisor that depends on the batch would make training and serving differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nonet.attention import uni_attention
from nonet.attention.calls import RelativeBias
from nonet.errors import ConfigError
from nonet.models.sid_decoder.spec import TIME_BUCKETS

# Shapes: T packed positions, B sequences, D width, H heads, A attention width per head, V value width per head.


class HstuBlock(nn.Module):
    """One HSTU block. `length`, the longest sequence, divides the attention weights and bounds the relative positions."""

    def __init__(
        self,
        width: int,
        heads: int,
        length: int,
        *,
        attention_width: int | None = None,
        value_width: int | None = None,
        dropout: float = 0.0,
        time: bool = True,
    ):
        super().__init__()
        if length < 1 or (attention_width is None and width % heads):
            raise ConfigError(
                f"HSTU block: width {width} must be a multiple of heads ({heads}), or give attention_width; length {length} "
                "must be at least 1."
            )
        self.heads, self.length, self.dropout = heads, length, dropout
        self.attention_width = attention_width or width // heads
        self.value_width = value_width or self.attention_width
        self.norm, self.out_norm = nn.LayerNorm(width), nn.LayerNorm(heads * self.value_width)
        self.uvqk = nn.Linear(width, 2 * heads * (self.value_width + self.attention_width))
        self.merge = nn.Linear(heads * self.value_width, width)
        self.position = nn.Parameter(torch.zeros(1, 2 * length - 1))
        self.time = nn.Parameter(torch.zeros(1, TIME_BUCKETS)) if time else None

    def forward(self, x_TD: Tensor, cuts_B1: Tensor, mask: Any, time_T: Tensor | None = None) -> Tensor:
        """Return the states [T, D] after the block.

        Args:
            x_TD: Packed states.
            cuts_B1: Offsets of the sequences in them.
            mask: A UniMask or its table, which all blocks can share.
            time_T: int32 seconds of each position, for the time bias.
        """
        if (self.time is None) != (time_T is None):
            raise ConfigError(
                "HSTU block: pass time_T [T] int32 if and only if the block was built with time=True."
            )
        uvqk = functional.silu(self.uvqk(self.norm(x_TD)))
        value_columns, attention_columns = self.heads * self.value_width, self.heads * self.attention_width
        u, v, q, k = uvqk.split([value_columns, value_columns, attention_columns, attention_columns], -1)
        attended_THV = uni_attention(
            *(x.unflatten(-1, (self.heads, -1)) for x in (q, k, v)),
            mask=mask,
            cu_seqlens_q=cuts_B1,
            activation="silu",
            scaling_length=float(self.length),
            bias=RelativeBias(self.position, self.time, time_T, time_T),
        )
        gated = self.out_norm(attended_THV.flatten(1)) * u
        return x_TD + self.merge(functional.dropout(gated, self.dropout, self.training))
