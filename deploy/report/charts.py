"""Charts as inline SVG, without scripts or files; the page's style sheet colors them, also for dark mode and print.

Every function returns markup whose texts are escaped. Coordinates are rounded to a tenth of a pixel and
lines are reduced to 300 points, which keeps a report of twenty curves under 200 KB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from nonet.deploy.report.scores import Difference, format_name, format_number

_MAX_POINTS = 300  # of a line
_WIDTH, _HEIGHT = 340, 170  # of a line chart, in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 8, 22  # margins around the plotting area, in pixels


def draw_line_chart(
    title: str,
    steps: Sequence[float],
    values: Sequence[float],
    unit: str = "",
    dashed_points: Sequence[tuple[float, float]] = (),
) -> str:
    """Draw one curve over steps.

    With 30 points or more, the points are drawn faint and their moving average bold.

    Args:
        title: The chart's title.
        steps: The x coordinates.
        values: The y coordinates; non-finite ones are left out.
        unit: The unit of the values.
        dashed_points: Points (step, value) of a second, dashed curve.

    Returns:
        The markup of a figure.
    """
    points = reduce_points([(x, y) for x, y in zip(steps, values, strict=True) if math.isfinite(y)])
    heading = f"{escape(title)}<small>{escape(unit)}</small>"
    if len(points) < 2:
        single = f" {_format_short(points[0][1])} at step {points[0][0]:.0f}" if points else " no points"
        return (
            f'<figure class="chart"><figcaption>{heading}</figcaption><p class="muted">{single}</p></figure>'
        )
    averages = compute_moving_average([y for _, y in points])
    frame = _ChartFrame([*points, *dashed_points])
    markup = frame.draw_axes()
    if dashed_points:
        markup += f'<path class="line beside" d="{frame.draw_path(dashed_points)}"/>'
    if averages:
        markup += f'<path class="line faint" d="{frame.draw_path(points)}"/>'
    bold_points = [(x, y) for (x, _), y in zip(points, averages, strict=True)] if averages else points
    markup += f'<path class="line" d="{frame.draw_path(bold_points)}"/>'
    last = _format_short(points[-1][1])
    label = f"{title}: from {_format_short(points[0][1])} to {last} over {len(points)} points"
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">{markup}</svg>'
    return f'<figure class="chart"><figcaption>{heading}<b>{last}</b></figcaption>{svg}</figure>'


def draw_reliability_chart(title: str, bins: Sequence[tuple[float, float]]) -> str:
    """Draw observed rates over predicted probabilities, with a dashed line where both are equal.

    Args:
        title: The chart's title.
        bins: (mean predicted probability, observed rate) of each bin, in ascending order.

    Returns:
        The markup of a figure.
    """
    highest = max(max(pair) for pair in bins)
    frame = _ChartFrame([(0.0, 0.0), (highest, highest)])
    points = "".join(
        f'<circle class="dot" cx="{frame.to_x(x)}" cy="{frame.to_y(y)}" r="3"/>' for x, y in bins
    )
    markup = (
        f'{frame.draw_axes()}<path class="line beside" d="{frame.draw_path([(0.0, 0.0), (highest, highest)])}"/>'
        f'<path class="line faint" d="{frame.draw_path(bins)}"/>{points}'
    )
    label = f"{title}: observed rate over predicted probability in {len(bins)} bins"
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">{markup}</svg>'
    heading = f"{escape(title)}<small>observed over predicted</small>"
    return f'<figure class="chart"><figcaption>{heading}</figcaption>{svg}</figure>'


def draw_forest_plot(differences: Sequence[Difference]) -> str:
    """Draw differences and their intervals around a line at zero, one row for each; return the markup."""
    row_height, left_margin, right_margin, width = 26, 330, 230, 960  # in pixels; the margins hold texts
    low, high = min(0.0, *(d.low for d in differences)), max(0.0, *(d.high for d in differences))
    value_range = (high - low) or 1.0

    def to_x(value: float) -> float:
        plot_width = width - left_margin - right_margin - 32
        return round(left_margin + 16 + (value - low) / value_range * plot_width, 1)

    height = row_height * len(differences) + 26
    zero_x = to_x(0.0)
    parts = [f'<line class="zero" x1="{zero_x}" x2="{zero_x}" y1="4" y2="{height - 20}"/>']
    parts.append(
        f'<text class="tick" x="{zero_x}" y="{height - 6}" text-anchor="middle">0: no difference</text>'
    )
    last_pair = None
    for index, difference in enumerate(differences):
        y = row_height * index + 18
        pair = (difference.left, difference.right)
        if last_pair not in (None, pair):
            parts.append(f'<line class="rule" x1="0" x2="{width}" y1="{y - 13}" y2="{y - 13}"/>')
        if last_pair != pair:
            pair_name = f"{format_name(difference.left)} − {format_name(difference.right)}"
            parts.append(f'<text x="0" y="{y + 4}">{escape(pair_name)}</text>')
        last_pair = pair
        parts.append(_draw_interval(difference, to_x, y, left_margin, width))
    label = "Paired differences with 95 % intervals"
    head = f'<svg class="forest" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
    return f'<div class="wide">{head}{"".join(parts)}</svg></div>'


def reduce_points(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Reduce a series to at most 300 points by averaging neighbours."""
    group_size = math.ceil(len(points) / _MAX_POINTS) or 1
    groups = [points[start : start + group_size] for start in range(0, len(points), group_size)]
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups
    ]


