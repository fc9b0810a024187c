"""Tables beyond accuracy over all events: properties of lists, segments, the gain from a memory, and rewards of RL.

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

_DIGITS = 3  # decimals of list properties and of the memory's weights


def build_list_table(report: Report) -> ReportTable:
    """Build the table of coverage, Gini, novelty, diversity and calibration of the lists of baselines and stages."""
    lists = _get_part(report, "lists")
    properties = list(dict.fromkeys(name for values in lists.values() for name in values))
    rows = [
        [
            TableCell(format_name(subject), kind),
            *(format_number(lists[subject].get(name), _DIGITS) for name in properties),
        ]
        for subject, kind in list_subjects(report)
        if subject in lists
    ]
    return ReportTable(["", *properties], rows, "Properties of lists")


def format_sampled_note(report: Report) -> str:
    """Return a sentence about the number of ranked users and the resulting uncertainty; "" if all were ranked."""
    facts_by_subject = _get_part(report, "sampled")
    if not facts_by_subject:
        return ""
    last_facts: Mapping[str, Any] = list(facts_by_subject.values())[-1]
    half_widths = ", ".join(
        f"{metric} ± {format_number(half_width)}" for metric, half_width in last_facts["half_width"].items()
    )
    return (
        f"{last_facts['users']:,} of {last_facts['of']:,} test users, drawn with the run's seed, were ranked; "
        f"the mean over all of them is within {half_widths} of the last row (95 % interval)."
    )


def format_list_note(report: Report) -> str:
    """Return a sentence that defines the columns of `build_list_table`."""
    column_names = " ".join(name for values in _get_part(report, "lists").values() for name in values)
    definitions = [
        "For the first items of every test list: coverage is the share of the catalogue that is shown to at least one user",
        "Gini is 0 if all items are shown equally often and 1 if all users are shown the same item",
        "novelty is how rare a shown item is, in bits",
    ]
    if "diversity" in column_names:
        definitions.append("diversity is how much the categories of two items of a list differ")
    if "calibration" in column_names:
        definitions.append(
            "calibration is the distance between the categories of a list and of its user's history (lower is better)"
        )
    return "; ".join(definitions) + "."


def build_calibration_table(report: Report) -> ReportTable:
    """Build the table of how well predicted probabilities agree with observed rates, by task and subject."""
    rows: list[list[TableCell | str]] = []
    for task, subjects in _group_calibrations(report).items():
        best = min(calibration["error"] for calibration in subjects.values())
        for name, calibration in subjects.items():
            rows.append(
                [
                    format_name(name),
                    task or "target",
                    f"{calibration['rows']:,}",
                    format_number(calibration["predicted"]),
                    format_number(calibration["observed"]),
                    format_number(calibration["ratio"], _DIGITS),
                    TableCell(format_number(calibration["error"]), bold=calibration["error"] == best),
                ]
            )
    head = ["", "label", "test events", "predicted", "observed", "ratio", "error"]
    return ReportTable(head, rows, "Calibration")


CALIBRATION_NOTE = (
    "Predicted is the mean probability and observed the rate of the label; a ratio above 1 predicts too much. Error is the mean "
    "distance between both in ten bins of equally many events, sorted by probability (expected calibration error; lower is "
    "better). The charts show the bins of the last stage; on the dashed line, predictions are calibrated."
)


def has_tasks(report: Report) -> bool:
    """Return whether a click model predicts further labels besides the target."""
    return any(_group_calibrations(report))


def list_calibration_charts(report: Report) -> list[tuple[str, list[tuple[float, float]]]]:
    """Return the title and the bins (mean probability, observed rate) of each label, of the last stage that predicts it."""
    stages, charts = report.get("stages") or {}, []
    for task, subjects in _group_calibrations(report).items():
        if predicting := [name for name in subjects if name in stages]:
            bins = [(bin_[0], bin_[1]) for bin_ in subjects[predicting[-1]]["bins"]]
            charts.append((f"{format_name(predicting[-1])} · {task or 'target'}", bins))
    return charts


def _group_calibrations(report: Report) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Return the calibrations on test events by task ("" for the target) and subject, baselines first."""
    calibrations: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, _ in list_subjects(report):
        for task, calibration in _get_part(report, "calibration").get(name, {}).get("test", {}).items():
            calibrations.setdefault(task, {})[name] = calibration
    return calibrations


