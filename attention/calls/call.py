"""AttentionCall: all arguments of an attention call except q, k and v, as operators pass them and backends read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nonet.attention.calls.bias import RelativeBias
from nonet.attention.masks import IntervalTable

# Shapes: B sequences, H query heads.


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """The arguments of a call.

    Attributes:
        cu_q: Cuts of the queries [B + 1].
        cu_k: Cuts of the keys [B + 1].
        form: The form of the mask: "full", "causal" or "table".
        table: The mask's interval table; None if the form ("full", or "causal" with equal cuts) defines the mask.
        scale: The factor of the products of queries and keys.
        activation: "softmax" or "silu".
        scaling_length: The divisor of "silu".
        soft_cap: The soft cap of the scaled product, applied before the bias.
        sink: A logit in addition to those of the keys [H].
        bias: A relative position and time bias.
    """

    cu_q: Tensor
    cu_k: Tensor
    form: str
    table: IntervalTable | None
    scale: float
    activation: str = "softmax"
    scaling_length: float = 1.0
    soft_cap: float | None = None
    sink: Tensor | None = None
    bias: RelativeBias | None = None

    @property
    def plain(self) -> bool:
        """Whether the call is a softmax of scaled products with at most a sink, which other libraries' fused kernels support."""
        return self.activation == "softmax" and self.soft_cap is None and self.bias is None

    def build_table(self, tokens_q: int | None = None, tokens_k: int | None = None) -> IntervalTable:
        """Return the table, built if only a form was given; with token counts nothing is read from a device."""
        if self.table is not None:
            return self.table
        from nonet.attention.masks import UniMask

        mask = UniMask.causal() if self.form == "causal" else UniMask.full()
        # Copied, because the cache keeps a table while its cuts are alive, and the table must not keep them alive.
        return mask.build_table(self.cu_q.clone(), self.cu_k.clone(), tokens_q=tokens_q, tokens_k=tokens_k)
