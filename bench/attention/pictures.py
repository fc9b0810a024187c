"""`nonet bench pictures`: SVG pictures of masks and of the tiles that a kernel computes for them.

Pictures are drawn from the interval tables of the masks: dark lines are visible keys, green tiles are computed without a mask,
yellow tiles with a mask, white tiles are skipped. For the rows of a tile, the hull of a slot is the union of its intervals
(minimum start to maximum stop), and the core their intersection. A tile is computed if it overlaps the hull of a slot, and it
needs no mask if the core of a slot covers it.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nonet.attention.masks import IntervalTable, UniMask, to_dense

# Shapes: T packed tokens, K slots, N tiles.
_TILE = 8  # queries and keys of a tile
_PIXELS = 4  # side of the square of a pair of query and key
_GAP, _TITLE = 44, 34  # pixels between panels, and of a title
_COLOURS = {"unmasked": "#cfe8d5", "masked": "#fbe7a8", "seen": "#26547c", "line": "#9aa5b1"}


def bench_pictures(folder: str = "docs/explanation") -> dict[str, Any]:
    """Write attention-masks.svg and attention-intervals.svg into a folder; the result has one row for each file."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    panels = [_draw_panel(name, mask.build_table(cuts)) for name, mask, cuts in _list_masks()]
    drawn = {
        "attention-masks.svg": _draw_grid(panels, columns=3),
        "attention-intervals.svg": _draw_intervals(),
    }
    for name, picture in drawn.items():
        (Path(folder) / name).write_text(picture, encoding="utf-8")
    return {"rows": [{"file": f"{folder}/{name}"} for name in drawn], "ratio": {}}


def _list_masks() -> list[tuple[str, UniMask, Tensor]]:
    """Return the title, the mask and the cumulative sequence lengths of each picture."""
    one, jagged = torch.tensor([0, 48]), torch.tensor([0, 27, 36, 48])
    tree = torch.tensor([[0, 0, 1, 2], [1, 1, 3, 0]])
    return [
        ("causal, three packed sequences", UniMask.causal(), jagged),
        ("prefix_lm(20)", UniMask.prefix_lm(20), one),
        ("causal(window=12)", UniMask.causal(window=12), one),
        ("sinks_window(4, 10)", UniMask.sinks_window(4, 10), one),
        ("hstu(targets=14)", UniMask.hstu(14), one),
        (
            "hstu(12, contextual=4, max_attn_len=10)",
            UniMask.hstu(12, contextual=4, max_attn_len=10),
            one,
        ),
        ("target_groups(targets=16, size=4)", UniMask.target_groups(16, 4), one),
        ("beam_tree: 3 levels of 4 beams", UniMask.beam_tree(36, tree), one),
        ("bos_interval(8): one interval a column", UniMask.bos_interval(8), one),
    ]


