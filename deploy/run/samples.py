"""Texts of `nonet samples explain` and `nonet samples stats`: the samples that stages read, and figures of files."""

from __future__ import annotations

from typing import Any

from nonet.controller.scenario import Scenario
from nonet.plugins import load_heavy
from nonet.samples.streams import measure_files


def explain_samples(scenario: Scenario) -> str:
    """Describe the source of samples, and the number and kind of samples in a step of each stage."""
    data = scenario.data
    source = data.source.spec
    source_lines = load_heavy(source.explain)(data.source.get_options(), scenario.seed, data.engine)
    lines = [
        f"{scenario.name}: source {data.source.use}, seed {scenario.seed}",
        *(f"  {line}" for line in source_lines),
    ]
    for name, stage in scenario.stages.items():
        user_count, key = stage.kind.find_least_users(stage)
        sample_kind = "prompts" if stage.kind.rolls_out else scenario.model.spec.rows
        step_size = (
            f"{user_count:,} {sample_kind} per global step ({key})" if user_count else "steps by tokens"
        )
        target = getattr(stage, "target", None)
        lines.append(f"{name}: {step_size}" + (f"; trains on events with {target}" if target else ""))
        if stage.kind.rolls_out:
            lines.append(
                "  events held out by split.rl, each once per epoch; a fifth of the users is never used for RL"
            )
    lines.append(
        "Every checkpoint has a ledger of the samples that were used (samples/ledger.json): docs/explanation/exactly-once.md"
    )
    return "\n".join(lines)


def format_stats(path: str, form: str | None, where: str | None) -> tuple[str, dict[str, Any]]:
    """Measure files and format the figures.

    Args:
        path: A path, a glob, a folder or a URI.
        form: The files' format; None to detect it.
        where: A condition on the rows; None for all rows.

    Returns:
        The figures as lines of text, and as a dictionary.
    """
    facts = measure_files(path, format=form, where=where)
    lines = [
        f"{facts['files']} files, {facts['bytes'] / 1e6:,.1f} MB, {facts['groups']:,} row groups, {facts['rows']:,} rows",
        f"read in {facts['seconds']:.2f} s: {facts['rows_per_s']:,} rows/s",
        f"bad rows (missing ids, or ids above 2^63): {facts['bad_rows']:,}",
    ]
    lines += [f"left out by where: {facts['filtered_rows']:,}"] if where else []
    for name, column in facts["columns"].items():
        parts = [column["type"], f"{column['missing']:,} missing"]
        parts += [f"{column['least']} to {column['largest']}"] if "least" in column else []
        if "lengths" in column:
            lengths = column["lengths"]
            parts.append(
                f"lengths: median {lengths['p50']}, 99th percentile {lengths['p99']}, maximum {lengths['most']}"
            )
        lines.append(f"  {name}: " + ", ".join(parts))
    return "\n".join(lines), facts
