"""The report's tables: pure functions of report.json's dictionary, any part of which may be missing.

A table without rows is false (`bool(table)`) and left out of the page. Texts are not escaped; the templates do that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from nonet.controller.scenario.settings import format_percent
from nonet.deploy.report.scores import (
    Difference,
    ScoreRow,
    format_name,
    format_number,
    is_lower_better,
    list_metrics,
    select_scores,
)
from nonet.deploy.report.verdicts import choose_reward_digits, get_reward_direction

_BASELINE_COLUMNS = ("epochs", "trials", "loss")  # facts of a trained baseline that have a column
Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TableCell:
    """One cell of a table.

    Attributes:
        text: The cell's text.
        small: A text in small type after the text.
        bold: Whether the text is bold.
        share: Length in [0, 1] of a bar below the text; None for no bar.
        tone: 1 (good), 0 (neutral) or -1 (bad), shown by a color and a sign; None for neither.
    """

    text: str
    small: str = ""
    bold: bool = False
    share: float | None = None
    tone: int | None = None


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table of cells.

    Attributes:
        head: The columns' titles.
        rows: Rows of cells; the first cell of a row is its name.
        caption: The table's caption.
        groups: (title, number of columns) of each group above the head.
        narrow: Whether the table takes only part of the page's width.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[TableCell | str]]
    caption: str = ""
    groups: Sequence[tuple[str, int]] = ()
    narrow: bool = False

    def __bool__(self) -> bool:
        return bool(self.rows)

    def format_lines(self) -> list[str]:
        """Format the table as lines of text, with columns aligned to the left."""
        rows = [list(self.head), *([_get_text(cell) for cell in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]


def _get_text(cell: TableCell | str) -> str:
    """Return the text of a cell, with the sign of its tone."""
    return cell if isinstance(cell, str) else {1: "▲ ", -1: "▼ "}.get(cell.tone or 0, "") + cell.text


def build_score_table(report: Report, split: str, search: str, caption: str) -> ReportTable:
    """Build the table with a row for each baseline and stage, and a column for each metric.

    There is a group of columns for all held-out events, and one for the events that match the finetuning target.

    Args:
        report: The contents of report.json.
        split: "test", "valid" or "shuffled".
        search: "exhaustive" or "beam".
        caption: The table's caption.
    """
    rows_by_events = {
        events: rows
        for events in ("all", "target")
        if (rows := select_scores(report, split=split, search=search, events=events))
    }
    columns = [(rows, metric) for rows in rows_by_events.values() for metric in list_metrics(rows)]
    subjects = dict.fromkeys((row.name, row.kind) for rows in rows_by_events.values() for row in rows)
    groups = [
        (_format_events_title(report, split, events), len(list_metrics(rows)))
        for events, rows in rows_by_events.items()
    ]
    return ReportTable(
        ["", *(metric for _, metric in columns)],
        [
            [
                TableCell(format_name(name), kind),
                *(
                    _make_score_cell(rows, metric, name, is_lower_better(report, metric))
                    for rows, metric in columns
                ),
            ]
            for name, kind in subjects
        ],
        caption,
        [("", 1), *groups],
    )


def _format_events_title(report: Report, split: str, events: str) -> str:
    """Return the title of a group of columns: which events ("all" or "target"), and their number if it is known."""
    held_out = _get_part(_get_part(report, "data"), "held_out")
    count = held_out.get(split if events == "all" else f"{split}_target")
    title = "all held-out events" if events == "all" else "events that match the finetuning target"
    return f"{title} ({count:,})" if isinstance(count, int) else title


def _make_score_cell(
    rows: Sequence[ScoreRow], metric: str, name: str, lower_is_better: bool
) -> TableCell | str:
    """Make the cell of one subject's score; the best of all rows is bold, and a bar shows the ratio to the highest."""
    scores = {row.name: row.scores[metric] for row in rows if metric in row.scores}
    if name not in scores:
        return "–"
    score, highest = scores[name], max(scores.values())
    best = min(scores.values()) if lower_is_better else highest
    return TableCell(
        format_number(score),
        bold=score == best and highest > 0,
        share=score / highest if highest > 0 else None,
    )


def build_difference_table(differences: Sequence[Difference]) -> ReportTable:
    """Build the table of paired differences and their 95 % intervals."""
    rows = [
        [
            f"{format_name(d.left)} − {format_name(d.right)}",
            d.metric,
            *(format_number(value, sign=True) for value in (d.diff, d.low, d.high)),
            "significant" if d.direction else "not significant",
        ]
        for d in differences
    ]
    return ReportTable(["", "metric", "difference", "low", "high", ""], rows)