def compute_moving_average(values: Sequence[float]) -> list[float]:
    """Compute centered means over windows of a tenth of the values, fewer at the ends; empty below 30 values."""
    if len(values) < 30:
        return []
    half_width = max(1, len(values) // 20)
    windows = [values[max(0, center - half_width) : center + half_width + 1] for center in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def choose_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Choose about `count` round numbers in [low, high] at equal distances, ascending."""
    if not high > low:
        return [low]
    exact_step = (high - low) / count
    power = 10.0 ** math.floor(math.log10(exact_step))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= exact_step * 0.999)
    first_multiple, last_multiple = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(multiple * step, 12) for multiple in range(first_multiple, last_multiple + 1)]


def format_ticks(values: Sequence[float]) -> list[str]:
    """Format ticks with as many decimals as are needed to show their exact values; in thousands from 10,000 on."""
    unit, suffix = (1000.0, "k") if max(map(abs, values)) >= 10_000 else (1.0, "")
    for digits in range(9):
        texts = [f"{value / unit:.{digits}f}{suffix}" for value in values]
        if all(
            math.isclose(float(f"{value / unit:.{digits}f}") * unit, value, abs_tol=1e-12) for value in values
        ):
            return [text.replace("-", "−") for text in texts]
    return [_format_short(value) for value in values]


class _ChartFrame:
    """The plotting area of a line chart, which converts data to pixels and draws lines and axes as SVG.

    Args:
        points: The (x, y) that must be visible.
    """

    def __init__(self, points: Sequence[tuple[float, float]]):
        self.x_low, self.x_high = min(x for x, _ in points), max(x for x, _ in points)
        low, high = min(y for _, y in points), max(y for _, y in points)
        margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        # Do not show negative values for curves that are never negative, such as a KL divergence.
        self.y_low = max(low - margin, 0.0) if low >= 0 else low - margin
        self.y_high = high + margin

    def to_x(self, value: float) -> float:
        """Return the horizontal pixel of an x."""
        share = (value - self.x_low) / ((self.x_high - self.x_low) or 1.0)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def to_y(self, value: float) -> float:
        """Return the vertical pixel of a y; pixels count from the top."""
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    def draw_path(self, points: Sequence[tuple[float, float]]) -> str:
        """Return the `d` of an SVG path through points."""
        return "M" + " ".join(f"{self.to_x(x)},{self.to_y(y)}" for x, y in points)

    def draw_axes(self) -> str:
        """Return the markup of grid lines and of the ticks of both axes."""
        parts = []
        y_ticks = choose_ticks(self.y_low, self.y_high)
        for value, text in zip(y_ticks, format_ticks(y_ticks), strict=True):
            y = self.to_y(value)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 3.5}" text-anchor="end">{text}</text>')
        x_ticks = choose_ticks(self.x_low, self.x_high)
        for value, text in zip(x_ticks, format_ticks(x_ticks), strict=True):
            x = self.to_x(value)
            parts.append(f'<text class="tick" x="{x}" y="{_HEIGHT - 6}" text-anchor="middle">{text}</text>')
        return "".join(parts)


def _draw_interval(
    difference: Difference, to_x: Callable[[float], float], y: float, label_x: int, width: int
) -> str:
    """Draw one row of a forest plot at height `y`: the metric, the difference, its interval and their text."""
    css_class = {1: "good", -1: "bad"}.get(difference.gain, "even")
    significance = "not significant" if difference.direction == 0 else "significant"
    diff, low, high = (
        format_number(value, sign=True) for value in (difference.diff, difference.low, difference.high)
    )
    return (
        f'<text class="muted" x="{label_x}" y="{y + 4}" text-anchor="end">{escape(difference.metric)}</text>'
        f'<g class="{css_class}"><line x1="{to_x(difference.low)}" x2="{to_x(difference.high)}" y1="{y}" y2="{y}"/>'
        f'<circle cx="{to_x(difference.diff)}" cy="{y}" r="4.5"/></g>'
        f'<text class="number" x="{width}" y="{y + 4}" text-anchor="end">{diff}  [{low}, {high}]'
        f"<title>{significance}</title></text>"
    )


def _format_short(value: float) -> str:
    """Format a number with about three significant digits."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    if magnitude >= 10_000:
        text = f"{value / 1000:.0f}k"
    elif magnitude < 0.001:
        text = f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    else:
        digits = max(0, 2 - math.floor(math.log10(magnitude))) if magnitude < 100 else 0
        text = f"{value:.{digits}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.replace("-", "−")
