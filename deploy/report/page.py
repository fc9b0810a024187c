"""The report's page: verdict first, then the numbers that carry it, then how it was made.

`page` is pure: the same report gives the same bytes. Every text that comes from the run is escaped. A section
is left out when its part of the report is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import zip_longest
from pathlib import Path
from string import Template
from typing import Any

from nonet.controller.predict import repeats_text
from nonet.deploy.report.charts import bar, forest_plot, line_chart
from nonet.deploy.report.curves import Curve
from nonet.deploy.report.markup import collapsed, note, row_name, section, table
from nonet.deploy.report.provenance import facts, footer
from nonet.deploy.report.receipt import receipt
from nonet.deploy.report.scores import (
    ScoreRow,
    differences,
    headline_metrics,
    label,
    metrics_of,
    number,
    stage_table,
)
from nonet.deploy.report.user_cards import people
from nonet.deploy.report.verdicts import findings, reward_digits, reward_direction

_TEMPLATE = Path(__file__).parents[1] / "templates" / "report.html"
_TONES = {1: "good", 0: "even", -1: "bad"}
_SIGNS = {1: "▲", 0: "●", -1: "▼"}


def page(
    report: Mapping[str, Any], *, curves: Sequence[Curve] = (), scenario: str = "", unread: int = 0
) -> str:
    """The whole page. `unread` metrics lines that could not be read are mentioned under the curves."""
    sections = [
        _verdict(report),
        _scores(report),
        _differences(report),
        _rewards(report),
        people(report),
        _curves(curves, unread),
        _tokenizer(report),
        receipt(report),
        facts(report, scenario),
    ]
    name = str(report.get("name") or report.get("run") or "run")
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(f"{name} · Nonet run report"),
        name=escape(name),
        subtitle=_subtitle(report),
        body="\n".join(part for part in sections if part),
        footer=footer(report),
    )


def _subtitle(report: Mapping[str, Any]) -> str:
    data = report.get("data") or {}
    parts = [str(report[key]) for key in ("run",) if report.get(key)]
    if report.get("seed") is not None:
        parts.append(f"seed {report['seed']}")
    parts += [
        f"{data[key]:,} {key}" for key in ("users", "items", "events") if isinstance(data.get(key), int)
    ]
    total = (report.get("wall_s") or {}).get("total")
    if isinstance(total, int | float):
        parts.append(f"{int(total // 60)} min {int(total % 60):02d} s")
    return escape(" · ".join(parts))


def _verdict(report: Mapping[str, Any]) -> str:
    lines = []
    for found in findings(report):
        sign = f'<span aria-hidden="true">{_SIGNS[found.tone]}</span>'
        lines.append(f'<li class="{_TONES[found.tone]}">{sign}{escape(found.text)}</li>')
    return f'<section class="verdict"><h2>Verdict</h2><ul>{"".join(lines)}</ul></section>'


def _scores(report: Mapping[str, Any]) -> str:
    test = _score_table(report, "test", "exhaustive", "Every catalogue item scored")
    test += _score_table(report, "test", "beam", "By beam search")
    if not test:
        return ""
    validation = "".join(
        _score_table(report, "valid", search, f"Validation, {search}") for search in ("exhaustive", "beam")
    )
    parts = [
        "Full ranking of the catalogue.",
        repeats_text(report.get("data") or {}),
        "Best of each column in bold; whether a difference means something is the next section's matter.",
    ]
    told = note(" ".join(part for part in parts if part))
    return section(
        "Stages and baselines", told + test + collapsed("Validation: used for choosing", validation)
    )


def _score_table(report: Mapping[str, Any], split: str, search: str, title: str) -> str:
    groups = {
        events: rows
        for events in ("all", "target")
        if (rows := stage_table(report, split=split, search=search, events=events))
    }
    if not groups:
        return ""
    columns = [(rows, metric) for rows in groups.values() for metric in metrics_of(rows)]
    above = [("", 1)]
    above += [
        (_events_title(report, split, events), len(metrics_of(rows))) for events, rows in groups.items()
    ]
    shown = dict.fromkeys((row.name, row.kind) for rows in groups.values() for row in rows)
    body = [
        [row_name(label(name), kind), *(_score_cell(*column, name) for column in columns)]
        for name, kind in shown
    ]
    return table(["", *(metric for _, metric in columns)], body, caption=title, groups=above)


def _events_title(report: Mapping[str, Any], split: str, events: str) -> str:
    held_out = (report.get("data") or {}).get("held_out") or {}
    count = held_out.get(split if events == "all" else f"{split}_target")
    words = "all held-out events" if events == "all" else "those matching the finetuning target"
    return f"{words} ({count:,})" if isinstance(count, int) else words


def _score_cell(rows: Sequence[ScoreRow], metric: str, name: str) -> str:
    scores = {row.name: row.scores.get(metric) for row in rows}
    value, best = scores.get(name), max((score for score in scores.values() if score is not None), default=0)
    if value is None:
        return "<td>–</td>"
    share = bar(value / best) if best > 0 else ""
    return (
        f"<td>{share}<b>{number(value)}</b></td>" if value == best > 0 else f"<td>{share}{number(value)}</td>"
    )


def _differences(report: Mapping[str, Any]) -> str:
    found = list(differences(report))
    shown = [d for d in found if d.metric in headline_metrics(report)]
    if not shown:
        return ""
    rows = [
        [
            row_name(f"{label(d.left)} − {label(d.right)}"),
            f"<td>{escape(d.metric)}</td>",
            *(f"<td>{number(value, sign=True)}</td>" for value in (d.diff, d.low, d.high)),
            f"<td>{'significant' if d.direction else 'not significant'}</td>",
        ]
        for d in found
    ]
    every = table(["", "metric", "difference", "low", "high", ""], rows)
    told = note(
        "Differences on the same users, with 95 % intervals of a bootstrap over users. Where the interval "
        "contains 0 (hollow), the difference is not significant."
    )
    return section("Are the differences real?", told + forest_plot(shown) + collapsed("All metrics", every))


def _rewards(report: Mapping[str, Any]) -> str:
    rows = []
    for name, values in (report.get("rewards") or {}).items():
        values = list(values)
        tone, digits, (before, after) = reward_direction(values), reward_digits(values), values[:2]
        change = f"{_SIGNS[tone]} {number(after - before, digits, sign=True)}"
        cells = f"<td>{number(before, digits)}</td><td>{number(after, digits)}</td>"
        cells += f'<td class="{_TONES[tone]}">{change}</td>'
        rows.append([row_name(label(name), "what RL trains" if name == "total" else ""), cells])
    if not rows:
        return ""
    on = report.get("rewards_on")
    told = note(f"On {on}.") if on else ""
    heads = ["objective", "before", "after", "change"]
    return section("Rewards before and after RL", told + table(heads, rows, narrow=True))


def _curves(curves: Sequence[Curve], unread: int) -> str:
    # A single point, such as a score at a stage's end, is no curve; the tables have it.
    drawn = [curve for curve in curves if len(curve.points) > 1]
    first = "".join(_chart(curve) for curve in drawn if curve.important)
    rest = "".join(_chart(curve) for curve in drawn if not curve.important)
    if not first and not rest:
        return ""
    told = "By step; faint is each step, bold its moving average; the number is the last step's."
    if unread:
        told += f" Lines of metrics.jsonl that could not be read: {unread}."
    charts = f'<div class="charts">{first}</div>' if first else ""
    more = collapsed("More curves", f'<div class="charts">{rest}</div>') if rest else ""
    return section("Curves", note(told) + charts + more)


def _chart(curve: Curve) -> str:
    points = curve.points
    title = f"{label(curve.stage)} · {curve.name}" if curve.stage else curve.name
    told_already = curve.unit in ("1", "1/s") or curve.unit in curve.name
    unit = "" if told_already else curve.unit
    return line_chart(title, [x for x, _ in points], [y for _, y in points], unit)


def _tokenizer(report: Mapping[str, Any]) -> str:
    health = report.get("tokenizer") or {}
    levels = zip_longest(*(health.get(key) or [] for key in ("codes", "used", "perplexity")))
    rows = []
    for level, (size, used, perplexity) in enumerate(levels, 1):
        share = bar(used / size) if used and size else ""
        cells = f"<td>{_count(size)}</td><td>{share}{_count(used)}</td><td>{number(perplexity, 1)}</td>"
        rows.append([row_name(f"level {level}"), cells])
    if not rows:
        return ""
    told = (
        "Perplexity is how many evenly used codes the level is worth; far below its codes means a collapsed "
        "codebook. The last level only tells items apart that share all others."
    )
    unique = health.get("unique_before_collisions")
    if isinstance(unique, int | float):
        told += f" Without it {100 * unique:.1f} % of the items have an id of their own."
    return section("Semantic ids", note(told) + table(["", "codes", "used", "perplexity"], rows, narrow=True))


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
