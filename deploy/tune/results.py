"""Texts of a search: the table of its trials, its progress and the best scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from nonet.deploy.tune.halving import TrialResult


def format_search_result(search_result: Mapping[str, Any]) -> str:
    """Format the trials as a table, best first, and the best one.

    Args:
        search_result: The result of `tune_scenario`.
    """
    search = search_result["search"]
    results = [TrialResult(**fields) for fields in search_result["results"]]
    paths = list(search["space"])
    lines = [format_header(search)]
    last_results = select_last_rungs(results, lower=search["lower"])
    rows = [("trial", *map(shorten_key, paths), "rung", search["metric"], "minutes")]
    for last_result in last_results:
        score = "failed" if last_result.score is None else f"{last_result.score:.4f}"
        minutes = sum(result.minutes for result in results if result.number == last_result.number)
        values = (format_value(last_result.values[path]) for path in paths)
        rows.append((str(last_result.number), *values, str(last_result.rung + 1), score, f"{minutes:.1f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines += [f"trial {result.number} failed: {result.failed}" for result in last_results if result.failed]
    best = search_result["best"]
    if best is None:
        return "\n".join([*lines, "", "no trial has a score"])
    values = ", ".join(f"{path} {format_value(value)}" for path, value in best["values"].items())
    lines += [
        "",
        f"best       trial {best['number']}, validation {search['metric']} {best['score']:.4f}: {values}",
    ]
    return "\n".join(
        [*lines, f"scenario   {search_result['scenario']}", f"picture    {search_result['picture']}"]
    )


def format_header(search: Mapping[str, Any]) -> str:
    """Describe a search in one line: its trials, metric, stage and rungs."""
    rungs = ", ".join(
        f"{count} with {format_share(share)}"
        for count, share in zip(search["sizes"], search["rungs"], strict=True)
    )
    return f"{search['trials']} trials by validation {search['metric']} in stages.{search['stage']}: {rungs} of its length"


def select_last_rungs(results: Sequence[TrialResult], *, lower: bool) -> list[TrialResult]:
    """Return each trial's result on the longest rung on which it has a score, or a failure if it has none.

    Args:
        results: All results.
        lower: Whether lower scores are better.

    Returns:
        Results of longer rungs before those of shorter ones, each rung's best first; failed trials last.
    """
    result_by_number: dict[int, TrialResult] = {}
    for result in sorted(results, key=lambda result: result.rung):
        if result.score is not None or result.number not in result_by_number:
            result_by_number[result.number] = result
    sign = 1.0 if lower else -1.0
    return sorted(
        result_by_number.values(),
        key=lambda result: (result.score is None, -result.rung, sign * (result.score or 0.0), result.number),
    )


def format_progress(result: TrialResult, search: Mapping[str, Any], done: int, total: int) -> str:
    """Format the result of a job in one line.

    Args:
        result: The job's result.
        search: The definition of the search.
        done: Number of jobs that have ended.
        total: Number of all jobs.
    """
    values = ", ".join(f"{shorten_key(path)} {format_value(value)}" for path, value in result.values.items())
    outcome = f"failed: {result.failed}" if result.score is None else f"{search['metric']} {result.score:.4f}"
    rung = f"{format_share(search['rungs'][result.rung])} of the length"
    return f"{done}/{total}  trial {result.number}, {rung}: {values}  {outcome}  {result.minutes:.1f} min"


def shorten_key(path: str) -> str:
    """Return the last two parts of a key: `pretrain.lr` for stages.pretrain.lr."""
    return ".".join(path.split(".")[-2:])


def format_share(share: str) -> str:
    """Format the share of a stage's length, which is a fraction such as "1/4": "all" for the whole length."""
    return "all" if Fraction(share) == 1 else share


def format_value(value: Any) -> str:
    """Format a value; numbers with a fraction get four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