def build_reward_tables(report: Report) -> list[tuple[str, ReportTable]]:
    """Build the reward table of each RL stage.

    Returns:
        (description of the prompts that the rewards were measured on, table) of each stage. Captions name the
        stages if there are several.
    """
    part_by_stage = _get_part(report, "stage_rewards") or {"": report}
    has_several = len(part_by_stage) > 1
    tables = [
        (part.get("rewards_on") or "", _build_reward_table(part, format_name(stage) if has_several else ""))
        for stage, part in part_by_stage.items()
    ]
    return [(prompts, table) for prompts, table in tables if table]


def _build_reward_table(stage_report: Report, caption: str) -> ReportTable:
    """Build the table of each reward before and after one RL stage."""
    rows = []
    for name, values in _get_part(stage_report, "rewards").items():
        digits, tone = choose_reward_digits(values), get_reward_direction(values)
        before, after = values[:2]
        change = TableCell(format_number(after - before, digits, sign=True), tone=tone)
        name_cell = TableCell(format_name(name), "trained by RL" if name == "total" else "")
        rows.append([name_cell, format_number(before, digits), format_number(after, digits), change])
    return ReportTable(["objective", "before", "after", "change"], rows, caption, narrow=True)


def build_codebook_table(report: Report) -> ReportTable:
    """Build the table of the levels of semantic ids: the size and the use of each codebook."""
    tokenizer = _get_part(report, "tokenizer")
    levels = zip_longest(*(tokenizer.get(key) or [] for key in ("codes", "used", "perplexity")))
    rows = [
        [
            f"level {level}",
            _format_count(size),
            TableCell(_format_count(used), share=used / size if used and size else None),
            format_number(perplexity, digits=1),
        ]
        for level, (size, used, perplexity) in enumerate(levels, 1)
    ]
    return ReportTable(["", "codes", "used", "perplexity"], rows, narrow=True)


def build_run_tables(report: Report) -> list[ReportTable]:
    """Build the tables of how the run was made, leaving out empty ones.

    They cover time, machine, baselines, work, joins, offloading, sparse tables, sizes and versions.
    """
    tables = (
        _build_time_table(report),
        _build_machine_table(report),
        _build_baseline_table(report),
        _build_work_table(report),
        _build_join_table(report),
        _build_offload_table(report),
        _build_sparse_table(report),
        _build_size_table(report),
    )
    return [table for table in tables if table]


def _build_time_table(report: Report) -> ReportTable:
    """Build the table of wall time, rows and speed by stage."""
    wall_s = {name: s for name, s in _get_part(report, "wall_s").items() if isinstance(s, int | float)}
    total_s = wall_s.pop("total", None) or sum(wall_s.values())
    rows: list[list[TableCell | str]] = []
    for name, seconds in wall_s.items():
        row_count = _get_part(report, "rows").get(name)
        has_count = isinstance(row_count, int)
        time_cell = TableCell(f"{format_number(seconds, 1)} s", share=seconds / total_s if total_s else None)
        speed = f"{row_count / seconds:,.0f} rows/s" if has_count and seconds > 0 else ""
        rows.append([format_name(name), time_cell, f"{row_count:,}" if has_count else "", speed])
    if total_s:
        rows.append(["total", TableCell(f"{format_number(total_s, 1)} s", bold=True), "", ""])
    return ReportTable(["stage", "wall time", "rows trained", "speed"], rows, "Time")


def _build_baseline_table(report: Report) -> ReportTable:
    """Build the table of how baselines were trained, for those that report it."""
    rows = []
    for name, facts in _get_part(report, "trained").items():
        seconds = facts.get("seconds")
        time_text = f"{format_number(seconds, 1)} s" if isinstance(seconds, int | float) else "–"
        cells = [str(facts.get(key, "–")) for key in _BASELINE_COLUMNS]
        other_facts = [
            f"{format_name(key)} {value}"
            for key, value in facts.items()
            if key not in ("seconds", *_BASELINE_COLUMNS)
        ]
        rows.append([format_name(name), time_text, *cells, "; ".join(other_facts)])
    return ReportTable(["baseline", "time", *_BASELINE_COLUMNS, ""], rows, "Baselines that were trained")


def _build_work_table(report: Report) -> ReportTable:
    """Build the table of each worker group's idle time and returned bytes, and of rows that were sent to rollouts."""
    returned_bytes = _get_part(report, "bytes_out")
    rows = [
        [format_name(name), f"{format_number(100 * share, 0)} %", _format_mib(returned_bytes.get(name, 0))]
        for name, share in _get_part(report, "idle").items()
    ]
    rows += [
        [f"rows to rollout, {counts['updates']:,} {kind} updates", "", _format_mib(counts["bytes"], digits=2)]
        for kind, counts in _get_part(report, "published").items()
        if counts.get("updates")
    ]
    note = "Idle: share of the time between a group's first and last call in which it had no call. trace.json has every call."
    return ReportTable(["group", "idle", "bytes returned"], rows, f"Work. {note}")