def build_segment_table(report: Report) -> ReportTable:
    """Build the table of the last stage and the strongest baseline by segment of users and of items."""
    segments, subjects = _get_part(report, "segments"), _select_subjects(report)
    metrics = select_headline_metrics(report)
    rows: list[list[TableCell | str]] = []
    for segment, facts in segments.items() if subjects else ():
        scores_by_subject = {row.name: row.scores for row in select_scores(report, events=segment)}
        if not any(subject in scores_by_subject for subject in subjects):
            continue  # nothing was held out of this segment
        cells = [
            format_number(scores_by_subject.get(subject, {}).get(metric))
            for metric in metrics
            for subject in subjects
        ]
        rows.append([TableCell(segment, _describe_segment(facts)), f"{facts['events']:,}", *cells])
    groups = [("", 2), *((metric, len(subjects)) for metric in metrics)]
    head = ["", "test events", *(format_name(subject) for _ in metrics for subject in subjects)]
    return ReportTable(head, rows, "By segment", groups)


def format_segment_note(report: Report) -> str:
    """Return sentences that define the segments of `build_segment_table`."""
    segments = _get_part(report, "segments")
    median = next((facts["most"] for facts in segments.values() if "most" in facts), None)
    median_text = f" ({median:g})" if median is not None else ""
    untested_share = _get_part(report, "data").get("share_only_trained")
    untested_text = (
        f" {format_percent(untested_share)} of the users have no test event and are not included."
        if untested_share
        else ""
    )
    pair_text = (
        "Pairs are those of an event's item and the newest item before it: the memory's counts have the pair, or both pairs of a "
        "path over one other item, or neither. "
        if any("steps" in facts for facts in segments.values())
        else ""
    )
    return (
        f"Users are split at the median of their training events{median_text}; items are split by popularity into groups "
        "with the first, second and last third of all training events. Both are also split by their training events. "
        f"{pair_text}Each column shows which segments a mean comes from.{untested_text}"
    )


def build_cold_table(report: Report) -> ReportTable:
    """Build the table of recall@10 of items without training events by baseline and stage, in all items and among such items."""
    facts = _get_part(report, "cold")
    scores = {row.name: row.scores for row in select_scores(report, events="items of 0 events")}
    rows: list[list[TableCell | str]] = [
        [
            format_name(name),
            format_number(scores.get(name, {}).get("recall@10")),
            format_number(facts[name]["recall@10"]),
            format_number(facts[name]["random recall@10"]),
        ]
        for name, _ in list_subjects(report)
        if name in facts
    ]
    head = ["", "all items", "such items", "such items of a known category, at random"]
    groups = [("", 1), ("recall@10, ranked among", 3)]
    return ReportTable(head, rows, "Items without training events", groups)


def format_cold_note(report: Report) -> str:
    """Return sentences about the events of `build_cold_table`; empty without any."""
    facts = next(iter(_get_part(report, "cold").values()), None)
    if facts is None:
        return ""
    return (
        f"{facts['events']:,} test events are of the {facts['items']:,} items without training events, which no count reaches. A "
        "known category is one of an item in the user's history."
    )


def build_memory_table(report: Report) -> ReportTable:
    """Build the table of each stage's scores with its memory and with its model alone, and of the memory's weights."""
    rows: list[list[TableCell | str]] = []
    metrics = select_headline_metrics(report)
    scores_alone = {row.name: row.scores for row in select_scores(report, search="model alone")}
    scores_with_memory = {row.name: row.scores for row in select_scores(report)}
    memory_by_stage = _get_part(report, "memory")
    # The names of the weights; see `format_memory_note`.
    known = ("l", "b", "c", "m")
    weights = [
        *(name for name in known if any(name in memory for memory in memory_by_stage.values())),
        *dict.fromkeys(
            name for memory in memory_by_stage.values() for name in memory if name.startswith("g ")
        ),
    ]
    for stage, memory in memory_by_stage.items():
        cells: list[TableCell | str] = []
        for metric in metrics:
            cells += [
                format_number(scores_with_memory.get(stage, {}).get(metric)),
                format_number(scores_alone.get(stage, {}).get(metric)),
                _make_gain_cell(metric, memory),
            ]
        rows.append(
            [format_name(stage), *(format_number(memory.get(weight), _DIGITS) for weight in weights), *cells]
        )
    head = ["", *weights, *("with memory", "model alone", "gain") * len(metrics)]
    groups = [("", 1), ("fitted weights", len(weights)), *((metric, 3) for metric in metrics)]
    return ReportTable(head, rows, "Gain from the memory", groups)


def build_part_table(report: Report) -> ReportTable:
    """Build the table of what each part of a stage's memory gives: the scores with it less those without it."""
    metrics = select_headline_metrics(report)
    rows: list[list[TableCell | str]] = []
    for stage, memory in _get_part(report, "memory").items():
        for way, gain in (memory.get("parts") or {}).items():
            scores = {row.name: row.scores for row in select_scores(report, search=way)}
            cells: list[TableCell | str] = []
            for metric in metrics:
                cells += [
                    format_number(scores.get(stage, {}).get(metric)),
                    _make_gain_cell(metric, {"gain": gain}),
                ]
            rows.append([format_name(stage), way, *cells])
    groups = [("", 2), *((metric, 2) for metric in metrics)]
    head = ["", "", *("without", "gain of the part") * len(metrics)]
    return ReportTable(head, rows, "Gain from each part of the memory", groups)


