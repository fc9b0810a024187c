"""Tables beyond accuracy over all events: properties of lists, segments, and the gain from a memory.

Pure functions of report.json's dictionary, any part of which may be missing. Each table comes with a
sentence that explains how to read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nonet.controller.scenario.settings import percent
from nonet.deploy.report.scores import Difference, headline_metrics, label, names, number, stage_table
from nonet.deploy.report.tables import Cell, Report, Table
from nonet.deploy.report.verdicts import strongest

_DIGITS = 3


def list_table(report: Report) -> Table:
    """Build the table of coverage, Gini, novelty, diversity and calibration of the lists of baselines and stages."""
    lists = _part(report, "lists")
    measures = list(dict.fromkeys(name for values in lists.values() for name in values))
    rows = [
        [Cell(label(name), kind), *(number(lists[name].get(measure), _DIGITS) for measure in measures)]
        for name, kind in names(report)
        if name in lists
    ]
    return Table(["", *measures], rows, "Properties of lists")


def sampled_note(report: Report) -> str:
    """Format how many users were ranked and the resulting uncertainty; "" if all users were ranked."""
    sampled = _part(report, "sampled")
    if not sampled:
        return ""
    facts: Mapping[str, Any] = list(sampled.values())[-1]
    known = ", ".join(f"{metric} ± {number(width)}" for metric, width in facts["half_width"].items())
    return (
        f"{facts['users']:,} of {facts['of']:,} test users, drawn with the run's seed, were ranked; the mean over all of them is "
        f"within {known} of the last row (95 % interval)."
    )


def list_note(report: Report) -> str:
    """Format how to read `list_table`."""
    sorts = " ".join(measure for values in _part(report, "lists").values() for measure in values)
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


def segment_table(report: Report) -> Table:
    """Build the table of the last stage and the strongest baseline by segment of users and of items."""
    segments, subjects = _part(report, "segments"), _compared(report)
    metrics = headline_metrics(report)
    rows: list[list[Cell | str]] = []
    for name, facts in segments.items() if subjects else ():
        scores = {row.name: row.scores for row in stage_table(report, events=name)}
        if not any(subject in scores for subject in subjects):
            continue  # nothing was held out of this segment
        cells = [number(scores.get(subject, {}).get(metric)) for metric in metrics for subject in subjects]
        rows.append([Cell(name, _told(facts)), f"{facts['events']:,}", *cells])
    groups = [("", 2), *((metric, len(subjects)) for metric in metrics)]
    head = ["", "test events", *(label(subject) for _ in metrics for subject in subjects)]
    return Table(head, rows, "By segment", groups)


def segment_note(report: Report) -> str:
    """Format how to read `segment_table`."""
    segments = _part(report, "segments")
    median = next((facts["most"] for facts in segments.values() if "most" in facts), None)
    at = f" ({median:g})" if median is not None else ""
    left_out = _part(report, "data").get("share_only_trained")
    nobody = f" {percent(left_out)} of the users have no test event and are not included." if left_out else ""
    return (
        f"Users are split at the median of their training events{at}; items are split by popularity into groups with the first, "
        f"second and last third of all training events. Each column shows which segments a mean comes from.{nobody}"
    )


def memory_table(report: Report) -> Table:
    """Build the table of each stage with its memory and with its model alone."""
    rows: list[list[Cell | str]] = []
    metrics = headline_metrics(report)
    alone = {row.name: row.scores for row in stage_table(report, search="model alone")}
    served = {row.name: row.scores for row in stage_table(report)}
    memories = _part(report, "memory")
    weights = "lbcm" if any("m" in told for told in memories.values()) else "lbc"
    for stage, told in memories.items():
        cells: list[Cell | str] = []
        for metric in metrics:
            cells += [
                number(served.get(stage, {}).get(metric)),
                number(alone.get(stage, {}).get(metric)),
                _gain(metric, told),
            ]
        rows.append([label(stage), *(number(told.get(weight), _DIGITS) for weight in weights), *cells])
    head = ["", *weights, *("with memory", "model alone", "gain") * len(metrics)]
    groups = [("", 1), ("fitted weights", len(weights)), *((metric, 3) for metric in metrics)]
    return Table(head, rows, "Gain from the memory", groups)


MEMORY_NOTE = (
    "A list mixes the model's distribution p with the votes v of items that followed the user's newest items in training, as "
    "(1 - l) p + l q with q ~ p^b v^c: a larger l gives the memory more weight. m is the share in v of the items nearest to the "
    "user's state, if they vote. The gain is colored if its 95 % interval excludes 0."
)


def _gain(metric: str, told: Mapping[str, Any]) -> Cell | str:
    """Make the cell of the gain from the memory in one metric."""
    values = (told.get("gain") or {}).get(metric)
    if not values:
        return "–"
    gain = Difference("", "", metric, values["diff"], values["low"], values["high"])
    return Cell(number(gain.diff, sign=True), tone=gain.direction)


def _compared(report: Report) -> list[str]:
    """Select the last stage that was ranked and the strongest baseline."""
    ranked = [row for row in stage_table(report) if row.kind == "stage"]
    baselines = [name for name, kind in names(report) if kind == "baseline"]
    return [row.name for row in ranked[-1:]] + (strongest(report, baselines) if ranked else [])


def _told(facts: Mapping[str, Any]) -> str:
    """Describe the size and bounds of a segment."""
    if "items" in facts:
        return f"{facts['items']:,} items"
    if "users" not in facts:
        return "scene"
    bound = f"at most {facts['most']:g}" if "most" in facts else f"above {facts['above']:g}"
    return f"{facts['users']:,} users, {bound}"


def _part(report: Report, key: str) -> Mapping[str, Any]:
    return report.get(key) or {}


def rl_tables(report: Mapping[str, Any]) -> list[Table]:
    """Build the tables of RL rewards, leaving out empty ones: floors, prompts without a score, and users' commands."""
    floors = [
        [
            name,
            number(each["at_least"]),
            number(each["held_out"][-1] if each.get("held_out") else None),
            Cell(number(each["mean"]), f"last {each['steps']} steps"),
            number(each["multiplier"]),
            Cell("held" if each["held"] else "not held", tone=1 if each["held"] else -1),
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
            Table(
                ["floor", "at least", "held-out users", "training", "multiplier", ""],
                floors,
                "Floors of rewards, met within 2 % for users that RL never trains on",
            ),
            Table(
                ["reward", "prompts", "steps", "users", "reason"],
                without,
                "Prompts without a score, left out of training",
            ),
            Table(["command", "from", ""], commands, "Commands given while the run was in progress"),
        )
        if table
    ]
