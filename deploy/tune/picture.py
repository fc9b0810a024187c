"""tune.svg: the importance of each key, and the scores by its values, over all trials of the first rung.

A key's importance is the share of the scores' variance that lies between groups of its values: one group
per choice, or thirds of the trials by value. Groups explain some variance by chance, more so with fewer
trials, so the share is corrected (epsilon squared, Kelley 1935) and is 0 if it is no larger than expected
by chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from nonet.deploy.report import choose_ticks, format_ticks
from nonet.deploy.tune.halving import TrialResult
from nonet.deploy.tune.results import format_value, shorten_key
from nonet.deploy.tune.space import SearchKey, SearchSpace

_THIRDS = 3
_COLUMNS, _WIDTH, _HEIGHT = 3, 320, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 26, 26
_BAR, _LABEL, _MARGIN = 24, 220, 16
_STYLE = """
svg { background: #fff; font: 12px system-ui, sans-serif } text { fill: #1a1f27 } .tick { fill: #5d6673; font-size: 11px }
.grid { stroke: #dfe3e8 } .bar { fill: #2459c4 }
.dot { fill: #2459c4; opacity: .45 } .later { opacity: .9 } .best { fill: #14713f; opacity: 1 }
.head { font-weight: 600 }
"""


def compute_importances(space: SearchSpace, results: Sequence[TrialResult]) -> dict[str, float]:
    """Compute the share [0, 1] of the variance that each key explains; 0 for all keys with too few trials."""
    scored = [each for each in results if each.rung == 0 and each.score is not None]
    return {key.path: _compute_importance(key, scored) for key in space.keys}


def draw_search(space: SearchSpace, results: Sequence[TrialResult], search: Mapping[str, Any]) -> str:
    """Draw the picture as one SVG file.

    Args:
        space: The search space.
        results: All results.
        search: The definition of the search.

    Returns:
        The text of the file.
    """
    shares = compute_importances(space, results)
    keys = sorted(space.keys, key=lambda key: -shares[key.path])
    width = _COLUMNS * _WIDTH + 2 * _MARGIN
    top = 56 + _BAR * len(keys)
    height = top + 24 + -(-len(keys) // _COLUMNS) * _HEIGHT + _MARGIN
    parts = [
        f'<text class="head" x="{_MARGIN}" y="28">Share of the variance of {escape(search["metric"])} by key</text>'
    ]
    for at, key in enumerate(keys):
        y, full = 44 + at * _BAR, width - _LABEL - 2 * _MARGIN - 60
        parts.append(
            f'<text x="{_MARGIN + _LABEL - 8}" y="{y + 13}" text-anchor="end">{escape(shorten_key(key.path))}</text>'
        )
        length = round(full * shares[key.path], 1)
        parts.append(
            f'<rect class="bar" x="{_MARGIN + _LABEL}" y="{y + 2}" width="{max(length, 1)}" height="15"/>'
        )
        parts.append(f'<text x="{_MARGIN + _LABEL + length + 8}" y="{y + 13}">{shares[key.path]:.0%}</text>')
    rungs = len(search["rungs"])
    shades = "" if rungs == 1 else "; darker: trained longer"
    note = f"Validation {search['metric']} by trial{shades}; green: best trial"
    parts.append(f'<text class="head" x="{_MARGIN}" y="{top + 12}">{escape(note)}</text>')
    for at, key in enumerate(keys):
        x, y = _MARGIN + at % _COLUMNS * _WIDTH, top + 24 + at // _COLUMNS * _HEIGHT
        parts.append(f'<g transform="translate({x} {y})">{_draw_scatter(key, results, search["lower"])}</g>')
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>{"".join(parts)}</svg>\n'


def _compute_importance(key: SearchKey, scored: Sequence[TrialResult]) -> float:
    """Compute the corrected share of the variance that a key explains."""
    scores = [each.score or 0.0 for each in scored]
    total = _sum_squares(scores)
    groups = list(_group_scores(key, scored).values())
    freedom = len(scored) - len(groups)
    if total == 0 or len(groups) < 2 or freedom < 1:
        return 0.0
    within = sum(map(_sum_squares, groups))
    return max(0.0, 1 - within / freedom * (len(scored) - 1) / total)


def _group_scores(key: SearchKey, scored: Sequence[TrialResult]) -> dict[int, list[float]]:
    """Group scores by choice, or by thirds of the trials; equal values stay in one group."""
    values = [key.to_number(each.values[key.path]) for each in scored]
    groups: dict[int, list[float]] = {}
    for value, each in zip(values, scored, strict=True):
        below = sum(other < value for other in values)
        name = int(value) if key.choices else below * _THIRDS // len(values)
        groups.setdefault(name, []).append(each.score or 0.0)
    return groups


def _sum_squares(values: Sequence[float]) -> float:
    """Return the sum of squared differences from the mean."""
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values)


def _draw_scatter(key: SearchKey, results: Sequence[TrialResult], lower: bool) -> str:
    """Draw the scores by a key's values, one dot for each run."""
    scored = [each for each in results if each.score is not None]
    title = f'<text class="head" x="{_LEFT}" y="14">{escape(shorten_key(key.path))}</text>'
    if not scored:
        return title
    scores = [each.score or 0.0 for each in scored]
    low, high = min(scores), max(scores)
    room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    low, high = low - room, high + room
    left, right = (
        (-0.5, len(key.choices) - 0.5) if key.choices else (key.to_number(key.low), key.to_number(key.high))
    )

    def to_x(value: float) -> float:
        return round(_LEFT + 6 + (value - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT - 12), 1)

    def to_y(value: float) -> float:
        return round(_TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM), 1)

    parts = [title]
    levels = choose_ticks(low, high)
    for level, text in zip(levels, format_ticks(levels), strict=True):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{to_y(level)}" y2="{to_y(level)}"/>'
        )
        parts.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{to_y(level) + 4}" text-anchor="end">{text}</text>'
        )
    for place, text in _list_axis_labels(key):
        parts.append(
            f'<text class="tick" x="{to_x(place)}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(text)}</text>'
        )
    last = max(each.rung for each in scored)
    best = (min if lower else max)(each.score or 0.0 for each in scored if each.rung == last)
    for each in scored:
        tone = (
            "best" if each.rung == last and each.score == best else "later" if each.rung == last > 0 else ""
        )
        told = f"trial {each.number}: {format_value(each.values[key.path])}, {each.score:.4f}"
        at = f'cx="{to_x(key.to_number(each.values[key.path]))}" cy="{to_y(each.score or 0.0)}"'
        parts.append(f'<circle class="dot {tone}" {at} r="4"><title>{escape(told)}</title></circle>')
    return "".join(parts)


def _list_axis_labels(key: SearchKey) -> list[tuple[float, str]]:
    """Return positions and labels of a key's axis."""
    if key.choices:
        return [(float(at), format_value(value)[:12]) for at, value in enumerate(key.choices)]
    if key.kind == "log":
        middle = (key.low * key.high) ** 0.5
        return [(key.to_number(value), format_value(value)) for value in (key.low, middle, key.high)]
    levels = choose_ticks(key.low, key.high)
    return list(zip(levels, format_ticks(levels), strict=True))
