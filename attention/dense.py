"""Dense views of a table: the bool matrix it stands for (the oracle of every test), its FlexAttention twin, its work."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nonet.attention.table import IntervalTable

# Shapes: T packed query tokens, S packed key tokens, K slots, Q queries and N keys of a block.
_FLEX_BLOCK = 128


def visible(
    table: IntervalTable, query: Tensor, key: Tensor, row: Tensor, place: Tensor, slots: Any = slice(None)
) -> Tensor:
    """[Q, N] bool of one sequence's packed tokens `query` [Q] and `key` [N], which stand at `row` and `place` in it."""
    start_KQ1, stop_KQ1 = table.start[slots][:, query, None], table.stop[slots][:, query, None]
    seen = ((place >= start_KQ1) & (place < stop_KQ1)).any(0)
    if table.column_start is not None and table.column_stop is not None:
        seen &= (row[:, None] >= table.column_start[key]) & (row[:, None] < table.column_stop[key])
    if table.sees is not None and table.word is not None:
        seen &= (table.sees[query, None] & table.word[key]) != 0
    return seen


def to_dense(table: IntervalTable) -> Tensor:
    """[T, S] bool over the packed batch, false between sequences."""
    device = table.start.device
    out = torch.zeros(table.start.shape[1], int(table.cu_k[-1]), dtype=torch.bool, device=device)
    cu_q, cu_k = table.cu_q.tolist(), table.cu_k.tolist()
    for b in range(len(cu_q) - 1):
        row, place = (torch.arange(cu[b + 1] - cu[b], device=device) for cu in (cu_q, cu_k))
        out[cu_q[b] : cu_q[b + 1], cu_k[b] : cu_k[b + 1]] = visible(
            table, row + cu_q[b], place + cu_k[b], row, place
        )
    return out


def visible_pairs(table: IntervalTable) -> int:
    """Number of (query, key) pairs that attend."""
    if table.column_start is None and table.sees is None:
        return int((table.stop - table.start).clamp_min(0).sum(dtype=torch.int64))
    pairs = 0
    cu_q, cu_k = table.cu_q.tolist(), table.cu_k.tolist()
    for b in range(len(cu_q) - 1):
        place = torch.arange(cu_k[b + 1] - cu_k[b], device=table.start.device)
        size = max(1, (1 << 22) // max(len(place), 1))
        for first in range(0, cu_q[b + 1] - cu_q[b], size):
            row = torch.arange(first, min(first + size, cu_q[b + 1] - cu_q[b]), device=table.start.device)
            pairs += int(visible(table, row + cu_q[b], place + cu_k[b], row, place).sum())
    return pairs


def to_flex(table: IntervalTable) -> Any:
    """FlexAttention's BlockMask over the packed batch (B and H broadcast)."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(
        flex_mod(table),
        None,
        None,
        table.start.shape[1],
        int(table.cu_k[-1]),
        device=str(table.start.device),
    )


def flex_mod(table: IntervalTable) -> Any:
    """A mask_mod(b, h, q, k) of packed tokens; its tables are padded to whole blocks, where it may be asked."""

    def wide(x: Tensor) -> Tensor:
        return pad(x, (0, -x.shape[-1] % _FLEX_BLOCK + _FLEX_BLOCK))

    tokens_q, tokens_k = table.start.shape[1], int(table.cu_k[-1])
    start, stop = wide(table.start), wide(table.stop)
    sequence_q, row = _places(table.cu_q, tokens_q)
    sequence_k, place = _places(table.cu_k, tokens_k)
    sequence_q, row, sequence_k, place = (
        wide(sequence_q + 1),
        wide(row),
        wide(sequence_k + 2) - 1,
        wide(place),
    )
    column = None if table.column_start is None else (wide(table.column_start), wide(table.column_stop))  # type: ignore[arg-type]
    words = None if table.sees is None else (wide(table.sees), wide(table.word))  # type: ignore[arg-type]

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (place[k] >= start[0][q]) & (place[k] < stop[0][q])
        for j in range(1, len(start)):
            seen = seen | ((place[k] >= start[j][q]) & (place[k] < stop[j][q]))
        seen = seen & (sequence_q[q] == sequence_k[k])
        if column is not None:
            seen = seen & (row[q] >= column[0][k]) & (row[q] < column[1][k])
        if words is not None:
            seen = seen & ((words[0][q] & words[1][k]) != 0)
        return seen

    return mod


def _places(cuts: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    token = torch.arange(tokens, device=cuts.device)
    sequence = torch.searchsorted(cuts[1:].contiguous(), token.to(cuts.dtype), right=True)
    return sequence, token - cuts[sequence]
