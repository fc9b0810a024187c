"""What a search found: its trials as a table, in words, and the winner as a scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from nonet.deploy.tune.halving import Result


def result_text(found: Mapping[str, Any]) -> str:
    """The table of trials, best first, and the winner. `found`: as `tune_scenario` gives it."""
    search, results = found["search"], [Result(**each) for each in found["results"]]
    paths = list(search["space"])
    lines = [header(search)]
    shown = last_rungs(results, lower=search["lower"])
    rows = [("trial", *map(short, paths), "rung", search["metric"], "minutes")]
    for result in shown:
        score = "failed" if result.score is None else f"{result.score:.4f}"
        minutes = sum(each.minutes for each in results if each.number == result.number)
        values = (value_text(result.values[path]) for path in paths)
        rows.append((str(result.number), *values, str(result.rung + 1), score, f"{minutes:.1f}"))
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines += [f"trial {each.number} failed: {each.failed}" for each in shown if each.failed]
    best = found["best"]
    if best is None:
        return "\n".join([*lines, "", "no trial has a score"])
    values = ", ".join(f"{path} {value_text(value)}" for path, value in best["values"].items())
    lines += [
        "",
        f"best       trial {best['number']}, {search['metric']} {best['score']:.4f} of validation: {values}",
    ]
    return "\n".join([*lines, f"scenario   {found['scenario']}", f"picture    {found['picture']}"])


def header(search: Mapping[str, Any]) -> str:
    """What a search is, in a line."""
    rungs = ", ".join(
        f"{count} with {share_text(share)}"
        for count, share in zip(search["sizes"], search["rungs"], strict=True)
    )
    return f"{search['trials']} trials by {search['metric']} of validation in stages.{search['stage']}: {rungs} of its length"


def last_rungs(results: Sequence[Result], *, lower: bool) -> list[Result]:
    """Each trial on the longest rung where it has a score, best first: by rung, then by score; failed ones last."""
    best: dict[int, Result] = {}
    for result in sorted(results, key=lambda each: each.rung):
        if result.score is not None or result.number not in best:
            best[result.number] = result
    sign = 1.0 if lower else -1.0
    return sorted(
        best.values(),
        key=lambda each: (each.score is None, -each.rung, sign * (each.score or 0.0), each.number),
    )


def progress_line(result: Result, search: Mapping[str, Any], done: int, of: int) -> str:
    """A job that ended, in a line."""
    values = ", ".join(f"{short(path)} {value_text(value)}" for path, value in result.values.items())
    outcome = f"failed: {result.failed}" if result.score is None else f"{search['metric']} {result.score:.4f}"
    rung = f"{share_text(search['rungs'][result.rung])} of the length"
    return f"{done}/{of}  trial {result.number}, {rung}: {values}  {outcome}  {result.minutes:.1f} min"


def short(path: str) -> str:
    """The last words of a key that say what it is: `pretrain.lr` of stages.pretrain.lr."""
    return ".".join(path.split(".")[-2:])


def share_text(share: str) -> str:
    return "all" if Fraction(share) == 1 else share


def value_text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
