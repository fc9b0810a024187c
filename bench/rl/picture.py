"""A picture of the gradient audit: cosine of each estimator to the exact gradient, and the share of exact ascent's gain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

_ROW, _LEFT, _BAR, _COLOURS = 22, 220, 300, ("#2a78d6", "#eb6834", "#1baf7a")


def draw_picture(estimators: Sequence[dict[str, Any]], climbed: Sequence[dict[str, Any]]) -> str:
    """Draw an SVG of two panels of bars, one above the other."""
    bars = [
        (f"{row['estimator']}, W = {row['W']}", row["cosine"], f"{row['cosine']:.3f}", _COLOURS[0])
        for row in estimators
    ]
    lines, y = _draw_panel("Cosine of the mean gradient to the exact one", bars, 10)
    bars = [
        (
            row["algorithm"],
            row["share of the ceiling"],
            f"{row['share of the ceiling']:.0%}",
            _COLOURS[1 if row["share of the ceiling"] < 0.999 else 2],
        )
        for row in climbed
    ]
    more, y = _draw_panel("Share of exact-gradient ascent's gain", bars, y + 20)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{y + 10}" font-family="sans-serif" font-size="12">'
        '<rect width="100%" height="100%" fill="#fcfcfb"/>'
    )
    return "\n".join([head, *lines, *more, "</svg>"]) + "\n"


def _draw_panel(title: str, bars: Sequence[tuple[str, float, str, str]], top: int) -> tuple[list[str], int]:
    """Draw one panel, and return its lines and its end; a bar below 0 has no length."""
    lines = [f'<text x="10" y="{top + 14}" font-weight="bold">{escape(title)}</text>']
    y = top + 24
    for name, value, text, colour in bars:
        width = _BAR * min(max(value, 0.0), 1.0)
        lines += [
            f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{_LEFT}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 7}" rx="2" fill="{colour}"/>',
            f'<text x="{_LEFT + width + 6:.1f}" y="{y + 14}">{escape(text)}</text>',
        ]
        y += _ROW
    return lines, y
