"""AttentionCall: all arguments of an attention call except q, k and v, as operators pass them and backends read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nonet.attention.calls.bias import RelativeBias
from nonet.attention.masks import IntervalTable

# Shapes: B sequences, H query heads.


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """The arguments of a call; `table` is None if `form` ("full", or "causal" with equal cuts) defines the mask."""

    cu_q: Tensor
    cu_k: Tensor
    form: str
    table: IntervalTable | None
    scale: float
    activation: str = "softmax"
    scaling_length: float = 1.0
    soft_cap: float | None = None  # Applied to the scaled product, before the bias.
    sink: Tensor | None = None  # [H]
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