def _draw_panel(title: str, table: IntervalTable) -> tuple[str, int, str]:
    """Draw one mask, and return the title, the side in pixels, and the SVG code."""
    seen = to_dense(table)
    computed, unmasked = _list_tiles(table)
    parts = []
    for q0, q1, k0, k1 in computed:
        colour = _COLOURS["unmasked" if (q0, q1, k0, k1) in unmasked else "masked"]
        parts.append(_draw_rect(k0, q0, keys=k1 - k0, rows=q1 - q0, colour=colour))
    edge = pad(seen.int(), (1, 1)).diff(dim=1)  # 1 where a run of visible keys starts, -1 after its end
    for q, k in (edge == 1).nonzero().tolist():
        stop = k + int((edge[q, k:] == -1).nonzero()[0])
        x, y, line_width = k * _PIXELS + 0.5, q * _PIXELS + 1.2, (stop - k) * _PIXELS - 1
        parts.append(f'<rect x="{x}" y="{y:.1f}" width="{line_width}" height="1.6"/>')
    side = len(seen) * _PIXELS
    pairs = int(seen.sum())
    all_tiles = sum(((n + _TILE - 1) // _TILE) ** 2 for n in table.cu_q.diff().tolist())
    body = f'<g fill="{_COLOURS["seen"]}">{"".join(parts)}</g>'
    frame = f'<rect width="{side}" height="{side}" fill="none" stroke="{_COLOURS["line"]}"/>'
    label = f"{len(computed)} of {all_tiles} tiles, {len(unmasked)} without a mask; {pairs} pairs"
    return title, side, f'{body}{frame}<text y="{side + 14}" class="small">{label}</text>'


def _draw_rect(k: int, q: int, keys: int, rows: int, colour: str) -> str:
    return (
        f'<rect x="{k * _PIXELS}" y="{q * _PIXELS}" width="{keys * _PIXELS}" height="{rows * _PIXELS}" fill="{colour}" '
        'stroke="white" stroke-width="0.6"/>'
    )


def _list_tiles(
    table: IntervalTable,
) -> tuple[list[tuple[int, int, int, int]], set[tuple[int, int, int, int]]]:
    """List the tiles [q0, q1) x [k0, k1) that overlap a slot's hull, and the set of those that a slot's core covers."""
    computed, unmasked = [], set()
    cu = table.cu_q.tolist()
    for begin, end in pairwise(cu):
        for q0 in range(begin, end, _TILE):
            q1 = min(q0 + _TILE, end)
            start, stop = table.start[:, q0:q1], table.stop[:, q0:q1]
            used = start < stop
            hull = [
                (int(s[u].min()), int(e[u].max()))
                for s, e, u in zip(start, stop, used, strict=True)
                if bool(u.any())
            ]
            core = [
                (int(s.max()), int(e.min()))
                for s, e, u in zip(start, stop, used, strict=True)
                if bool(u.all())
            ]
            for k0 in range(0, end - begin, _TILE):
                k1 = min(k0 + _TILE, end - begin)
                tile = (q0, q1, begin + k0, begin + k1)
                if any(s < k1 and e > k0 for s, e in hull) and _is_in_column(table, tile, begin, "any"):
                    computed.append(tile)
                    if any(s <= k0 and e >= k1 for s, e in core) and _is_in_column(table, tile, begin, "all"):
                        unmasked.add(tile)
    return computed, unmasked


def _is_in_column(table: IntervalTable, tile: tuple[int, int, int, int], begin: int, how: str) -> bool:
    """Return whether "any" or "all" pairs of a tile are allowed by the intervals of its keys (the column form of a mask).

    `begin` is the first token of the sequence.
    """
    if table.column_start is None or table.column_stop is None:
        return True
    q0, q1, k0, k1 = tile
    start, stop = table.column_start[k0:k1], table.column_stop[k0:k1]
    if how == "all":
        return bool((start <= q0 - begin).all() and (stop >= q1 - begin).all())
    return bool(((start < q1 - begin) & (stop > q0 - begin)).any())


def _draw_grid(panels: list[tuple[str, int, str]], columns: int) -> str:
    """Arrange panels in a grid with a legend."""
    side = max(panel[1] for panel in panels)
    across, down = side + _GAP, side + _TITLE + _GAP
    drawn = [
        f'<g transform="translate({_GAP + i % columns * across},{_TITLE + 30 + i // columns * down})">'
        f'<text y="-7">{title}</text>{body}</g>'
        for i, (title, _, body) in enumerate(panels)
    ]
    width, height = columns * across + _GAP, -(-len(panels) // columns) * down + _TITLE + 20
    legend = "".join(
        f'<g transform="translate({_GAP + 190 * i},10)"><rect width="14" height="14" fill="{_COLOURS[name]}"/>'
        f'<text x="20" y="12">{text}</text></g>'
        for i, (name, text) in enumerate(
            [
                ("unmasked", "tile without a mask"),
                ("masked", "tile under a mask"),
                ("seen", "visible keys of a row"),
            ]
        )
    )
    return _wrap_svg(width, height, legend + "".join(drawn))


def _draw_intervals() -> str:
    """Draw one tile of rows of hstu(targets=14) with two slots: hull and core of each, and their key blocks."""
    table = UniMask.hstu(14).build_table(torch.tensor([0, 48]))
    q0, q1, wide, high = 32, 40, 14, 16
    parts = []
    for slot, colour in enumerate(("#26547c", "#c8553d")):
        for row in range(q0, q1):
            start, stop = int(table.start[slot, row]), int(table.stop[slot, row])
            if start < stop:
                y = (row - q0) * high + 3
                parts.append(
                    f'<rect x="{start * wide}" y="{y}" width="{(stop - start) * wide}" height="{high - 6}" '
                    f'rx="3" fill="{colour}"/>'
                )
        used = table.start[slot, q0:q1] < table.stop[slot, q0:q1]
        s, e = table.start[slot, q0:q1][used], table.stop[slot, q0:q1][used]
        hull, core = (
            (int(s.min()), int(e.max())),
            (int(s.max()), int(e.min())) if bool(used.all()) else (0, 0),
        )
        y = (q1 - q0) * high + 14 + 50 * slot
        parts.append(
            _draw_bar(hull, y, wide, colour, 0.25, f"slot {slot}: hull, min start to max stop: computed")
        )
        text = f"slot {slot}: core, max start to min stop: no mask" if core[0] < core[1] else ""
        parts.append(_draw_bar(core, y + 22, wide, colour, 0.6, text))
    lines = "".join(
        f'<line x1="{k * wide}" y1="-6" x2="{k * wide}" y2="{(q1 - q0) * high + 112}" '
        f'stroke="{_COLOURS["line"]}" stroke-dasharray="2 3"/>'
        f'<text x="{k * wide + 2}" y="-9" class="small">{k}</text>'
        for k in range(0, 49, _TILE)
    )
    title = '<text x="20" y="22">Rows 32 to 39 of hstu(targets=14) over 48 keys: two intervals a row, blocks of 8 keys</text>'
    return _wrap_svg(
        48 * wide + 60, 300, f'{title}<g transform="translate(30,60)">{lines}{"".join(parts)}</g>'
    )


def _draw_bar(span: tuple[int, int], y: int, wide: int, colour: str, opacity: float, text: str) -> str:
    """Draw one interval with its label."""
    if span[0] >= span[1]:
        return ""
    inside = span[1] * wide > 300 and opacity > 0.5
    return (
        f'<rect x="{span[0] * wide}" y="{y}" width="{(span[1] - span[0]) * wide}" height="16" fill="{colour}" '
        f'fill-opacity="{opacity}"/><text x="4" y="{y + 12}" class="{"light" if inside else "small"}">{text}</text>'
    )


def _wrap_svg(width: int, height: int, body: str) -> str:
    """Return an SVG file of this size with the body on a white background."""
    style = "text{font:12px sans-serif;fill:#1f2933}.small{font-size:10px;fill:#52606d}.light{font-size:10px;fill:white}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<style>{style}</style><rect width="{width}" height="{height}" fill="white"/>{body}</svg>\n'
    )
