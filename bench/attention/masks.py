"""Masks for measuring and checking attention, as interval tables of a packed batch.

Each builder takes the lengths of the sequences and returns an IntervalTable, the integers that a kernel reads. The GPU bench
times these masks, and the tests of the kernels check them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nonet.attention.masks import IntervalTable

# Shapes: T packed query tokens, S packed key tokens, B sequences.
# In the builders, `position` is the position of each token in its sequence, and `length` the length of that sequence, [T] each.


def build_table(
    slots: list[tuple[Tensor, Tensor]],
    lengths_q: list[int],
    lengths_k: list[int] | None = None,
    **more: Tensor | None,
) -> IntervalTable:
    """Build a table from slots, which are intervals (start [T], stop [T]) of visible keys, clamped to the existing keys.

    `more` are further fields of the IntervalTable.
    """
    lengths_k = lengths_q if lengths_k is None else lengths_k
    keys_T = torch.tensor(lengths_k).long().repeat_interleave(torch.tensor(lengths_q).long())
    start = torch.stack([start.expand_as(keys_T).clamp_min(0) for start, _ in slots])
    stop = torch.stack([torch.minimum(stop.expand_as(keys_T), keys_T) for _, stop in slots])
    return IntervalTable(
        start.int(),
        stop.int(),
        build_cuts(lengths_q),
        build_cuts(lengths_k),
        max(lengths_q, default=0),
        max(lengths_k, default=0),
        **more,
    )


def build_cuts(lengths: list[int]) -> Tensor:
    """Return the cumulative lengths [B + 1] int32, from 0."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def compute_positions(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return the position of every packed token in its sequence [T], and the length of the sequence [T]."""
    position = torch.cat([torch.arange(n) for n in lengths]) if lengths else torch.zeros(0, dtype=torch.long)
    return position, torch.tensor(lengths, dtype=torch.long).repeat_interleave(
        torch.tensor(lengths, dtype=torch.long)
    )


def build_full(lengths: list[int]) -> IntervalTable:
    """Build a mask in which every token sees its whole sequence."""
    position, length = compute_positions(lengths)
    return build_table([(torch.zeros_like(position), length)], lengths)


def build_causal(lengths: list[int], window: int | None = None) -> IntervalTable:
    """Build a causal mask, optionally with a window."""
    position, _ = compute_positions(lengths)
    start = torch.zeros_like(position) if window is None else position - window + 1
    return build_table([(start, position + 1)], lengths)


def build_prefix_lm(lengths: list[int], prefix: int) -> IntervalTable:
    """Build a causal mask in which the first `prefix` tokens see each other."""
    position, _ = compute_positions(lengths)
    return build_table([(torch.zeros_like(position), (position + 1).clamp_min(prefix))], lengths)


def build_sinks_window(lengths: list[int], sinks: int, window: int) -> IntervalTable:
    """Build a causal window mask whose first `sinks` keys are always visible."""
    position, _ = compute_positions(lengths)
    zero = torch.zeros_like(position)
    return build_table(
        [(zero, (position + 1).clamp_max(sinks)), (position - window + 1, position + 1)], lengths
    )


def build_candidates(lengths: list[int], targets: int) -> IntervalTable:
    """Build a mask of candidates that see the history and themselves, but not each other."""
    position, length = compute_positions(lengths)
    history = (length - targets).clamp_min(0)
    own = position >= history
    self_stop = torch.where(own, position + 1, 0)
    return build_table(
        [(torch.zeros_like(position), torch.minimum(position + 1, history)), (position, self_stop)], lengths
    )


def build_hstu(lengths: list[int], targets: int, window: int, context: int, full_tail: int) -> IntervalTable:
    """Build a mask of the HSTU family.

    Args:
        lengths: Lengths of the sequences.
        targets: Number of targets at the end of a sequence, which see the history and themselves.
        window: Longest distance of attention within the history.
        context: Number of contextual tokens at the start, which see the whole history.
        full_tail: Number of tokens at the end of the history that see all of it despite the window.
    """
    position, length = compute_positions(lengths)
    targets_T = length.clamp_max(targets)
    history = length - targets_T
    shift = max(context - 1, 0)
    last = history - shift
    row = torch.minimum((position - shift).clamp_min(0), last)
    low = row - window
    start = torch.where(low <= 0, 0, low + shift)
    start = torch.where(row >= last - full_tail, 0, start) if full_tail else start
    is_context = position < context
    stop = torch.where(is_context, history, torch.minimum(position + 1, history))
    start = torch.where(is_context, 0, start)
    target = position >= history
    return build_table([(start, stop), (position, torch.where(target, position + 1, 0))], lengths)


