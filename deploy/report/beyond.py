"""Tables of what accuracy over all events does not tell: what lists are like, segments, and what a memory adds.

Pure functions of report.json's dictionary, any part of which may be missing; each table comes with the sentence that says how
to read it.
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
    """Baselines and stages by coverage, Gini, novelty, diversity and calibration of their lists."""
    lists = _part(report, "lists")
    measures = list(dict.fromkeys(name for values in lists.values() for name in values))
    rows = [
        [Cell(label(name), kind), *(number(lists[name].get(measure), _DIGITS) for measure in measures)]
        for name, kind in names(report)
        if name in lists
    ]
    return Table(["", *measures], rows, "What lists are like")


def sampled_note(report: Report) -> str:
    """How many users were ranked and what that leaves uncertain; "" where all were."""
    sampled = _part(report, "sampled")
    if not sampled:
        return ""
    facts: Mapping[str, Any] = list(sampled.values())[-1]
    known = ", ".join(f"{metric} ± {number(width)}" for metric, width in facts["half_width"].items())
    return (
        f"{facts['users']:,} of {facts['of']:,} tested users were ranked, drawn by the seed; the mean over all of them lies, at "
        f"95 %, within {known} of the last row."
    )


def list_note(report: Report) -> str:
    """How to read `list_table`."""
    sorts = " ".join(measure for values in _part(report, "lists").values() for measure in values)
    told = [
        "Of the first items of every test list: coverage is the part of the catalogue that anybody is shown",
        "Gini is 0 where all items are shown alike and 1 where everybody is shown the same",
        "novelty is how rare a shown item is, in bits",
    ]
    if "diversity" in sorts:
        told.append("diversity is how little two items of a list share in categories")
    if "calibration" in sorts:
        told.append(
            "calibration is how far a list's categories are from its user's history, where less is better"
        )
    return "; ".join(told) + "."


def segment_table(report: Report) -> Table:
    """The last stage beside the strongest baseline, by segment of users and of items."""
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
    """How to read `segment_table`."""
    segments = _part(report, "segments")
    median = next((facts["most"] for facts in segments.values() if "most" in facts), None)
    at = f" ({median:g})" if median is not None else ""
    left_out = _part(report, "data").get("share_only_trained")
    nobody = (
        f" {percent(left_out)} of the users have no test event: nothing here is of them." if left_out else ""
    )
    return (
        f"Users are split at the median of their training events{at}, items by the first, second and last third of all training "
        f"events that they make up, so a column read downwards says whom a mean is of.{nobody}"
    )


def memory_table(report: Report) -> Table:
    """Each stage with its memory beside its model alone."""
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
    return Table(head, rows, "What the memory gives", groups)


MEMORY_NOTE = (
    "A list mixes the model p with the votes v of what came soon after the user's newest items in training, as (1 - l) p + l q "
    "with q ~ p^b v^c: the larger l, the more is remembered. m is what the items nearest to a user's state have of v, "
    "where they vote; the gain is coloured where its 95 % interval leaves out 0."
)


def _gain(metric: str, told: Mapping[str, Any]) -> Cell | str:
    values = (told.get("gain") or {}).get(metric)
    if not values:
        return "–"
    gain = Difference("", "", metric, values["diff"], values["low"], values["high"])
    return Cell(number(gain.diff, sign=True), tone=gain.direction)


def _compared(report: Report) -> list[str]:
    """The last stage that was ranked, and the strongest baseline."""
    ranked = [row for row in stage_table(report) if row.kind == "stage"]
    baselines = [name for name, kind in names(report) if kind == "baseline"]
    return [row.name for row in ranked[-1:]] + (strongest(report, baselines) if ranked else [])


def _told(facts: Mapping[str, Any]) -> str:
    if "items" in facts:
        return f"{facts['items']:,} items"
    if "users" not in facts:
        return "scene"
    bound = f"at most {facts['most']:g}" if "most" in facts else f"above {facts['above']:g}"
    return f"{facts['users']:,} users, {bound}"


def _part(report: Report, key: str) -> Mapping[str, Any]:
    return report.get(key) or {}


def rl_tables(report: Mapping[str, Any]) -> list[Table]:
    """What happened to the rewards of RL: floors, prompts without a score, commands of people; those that have rows."""
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
                "Floors of rewards, held within 2 % for users that RL never trains on",
            ),
            Table(
                ["reward", "prompts", "steps", "users", "why"],
                without,
                "Prompts without a score, left out of training",
            ),
            Table(["command", "from", ""], commands, "Asked for while the run went on"),
        )
        if table
    ]
