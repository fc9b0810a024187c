"""`nonet report A --compare B`: a comparison of two runs on the same test events, paired over users."""

from __future__ import annotations

from typing import Any

from nonet.controller.record import find_run
from nonet.deploy.after.ranks import TestedRun, check_same_events
from nonet.models.ranking import compare_paired, compute_per_event, is_significant, select_event_metrics


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
        {"a", "b": {run, subject}, "events", "metrics": {name: {a, b, diff, low, high}}}: means over the
        test events, and their difference a - b with a 95 % interval from resampling users.

    Raises:
        ConfigError: The runs were tested on different events, or a subject was not ranked.
    """
    left, right = TestedRun.from_run(find_run(run_a)), TestedRun.from_run(find_run(run_b))
    check_same_events(left, right)
    subjects = stage_a or left.find_last_stage(), stage_b or right.find_last_stage()
    ranks = left.load_ranks(subjects[0]), right.load_ranks(subjects[1])
    metrics = {}
    for name in select_event_metrics(left.metrics):
        values = compute_per_event(name, ranks[0]), compute_per_event(name, ranks[1])
        metrics[name] = {
            "a": float(values[0].mean()),
            "b": float(values[1].mean()),
            **compare_paired(*values, left.user, left.seed),
        }
    return {
        "a": {"run": left.run.id, "subject": subjects[0]},
        "b": {"run": right.run.id, "subject": subjects[1]},
        "events": len(left.events),
        "metrics": metrics,
    }


def format_comparison(comparison: dict[str, Any]) -> str:
    """Format a comparison as a table with a summary."""
    names = [f"{comparison[side]['run']} {comparison[side]['subject']}" for side in "ab"]
    lines = [f"{comparison['events']:,} test events, a - b paired over users, 95 % interval"]
    lines += [f"  {side}: {name}" for side, name in zip("ab", names, strict=True)]
    lines.append(f"\n{'':<14}{'a':>10}{'b':>10}{'a - b':>10}   interval")
    for metric, row in comparison["metrics"].items():
        interval = f"[{row['low']:+.4f}, {row['high']:+.4f}]"
        lines.append(f"{metric:<14}{row['a']:>10.4f}{row['b']:>10.4f}{row['diff']:>+10.4f}   {interval}")
    lines.append("\n" + _summarise_comparison(comparison["metrics"], names))
    return "\n".join(lines)


def _summarise_comparison(metrics: dict[str, dict[str, float]], names: list[str]) -> str:
    """Name the metrics in which the runs differ significantly."""
    better = [name for name, row in metrics.items() if is_significant(row) and row["diff"] > 0]
    worse = [name for name, row in metrics.items() if is_significant(row) and row["diff"] < 0]
    if not better and not worse:
        return f"No difference between {names[0]} and {names[1]} is significant."
    parts = [f"better in {', '.join(better)}"] if better else []
    parts += [f"worse in {', '.join(worse)}"] if worse else []
    return f"{names[0]} is {' and '.join(parts)} than {names[1]}."