def build_sessions(lengths: list[int], session: int) -> IntervalTable:
    """Build a causal mask within sessions of about `session` events; their borders are no multiples of a tile."""
    position, _ = compute_positions(lengths)
    start = (position // session) * session
    return build_table([(start, position + 1)], lengths)


def build_beam_tree(history: list[int], beams: int, levels: int = 3, seed: int = 0) -> IntervalTable:
    """Build a mask of histories, each followed by a tree with `levels` levels of `beams` nodes, with levels + 1 slots.

    A node sees the history, its ancestors and itself. Parents are random.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [n + beams * levels for n in history]
    starts, stops = [], []
    for past, length in zip(history, lengths, strict=True):
        start, stop = (
            torch.zeros(levels + 1, length, dtype=torch.long),
            torch.zeros(levels + 1, length).long(),
        )
        stop[0] = (torch.arange(length) + 1).clamp_max(past)
        node = torch.arange(beams)
        parents = [
            torch.randint(0, beams, (beams,), generator=generator).sort().values for _ in range(levels)
        ]
        for level in range(levels):
            ancestor, rows = node, past + level * beams + node
            for above in range(level, -1, -1):
                start[above + 1, rows] = past + above * beams + ancestor
                stop[above + 1, rows] = start[above + 1, rows] + 1
                ancestor = parents[above][ancestor]
        starts.append(start)
        stops.append(stop)
    return build_table(list(zip(torch.cat(starts, 1), torch.cat(stops, 1), strict=True)), lengths)


def build_bos(lengths: list[int], period: int) -> IntervalTable:
    """Build a causal mask in the column form: every period-th key is seen only by the `period` queries from itself on."""
    position, length = compute_positions(lengths)
    marked = (position + 1) % period == 0
    stop = torch.where(marked, torch.minimum(position + period, length), length)
    return build_table(
        [(torch.zeros_like(position), position + 1)],
        lengths,
        column_start=position.int(),
        column_stop=stop.int(),
    )


def build_classes(lengths: list[int], run: int) -> IntervalTable:
    """Build a causal mask with classes.

    Runs of tokens alternate among three scenarios; a token sees its own scenario and the shared third one.
    """
    position, _ = compute_positions(lengths)
    word = (1 << (position // run % 3)).int()
    return build_table([(torch.zeros_like(position), position + 1)], lengths, sees=word | 4, word=word)


def build_cross(lengths_q: list[int], lengths_k: list[int]) -> IntervalTable:
    """Build a mask in which every query sees all keys of its sequence's other side."""
    queries = sum(lengths_q)
    return build_table([(torch.zeros(queries).long(), torch.full((queries,), 2**30))], lengths_q, lengths_k)


def compute_visible(table: IntervalTable) -> Tensor:
    """Return the dense mask [T, S] bool of packed tokens from the table's definition; for checks, with O(T S) memory."""
    cu_q, cu_k = table.cu_q.tolist(), table.cu_k.tolist()
    seen = torch.zeros(cu_q[-1], cu_k[-1], dtype=torch.bool, device=table.start.device)
    for b in range(len(cu_q) - 1):
        rows, columns = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        key = torch.arange(cu_k[b + 1] - cu_k[b], device=seen.device)
        query = torch.arange(cu_q[b + 1] - cu_q[b], device=seen.device)[:, None]
        block = ((key >= table.start[:, rows, None]) & (key < table.stop[:, rows, None])).any(0)
        if table.column_start is not None and table.column_stop is not None:
            block &= (query >= table.column_start[columns]) & (query < table.column_stop[columns])
        if table.sees is not None and table.word is not None:
            block &= (table.sees[rows, None] & table.word[columns]) != 0
        seen[rows, columns] = block
    return seen


# The masks that the tests of the kernels check, by name.
CHECKED: dict[str, Callable[[list[int]], IntervalTable]] = {
    "full": build_full,
    "causal": build_causal,
    "window": lambda n: build_causal(n, 33),
    "prefix-LM": lambda n: build_prefix_lm(n, 40),
    "sinks and window": lambda n: build_sinks_window(n, 5, 30),
    "candidates": lambda n: build_candidates(n, 37),
    "HSTU": lambda n: build_hstu(n, 21, 30, 6, 10),
    "sessions": lambda n: build_sessions(n, 23),
    "beam tree": lambda n: build_beam_tree(n, 9),
    "BOS columns": lambda n: build_bos(n, 5),
    "classes": lambda n: build_classes(n, 70),
}
