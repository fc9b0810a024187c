"""Call: everything of one attention call but q, k and v, as the ops carry it and backends read it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nonet.attention.bias import RelativeBias
from nonet.attention.table import IntervalTable

# Shapes: B sequences, H query heads.


@dataclass(frozen=True, slots=True, eq=False)
class Call:
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

    def whole_table(self) -> IntervalTable:
        """The table, built where only a form was given."""
        if self.table is not None:
            return self.table
        from nonet.attention.mask import UniMask

        return (UniMask.causal() if self.form == "causal" else UniMask.full()).table(self.cu_q, self.cu_k)
