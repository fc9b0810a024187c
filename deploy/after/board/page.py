"""The board as a page, as Markdown and for a terminal: the same tables in each.

All functions are pure functions of the board's JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nonet.controller.record import list_subjects_beside
from nonet.deploy.after.board.entries import PROTOCOLS, BoardEntry
from nonet.deploy.report import (
    HEADLINES,
    ReportTable,
    TableCell,
    build_cold_table,
    build_difference_table,
    build_memory_table,
    build_part_table,
    build_segment_table,
    find_strongest_baseline,
    format_name,
    format_number,
    iterate_differences,
    load_template,
    select_headline_metrics,
    to_report,
)

Board = Mapping[str, Any]


def render_board(board: Board) -> str:
    """Render the board as an HTML page."""
    return load_template("board.html").render(
        subtitle=_describe_board(board),
        summary=_build_summary(board),
        together=_build_together_table(board),
        together_note=_describe_together(board),
        problems=list(_list_problems(board)),
        entries=[
            (key, list(_describe_entry(entry)), list(_list_tables(entry)))
            for key, entry in board["results"].items()
        ],
        commands=board["commands"],
    )


def format_markdown(board: Board) -> str:
    """Format the board as a Markdown page."""
    lines = ["# Board", "", f"Written by {_join_commands(board)}. {_describe_board(board)}", ""]
    lines += [f"- {problem}" for problem in _list_problems(board)]
    lines += ["", *_format_table(_build_summary(board))]
    if table := _build_together_table(board):
        lines += ["## Small sets together", "", _describe_together(board), "", *_format_table(table)]
    for key, entry in board["results"].items():
        lines += [f"## {key}", ""]
        for paragraph in _describe_entry(entry):
            lines += [paragraph, ""]
        for table in _list_tables(entry):
            lines += _format_table(table)
    return "\n".join(lines).rstrip() + "\n"


def format_summary(board: Board) -> str:
    """Format the summary and the problems of a board as text."""
    return "\n".join([*_build_summary(board).format_lines(), "", *_list_problems(board)]).rstrip()


def _join_commands(board: Board) -> str:
    """Return the commands that made a board, quoted for Markdown."""
    return ", then ".join(f"`{command}`" for command in board["commands"])


def _describe_board(board: Board) -> str:
    """Return sentences about the seeds, the machines and the intervals."""
    results = board["results"].values()
    processors = sorted({name for entry in results for name in entry["processors"]})
    minutes = sum(sum(entry["seconds"]) for entry in results) / 60
    seeds = ", ".join(map(str, board["seeds"]))
    return (
        f"Seeds {seeds}; {minutes:.0f} minutes of runs on {', '.join(processors) or 'no machine yet'}. Settings, commits and "
        "options of baselines are chosen on validation; test events are used once. Differences are paired over users (95 %)."
    )


def _list_problems(board: Board) -> Iterator[str]:
    """Yield what is missing from the board."""
    for run_name, reason in board["failed"].items():
        yield f"{run_name} failed: {reason}"
    for entry in board["entries"]:
        key = BoardEntry(**entry).key
        done = board["results"].get(key, {}).get("seeds", [])
        if missing := [seed for seed in board["seeds"] if seed not in done]:
            yield f"{key} lacks the seeds {', '.join(map(str, missing))}; nonet board --run-dir . in the board's folder continues"


def _build_summary(board: Board) -> ReportTable:
    """Build the table of each entry's last stage beside the strongest baseline."""
    rows = []
    for key, entry in board["results"].items():
        scores, strongest, last = entry["subjects"], _find_strongest(entry), entry["stages"][-1]
        metrics = select_headline_metrics(to_report(entry))
        cells: list[TableCell | str] = [
            key,
            f"{entry['events']:,}",
            " / ".join(format_number(scores[last][metric]["mean"]) for metric in metrics),
            format_name(strongest),
            " / ".join(format_number(scores[strongest][metric]["mean"]) for metric in metrics),
        ]
        for difference in _select_differences(entry, metrics, strongest):
            interval = (
                f"[{format_number(difference.low, sign=True)}, {format_number(difference.high, sign=True)}]"
            )
            text = f"{format_number(difference.diff, sign=True)} {interval}"
            cells.append(TableCell(text, tone=difference.gain))
        rows.append(cells)
    head = [
        *(
            "",
            "test events",
            "recommender, recall@10 / NDCG@10",
            "strongest baseline",
            "its recall@10 / NDCG@10",
        ),
        *("difference in recall@10", "in NDCG@10"),
    ]
    return ReportTable(head, rows)


