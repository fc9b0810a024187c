"""The few shapes that the report's page is made of.

Titles, names and notes are plain text and escaped here; bodies and cells are markup already.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def section(title: str, body: str) -> str:
    """A headed part of the page."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def collapsed(title: str, body: str) -> str:
    """What most readers will not ask for; nothing where there is no body."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if body else ""


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str = "",
    groups: Sequence[tuple[str, int]] = (),
    narrow: bool = False,
) -> str:
    """A table of cells that are markup already; `groups` (title, columns) make a row above the head.

    Without any name in the head there is none.
    """
    above = "".join(f'<th colspan="{span}" scope="colgroup">{escape(title)}</th>' for title, span in groups)
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    top = f'<tr class="groups">{above}</tr>' if groups else ""
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    above_body = f"<thead>{top}<tr>{names}</tr></thead>" if any(head) else ""
    inner = f"{named}{above_body}<tbody>{body}</tbody>"
    return f'<div class="{"narrow" if narrow else "wide"}"><table>{inner}</table></div>'


def note(text: str) -> str:
    """A quiet paragraph that says how to read what follows."""
    return f'<p class="muted">{escape(text)}</p>'


def row_name(name: str, kind: str = "") -> str:
    """The first cell of a row."""
    return f'<th scope="row">{escape(name)}{f" <small>{escape(kind)}</small>" if kind else ""}</th>'
