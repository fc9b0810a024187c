"""Dense attention: the reference that kernels and fallbacks are compared with.

Every feature takes a few lines of torch, one sequence at a time, with O(N^2) memory, in the dtype of the inputs: float64 for the
exact result, the kernel's own dtype for the error that this dtype may have. All inputs with gradients are differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nonet.attention.calls import RelativeBias, compute_bucket
from nonet.attention.masks import IntervalTable

# Shapes: T packed query tokens, S packed key tokens, H query heads, G key heads, D width, E value width; of one
# sequence Q queries and N keys.


def attend_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: IntervalTable,
    *,
    scale: float | None = None,
    activation: str = "softmax",
    scaling_length: float | None = None,
    soft_cap: float | None = None,
    sink: Tensor | None = None,
    bias: RelativeBias | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute outputs [T, H, E] and log-sum-exp [H, T] in nats (zeros for "silu"); arguments are as in `uni_attention`."""
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    cu_q, cu_k = table.cu_q.tolist(), table.cu_k.tolist()
    outs, sums = [q.new_zeros(0, q.shape[1], v.shape[2])], [q.new_zeros(q.shape[1], 0)]
    for b in range(len(cu_q) - 1):
        rows, columns = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        score_HQN = torch.einsum("qhd,nhd->hqn", q[rows], _spread(k[columns], q.shape[1])) * scale
        if soft_cap is not None:
            score_HQN = soft_cap * torch.tanh(score_HQN / soft_cap)
        if bias is not None:
            score_HQN = score_HQN + _compute_bias(bias, rows, columns)
        seen_QN = compute_visible_pairs(table, rows, columns)
        values_NHE = _spread(v[columns], q.shape[1])
        if activation == "silu":
            weight_HQN = torch.nn.functional.silu(score_HQN).masked_fill(~seen_QN, 0.0)
            weight_HQN = weight_HQN / (scaling_length or 1.0)
            total_HQ = score_HQN.new_zeros(score_HQN.shape[:2])
        else:
            weight_HQN, total_HQ = _compute_softmax(score_HQN, seen_QN, sink)
        outs.append(torch.einsum("hqn,nhe->qhe", weight_HQN, values_NHE))
        sums.append(total_HQ)
    return torch.cat(outs), torch.cat(sums, 1)


def compute_visible_pairs(table: IntervalTable, rows: slice, columns: slice) -> Tensor:
    """Compute the mask [Q, N] of one sequence, directly from the definition of the table."""
    key_N = torch.arange(columns.stop - columns.start, device=table.start.device)
    query_Q = torch.arange(rows.stop - rows.start, device=table.start.device)
    seen = ((key_N >= table.start[:, rows, None]) & (key_N < table.stop[:, rows, None])).any(0)
    if table.column_start is not None and table.column_stop is not None:
        seen = seen & (query_Q[:, None] >= table.column_start[columns])
        seen = seen & (query_Q[:, None] < table.column_stop[columns])
    if table.sees is not None and table.word is not None:
        seen = seen & ((table.sees[rows, None] & table.word[columns]) != 0)
    return seen


def _compute_softmax(score_HQN: Tensor, seen_QN: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute weights, zero in rows without visible keys, and the rows' log-sum-exp including the sink."""
    score_HQN = score_HQN.masked_fill(~seen_QN, -torch.inf)
    if sink is not None:
        column_HQ1 = sink[:, None, None].to(score_HQN.dtype).expand(-1, score_HQN.shape[1], 1)
        score_HQN = torch.cat([score_HQN, column_HQ1], -1)
    blind_Q = ~seen_QN.any(-1, keepdim=True) if sink is None else seen_QN.new_zeros(len(seen_QN), 1)
    weight = score_HQN.masked_fill(blind_Q, 0.0).softmax(-1).masked_fill(blind_Q, 0.0)
    lse = score_HQN.masked_fill(blind_Q, 0.0).logsumexp(-1) if score_HQN.shape[-1] else score_HQN.sum(-1)
    lse = lse.masked_fill(blind_Q.squeeze(-1), -torch.inf)
    return weight[..., : seen_QN.shape[1]], lse


def _compute_bias(bias: RelativeBias, rows: slice, columns: slice) -> Tensor:
    """Compute the bias [H or 1, Q, N]."""
    queries, keys = rows.stop - rows.start, columns.stop - columns.start
    total = torch.zeros((), dtype=torch.float64)
    if bias.position is not None:
        reach = (bias.position.shape[1] + 1) // 2
        apart = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
        total = bias.position[:, apart.clamp(1 - reach, reach - 1) + reach - 1]
    if bias.time is not None and bias.time_q is not None and bias.time_k is not None:
        between = bias.time_q[rows, None].long() - bias.time_k[columns].long()
        total = total + bias.time[:, compute_bucket(between, bias.steps, bias.time.shape[1])]
    return total


def _spread(x_NGD: Tensor, heads: int) -> Tensor:
    """Repeat key heads for the query heads that share them."""
    return x_NGD.repeat_interleave(heads // x_NGD.shape[1], dim=1)
