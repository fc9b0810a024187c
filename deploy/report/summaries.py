"""A summary of a finished run in a few lines of text, and a suggested `nonet recommend` command.

The suggested command works on this run's data and is quoted for a shell.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from nonet.controller.record import RunFolder, find_runs_root
from nonet.deploy.report.verdicts import get_verdict


def format_summary(report: Mapping[str, Any]) -> str:
    """Format the verdict and a table of baselines and stages by metric.

    The metrics are computed on all held-out test events by full ranking.

    Args:
        report: The contents of report.json.

    Returns:
        Lines of text for a terminal.
    """
    rows = {**report.get("baselines", {}), **report.get("stages", {})}
    metrics = list(next(iter(rows.values()), {}))
    lines = [*get_verdict(report), ""]
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


_LONGEST = 60  # characters of a suggested title


def suggest_command(run: RunFolder) -> str:
    """Suggest a `nonet recommend` command for a run.

    Args:
        run: The run's folder.

    Returns:
        The command with two popular titles, or with a user if items have no titles. It is "" if the run cannot
        recommend items.
    """
    artifacts = (run.read_facts() or {}).get("artifacts", {})
    if not {"sequences", "sids"} <= set(artifacts):
        return ""
    name = run.id if run.path.parent == find_runs_root() else str(run.path)
    titles = _find_popular_titles(Path(artifacts["sequences"]["path"]))
    if titles:
        return shlex.join(["nonet", "recommend", name, "--like", *titles])
    users = (run.read_json("report.json") or {}).get("users") or []
    return shlex.join(["nonet", "recommend", name, f"--user={users[0]['user_id']}"]) if users else ""


def _find_popular_titles(folder: Path) -> list[str]:
    """Return the two most popular titles that differ from the item's id and name exactly one item."""
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
