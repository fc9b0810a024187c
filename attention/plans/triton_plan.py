"""Triton kernels that make a tile plan on the device, with one program per tile and without a transfer to the host.

The spans equal those of tile_plan.py. The tensors have space for the maximum number of tiles; unused ones have sequence -1. The
program of a key tile scans the query tiles of its sequence, of which a sequence of 2,000 tokens has 32. PLACE and SPANS are the
tensors of `Tiles`; BASE has the first tile of each sequence.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportCallIssue=false
# (the code below is Triton's language: its constants, loops and tuples are not Python's, and its stubs change by version)

from __future__ import annotations

import triton
import triton.language as tl

# Shapes: BM queries and BN keys of a tile, K slots, S spans per tile of queries, R spans per tile of keys.
_FAR = tl.constexpr(2**30)  # The begin of an empty interval, after every block.


@triton.jit
def find_sequence(BASE, tile, sequences, turns):
    """Find the sequence of a tile by a binary search of `turns` steps: the last one whose first tile is not after this tile."""
    low = 0
    high = sequences
    for _ in range(turns):
        middle = (low + high) // 2
        starts_before = tl.load(BASE + middle) <= tile
        low = tl.where(starts_before & (middle > low), middle, low)
        high = tl.where(starts_before, high, middle)
    return low


@triton.jit
def combine_any_bits(a, b):
    """Return the bits that at least one of two class words has."""
    return a | b


@triton.jit
def combine_all_bits(a, b):
    """Return the bits that both class words have."""
    return a & b


@triton.jit(do_not_specialize=["sequences", "turns"])
def summary_kernel(SUMMARY, BASE, CU_K, COLUMN_START, COLUMN_STOP, WORD, sequences, turns, BN: tl.constexpr):
    """Summarise a tile of keys for `refine`.

    SUMMARY [tiles, 8] gets the range of queries that any key allows (0, 1), the range that all keys allow (2, 3), the class bits
    of any key (4) and of all keys (5), and 1 if every key has a class bit (6).
    """
    tile = tl.program_id(0)
    if tile >= tl.load(BASE + sequences):
        return
    sequence = find_sequence(BASE, tile, sequences, turns)
    first = tl.load(CU_K + sequence) + (tile - tl.load(BASE + sequence)) * BN
    token = first + tl.arange(0, BN)
    exists = token < tl.load(CU_K + sequence + 1)
    address = SUMMARY + tile * 8
    if COLUMN_START is not None:
        begin = tl.load(COLUMN_START + token, mask=exists, other=0)
        end = tl.load(COLUMN_STOP + token, mask=exists, other=0)
        seen = exists & (end > begin)
        tl.store(address, tl.min(tl.where(seen, begin, _FAR)))
        tl.store(address + 1, tl.max(tl.where(seen, end, 0)))
        tl.store(address + 2, tl.max(tl.where(exists, begin, 0)))
        tl.store(address + 3, tl.min(tl.where(exists, end, _FAR)))
    if WORD is not None:
        word = tl.load(WORD + token, mask=exists, other=0)
        tl.store(address + 4, tl.reduce(tl.where(exists, word, 0), 0, combine_any_bits))
        tl.store(address + 5, tl.reduce(tl.where(exists, word, -1), 0, combine_all_bits))
        tl.store(address + 6, tl.min(tl.where(exists & (word == 0), 0, 1)))


@triton.jit
def write_span(SPANS, count, begin, inner, outer, end):
    """Write a span as number `count` if it has blocks, and return the number of spans so far.

    An empty core is written as [begin, begin).
    """
    filled = (begin < end) & (begin < _FAR)
    no_core = inner >= outer
    address = SPANS + count * 4
    tl.store(address, begin, mask=filled)
    tl.store(address + 1, tl.where(no_core, begin, inner), mask=filled)
    tl.store(address + 2, tl.where(no_core, begin, outer), mask=filled)
    tl.store(address + 3, end, mask=filled)
    return count + tl.where(filled, 1, 0)


@triton.jit
def extend(SPANS, count, state_begin, state_end, core, longest, core_at, block, keep, full, most):
    """Add one block to the spans of a tile: start, extend or end a span.

    `keep` says whether the tile reads the block, `full` whether the block needs no mask. From span number `most` on, blocks
    extend the last span. The state of the current span is its blocks [state_begin, state_end), the number `core` of unmasked
    blocks at its end, and its longest core: `longest` blocks from block `core_at`.

    Returns:
        The number of written spans and the new state.
    """
    gap = keep & (state_end > 0) & (block != state_end) & (count < most - 1)
    written = write_span(
        SPANS, count, state_begin, core_at, core_at + longest, tl.where(gap, state_end, state_begin)
    )
    count = tl.where(gap, written, count)
    starts = gap | (state_end == 0)
    state_begin = tl.where(keep & starts, block, state_begin)
    longest = tl.where(gap, 0, longest)
    # `core` counts the unmasked blocks that end just before this one.
    core = tl.where(keep & full, tl.where(block == state_end, core, 0) + 1, tl.where(keep, 0, core))
    is_longest = keep & full & (core >= longest) & (core > 0)
    longest = tl.where(is_longest, core, longest)
    core_at = tl.where(is_longest, block + 1 - core, core_at)
    state_end = tl.where(keep, block + 1, state_end)
    return count, state_begin, state_end, core, longest, core_at


@triton.jit(do_not_specialize=["sequences", "turns", "tokens"])
def query_kernel(
    PLACE, SPANS, ROWS, BASE, KEY_BASE, CU_Q, START, STOP, SEES, SUMMARY, HULLS, sequences, turns, tokens,
    K: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the place, spans and number of rows of one tile of queries. SUMMARY is None without columns and classes."""
    tile = tl.program_id(0)
    if tile >= tl.load(BASE + sequences):
        tl.store(PLACE + tile * 3, -1)
        return
    sequence = find_sequence(BASE, tile, sequences, turns)
    number = tile - tl.load(BASE + sequence)
    first = tl.load(CU_Q + sequence) + number * BM
    rows = tl.minimum(tl.load(CU_Q + sequence + 1) - first, BM)
    row = tl.arange(0, BM)
    exists = row < rows
    slot = tl.arange(0, 4)
    begins = tl.full([4], _FAR, tl.int32)
    inners, outers, ends = begins, begins, begins
    for k in tl.static_range(K):
        start = tl.load(START + k * tokens + first + row, mask=exists, other=0)
        stop = tl.load(STOP + k * tokens + first + row, mask=exists, other=0)
        sees_keys = exists & (stop > start)
        has_keys = tl.max(tl.where(sees_keys, 1, 0)) > 0
        all_rows_see = tl.min(tl.where(sees_keys | (row >= rows), 1, 0)) > 0
        begin = tl.min(tl.where(sees_keys, start, _FAR)) // BN
        end = (tl.max(tl.where(sees_keys, stop, 0)) + BN - 1) // BN
        inner = (tl.max(tl.where(exists, start, 0)) + BN - 1) // BN
        outer = tl.min(tl.where(exists, stop, _FAR)) // BN
        has_core = all_rows_see & (inner < outer)
        inner = tl.where(has_core, inner, begin)
        outer = tl.where(has_core, outer, begin)
        is_slot = (slot == k) & has_keys
        begins = tl.where(is_slot, begin, begins)
        inners = tl.where(is_slot, inner, inners)
        outers = tl.where(is_slot, outer, outers)
        ends = tl.where(is_slot, end, ends)
    spans = SPANS + tile * S * 4
    hulls = spans
    if SUMMARY is not None:
        hulls = HULLS + tile * 16
    used = sweep(hulls, begins, inners, outers, ends, K)
    if SUMMARY is not None:
        bits_any = 0
        bits_all = 0
        no_blank = 0
        if SEES is not None:
            word = tl.load(SEES + first + row, mask=exists, other=0)
            bits_any = tl.reduce(tl.where(exists, word, 0), 0, combine_any_bits)
            bits_all = tl.reduce(tl.where(exists, word, -1), 0, combine_all_bits)
            no_blank = tl.min(tl.where(exists & (word == 0), 0, 1))
        used = refine(
            spans, hulls, used, SUMMARY + tl.load(KEY_BASE + sequence) * 8, number * BM, number * BM + rows,
            bits_any, bits_all, no_blank, COLUMNS, SEES is not None,
        )  # fmt: skip
    tl.store(PLACE + tile * 3, sequence)
    tl.store(PLACE + tile * 3 + 1, number)
    tl.store(PLACE + tile * 3 + 2, used)
    tl.store(ROWS + tile, rows)


