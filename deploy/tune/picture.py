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

_GROUPS = 3  # by which the trials are grouped for keys without choices
_COLUMNS, _WIDTH, _HEIGHT = 3, 320, 200  # number of scatter plots in a row; size of each in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 26, 26  # margins inside a scatter plot, in pixels
_BAR_HEIGHT, _LABEL_WIDTH, _MARGIN = 24, 220, 16  # of the bar chart, and around the picture, in pixels
_STYLE = """
svg { background: #fff; font: 12px system-ui, sans-serif } text { fill: #1a1f27 } .tick { fill: #5d6673; font-size: 11px }
.grid { stroke: #dfe3e8 } .bar { fill: #2459c4 }
.dot { fill: #2459c4; opacity: .45 } .later { opacity: .9 } .best { fill: #14713f; opacity: 1 }
.head { font-weight: 600 }
"""


def compute_importances(space: SearchSpace, results: Sequence[TrialResult]) -> dict[str, float]:
    """Compute the importance of each key in [0, 1], by key; 0 for all keys with too few trials."""
    scored_results = [result for result in results if result.rung == 0 and result.score is not None]
    return {key.path: _compute_importance(key, scored_results) for key in space.keys}


def draw_search(space: SearchSpace, results: Sequence[TrialResult], search: Mapping[str, Any]) -> str:
    """Draw the picture as one SVG file.

    Args:
        space: The search space.
        results: All results.
        search: The definition of the search.

    Returns:
        The text of the file: a bar chart of importances, and below it a scatter plot for each key.
    """
    importances = compute_importances(space, results)
    keys = sorted(space.keys, key=lambda key: -importances[key.path])
    width = _COLUMNS * _WIDTH + 2 * _MARGIN
    plots_top = 56 + _BAR_HEIGHT * len(keys)
    plot_rows = -(-len(keys) // _COLUMNS)  # rounded up
    height = plots_top + 24 + plot_rows * _HEIGHT + _MARGIN
    parts = [
        f'<text class="head" x="{_MARGIN}" y="28">Share of the variance of {escape(search["metric"])} by key</text>'
    ]
    bars_left, full_length = _MARGIN + _LABEL_WIDTH, width - _LABEL_WIDTH - 2 * _MARGIN - 60
    for index, key in enumerate(keys):
        y, importance = 44 + index * _BAR_HEIGHT, importances[key.path]
        parts.append(
            f'<text x="{bars_left - 8}" y="{y + 13}" text-anchor="end">{escape(shorten_key(key.path))}</text>'
        )
        length = round(full_length * importance, 1)
        parts.append(f'<rect class="bar" x="{bars_left}" y="{y + 2}" width="{max(length, 1)}" height="15"/>')
        parts.append(f'<text x="{bars_left + length + 8}" y="{y + 13}">{importance:.0%}</text>')
    shades = "" if len(search["rungs"]) == 1 else "; darker: trained longer"
    note = f"Validation {search['metric']} by trial{shades}; green: best trial"
    parts.append(f'<text class="head" x="{_MARGIN}" y="{plots_top + 12}">{escape(note)}</text>')
    for index, key in enumerate(keys):
        x = _MARGIN + index % _COLUMNS * _WIDTH
        y = plots_top + 24 + index // _COLUMNS * _HEIGHT
        parts.append(f'<g transform="translate({x} {y})">{_draw_scatter(key, results, search["lower"])}</g>')
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>{"".join(parts)}</svg>\n'


def _compute_importance(key: SearchKey, scored_results: Sequence[TrialResult]) -> float:
    """Compute epsilon squared: the corrected share of the scores' variance that lies between a key's groups."""
    scores = [result.score or 0.0 for result in scored_results]
    total_squares = _sum_squares(scores)
    groups = list(_group_scores(key, scored_results).values())
    degrees_of_freedom = len(scores) - len(groups)
    if total_squares == 0 or len(groups) < 2 or degrees_of_freedom < 1:
        return 0.0
    within_squares = sum(map(_sum_squares, groups))
    return max(0.0, 1 - within_squares / degrees_of_freedom * (len(scores) - 1) / total_squares)


def _group_scores(key: SearchKey, scored_results: Sequence[TrialResult]) -> dict[int, list[float]]:
    """Group scores by choice, or into thirds by value; equal values stay in one group."""
    values = [key.to_number(result.values[key.path]) for result in scored_results]
    groups: dict[int, list[float]] = {}
    for value, result in zip(values, scored_results, strict=True):
        lower_count = sum(other < value for other in values)
        group = int(value) if key.choices else lower_count * _GROUPS // len(values)
        groups.setdefault(group, []).append(result.score or 0.0)
    return groups


def _sum_squares(values: Sequence[float]) -> float:
    """Return the sum of squared differences from the mean."""
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values)


def _draw_scatter(key: SearchKey, results: Sequence[TrialResult], lower: bool) -> str:
    """Draw the scores (y) against a key's values (x), one dot for each job; `lower` scores may be better."""
    scored_results = [result for result in results if result.score is not None]
    title = f'<text class="head" x="{_LEFT}" y="14">{escape(shorten_key(key.path))}</text>'
    if not scored_results:
        return title
    scores = [result.score or 0.0 for result in scored_results]
    low, high = min(scores), max(scores)
    padding = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    low, high = low - padding, high + padding
    left, right = (
        (-0.5, len(key.choices) - 0.5) if key.choices else (key.to_number(key.low), key.to_number(key.high))
    )

    def to_x(position: float) -> float:
        return round(_LEFT + 6 + (position - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT - 12), 1)

    def to_y(score: float) -> float:
        return round(_TOP + (high - score) / (high - low) * (_HEIGHT - _TOP - _BOTTOM), 1)

    parts = [title]
    ticks = choose_ticks(low, high)
    for tick, text in zip(ticks, format_ticks(ticks), strict=True):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{to_y(tick)}" y2="{to_y(tick)}"/>'
        )
        parts.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{to_y(tick) + 4}" text-anchor="end">{text}</text>'
        )
    for position, text in _list_axis_labels(key):
        parts.append(
            f'<text class="tick" x="{to_x(position)}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(text)}</text>'
        )
    last_rung = max(result.rung for result in scored_results)
    best_score = (min if lower else max)(
        result.score or 0.0 for result in scored_results if result.rung == last_rung
    )
    for result in scored_results:
        is_last = result.rung == last_rung
        css_class = (
            "best" if is_last and result.score == best_score else "later" if is_last and last_rung else ""
        )
        value = result.values[key.path]
        label = f"trial {result.number}: {format_value(value)}, {result.score:.4f}"
        center = f'cx="{to_x(key.to_number(value))}" cy="{to_y(result.score or 0.0)}"'
        parts.append(
            f'<circle class="dot {css_class}" {center} r="4"><title>{escape(label)}</title></circle>'
        )
    return "".join(parts)


def _list_axis_labels(key: SearchKey) -> list[tuple[float, str]]:
    """Return (position, label) of each tick on a key's axis; positions are those of `SearchKey.to_number`."""
    if key.choices:
        return [(float(index), format_value(value)[:12]) for index, value in enumerate(key.choices)]
    if key.kind == "log":
        middle = (key.low * key.high) ** 0.5  # halfway on a logarithmic axis
        return [(key.to_number(value), format_value(value)) for value in (key.low, middle, key.high)]
    ticks = choose_ticks(key.low, key.high)
    return list(zip(ticks, format_ticks(ticks), strict=True))
