"""A summary of a finished run in a few lines of text, and a suggested `nonet recommend` command.

The suggested command works on this run's data and is quoted for a shell.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from nonet.controller.record import RunFolder, name_run
from nonet.controller.setup import ReadingFacts
from nonet.deploy.report.scores import format_aligned
from nonet.deploy.report.verdicts import get_verdict
from nonet.errors import ConfigError
from nonet.storage import fetch, read_address


def format_summary(report: Mapping[str, Any]) -> str:
    """Format the verdict, a table of the test scores of baselines and stages, joins, time and memory.

    Args:
        report: The contents of report.json.

    Returns:
        Lines of text for a terminal.
    """
    scores_by_name = {**report.get("baselines", {}), **report.get("stages", {})}
    metrics = list(next(iter(scores_by_name.values()), {}))
    lines = [*get_verdict(report), ""]
    widths = {metric: max(11, len(metric) + 2) for metric in metrics}
    # A model that makes no lists has none to describe; reports of earlier versions have no such part.
    title = "test" if report.get("lists") == {} else "test, full ranking"
    lines.append(f"{title:<20}" + "".join(f"{metric:>{widths[metric]}}" for metric in metrics))
    lines += [
        f"{name:<20}" + "".join(format_aligned(scores.get(metric), widths[metric]) for metric in metrics)
        for name, scores in scores_by_name.items()
    ]
    for name, readers in (report.get("joins") or {}).items():
        row_count, found_count = (
            sum(counts[key] for counts in readers.values()) for key in ("rows", "found")
        )
        share = f" ({found_count / row_count:.1%})" if row_count else ""
        lines.append(f"join {name}: found {found_count:,} of {row_count:,} rows{share}")
    wall_s, peak_bytes = report.get("wall_s", {}).get("total", 0), report.get("peak_rss_bytes", 0)
    memory = f", {peak_bytes / 1e9:.2f} GB at most (PSS of all processes)" if peak_bytes else ""
    resumptions = sum("seconds" in part for part in report.get("interruptions", ()))
    parts = f" over {resumptions + 1} parts of the run" if resumptions else ""
    lines.append(f"\n{wall_s:.0f} s{parts}{memory}")
    return "\n".join(lines)


_MAX_TITLE_CHARS = 60  # longer titles are suggested only if there are not two shorter ones


def suggest_command(run: RunFolder) -> str:
    """Suggest a `nonet recommend` command for a run.

    Args:
        run: The run's folder.

    Returns:
        The command with two popular titles, or with a user if items have no titles. It names a stored run by its address, so
        that it works on any machine. It is "" if the kinds of the run do not
        support the verb, its scenario is one of another version that this one cannot read, or it has no data yet.
    """
    facts = run.read_facts()
    try:
        if facts is None or "recommend" in ReadingFacts.from_run(run, facts).limits:
            return ""
    except ConfigError:
        return ""
    name, sequences = read_address(run.path) or name_run(run), facts["artifacts"].get("sequences")
    titles = _find_popular_titles(Path(sequences["path"]) / "items.parquet") if sequences else []
    if titles:
        return shlex.join(["nonet", "recommend", name, "--like", *titles])
    users = (run.read_json("report.json") or {}).get("users") or []
    return shlex.join(["nonet", "recommend", name, f"--user={users[0]['user_id']}"]) if users else ""


def _find_popular_titles(file: Path) -> list[str]:
    """Return up to two of the most popular titles that differ from the item's id and name exactly one item.

    Args:
        file: The table items.parquet of the run's sequences.
    """
    fetch(file)
    items = pq.read_table(file, columns=["item_id", "title", "events"]).sort_by([("events", "descending")])
    ids, titles = (list(map(str, items[name].to_pylist())) for name in ("item_id", "title"))
    item_counts = Counter(titles)
    usable = [
        title
        for title, item_id in zip(titles, ids, strict=True)
        if title != item_id
        and item_counts[title] == 1
        and title.strip()
        and title.isprintable()
        and title[0] != "-"  # would be read as an option of the command
    ]
    short = [title for title in usable if len(title) <= _MAX_TITLE_CHARS]
    return (short if len(short) > 1 else usable)[:2]