def _build_join_table(report: Report) -> ReportTable:
    """Build the table of how many rows each join looked up in its store and found there."""
    rows = [
        [
            name,
            reader,
            f"{counts['rows']:,}",
            f"{counts['found']:,}",
            format_percent(counts["found"] / counts["rows"]) if counts["rows"] else "–",
            f"{format_number(counts['seconds'], 1)} s",
        ]
        for name, readers in _get_part(report, "joins").items()
        for reader, counts in readers.items()
    ]
    note = "Joins: rows looked up by key, as of the event's time. A row that is not found has missing values."
    return ReportTable(["join", "read by", "rows", "found", "share", "time"], rows, note)


def _build_machine_table(report: Report) -> ReportTable:
    """Build the table of each stage's hardware utilization, and of the parts of the first trainer's time."""
    stages = _get_part(report, "machine")
    parts = list(dict.fromkeys(part for stage in stages.values() for part in stage["shares"]))
    rows = [
        [
            name,
            format_percent(stage["mfu"]),
            f"{stage['flops_per_s'] / 1e9:,.3g} of {stage['matmul_flops_per_s'] / 1e9:,.3g}",
            f"{stage['tokens_per_s']:,.0f}" if stage["tokens_per_s"] else "–",
            *(format_percent(stage["shares"].get(part, 0.0)) for part in parts),
        ]
        for name, stage in stages.items()
    ]
    note = (
        "Hardware utilization: operations of layers and visible attention, divided by those of a matrix product measured on the "
        "first trainer's device; tokens per second; and the share of each part of a step in its time."
    )
    return ReportTable(["stage", "MFU", "GFLOP/s", "tokens/s", *parts], rows, note)


def _build_offload_table(report: Report) -> ReportTable:
    """Build the table of offloads of groups that share a device; it is empty if they fit together."""
    rows = [
        [
            name,
            str(counts["offload"]),
            str(counts["resume"]),
            _format_mib(counts["bytes"]),
            f"{format_number(counts['seconds'], 2)} s",
        ]
        for name, counts in _get_part(report, "moved").items()
    ]
    note = "Offloading: groups that do not fit on their device together are kept in host memory while another one computes."
    return ReportTable(["group", "offloads", "resumes", "moved", "time"], rows, note)


def _build_sparse_table(report: Report) -> ReportTable:
    """Build the table of sparse tables; it is empty unless an id was refused, evicted or absent."""
    tables = _get_part(report, "sparse")
    is_shown = any(counts.get(key) for counts in tables.values() for key in ("refused", "evicted", "absent"))
    columns = ["rows", "admitted", "evicted", "refused", "absent"]
    rows = [[name, *(f"{counts.get(key, 0):,}" for key in columns)] for name, counts in tables.items()]
    note = "Refused and absent: lookups in training and in reading that returned the default row."
    return ReportTable(["table", *columns], rows if is_shown else [], f"Sparse tables. {note}")


def _build_size_table(report: Report) -> ReportTable:
    """Build the table of parameters, memory, held-out events, repeats and package versions."""
    data, peak_bytes = _get_part(report, "data"), report.get("peak_rss_bytes")
    rows = [
        ["dense parameters" if key == "parameters" else format_name(key), f"{count:,}"]
        for key, count in _get_part(report, "weights").items()
        if isinstance(count, int)
    ]
    if isinstance(peak_bytes, int | float) and peak_bytes > 0:
        rows.append(["peak memory, all processes", f"{peak_bytes / 2**30:.2f} GiB"])
    rows += [
        [f"held-out events, {format_name(name)}", f"{count:,}"]
        for name, count in _get_part(data, "held_out").items()
    ]
    if isinstance(untested_share := data.get("share_only_trained"), float):
        rows.append(["users without a test event", format_percent(untested_share)])
    rows += [
        [f"{split} events of an item seen before", format_percent(share)]
        for split, share in _get_part(_get_part(data, "repeats"), "share").items()
    ]
    rows += [[f"version of {name}", str(version)] for name, version in _get_part(report, "versions").items()]
    return ReportTable(["", ""], rows, "Sizes and versions", narrow=True)


def _get_part(report: Report, key: str) -> Report:
    """Return a part of the report; empty if it is missing."""
    return report.get(key) or {}


def _format_mib(byte_count: float, digits: int = 1) -> str:
    """Format a number of bytes in MiB."""
    return f"{format_number(byte_count / 2**20, digits)} MiB"


def _format_count(value: int | None) -> str:
    """Format a count; a missing one becomes a dash."""
    return "–" if value is None else f"{value:,}"