PART_NOTE = (
    "The same events without one part of the memory, the fitted weights unchanged: without the similarity of items with the "
    "newest ones, the votes of items that are often in the same histories, those of the items nearest to the user's state, or "
    "those of items without training events, which similarity selects. A gain is colored if its 95 % interval excludes 0."
)


def format_memory_note(report: Report) -> str:
    """Return sentences that explain the weights of `build_memory_table`, and what validation chose of the votes."""
    votes = _get_part(report, "data").get("votes") or {}
    chosen = [f"the k-th newest event votes with k^-{votes['decay']:g}"] if "decay" in votes else []
    chosen += (
        [f"co-occurring items have {votes['cooccurrence']:g} of the votes"] if "cooccurrence" in votes else []
    )
    return _MEMORY_NOTE + (f" Validation chose that {' and '.join(chosen)}." if chosen else "")


_MEMORY_NOTE = (
    "A list mixes the model's distribution p with the votes v of items that followed the user's newest items in training, as "
    "(1 - l) p + l q with q ~ p^b v^c: a larger l gives the memory more weight. m is the share in v of the items nearest to the "
    "user's state, if they vote; g weighs the similarity with the newest items in a column, if the memory has signals; items "
    "without training events get exp(-g) of what their similarity gives, with the g of cold items. The gain is colored if its "
    "95 % interval excludes 0."
)


def _make_gain_cell(metric: str, memory: Mapping[str, Any]) -> TableCell | str:
    """Make the cell of the gain from a stage's memory in one metric."""
    values = (memory.get("gain") or {}).get(metric)
    if not values:
        return "–"
    gain = Difference("", "", metric, values["diff"], values["low"], values["high"])
    return TableCell(format_number(gain.diff, sign=True), tone=gain.direction)


def _select_subjects(report: Report) -> list[str]:
    """Return the names of the last stage with scores and of the strongest baseline; empty without such a stage."""
    stage_rows = [row for row in select_scores(report) if row.kind == "stage"]
    baselines = [name for name, kind in list_subjects(report) if kind == "baseline"]
    strongest = find_strongest_baseline(report, baselines) if stage_rows else []
    return [row.name for row in stage_rows[-1:]] + strongest


def _describe_segment(facts: Mapping[str, Any]) -> str:
    """Describe the size and bounds of a segment of items, of a scene or of users."""
    if "items" in facts:
        return f"{facts['items']:,} items"
    if "steps" in facts:
        return {1: "counted", 2: "over one other item"}.get(facts["steps"], "neither")
    if "users" not in facts:
        return "scene"
    bounds = [
        f"{word} {facts[key]:g}" for key, word in (("most", "at most"), ("above", "above")) if key in facts
    ]
    return ", ".join([f"{facts['users']:,} users", *bounds])


def _get_part(report: Report, key: str) -> Mapping[str, Any]:
    """Return a part of the report; empty if it is missing."""
    return report.get(key) or {}


def build_rl_tables(report: Mapping[str, Any]) -> list[ReportTable]:
    """Build the tables of RL rewards, leaving out empty ones: floors, prompts without a score, and users' commands."""
    floor_rows = [
        [
            name,
            format_number(floor["at_least"]),
            format_number(floor["held_out"][-1] if floor.get("held_out") else None),
            TableCell(format_number(floor["mean"]), f"last {floor['steps']} steps"),
            format_number(floor["multiplier"]),
            TableCell("held" if floor["held"] else "not held", tone=1 if floor["held"] else -1),
        ]
        for name, floor in (report.get("floors") or {}).items()
    ]
    unscored_rows = [
        [name, f"{facts['prompts']:,}", f"{facts['steps']:,}", ", ".join(facts["users"][:8]), facts["why"]]
        for name, facts in (report.get("quarantined") or {}).items()
    ]
    command_rows = [
        [
            f"{command['verb']} {command.get('name', '')}",
            f"{command['stage']}, step {command['step']}" if "step" in command else "refused",
            command.get("text") or command.get("refused", ""),
        ]
        for command in report.get("commands") or []
    ]
    tables = (
        ReportTable(
            ["floor", "at least", "held-out users", "training", "multiplier", ""],
            floor_rows,
            "Floors of rewards, met within 2 % for users that RL never trains on",
        ),
        ReportTable(
            ["reward", "prompts", "steps", "users", "reason"],
            unscored_rows,
            "Prompts without a score, left out of training",
        ),
        ReportTable(["command", "from", ""], command_rows, "Commands given while the run was in progress"),
    )
    return [table for table in tables if table]
