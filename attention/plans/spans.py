"""Computes which key blocks a tile of queries reads, and which of these need no mask, directly from the row intervals.

For each slot, the hull is the range from the first to the last key that any row of the tile sees, and the core is the range of
keys that every row sees, which needs no mask. A row whose slot is empty makes the core empty, but not the hull. So for any
intervals, the blocks that are computed include all visible ones, and the unmasked blocks are fully visible. This takes
O(tokens) loads. Plans on a CPU use NumPy: their arrays have about a thousand elements, for which torch's overhead is three
times as large.
"""

from __future__ import annotations

import numpy as np

# Shapes: N tiles, R rows of a tile, T tokens, K slots, S spans of a tile. A span is (first block, first unmasked block, block
# past the last unmasked one, block past the last one), in blocks of keys of the tile's own sequence.
FAR = 2**30  # The begin of an empty interval or span, after every block.


def compute_tokens(first_N: np.ndarray, rows_N: np.ndarray, size: int) -> np.ndarray:
    """Return the packed token of each tile's rows [N, R]; missing rows repeat the last one, so that reductions need no mask."""
    return first_N[:, None] + np.minimum(np.arange(size), rows_N[:, None] - 1)


def compute_extents(
    start: np.ndarray, stop: np.ndarray, token_NR: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Compute the hull and the core of the intervals [start, stop) [..., T] of each tile's tokens.

    Returns:
        The begin and end of the hull and the begin and end of the core, each [..., N]. If all intervals of a tile are empty, the
        hull ends at 0. If one is empty, the core begins at or after its end.
    """
    start_NR, stop_NR = start.take(token_NR, axis=-1), stop.take(token_NR, axis=-1)
    seen_NR = stop_NR > start_NR
    begin, end = np.where(seen_NR, start_NR, np.int32(FAR)).min(-1), (stop_NR * seen_NR).max(-1)
    return begin, end, start_NR.max(-1), stop_NR.min(-1)


def compute_slot_spans(
    start_KT: np.ndarray, stop_KT: np.ndarray, first_N: np.ndarray, rows_N: np.ndarray, sizes: tuple[int, int]
) -> np.ndarray:
    """Compute the span of every slot, [N, K, 4]; (FAR, FAR, FAR, FAR) for an empty slot.

    Args:
        start_KT: The starts of the row intervals.
        stop_KT: The stops of the row intervals.
        first_N: The first packed token of each tile.
        rows_N: The number of rows of each tile.
        sizes: The maximum number of rows of a tile, and the number of keys of a block.
    """
    tile_rows, block = sizes
    begin, end, inner, outer = compute_extents(start_KT, stop_KT, compute_tokens(first_N, rows_N, tile_rows))
    first, last = begin // block, -(-end // block)
    core_first, core_last = -(-inner // block), outer // block
    # A core that is empty after rounding is set to the hull's begin, so that first <= core_first <= core_last <= last holds.
    no_core_KN = core_first >= core_last
    core_first, core_last = np.where(no_core_KN, first, core_first), np.where(no_core_KN, first, core_last)
    spans_KN4 = np.stack([first, core_first, core_last, last], -1)
    spans_KN4[end <= 0] = FAR
    return spans_KN4.transpose(1, 0, 2)


def make_disjoint(spans_NK4: np.ndarray) -> np.ndarray:
    """Convert spans to at most K disjoint spans of the same blocks, in ascending order.

    Empty spans are last, as (0, 0, 0, 0). Where hulls overlap, a span ends after its core, and the next one has the rest. The
    core of the earlier span is kept completely; the core of the later one loses the blocks before this cut.
    """
    if spans_NK4.shape[1] == 1:
        return np.where(spans_NK4[..., :1] >= FAR, 0, spans_NK4)
    order_NK1 = spans_NK4[..., 0].argsort(axis=1, kind="stable")[..., None]
    spans_K4N = np.take_along_axis(spans_NK4, order_NK1, axis=1).transpose(1, 2, 0)
    disjoint, current = [], spans_K4N[0]
    for later in spans_K4N[1:]:
        cut = np.minimum(np.maximum(current[2], later[0]), np.maximum(current[3], current[0]))
        is_disjoint = later[0] >= current[3]
        cut = np.where(is_disjoint, current[3], cut)
        disjoint.append(_clip_span(current, current[0], cut))
        end = np.where(is_disjoint, later[3], np.maximum(later[3], current[3]))
        current = _clip_span(later, np.maximum(later[0], cut), end)
    disjoint.append(_clip_span(current, current[0], current[3]))
    spans_NS4 = np.stack(disjoint).transpose(2, 0, 1)
    empty = (spans_NS4[..., 0] >= spans_NS4[..., 3]) | (spans_NS4[..., 0] >= FAR)
    spans_NS4 = np.where(empty[..., None], 0, spans_NS4)
    return np.take_along_axis(spans_NS4, empty.argsort(axis=1, kind="stable")[..., None], axis=1)


def _clip_span(span_4N: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Clip spans [4, N] and their cores to [begin, end)."""
    inner, outer = np.maximum(span_4N[1], begin), np.minimum(span_4N[2], end)
    no_core = inner >= outer
    return np.stack(
        [begin, np.where(no_core, begin, inner), np.where(no_core, begin, outer), np.maximum(end, begin)]
    )
