"""How a run was made: time, memory, sizes, versions, and the command that makes it again."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from nonet.controller.predict import percent
from nonet.deploy.report.charts import bar
from nonet.deploy.report.markup import collapsed, row_name, section, table
from nonet.deploy.report.scores import label, number


def facts(report: Mapping[str, Any], scenario: str) -> str:
    """The last section: the command, the scenario as resolved, wall time, memory, sizes and versions."""
    body = _command(report) + _wall(report) + _work(report) + _tables(report) + _sizes(report)
    if scenario:
        body += collapsed("Scenario as resolved", f"<pre>{escape(scenario)}</pre>")
    return section("How it was made", body) if body else ""


def footer(report: Mapping[str, Any]) -> str:
    """The data's notice."""
    notice = (report.get("data") or {}).get("notice")
    return f"<p>{escape(str(notice))}</p>" if notice else ""


def _command(report: Mapping[str, Any]) -> str:
    command = report.get("command")
    return f"<h3>To reproduce</h3><pre>{escape(str(command))}</pre>" if command else ""


def _wall(report: Mapping[str, Any]) -> str:
    wall = {name: s for name, s in (report.get("wall_s") or {}).items() if isinstance(s, int | float)}
    total = wall.pop("total", None) or sum(wall.values())
    rows_done = report.get("rows") or {}
    rows = []
    for name, seconds in wall.items():
        done = rows_done.get(name)
        speed = f"{done / seconds:,.0f} rows/s" if isinstance(done, int) and seconds > 0 else ""
        rows.append(
            [
                row_name(label(name)),
                f"<td>{bar(seconds / total) if total else ''}{number(seconds, 1)} s</td>",
                f"<td>{f'{done:,}' if isinstance(done, int) else ''}</td><td>{speed}</td>",
            ]
        )
    if total:
        rows.append([row_name("total"), f"<td><b>{number(total, 1)} s</b></td><td></td><td></td>"])
    return table(["stage", "wall time", "rows trained", "speed"], rows, caption="Time") if rows else ""


def _work(report: Mapping[str, Any]) -> str:
    idle, sent = report.get("idle") or {}, report.get("bytes_out") or {}
    rows = [
        [
            row_name(label(name)),
            f"<td>{number(100 * share, 0)} %</td><td>{number(sent.get(name, 0) / 2**20, 1)} MiB</td>",
        ]
        for name, share in idle.items()
    ]
    for kind, counts in (report.get("published") or {}).items():
        if counts.get("updates"):
            name = f"rows to rollout, {counts['updates']:,} {kind} updates"
            rows.append([row_name(name), f"<td></td><td>{number(counts['bytes'] / 2**20, 2)} MiB</td>"])
    note = "Idle: share of the time between a group's first and last call in which it had none. Every call is in trace.json."
    shown = table(["group", "idle", "bytes given back"], rows, caption=f"Work. {note}") if rows else ""
    return shown + _turns(report.get("moved") or {})


def _turns(moved: Mapping[str, Any]) -> str:
    """What groups that share a device moved to host memory and back; nothing where they fit together."""
    rows = [
        [
            row_name(name),
            f"<td>{found['offload']}</td><td>{found['resume']}</td>"
            f"<td>{number(found['bytes'] / 2**20, 1)} MiB</td><td>{number(found['seconds'], 2)} s</td>",
        ]
        for name, found in moved.items()
    ]
    note = "Turns: groups that don't fit on their device together wait in host memory while another works."
    return table(["group", "offloads", "resumes", "moved", "time"], rows, caption=note) if rows else ""


def _tables(report: Mapping[str, Any]) -> str:
    """Sparse tables, where some id was refused, forgotten or read as the default row."""
    tables = report.get("sparse") or {}
    if not any(counts.get(what) for counts in tables.values() for what in ("refused", "evicted", "absent")):
        return ""
    columns = ["rows", "admitted", "evicted", "refused", "absent"]
    rows = [
        [row_name(name), "".join(f"<td>{counts.get(what, 0):,}</td>" for what in columns)]
        for name, counts in tables.items()
    ]
    note = "Refused and absent: look-ups in training and in reading that read the default row."
    return table(["table", *columns], rows, caption=f"Sparse tables. {note}")


def _sizes(report: Mapping[str, Any]) -> str:
    pairs: list[tuple[str, str]] = []
    weights = report.get("weights") or {}
    titles = {"parameters": "dense parameters"}
    pairs += [(titles.get(key, label(key)), f"{n:,}") for key, n in weights.items() if isinstance(n, int)]
    peak = report.get("peak_rss_bytes")
    if isinstance(peak, int | float) and peak > 0:
        pairs.append(("peak memory, all processes", f"{peak / 2**30:.2f} GiB"))
    held_out = (report.get("data") or {}).get("held_out") or {}
    pairs += [(f"held-out events, {label(name)}", f"{count:,}") for name, count in held_out.items()]
    repeats = ((report.get("data") or {}).get("repeats") or {}).get("share") or {}
    pairs += [(f"of an item seen before, {name} events", percent(share)) for name, share in repeats.items()]
    pairs += [
        (f"version of {name}", str(version)) for name, version in (report.get("versions") or {}).items()
    ]
    rows = [[row_name(name), f"<td>{escape(value)}</td>"] for name, value in pairs]
    return table(["", ""], rows, caption="Sizes and versions", narrow=True) if rows else ""