def _find_strongest(entry: Mapping[str, Any]) -> str:
    """Return the name of an entry's baseline with the best first headline metric, as reports do; controls of RL are none."""
    stages = entry["stages"]
    beside = {subject for stage in stages for subject in list_subjects_beside(stage)}
    baselines = [name for name in entry["subjects"] if name not in stages and name not in beside]
    return find_strongest_baseline(to_report(entry), baselines)[0]


def _select_differences(
    entry: Mapping[str, Any], metrics: Sequence[str], other: str | None = None
) -> list[Any]:
    """Return the differences of an entry's last stage from its baselines, or from `other` alone, in some metrics."""
    last, stages = entry["stages"][-1], entry["stages"]
    return [
        difference
        for difference in iterate_differences(to_report(entry))
        if difference.left == last
        and difference.metric in metrics
        and (difference.right not in stages if other is None else difference.right == other)
    ]


def _build_together_table(board: Board) -> ReportTable:
    """Build the table of the differences over all small sets together."""
    rows: list[list[TableCell | str]] = [
        [
            format_name(name),
            metric,
            *(format_number(values[part], sign=True) for part in ("diff", "low", "high")),
        ]
        for name, by_metric in board["together"].get("paired", {}).items()
        for metric, values in by_metric.items()
        if metric in HEADLINES
    ]
    return ReportTable(["recommender less", "metric", "difference", "low", "high"], rows)


def _describe_together(board: Board) -> str:
    """Return a sentence about the sets of `_build_together_table`."""
    sets = board["together"].get("sets", [])
    return f"{', '.join(sets)}: {board['together'].get('events', 0):,} test events, users paired over all of them."


