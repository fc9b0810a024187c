"""The end of a run as a few lines of text: verdict and table.

What to try after a run: a `nonet recommend` that works on this run's own data, safe to paste into a shell.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from nonet.controller.record import RunFolder, runs_root
from nonet.deploy.report.verdicts import verdict


def summary(report: Mapping[str, Any]) -> str:
    """Verdict sentences, then baselines and stages by metric (test, full ranking, all held-out events)."""
    rows = {**report.get("baselines", {}), **report.get("stages", {})}
    metrics = list(next(iter(rows.values()), {}))
    lines = [*verdict(report), ""]
    wide = {metric: max(11, len(metric) + 2) for metric in metrics}
    lines.append(f"{'test, full ranking':<20}" + "".join(f"{metric:>{wide[metric]}}" for metric in metrics))
    lines += [
        f"{name:<20}"
        + "".join(f"{values.get(metric, float('nan')):>{wide[metric]}.4f}" for metric in metrics)
        for name, values in rows.items()
    ]
    for name, readers in (report.get("joins") or {}).items():
        looked_up, found = (sum(counts[key] for counts in readers.values()) for key in ("rows", "found"))
        share = f" ({found / looked_up:.1%})" if looked_up else ""
        lines.append(f"join {name}: found {found:,} of {looked_up:,} rows{share}")
    wall, peak = report.get("wall_s", {}).get("total", 0), report.get("peak_rss_bytes", 0)
    lines.append(
        f"\n{wall:.0f} s" + (f", {peak / 1e9:.2f} GB at most (PSS of all processes)" if peak else "")
    )
    return "\n".join(lines)


_LONGEST = 60  # letters of a title that is pleasant to type


def suggestion(run: RunFolder) -> str:
    """The command, with two popular titles, or with a user where items have none; "" where there is nothing to recommend."""
    artifacts = (run.read_facts() or {}).get("artifacts", {})
    if not {"sequences", "sids"} <= set(artifacts):
        return ""
    name = run.id if run.path.parent == runs_root() else str(run.path)
    titles = _popular_titles(Path(artifacts["sequences"]["path"]))
    if titles:
        return shlex.join(["nonet", "recommend", name, "--like", *titles])
    users = (run.read_json("report.json") or {}).get("users") or []
    return shlex.join(["nonet", "recommend", name, f"--user={users[0]['user_id']}"]) if users else ""


def _popular_titles(folder: Path) -> list[str]:
    """Two titles that are no ids and name one item each, of those that were interacted with most."""
    items = pq.read_table(folder / "items.parquet", columns=["item_id", "title", "events"]).sort_by(
        [("events", "descending")]
    )
    ids, titles = (list(map(str, items[name].to_pylist())) for name in ("item_id", "title"))
    times: dict[str, int] = {}
    for title in titles:
        times[title] = times.get(title, 0) + 1
    plain = [
        title
        for title, item in zip(titles, ids, strict=True)
        if title != item and times[title] == 1 and title.strip() and title.isprintable() and title[0] != "-"
    ]
    short = [title for title in plain if len(title) <= _LONGEST]
    return (short if len(short) > 1 else plain)[:2]
