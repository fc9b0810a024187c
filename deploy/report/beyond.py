"""Tables beyond accuracy over all events: properties of lists, segments, and the gain from a memory.

Pure functions of report.json's dictionary, any part of which may be missing. Each table comes with a
sentence that explains how to read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nonet.controller.scenario.settings import format_percent
from nonet.deploy.report.scores import (
    Difference,
    format_name,
    format_number,
    list_subjects,
    select_headline_metrics,
    select_scores,
)
from nonet.deploy.report.tables import Report, ReportTable, TableCell
from nonet.deploy.report.verdicts import find_strongest_baseline

_DIGITS = 3


def build_list_table(report: Report) -> ReportTable:
    """Build the table of coverage, Gini, novelty, diversity and calibration of the lists of baselines and stages."""
    lists = _get_part(report, "lists")
    measures = list(dict.fromkeys(name for values in lists.values() for name in values))
    rows = [
        [
            TableCell(format_name(name), kind),
            *(format_number(lists[name].get(measure), _DIGITS) for measure in measures),
        ]
        for name, kind in list_subjects(report)
        if name in lists
    ]
    return ReportTable(["", *measures], rows, "Properties of lists")


def format_sampled_note(report: Report) -> str:
    """Format how many users were ranked and the resulting uncertainty; "" if all users were ranked."""
    sampled = _get_part(report, "sampled")
    if not sampled:
        return ""
    facts: Mapping[str, Any] = list(sampled.values())[-1]
    known = ", ".join(f"{metric} ± {format_number(width)}" for metric, width in facts["half_width"].items())
    return (
        f"{facts['users']:,} of {facts['of']:,} test users, drawn with the run's seed, were ranked; the mean over all of them is "
        f"within {known} of the last row (95 % interval)."
    )


def format_list_note(report: Report) -> str:
    """Format how to read `build_list_table`."""
    sorts = " ".join(measure for values in _get_part(report, "lists").values() for measure in values)
    told = [
        "For the first items of every test list: coverage is the share of the catalogue that is shown to at least one user",
        "Gini is 0 if all items are shown equally often and 1 if all users are shown the same item",
        "novelty is how rare a shown item is, in bits",
    ]
    if "diversity" in sorts:
        told.append("diversity is how much the categories of two items of a list differ")
    if "calibration" in sorts:
        told.append(
            "calibration is the distance between the categories of a list and of its user's history (lower is better)"
        )
    return "; ".join(told) + "."


def build_segment_table(report: Report) -> ReportTable:
    """Build the table of the last stage and the strongest baseline by segment of users and of items."""
    segments, subjects = _get_part(report, "segments"), _select_subjects(report)
    metrics = select_headline_metrics(report)
    rows: list[list[TableCell | str]] = []
    for name, facts in segments.items() if subjects else ():
        scores = {row.name: row.scores for row in select_scores(report, events=name)}
        if not any(subject in scores for subject in subjects):
            continue  # nothing was held out of this segment
        cells = [
            format_number(scores.get(subject, {}).get(metric)) for metric in metrics for subject in subjects
        ]
        rows.append([TableCell(name, _describe_segment(facts)), f"{facts['events']:,}", *cells])
    groups = [("", 2), *((metric, len(subjects)) for metric in metrics)]
    head = ["", "test events", *(format_name(subject) for _ in metrics for subject in subjects)]
    return ReportTable(head, rows, "By segment", groups)


def format_segment_note(report: Report) -> str:
    """Format how to read `build_segment_table`."""
    segments = _get_part(report, "segments")
    median = next((facts["most"] for facts in segments.values() if "most" in facts), None)
    at = f" ({median:g})" if median is not None else ""
    left_out = _get_part(report, "data").get("share_only_trained")
    nobody = (
        f" {format_percent(left_out)} of the users have no test event and are not included."
        if left_out
        else ""
    )
    return (
        f"Users are split at the median of their training events{at}; items are split by popularity into groups with the first, "
        f"second and last third of all training events. Each column shows which segments a mean comes from.{nobody}"
    )


def build_memory_table(report: Report) -> ReportTable:
    """Build the table of each stage with its memory and with its model alone."""
    rows: list[list[TableCell | str]] = []
    metrics = select_headline_metrics(report)
    alone = {row.name: row.scores for row in select_scores(report, search="model alone")}
    served = {row.name: row.scores for row in select_scores(report)}
    memories = _get_part(report, "memory")
    weights = "lbcm" if any("m" in told for told in memories.values()) else "lbc"
    for stage, told in memories.items():
        cells: list[TableCell | str] = []
        for metric in metrics:
            cells += [
                format_number(served.get(stage, {}).get(metric)),
                format_number(alone.get(stage, {}).get(metric)),
                _make_gain_cell(metric, told),
            ]
        rows.append(
            [format_name(stage), *(format_number(told.get(weight), _DIGITS) for weight in weights), *cells]
        )
    head = ["", *weights, *("with memory", "model alone", "gain") * len(metrics)]
    groups = [("", 1), ("fitted weights", len(weights)), *((metric, 3) for metric in metrics)]
    return ReportTable(head, rows, "Gain from the memory", groups)


MEMORY_NOTE = (
    "A list mixes the model's distribution p with the votes v of items that followed the user's newest items in training, as "
    "(1 - l) p + l q with q ~ p^b v^c: a larger l gives the memory more weight. m is the share in v of the items nearest to the "
    "user's state, if they vote. The gain is colored if its 95 % interval excludes 0."
)


def _make_gain_cell(metric: str, told: Mapping[str, Any]) -> TableCell | str:
    """Make the cell of the gain from the memory in one metric."""
    values = (told.get("gain") or {}).get(metric)
    if not values:
        return "–"
    gain = Difference("", "", metric, values["diff"], values["low"], values["high"])
    return TableCell(format_number(gain.diff, sign=True), tone=gain.direction)


def _select_subjects(report: Report) -> list[str]:
    """Select the last stage that was ranked and the strongest baseline."""
    ranked = [row for row in select_scores(report) if row.kind == "stage"]
    baselines = [name for name, kind in list_subjects(report) if kind == "baseline"]
    return [row.name for row in ranked[-1:]] + (find_strongest_baseline(report, baselines) if ranked else [])


def _describe_segment(facts: Mapping[str, Any]) -> str:
    """Describe the size and bounds of a segment."""
    if "items" in facts:
        return f"{facts['items']:,} items"
    if "users" not in facts:
        return "scene"
    bound = f"at most {facts['most']:g}" if "most" in facts else f"above {facts['above']:g}"
    return f"{facts['users']:,} users, {bound}"


def _get_part(report: Report, key: str) -> Mapping[str, Any]:
    return report.get(key) or {}


def build_rl_tables(report: Mapping[str, Any]) -> list[ReportTable]:
    """Build the tables of RL rewards, leaving out empty ones: floors, prompts without a score, and users' commands."""
    floors = [
        [
            name,
            format_number(each["at_least"]),
            format_number(each["held_out"][-1] if each.get("held_out") else None),
            TableCell(format_number(each["mean"]), f"last {each['steps']} steps"),
            format_number(each["multiplier"]),
            TableCell("held" if each["held"] else "not held", tone=1 if each["held"] else -1),
        ]
        for name, each in (report.get("floors") or {}).items()
    ]
    without = [
        [name, f"{each['prompts']:,}", f"{each['steps']:,}", ", ".join(each["users"][:8]), each["why"]]
        for name, each in (report.get("quarantined") or {}).items()
    ]
    commands = [
        [
            f"{each['verb']} {each.get('name', '')}",
            f"{each['stage']}, step {each['step']}" if "step" in each else "refused",
            each.get("text") or each.get("refused", ""),
        ]
        for each in report.get("commands") or []
    ]
    return [
        table
        for table in (
            ReportTable(
                ["floor", "at least", "held-out users", "training", "multiplier", ""],
                floors,
                "Floors of rewards, met within 2 % for users that RL never trains on",
            ),
            ReportTable(
                ["reward", "prompts", "steps", "users", "reason"],
                without,
                "Prompts without a score, left out of training",
            ),
            ReportTable(["command", "from", ""], commands, "Commands given while the run was in progress"),
        )
        if table
    ]
