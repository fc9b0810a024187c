"""The workloads of the attention benchmark: masks, lengths and heads, and each mask as a predicate for FlexAttention.

A predicate is what a user of FlexAttention would write: that of a causal mask compares positions and documents. Only masks
without such a short form read interval tables, which is slower. The FLOPs of a workload count visible pairs only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nonet.attention.masks import IntervalTable
from nonet.bench.attention import masks
from nonet.random import rng

# Shapes: T packed query tokens, S packed key tokens, B sequences, K slots.
Predicate = Callable[[Any, Any, Any, Any], Any]  # batch, head, query, key -> visible


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """One row of the benchmark's results.

    Attributes:
        name: Name of the row.
        table: The mask, on the CPU.
        predicate: Makes FlexAttention's mask_mod over packed tokens, for a device.
        heads: Number of query heads.
        key_heads: Number of key heads.
        width: Width of a head.
        backward: Whether gradients are timed.
        window: The mask as the argument `window_size` of torch's varlen_attn; None if it cannot be expressed so.
    """

    name: str
    table: IntervalTable
    predicate: Callable[[str], Predicate]
    heads: int = 8
    key_heads: int = 8
    width: int = 128
    backward: bool = True
    window: tuple[int, int] | None = None

    def count_flops(self) -> float:
        """Return the FLOPs of a forward pass: two products of vectors for each visible pair and head."""
        return 4.0 * count_visible_pairs(self.table) * self.heads * self.width


def list_workloads(width: int, seed: int = 0, shrink: int = 1) -> list[Workload]:
    """Return all workloads: one long sequence, jagged histories as in recommenders, and a step of a beam search.

    Args:
        width: Width of a head.
        seed: Seed of the lengths.
        shrink: Divisor of the lengths, for a fast test run.
    """
    single, histories = [8192 // shrink], [4096 // shrink] * 16
    short, long = draw_lengths(64, 512, 2048, seed), draw_lengths(8, 4096, 8192, seed)
    if shrink > 1:
        short, long, histories = ([max(n // shrink, 1) for n in x[:2]] for x in (short, long, histories))
    rows = [
        _make_row("dense causal 8k", masks.build_causal(single), _make_causal(single), (-1, 0)),
        _make_row("jagged causal, 64 rows of 512", masks.build_causal(short), _make_causal(short), (-1, 0)),
        _make_row("jagged causal, 8 rows of 4k", masks.build_causal(long), _make_causal(long), (-1, 0)),
        _make_row("prefix-LM 256, 64 rows", masks.build_prefix_lm(short, 256), _make_prefix(short, 256)),
        _make_row(
            "window 256, 8 rows of 4k", masks.build_causal(long, 256), _make_causal(long, 256), (255, 0)
        ),
        _make_row("256 candidates, 64 rows", *_make_candidates([n + 256 for n in short], 256)),
        _make_row("HSTU, 64 rows", *_make_general(masks.build_hstu([n + 64 for n in short], 64, 256, 8, 64))),
        _make_row(
            "sessions of 128, 8 rows of 4k", masks.build_sessions(long, 128), _make_sessions(long, 128)
        ),
        _make_row(
            "beam tree 64 x 3, 16 histories of 4k",
            *_make_general(build_beam_step(histories, max(64 // shrink, 2))),
            backward=False,
        ),
    ]
    return [Workload(name, table, predicate, width=width, **more) for name, table, predicate, more in rows]


def draw_lengths(rows: int, mean: int, longest: int, seed: int) -> list[int]:
    """Draw the lengths of histories: lognormal, scaled to a mean, and clipped to 1 to `longest`."""
    draw = rng(seed, "lengths", rows, mean).lognormal(0.0, 0.8, rows)
    return (draw * mean / draw.mean()).clip(1, longest).astype(int).tolist()


def build_beam_step(history: list[int], beams: int, levels: int = 3) -> IntervalTable:
    """Build the mask of a decoding step: the rows of a beam tree mask whose queries are nodes of the tree."""
    tree = masks.build_beam_tree(history, beams, levels)
    nodes = torch.cat(
        [
            torch.arange(int(start) + length, int(start) + length + beams * levels)
            for start, length in zip(tree.cu_q[:-1], history, strict=True)
        ]
    )
    return IntervalTable(
        tree.start[:, nodes].contiguous(),
        tree.stop[:, nodes].contiguous(),
        masks.build_cuts([beams * levels] * len(history)),
        tree.cu_k,
        beams * levels,
        tree.max_k,
    )


def count_visible_pairs(table: IntervalTable) -> int:
    """Count the visible pairs of query and key; overlapping intervals of a row count once. Memory is O(tokens)."""
    if table.column_start is not None or table.sees is not None:
        return int(masks.compute_visible(table).sum())
    start, stop = table.start.long(), torch.maximum(table.stop, table.start).long()
    start, order = start.sort(dim=0)
    stop = stop.gather(0, order)
    covered_stop, total = torch.zeros_like(start[0]), torch.zeros_like(start[0])
    for k in range(len(start)):
        total += (stop[k] - torch.maximum(start[k], covered_stop)).clamp_min(0)
        covered_stop = torch.maximum(covered_stop, stop[k])
    return int(total.sum())


def to_device(table: IntervalTable, device: str) -> IntervalTable:
    """Copy a table to a device; if queries and keys have equal offsets, they share one tensor."""

    def move_tensor(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(device)

    cu_q = table.cu_q.to(device)
    has_equal_offsets = table.cu_k is table.cu_q or torch.equal(table.cu_k, table.cu_q)
    return IntervalTable(
        table.start.to(device),
        table.stop.to(device),
        cu_q,
        cu_q if has_equal_offsets else table.cu_k.to(device),
        table.max_q,
        table.max_k,
        move_tensor(table.column_start),
        move_tensor(table.column_stop),
        move_tensor(table.sees),
        move_tensor(table.word),
    )


def _make_row(
    name: str,
    table: IntervalTable,
    predicate: Callable[[str], Predicate],
    window: tuple[int, int] | None = None,
    backward: bool = True,
) -> tuple[str, IntervalTable, Callable[[str], Predicate], dict[str, Any]]:
    return name, table, predicate, {"window": window, "backward": backward}


def _number_documents(lengths: list[int], device: str) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device)


def _make_causal(lengths: list[int], window: int | None = None) -> Callable[[str], Predicate]:
    """Return the predicate of a causal mask."""

    def make_predicate(device: str) -> Predicate:
        document = _number_documents(lengths, device)
        if len(lengths) == 1 and window is None:
            return lambda b, h, q, k: q >= k
        if window is None:
            return lambda b, h, q, k: (document[q] == document[k]) & (q >= k)
        return lambda b, h, q, k: (document[q] == document[k]) & (q >= k) & (q - k < window)

    return make_predicate


def _make_prefix(lengths: list[int], prefix: int) -> Callable[[str], Predicate]:
    """Return the predicate of a prefix-LM mask."""

    def make_predicate(device: str) -> Predicate:
        document, position = (
            _number_documents(lengths, device),
            masks.compute_positions(lengths)[0].to(device),
        )
        return lambda b, h, q, k: (document[q] == document[k]) & ((q >= k) | (position[k] < prefix))

    return make_predicate


def _make_candidates(lengths: list[int], targets: int) -> tuple[IntervalTable, Callable[[str], Predicate]]:
    """Return the table and the predicate of a candidates mask."""

    def make_predicate(device: str) -> Predicate:
        document = _number_documents(lengths, device)
        position, length = masks.compute_positions(lengths)
        history = (position < length - targets).to(device)
        return lambda b, h, q, k: (q == k) | ((document[q] == document[k]) & history[k] & (q >= k))

    return masks.build_candidates(lengths, targets), make_predicate


def _make_sessions(lengths: list[int], session: int) -> Callable[[str], Predicate]:
    """Return the predicate of a sessions mask."""

    def make_predicate(device: str) -> Predicate:
        position, _ = masks.compute_positions(lengths)
        is_session_start = position % session == 0
        session_index = is_session_start.cumsum(0).to(device)
        return lambda b, h, q, k: (session_index[q] == session_index[k]) & (q >= k)

    return make_predicate


def _make_general(table: IntervalTable) -> tuple[IntervalTable, Callable[[str], Predicate]]:
    """Return the table and a predicate that compares with its K intervals, for masks without a shorter form."""

    def make_predicate(device: str) -> Predicate:
        rows = table.cu_q.diff().long()
        base = table.cu_k[:-1].long().repeat_interleave(rows)
        start, stop = (table.start + base).int().to(device), (table.stop + base).int().to(device)
        slots = len(start)

        def is_visible(b: Any, h: Any, q: Any, k: Any) -> Any:
            visible = (k >= start[0, q]) & (k < stop[0, q])
            for slot in range(1, slots):
                visible = visible | ((k >= start[slot, q]) & (k < stop[slot, q]))
            return visible

        return is_visible

    return table, make_predicate