@triton.jit
def sweep(SPANS, begins, inners, outers, ends, K: tl.constexpr):
    """Convert the spans of the slots to disjoint spans in order of their begin, and return their number.

    It computes the same as `spans.make_disjoint`, for one tile.
    """
    slot = tl.arange(0, 4)
    is_left = tl.full([4], 1, tl.int32)
    count = 0
    current_begin = 0
    current_inner = 0
    current_outer = 0
    current_end = 0
    for turn in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
        next_begin = tl.where((is_left == 1) & (slot < K), begins, 2147483647)
        first_slot = tl.min(tl.where(next_begin == tl.min(next_begin), slot, 4))
        is_chosen = slot == first_slot
        is_left = tl.where(is_chosen, 0, is_left)
        begin = tl.sum(tl.where(is_chosen, begins, 0))
        inner = tl.sum(tl.where(is_chosen, inners, 0))
        outer = tl.sum(tl.where(is_chosen, outers, 0))
        end = tl.sum(tl.where(is_chosen, ends, 0))
        if turn > 0:
            is_disjoint = begin >= current_end
            cut = tl.minimum(tl.maximum(current_outer, begin), tl.maximum(current_end, current_begin))
            cut = tl.where(is_disjoint, current_end, cut)
            count = write_span(
                SPANS, count, current_begin, current_inner, tl.minimum(current_outer, cut), cut
            )
            new_end = tl.where(is_disjoint, end, tl.maximum(end, current_end))
            begin = tl.maximum(begin, cut)
            end = tl.maximum(new_end, begin)
            inner = tl.maximum(inner, begin)
            outer = tl.minimum(outer, end)
            has_core = inner < outer
            inner = tl.where(has_core, inner, begin)
            outer = tl.where(has_core, outer, begin)
        current_begin = begin
        current_inner = inner
        current_outer = outer
        current_end = end
    return write_span(SPANS, count, current_begin, current_inner, current_outer, current_end)


