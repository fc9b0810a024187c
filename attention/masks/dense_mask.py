"""Converts an interval table to a bool matrix or a FlexAttention mask, and counts its visible (query, key) pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nonet.attention.masks.interval_table import IntervalTable

# Shapes: T packed query tokens, S packed key tokens, K slots, Q queries and N keys of a block.
_FLEX_BLOCK = 128  # FlexAttention's block size.
_MAX_BLOCK_PAIRS = 1 << 22  # The pairs whose visibility is computed at a time to count them.


def compute_visible(
    table: IntervalTable, query: Tensor, key: Tensor, row: Tensor, place: Tensor, slots: Any = slice(None)
) -> Tensor:
    """Compute the mask of some queries and keys of one sequence, bool [Q, N], true for visible pairs.

    Args:
        table: The interval table.
        query: Packed indices of the queries [Q].
        key: Packed indices of the keys [N].
        row: Positions of the queries among the queries of the sequence [Q].
        place: Positions of the keys in the sequence [N].
        slots: Index of the slots that are used; all by default.
    """
    start_KQ1, stop_KQ1 = table.start[slots][:, query, None], table.stop[slots][:, query, None]
    visible = ((place >= start_KQ1) & (place < stop_KQ1)).any(0)
    if table.column_start is not None and table.column_stop is not None:
        visible &= (row[:, None] >= table.column_start[key]) & (row[:, None] < table.column_stop[key])
    if table.sees is not None and table.word is not None:
        visible &= (table.sees[query, None] & table.word[key]) != 0
    return visible


def to_dense(table: IntervalTable) -> Tensor:
    """Convert a table to a bool mask [T, S] of the packed batch; pairs of different sequences are False."""
    device = table.start.device
    out = torch.zeros(table.start.shape[1], int(table.cu_k[-1]), dtype=torch.bool, device=device)
    cu_q, cu_k = table.cu_q.tolist(), table.cu_k.tolist()
    for b in range(len(cu_q) - 1):
        row, place = (torch.arange(cu[b + 1] - cu[b], device=device) for cu in (cu_q, cu_k))
        out[cu_q[b] : cu_q[b + 1], cu_k[b] : cu_k[b + 1]] = compute_visible(
            table, row + cu_q[b], place + cu_k[b], row, place
        )
    return out


def count_visible_pairs(table: IntervalTable) -> int:
    """Count the (query, key) pairs that the mask allows."""
    if table.column_start is None and table.sees is None:
        return int((table.stop - table.start).clamp_min(0).sum(dtype=torch.int64))
    pairs = 0
    cu_q, cu_k = table.cu_q.tolist(), table.cu_k.tolist()
    for b in range(len(cu_q) - 1):
        place = torch.arange(cu_k[b + 1] - cu_k[b], device=table.start.device)
        block_rows = max(1, _MAX_BLOCK_PAIRS // max(len(place), 1))
        for first in range(0, cu_q[b + 1] - cu_q[b], block_rows):
            row = torch.arange(
                first, min(first + block_rows, cu_q[b + 1] - cu_q[b]), device=table.start.device
            )
            pairs += int(compute_visible(table, row + cu_q[b], place + cu_k[b], row, place).sum())
    return pairs


def to_flex(table: IntervalTable) -> Any:
    """Convert a table to FlexAttention's BlockMask of the packed batch, one mask for every batch index and head."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(
        make_flex_mod(table),
        B=None,
        H=None,
        Q_LEN=table.start.shape[1],
        KV_LEN=int(table.cu_k[-1]),
        device=str(table.start.device),
    )


def make_flex_mod(table: IntervalTable) -> Any:
    """Create FlexAttention's mask_mod(b, h, q, k) for packed token indices."""
    return make_mask_mod(make_flex_tensors(table))


def make_flex_tensors(table: IntervalTable) -> dict[str, Tensor]:
    """Build the tensors that the mask_mod reads, padded to complete blocks.

    A compiled mask_mod can be used for another batch by copying that batch's tensors into these.
    """
    tokens_q = table.start.shape[1]
    tokens_k = len(table.word) if table.word is not None else int(table.cu_k[-1])
    sequence_q, row = _compute_places(table.cu_q, tokens_q)
    sequence_k, place = _compute_places(table.cu_k, tokens_k)
    tensors = {
        "start": table.start,
        "stop": table.stop,
        # These never match padding, which is 0: see `make_mask_mod`.
        "sequence_q": sequence_q + 1,
        "sequence_k": sequence_k + 2,
    }
    tensors |= {"row": row, "place": place}
    if table.column_start is not None and table.column_stop is not None:
        tensors |= {"column_start": table.column_start, "column_stop": table.column_stop}
    if table.sees is not None and table.word is not None:
        tensors |= {"sees": table.sees, "word": table.word}
    return {name: pad(x, (0, -x.shape[-1] % _FLEX_BLOCK + _FLEX_BLOCK)) for name, x in tensors.items()}


def make_mask_mod(tensors: dict[str, Tensor]) -> Any:
    """Create the mask_mod that reads the tensors of `make_flex_tensors`.

    The stored sequence numbers start at 1 for queries and at 2 for keys, so that padding (0) never satisfies
    sequence_q + 1 == sequence_k.
    """
    start, stop, place = tensors["start"], tensors["stop"], tensors["place"]
    sequence_q, sequence_k, row = tensors["sequence_q"], tensors["sequence_k"], tensors["row"]
    columns = (tensors["column_start"], tensors["column_stop"]) if "column_start" in tensors else None
    words = (tensors["sees"], tensors["word"]) if "sees" in tensors else None

    def evaluate_mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        visible = (place[k] >= start[0][q]) & (place[k] < stop[0][q])
        for j in range(1, len(start)):
            visible = visible | ((place[k] >= start[j][q]) & (place[k] < stop[j][q]))
        visible = visible & (sequence_q[q] + 1 == sequence_k[k])
        if columns is not None:
            visible = visible & (row[q] >= columns[0][k]) & (row[q] < columns[1][k])
        if words is not None:
            visible = visible & ((words[0][q] & words[1][k]) != 0)
        return visible

    return evaluate_mask


def _compute_places(cuts: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the sequence of each packed token and the token's position in it, both [tokens]."""
    token = torch.arange(tokens, device=cuts.device)
    sequence = torch.searchsorted(cuts[1:].contiguous(), token.to(cuts.dtype), right=True)
    return sequence, token - cuts[sequence]
