"""`nonet report A --compare B`: a comparison of two runs on the same test events, paired over users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nonet.controller.record import RunFolder, find_run, name_run
from nonet.deploy.after.ranks import TestedRun, check_same_events
from nonet.deploy.report import format_aligned
from nonet.errors import ConfigError
from nonet.models.ranking import is_significant
from nonet.suggest import join_names


def compare_runs(
    run_a: str, run_b: str, stage_a: str | None = None, stage_b: str | None = None
) -> dict[str, Any]:
    """Compare two runs, or a stage or baseline of each, on the same test events.

    Args:
        run_a: The first run.
        run_b: The second run.
        stage_a: A stage or baseline of the first run, by default its last stage.
        stage_b: A stage or baseline of the second run, by default its last stage.

    Returns:
        {"a": {run, subject}, "b": {run, subject}, "events": number of test events, "metrics": {name: {a, b, diff,
        low, high}}, "lower_is_better": names of such metrics, "left_out": metrics that code of the runs computes, which is not
        imported}. `a` and `b` are scores on the test events; `diff` is a - b, and `low` to `high` is its 95 % interval from
        resampling users. All are None where the labels do not define the metric.

    Raises:
        ConfigError: The runs were tested on different events or labels, or predict different things, or a subject was not
            evaluated.
    """
    a, b = TestedRun.from_run(find_run(run_a)), TestedRun.from_run(find_run(run_b))
    check_same_events(a, b)
    subject_a, subject_b = stage_a or a.find_last_stage(), stage_b or b.find_last_stage()
    if type(a.results) is not type(b.results):
        raise ConfigError(
            f"{a.run.id} has {a.results.noun} and {b.run.id} has {b.results.noun}; compare runs of the same kind of model"
        )
    values_a = a.load_results(subject_a)[None]
    values_b = b.load_results(subject_b, a.results)[None]
    selected = a.results.select_metrics(a.metrics)
    left_out = sorted({*a.left_out, *b.left_out})
    if not selected and left_out:
        raise ConfigError(
            f"report --compare: {join_names(left_out)} are computed by code of the runs, which it does not import"
        )
    differences = a.results.compare(selected, values_a, values_b)
    metrics: dict[str, dict[str, float | None]] = {}
    for name in selected:
        score_a, score_b = (
            float(run.results.compute(name, values)[0]) for run, values in ((a, values_a), (b, values_b))
        )
        if name in differences:
            metrics[name] = {"a": score_a, "b": score_b, **differences[name]}
        elif name in b.metrics and np.isnan(score_a):  # Else one of the runs does not have the task.
            metrics[name] = dict.fromkeys(("a", "b", "diff", "low", "high"))
    return {
        "a": {"run": _label(a.run), "subject": subject_a},
        "b": {"run": _label(b.run), "subject": subject_b},
        "events": len(a.events),
        "metrics": metrics,
        "lower_is_better": sorted(a.lower_is_better & set(metrics)),
        "left_out": left_out,
    }


def _label(run: RunFolder) -> str:
    """Return the name of a run as `nonet runs` lists it, such as `many/seed-1`; its id for a run elsewhere."""
    name = name_run(run)
    return run.id if Path(name).is_absolute() else name


def format_comparison(comparison: dict[str, Any]) -> str:
    """Format a comparison of `compare_runs` as a table with a summary."""
    names = [f"{comparison[side]['run']} {comparison[side]['subject']}" for side in "ab"]
    lines = [f"{comparison['events']:,} test events, a - b paired over users, 95 % interval"]
    lines += [f"  {side}: {name}" for side, name in zip("ab", names, strict=True)]
    width = max(14, 2 + max(map(len, comparison["metrics"])))
    lines.append(f"\n{'':<{width}}{'a':>10}{'b':>10}{'a - b':>10}   interval")
    for metric, row in comparison["metrics"].items():
        interval = "-" if row["low"] is None else f"[{row['low']:+.4f}, {row['high']:+.4f}]"
        scores = "".join(format_aligned(row[side], 10) for side in "ab")
        lines.append(f"{metric:<{width}}{scores}{format_aligned(row['diff'], 10, sign=True)}   {interval}")
    if comparison["left_out"]:
        lines.append(
            f"\nnot compared, because code of the runs computes them: {', '.join(comparison['left_out'])}"
        )
    lines.append("\n" + _summarise_comparison(comparison, names))
    return "\n".join(lines)


def _summarise_comparison(comparison: dict[str, Any], names: list[str]) -> str:
    """Return a sentence that names the metrics in which the runs differ significantly."""
    # By metric, whether the first run is better; metrics without a significant difference are left out.
    a_is_better = {
        name: (row["diff"] > 0) != (name in comparison["lower_is_better"])
        for name, row in comparison["metrics"].items()
        if row["diff"] is not None and is_significant(row)
    }
    better = [name for name, is_better in a_is_better.items() if is_better]
    worse = [name for name, is_better in a_is_better.items() if not is_better]
    if not better and not worse:
        return f"No difference between {names[0]} and {names[1]} is significant."
    parts = [f"better in {', '.join(better)}"] if better else []
    parts += [f"worse in {', '.join(worse)}"] if worse else []
    return f"{names[0]} is {' and '.join(parts)} than {names[1]}."