@triton.jit
def refine(
    SPANS, HULLS, used, SUMMARY, first, last, bits_any, bits_all, no_blank,
    COLUMNS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Convert the blocks of the hulls that columns and classes allow to spans, and return the number of spans.

    It computes the same as `refine.refine_spans`, for one tile of queries [first, last). `no_blank` says whether all
    queries have a bit.
    """
    count = 0
    run_begin = 0
    run_end = 0
    core = 0
    longest = 0
    core_at = 0
    for span in range(used):
        begin, inner = tl.load(HULLS + span * 4), tl.load(HULLS + span * 4 + 1)
        outer, end = tl.load(HULLS + span * 4 + 2), tl.load(HULLS + span * 4 + 3)
        for block in range(begin, end):
            address = SUMMARY + block * 8
            keep = end > begin
            full = (block >= inner) & (block < outer)
            if COLUMNS:
                keep = keep & (tl.load(address) < last) & (tl.load(address + 1) > first)
                full = full & (tl.load(address + 2) <= first) & (tl.load(address + 3) >= last)
            if WORDS:
                block_bits_any, block_bits_all = tl.load(address + 4), tl.load(address + 5)
                keep = keep & ((bits_any & block_bits_any) != 0)
                all_share = (bits_all & block_bits_all) != 0
                all_share = all_share | (((block_bits_any & ~bits_all) == 0) & (tl.load(address + 6) == 1))
                all_share = all_share | (((bits_any & ~block_bits_all) == 0) & (no_blank == 1))
                full = full & all_share
            count, run_begin, run_end, core, longest, core_at = extend(  # pyright: ignore[reportGeneralTypeIssues]
                SPANS, count, run_begin, run_end, core, longest, core_at, block, keep, full & keep, 4
            )
    return write_span(SPANS, count, run_begin, core_at, core_at + longest, run_end)


@triton.jit(do_not_specialize=["sequences", "turns"])
def key_kernel(
    PLACE, SPANS, BASE, QUERY_BASE, QUERY_PLACE, QUERY_SPANS, ROWS, sequences, turns,
    S: tl.constexpr, R: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Compute the place and the spans of one tile of keys by scanning the query tiles of its sequence."""
    tile = tl.program_id(0)
    if tile >= tl.load(BASE + sequences):
        tl.store(PLACE + tile * 3, -1)
        return
    sequence = find_sequence(BASE, tile, sequences, turns)
    number = tile - tl.load(BASE + sequence)
    base = tl.load(QUERY_BASE + sequence)
    spans = SPANS + tile * R * 4
    count = 0
    run_begin = 0
    run_end = 0
    core = 0
    longest = 0
    core_at = 0
    for query in range(tl.load(QUERY_BASE + sequence + 1) - base):
        keep = number < 0
        full = number < 0
        for span in range(tl.load(QUERY_PLACE + (base + query) * 3 + 2)):
            address = QUERY_SPANS + ((base + query) * S + span) * 4
            keep = keep | ((number >= tl.load(address)) & (number < tl.load(address + 3)))
            full = full | ((number >= tl.load(address + 1)) & (number < tl.load(address + 2)))
        full = full & (tl.load(ROWS + base + query) == BM)
        count, run_begin, run_end, core, longest, core_at = extend(
            spans, count, run_begin, run_end, core, longest, core_at, query, keep, full, R
        )
    used = write_span(spans, count, run_begin, core_at, core_at + longest, run_end)
    tl.store(PLACE + tile * 3, sequence)
    tl.store(PLACE + tile * 3 + 1, number)
    tl.store(PLACE + tile * 3 + 2, used)
