"""A picture of slots and trainer over time, one panel a staleness; a colour a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_ROW, _LEFT, _WIDTH = 12, 80, 700
_COLOURS = ("#2a78d6", "#eb6834", "#1baf7a", "#8e5bd0", "#c9a227")


@dataclass(frozen=True, slots=True)
class Span:
    """What one row, a slot or the trainer, did from `start` to `end` (seconds) for a step."""

    row: int
    step: int
    start: float
    end: float


def picture_of(panels: Sequence[tuple[str, Sequence[Span]]], slots: int) -> str:
    """SVG: each panel a title, a row a slot and a taller one for the trainer, on one scale of time."""
    longest = max(span.end for _, spans in panels for span in spans)
    scale, y, lines = _WIDTH / longest, 10, []
    for title, spans in panels:
        lines.append(f'<text x="10" y="{y + 12}" font-weight="bold">{escape(title)}</text>')
        top = y + 20
        for row in range(slots + 1):
            name = "trainer" if row == slots else f"rollout {row}"
            lines.append(f'<text x="10" y="{top + row * (_ROW + 2) + 10}" font-size="10">{name}</text>')
        for span in spans:
            height = _ROW if span.row < slots else _ROW + 6
            lines.append(
                f'<rect x="{_LEFT + span.start * scale:.1f}" y="{top + span.row * (_ROW + 2)}" '
                f'width="{max(0.5, (span.end - span.start) * scale - 0.5):.1f}" height="{height}" '
                f'fill="{_COLOURS[span.step % len(_COLOURS)]}"/>'
            )
        y = top + (slots + 1) * (_ROW + 2) + 16
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{y + 4}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="#fcfcfb"/>'
    )
    note = (
        f'<text x="10" y="{y - 2}" font-size="10">a colour a step: prompts that a rollout answers, and the update '
        "that they would be learned in if all took the same time</text>"
    )
    return "\n".join([head, *lines, note, "</svg>"]) + "\n"
