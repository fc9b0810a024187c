"""Users' histories beside what each baseline and stage recommends to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from nonet.deploy.report.markup import collapsed, note, section
from nonet.deploy.report.scores import label

_HISTORY, _SHOWN = 8, 3


def people(report: Mapping[str, Any]) -> str:
    """The section with a card for each user of the report; empty without users."""
    users = report.get("users") or []
    if not users:
        return ""
    told = note(
        "Held-out items are what the user chose next and the model never saw; a recommendation that names "
        "one is a hit and marked ✓. What the stage before did not recommend is marked new."
    )
    stages = list(report.get("stages") or {})
    cards = [_card(user, stages) for user in users]
    more = collapsed(f"{len(cards) - _SHOWN} more users", "".join(cards[_SHOWN:]))
    return section("What people are recommended", told + "".join(cards[:_SHOWN]) + more)


def _card(user: Mapping[str, Any], stages: Sequence[str]) -> str:
    wanted = [str(title) for title in user.get("target") or []]
    history = [str(title) for title in user.get("history") or []]
    lists, before = [], None
    for name, titles in (user.get("recommended") or {}).items():
        shown = [str(title) for title in titles or []]
        lists.append(_recommended(name, shown, wanted, before))
        before = shown if name in stages else before
    return (
        f'<article class="user"><h3>User {escape(str(user.get("user_id", "?")))}</h3>'
        f'<div class="past">{_history(history)}{_targets(wanted)}</div>'
        f'<div class="lists">{"".join(lists)}</div></article>'
    )


def _history(titles: Sequence[str]) -> str:
    earlier = len(titles) - _HISTORY
    more = f'<li class="muted">{earlier} earlier</li>' if earlier > 0 else ""
    items = "".join(f"<li>{escape(title)}</li>" for title in titles[-_HISTORY:])
    return f"<div><h4>History, newest last</h4><ul>{more}{items or '<li>–</li>'}</ul></div>"


def _targets(titles: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(title)}</li>" for title in titles)
    return f'<div class="held"><h4>Held out: chosen next</h4><ul>{items}</ul></div>' if titles else ""


def _recommended(
    name: str, titles: Sequence[str], wanted: Sequence[str], before: Sequence[str] | None
) -> str:
    items = "".join(
        _item(title, title in wanted, before is not None and title not in before) for title in titles
    )
    hits = sum(title in wanted for title in titles)
    count = f"<small>{hits} ✓</small>" if hits else ""
    return f"<div><h4>{escape(label(name))}{count}</h4><ol>{items}</ol></div>"


def _item(title: str, hit: bool, new: bool) -> str:
    mark = "&nbsp;<small>new</small>" if new else ""
    if hit:
        return f'<li class="hit">{escape(title)}&nbsp;<b title="hit">✓</b>{mark}</li>'
    return f"<li>{escape(title)}{mark}</li>"