def _describe_entry(entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences about an entry's data, protocol, cost and command."""
    data, seeds = entry["data"], ", ".join(map(str, entry["seeds"]))
    yield (
        f"{data['users']:,} users, {data['items']:,} items, {data['events']:,} events; {entry['events']:,} test events. "
        f"{PROTOCOLS[entry['protocol']]}"
    )
    seconds = sum(entry["seconds"]) / len(entry["seconds"])
    memory = f" and {entry['peak_bytes'] / 1e9:.1f} GB" if entry["peak_bytes"] else ""  # of runs on one node
    yield (
        f"Seeds {seeds}; {seconds:.0f} s{memory} for each run, baselines included, on "
        f"{', '.join(entry['processors'])}, torch {entry['versions'].get('torch')}."
    )
    file, seed = entry["scenario"].rpartition("/")[2], entry["seeds"][0]
    yield f"Repeat seed {seed}, in the board's folder: nonet run {file} --seeds {seed}"
    for name, facts in entry["trained"].items():
        yield (
            f"{format_name(name)}: {facts['best']}."
            if "best" in facts
            else f"{format_name(name)}: {_join_facts(facts)}."
        )


def _join_facts(facts: Mapping[str, Any]) -> str:
    """Join the facts about a fitted baseline."""
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def _list_tables(entry: Mapping[str, Any]) -> Iterator[ReportTable]:
    """Yield the tables of an entry."""
    yield _build_score_table(entry)
    if entry["published_otherwise"]:
        yield _build_other_table(entry)
    if entry["shuffled"]:
        yield _build_plain_table(entry["shuffled"], "Events of equal time in random order")
    if entry["alone"]:
        yield _build_plain_table(entry["alone"], "The model alone, without its memory")
        yield _name_seed(build_memory_table(entry["report"]), entry)
        if parts := build_part_table(entry["report"]):
            yield _name_seed(parts, entry)
    if cold := build_cold_table(entry["report"]):
        yield _name_seed(cold, entry)
    metrics = select_headline_metrics(to_report(entry))
    yield build_difference_table(_select_differences(entry, metrics))
    yield _name_seed(build_segment_table(entry["report"]), entry)


def _name_seed(table: ReportTable, entry: Mapping[str, Any]) -> ReportTable:
    """Return a table of the first run alone with its seed in the caption, if there are several."""
    if len(entry["seeds"]) == 1:
        return table
    return replace(table, caption=f"{table.caption}, seed {entry['seeds'][0]} alone")


def _build_score_table(entry: Mapping[str, Any]) -> ReportTable:
    """Build the table of all subjects by all metrics, with published results below."""
    subjects, several = entry["subjects"], len(entry["seeds"]) > 1
    metrics = list(next(iter(subjects.values())))
    best = {metric: max(scores[metric]["mean"] for scores in subjects.values()) for metric in metrics}
    rows: list[list[TableCell | str]] = [
        [
            TableCell(format_name(name), "stage" if name in entry["stages"] else "baseline"),
            *(
                TableCell(
                    format_number(scores[metric]["mean"]),
                    f"± {format_number(scores[metric]['sd'])}" if several else "",
                    bold=scores[metric]["mean"] == best[metric],
                )
                for metric in metrics
            ),
        ]
        for name, scores in subjects.items()
    ]
    for row in entry["published"]:
        text = "with a language model's text" if row["text"] else "no language model's text"
        rows.append(
            [
                TableCell(row["name"], f"copied from {row['source']}; {text}"),
                *(format_number(row.get(metric)) for metric in metrics),
            ]
        )
    return ReportTable(["", *metrics], rows, "Test events")


def _build_other_table(entry: Mapping[str, Any]) -> ReportTable:
    """Build the table of published results for the same data by other protocols, which are not comparable."""
    rows: list[list[TableCell | str]] = [
        [
            TableCell(row["name"], f"copied from {row['source']}"),
            row.get("protocol", "last"),
            format_number(row.get("recall@10")),
            format_number(row.get("ndcg@10")),
        ]
        for row in entry["published_otherwise"]
    ]
    return ReportTable(
        ["", "protocol", "recall@10", "ndcg@10"], rows, "Published by another protocol, not comparable"
    )


def _build_plain_table(scores: Mapping[str, Mapping[str, float]], caption: str) -> ReportTable:
    """Build a table of scores by subject and metric."""
    metrics = list(next(iter(scores.values())))
    rows: list[list[TableCell | str]] = [
        [format_name(name), *(format_number(by_metric.get(metric)) for metric in metrics)]
        for name, by_metric in scores.items()
    ]
    return ReportTable(["", *metrics], rows, caption)


def _format_table(table: ReportTable) -> list[str]:
    """Format a table as lines of Markdown, with an empty line after it; a table without rows has none."""
    if not table:
        return []
    head = list(table.head)
    if table.groups:  # Markdown has no groups of columns: their titles go into the head.
        titles = [title for title, size in table.groups for _ in range(size)]
        head = [f"{title} {name}".strip() for title, name in zip(titles, head, strict=True)]
    lines = [table.caption, ""] if table.caption else []
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(_format_cell(cell) for cell in row)} |" for row in table.rows]
    return [*lines, ""]


def _format_cell(cell: TableCell | str) -> str:
    """Format a cell in Markdown."""
    if isinstance(cell, str):
        return cell.replace("|", "\\|")
    text = f"**{cell.text}**" if cell.bold else cell.text
    sign = {1: "▲ ", 0: "", -1: "▼ ", None: ""}[cell.tone]
    small = cell.small if cell.small.startswith("±") or not cell.small else f"({cell.small})"
    return f"{sign}{text} {small}".rstrip().replace("|", "\\|")
