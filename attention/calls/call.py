"""Call: everything of one attention call but q, k and v, as the ops carry it and backends read it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nonet.attention.calls.bias import RelativeBias
from nonet.attention.masks import IntervalTable

# Shapes: B sequences, H query heads.


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """`table` is None where `form` ("full" or "causal" of equal cuts) says it all."""

    cu_q: Tensor
    cu_k: Tensor
    form: str
    table: IntervalTable | None
    scale: float
    activation: str = "softmax"
    scaling_length: float = 1.0
    soft_cap: float | None = None  # of the scaled product, before the bias
    sink: Tensor | None = None  # [H]
    bias: RelativeBias | None = None

    @property
    def plain(self) -> bool:
        """Softmax of scaled products, at most with a sink: what fused kernels of other libraries speak."""
        return self.activation == "softmax" and self.soft_cap is None and self.bias is None

    def build_table(self, tokens_q: int | None = None, tokens_k: int | None = None) -> IntervalTable:
        """Return the table, built if only a form was given; with token counts nothing is read from a device."""
        if self.table is not None:
            return self.table
        from nonet.attention.masks import UniMask

        mask = UniMask.causal() if self.form == "causal" else UniMask.full()
        # Copies: a table that is kept as long as its cuts live must not keep them alive.
        return mask.build_table(self.cu_q.clone(), self.cu_k.clone(), tokens_q=tokens_q, tokens_k=tokens_k)
