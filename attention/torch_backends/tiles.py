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
_REGULAR = 32  # Minimum number of rows for which a separate kernel call costs less than a mask tensor.
_BLOCK = 128  # Rows of a masked block.
_BAND = 64  # Minimum width of a window whose triangles are computed by separate calls.
# Kinds of rows, by the changes of their interval's (start, stop) from row to row: (0, 0), (0, 1), (1, 1) and (1, 0).
_STILL, _GROWING, _MOVING, _SHRINKING = 0, 1, 2, 3  # 9 is any other change.


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
    refined = table.column_start is not None or table.sees is not None
    out: list[MaskPiece] = []
    for b in sequences:
        rows = slice(cu_q[b], cu_q[b + 1])
        loose: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        pieces: list[MaskPiece] = []
        for slot in range(len(start)):
            s, e = start[slot, rows], stop[slot, rows]
            for kind, first, last in [(None, 0, len(s))] if refined else _find_regular_rows(s, e):
                pieces += _cut_rows(kind, s, e, first, last, (cu_q[b], cu_k[b], b, slot), loose)
        pieces += _make_masked_pieces(loose, cu_q[b], cu_k[b], b)
        out += _mark_first_pieces(pieces, cu_q[b], cu_q[b + 1])
    return out


def _find_regular_rows(s: Any, e: Any) -> list[tuple[int | None, int, int]]:
    """Group the rows of one slot, given the starts `s` and the stops `e` of their intervals.

    Returns:
        (kind, first, past the last) of consecutive rows of one kind, and (None, first, past the last) of rows in between. Runs of
        empty rows are left out.
    """
    empty = s >= e
    s, e = np.where(empty, -9, s), np.where(empty, -9, e)
    ds, de = np.diff(s), np.diff(e)
    kind = np.where(ds == 0, np.where(de == 0, _STILL, np.where(de == 1, _GROWING, 9)), 9)
    kind = np.where(ds == 1, np.where(de == 1, _MOVING, np.where(de == 0, _SHRINKING, kind)), kind)
    edge = np.flatnonzero(np.diff(kind)) + 1
    begin, end = np.concatenate([[0], edge]), np.concatenate([edge, [len(kind)]])
    long = (end - begin + 1 >= _REGULAR) & (
        kind[np.minimum(begin, max(len(kind) - 1, 0))] != 9 if len(kind) else False
    )
    out: list[tuple[int | None, int, int]] = []
    row = 0
    for i, j in zip(begin[long].tolist(), end[long].tolist(), strict=True):
        first = max(i, row)
        if j + 1 - first < _REGULAR:
            continue
        if first > row:
            out.append((None, row, first))
        if not empty[first]:
            out.append((int(kind[i]), first, j + 1))
        row = j + 1
    if row < len(s):
        out.append((None, row, len(s)))
    return out


def _cut_rows(
    kind: int | None, s: Any, e: Any, first: int, last: int, at: tuple[int, int, int, int], loose: dict
) -> list[MaskPiece]:
    """Return the pieces of regular rows; divide other rows into blocks and add them to `loose`, because they need a mask.

    `loose` maps the rows of a block (first, past the last) to a list of (slot, first key, past the last key).
    """
    base_q, base_k, b, slot = at
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
    if kind == _MOVING and k1 - k0 >= _BAND:
        return _cut_band(q0, q1, k0, k1 - k0, b)
    for block in range(first // _BLOCK, -(-last // _BLOCK)):
        part = slice(max(first, block * _BLOCK), min(last, (block + 1) * _BLOCK))
        used = s[part] < e[part]
        if used.any():
            keys = int(s[part][used].min()), int(e[part][used].max())
            loose[part.start, part.stop].append((slot, *keys))
    return []


def _cut_band(q0: int, q1: int, k0: int, width: int, b: int) -> list[MaskPiece]:
    """Split a window of `width` keys that moves by one key per row into triangles and rectangles.

    Each block of `width` rows has a triangle of keys that leave the window and a triangle of keys that enter it.
    """
    out = []
    for first in range(q0, q1, width):
        rows, key = min(width, q1 - first), k0 + first - q0
        out.append(MaskPiece("anti", first, first + rows, key, key + rows, b))
        if width > rows:
            out.append(MaskPiece("dense", first, first + rows, key + rows, key + width, b))
        if rows > 1:
            out.append(MaskPiece("causal", first + 1, first + rows, key + width, key + width + rows - 1, b))
    return out


def _make_masked_pieces(loose: dict, base_q: int, base_k: int, b: int) -> list[MaskPiece]:
    """Make the masked pieces of a sequence.

    Slots of the same rows share a piece if its keys exceed the sum of the slots' keys by at most 32.
    """
    out = []
    for (first, last), parts in loose.items():
        groups: list[list[Any]] = []
        for slot, k0, k1 in sorted(parts, key=lambda part: part[1:]):
            if groups and max(k1, groups[-1][2]) - groups[-1][1] <= groups[-1][3] + k1 - k0 + 32:
                group = groups[-1]
                group[0].append(slot)
                group[2], group[3] = max(group[2], k1), group[3] + k1 - k0
            else:
                groups.append([[slot], k0, k1, k1 - k0])
        for slots, k0, k1, _ in groups:
            out.append(
                MaskPiece("masked", base_q + first, base_q + last, base_k + k0, base_k + k1, b, tuple(slots))
            )
    return out


def _mark_first_pieces(pieces: list[MaskPiece], q0: int, q1: int) -> list[MaskPiece]:
    """Return copies of the pieces with `first` set."""
    covered = np.zeros(q1 - q0, dtype=bool)
    out = []
    for piece in pieces:
        rows = slice(piece.q0 - q0, piece.q1 - q0)
        is_first = not covered[rows].any()
        covered[rows] = True
        out.append(
            MaskPiece(
                piece.kind, piece.q0, piece.q1, piece.k0, piece.k1, piece.sequence, piece.slots, is_first
            )
        )
    return out
