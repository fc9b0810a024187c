"""Splits a mask into pieces that a fused kernel computes without a mask tensor: rectangles, triangles and diagonals.

Consecutive rows whose interval ends are constant or move by one key per row form one piece. Other rows are computed in blocks
that span all of their keys, with a mask tensor of that block. Candidate isolation, for example, is a causal square, a rectangle
and a diagonal, and no tensor has N x N elements. Pieces of the same row have disjoint keys; their results are merged by
log-sum-exp.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from nonet.attention.masks import IntervalTable

# Shapes: T packed query tokens, K slots. Rows and keys below are packed tokens.
# Minimum number of rows for which a separate kernel call costs less than a mask tensor.
_MIN_REGULAR_ROWS = 32
_BLOCK_ROWS = 128  # Rows of a masked block.
_MIN_WINDOW = 64  # Minimum width of a window whose triangles are computed by separate calls.
_MAX_EXTRA_KEYS = (
    32  # Slots share a masked piece if it has at most this many keys more than the slots together.
)
# Kinds of rows, by the changes of their interval's (start, stop) from row to row: (0, 0), (0, 1), (1, 1) and (1, 0).
_STILL, _GROWING, _MOVING, _SHRINKING, _IRREGULAR = 0, 1, 2, 3, 9


@dataclass(frozen=True, slots=True)
class MaskPiece:
    """A piece of a mask: rows [q0, q1) and keys [k0, k1) with one pattern.

    Attributes:
        kind: "dense" (every row attends to all keys), "causal" (a square; row i attends to its first i + 1 keys), "anti" (a
            square; row i attends to all except its first i keys), "self" (row i attends to its i-th key) or "masked"
            (the union of the intervals in `slots`).
        q0, q1: Packed rows.
        k0, k1: Packed keys.
        sequence: Index of the sequence.
        slots: Slots of the interval table, for "masked".
        first: Whether no earlier piece contains these rows.
    """

    kind: str
    q0: int
    q1: int
    k0: int
    k1: int
    sequence: int
    slots: tuple[int, ...] = ()
    first: bool = False


def split_mask(table: IntervalTable, sequences: list[int]) -> list[MaskPiece]:
    """Split the mask of these sequences into pieces; the pieces of a sequence are consecutive."""
    cu_q, cu_k = table.cu_q.tolist(), table.cu_k.tolist()
    start, stop = table.start.cpu().numpy(), table.stop.cpu().numpy()
    # With columns or classes, every piece needs a mask.
    refined = table.column_start is not None or table.sees is not None
    all_pieces: list[MaskPiece] = []
    for b in sequences:
        rows = slice(cu_q[b], cu_q[b + 1])
        # The blocks of rows that need a mask: (first row, past the last) -> [(slot, first key, past the last)].
        masked_blocks: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        pieces: list[MaskPiece] = []
        for slot in range(len(start)):
            s, e = start[slot, rows], stop[slot, rows]
            for kind, first, last in [(None, 0, len(s))] if refined else _find_regular_rows(s, e):
                pieces += _cut_rows(kind, s, e, first, last, (cu_q[b], cu_k[b], b, slot), masked_blocks)
        pieces += _make_masked_pieces(masked_blocks, cu_q[b], cu_k[b], b)
        all_pieces += _mark_first_pieces(pieces, cu_q[b], cu_q[b + 1])
    return all_pieces


def _find_regular_rows(s: Any, e: Any) -> list[tuple[int | None, int, int]]:
    """Group the rows of one slot, given the starts `s` and the stops `e` of their intervals.

    Returns:
        (kind, first, past the last) of consecutive rows of one kind, and (None, first, past the last) of rows in between. Runs of
        empty rows are left out.
    """
    empty = s >= e
    # Empty rows are equal, and no change to another row is regular.
    s, e = np.where(empty, -9, s), np.where(empty, -9, e)
    ds, de = np.diff(s), np.diff(e)
    # The kind of the change from each row to the next.
    kind = np.where(ds == 0, np.where(de == 0, _STILL, np.where(de == 1, _GROWING, _IRREGULAR)), _IRREGULAR)
    kind = np.where(ds == 1, np.where(de == 1, _MOVING, np.where(de == 0, _SHRINKING, kind)), kind)
    edge = np.flatnonzero(np.diff(kind)) + 1
    begin, end = np.concatenate([[0], edge]), np.concatenate([edge, [len(kind)]])
    # n changes of one kind connect n + 1 rows.
    is_regular = (end - begin + 1 >= _MIN_REGULAR_ROWS) & (
        kind[np.minimum(begin, max(len(kind) - 1, 0))] != _IRREGULAR if len(kind) else False
    )
    groups: list[tuple[int | None, int, int]] = []
    next_row = 0  # The first row that is in no group.
    for first_change, last in zip(begin[is_regular].tolist(), end[is_regular].tolist(), strict=True):
        first = max(first_change, next_row)
        if last + 1 - first < _MIN_REGULAR_ROWS:
            continue
        if first > next_row:
            groups.append((None, next_row, first))
        if not empty[first]:
            groups.append((int(kind[first_change]), first, last + 1))
        next_row = last + 1
    if next_row < len(s):
        groups.append((None, next_row, len(s)))
    return groups


def _cut_rows(
    kind: int | None,
    s: Any,
    e: Any,
    first: int,
    last: int,
    location: tuple[int, int, int, int],
    masked_blocks: dict,
) -> list[MaskPiece]:
    """Return the pieces of regular rows [first, last); add other rows to `masked_blocks`, because they need a mask.

    Args:
        kind: The kind of the rows; None for irregular ones, which are divided into blocks.
        s: The starts of the slot's intervals in all rows of the sequence.
        e: The stops of these intervals.
        first: The first row, counted in the sequence.
        last: The row past the last.
        location: The first packed query and key of the sequence, the sequence, and the slot.
        masked_blocks: (first row, past the last) of a block -> [(slot, first key, past the last key)].
    """
    base_q, base_k, b, slot = location
    q0, q1, k0, k1 = base_q + first, base_q + last, base_k + int(s[first]), base_k + int(e[first])
    if kind == _STILL:
        return [MaskPiece("dense", q0, q1, k0, k1, b)]
    if kind == _GROWING:
        square = MaskPiece("causal", q0, q1, k1 - 1, k1 - 1 + q1 - q0, b)
        return [MaskPiece("dense", q0, q1, k0, k1 - 1, b), square] if k1 - 1 > k0 else [square]
    if kind == _SHRINKING:
        square = MaskPiece("anti", q0, q1, k0, k0 + q1 - q0, b)
        return [square, MaskPiece("dense", q0, q1, square.k1, k1, b)] if k1 > square.k1 else [square]
    if kind == _MOVING and k1 - k0 == 1:
        return [MaskPiece("self", q0, q1, k0, k0 + q1 - q0, b)]
    if kind == _MOVING and k1 - k0 >= _MIN_WINDOW:
        return _cut_window(q0, q1, k0, k1 - k0, b)
    for block in range(first // _BLOCK_ROWS, -(-last // _BLOCK_ROWS)):
        rows = slice(max(first, block * _BLOCK_ROWS), min(last, (block + 1) * _BLOCK_ROWS))
        filled = s[rows] < e[rows]
        if filled.any():
            keys = int(s[rows][filled].min()), int(e[rows][filled].max())
            masked_blocks[rows.start, rows.stop].append((slot, *keys))
    return []


def _cut_window(q0: int, q1: int, k0: int, width: int, b: int) -> list[MaskPiece]:
    """Split rows [q0, q1) with a window of `width` keys, which moves by one key per row, into triangles and rectangles.

    `k0` is the first key of row q0, `b` the sequence.

    Each block of `width` rows has a triangle of keys that leave the window and a triangle of keys that enter it.
    """
    pieces = []
    for first in range(q0, q1, width):
        rows, key = min(width, q1 - first), k0 + first - q0
        pieces.append(MaskPiece("anti", first, first + rows, key, key + rows, b))
        if width > rows:
            pieces.append(MaskPiece("dense", first, first + rows, key + rows, key + width, b))
        if rows > 1:
            pieces.append(
                MaskPiece("causal", first + 1, first + rows, key + width, key + width + rows - 1, b)
            )
    return pieces


def _make_masked_pieces(masked_blocks: dict, base_q: int, base_k: int, b: int) -> list[MaskPiece]:
    """Make the masked pieces of a sequence from the blocks that `_cut_rows` collected.

    Slots of the same rows share a piece if its keys exceed the sum of the slots' keys by at most 32.
    """
    pieces = []
    for (first, last), slot_keys in masked_blocks.items():
        groups: list[list[Any]] = []  # Each is [slots, first key, past the last key, sum of the slots' keys].
        for slot, k0, k1 in sorted(slot_keys, key=lambda keys: keys[1:]):
            if groups and max(k1, groups[-1][2]) - groups[-1][1] <= groups[-1][3] + k1 - k0 + _MAX_EXTRA_KEYS:
                group = groups[-1]
                group[0].append(slot)
                group[2], group[3] = max(group[2], k1), group[3] + k1 - k0
            else:
                groups.append([[slot], k0, k1, k1 - k0])
        for slots, k0, k1, _ in groups:
            pieces.append(
                MaskPiece("masked", base_q + first, base_q + last, base_k + k0, base_k + k1, b, tuple(slots))
            )
    return pieces


def _mark_first_pieces(pieces: list[MaskPiece], q0: int, q1: int) -> list[MaskPiece]:
    """Return copies of a sequence's pieces with `first` set; its packed rows are [q0, q1)."""
    covered = np.zeros(q1 - q0, dtype=bool)
    marked_pieces = []
    for piece in pieces:
        rows = slice(piece.q0 - q0, piece.q1 - q0)
        is_first = not covered[rows].any()
        covered[rows] = True
        marked_pieces.append(
            MaskPiece(
                piece.kind, piece.q0, piece.q1, piece.k0, piece.k1, piece.sequence, piece.slots, is_first
            )
        )
    return marked_pieces
