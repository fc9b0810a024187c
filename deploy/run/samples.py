"""What a scenario's stages read, and what files hold, in lines: `nonet samples explain` and `nonet samples stats`."""

from __future__ import annotations

from typing import Any

from nonet.controller.scenario import Scenario
from nonet.plugins import load_heavy
from nonet.samples.streams import stats


def explained(scenario: Scenario) -> str:
    """Each stage's rows, their order and who reads them."""
    data = scenario.data
    source = data.source.spec
    plan = load_heavy(source.explain)(data.source.options(), scenario.seed, data.engine)
    lines = [
        f"{scenario.name}: source {data.source.use}, seed {scenario.seed}",
        *(f"  {line}" for line in plan),
    ]
    for name, body in scenario.stages.items():
        users, key = body.kind.least_users(body)
        what = "prompts" if body.kind.rolls_out else scenario.model.spec.rows
        sizes = f"{users:,} {what} a global step ({key})" if users else "steps by tokens"
        target = getattr(body, "target", None)
        lines.append(f"{name}: {sizes}" + (f"; learns where {target}" if target else ""))
        if body.kind.rolls_out:
            lines.append(
                "  events that split.rl holds out, each once an epoch; a fifth of the users is never asked"
            )
    lines.append(
        "Every commit holds a ledger of what was learned from (samples/ledger.json): docs/explanation/exactly-once.md"
    )
    return "\n".join(lines)


def stats_text(path: str, form: str | None, where: str | None) -> tuple[str, dict[str, Any]]:
    """Figures of files, as lines and as they are."""
    facts = stats(path, format=form, where=where)
    lines = [
        f"{facts['files']} files, {facts['bytes'] / 1e6:,.1f} MB, {facts['groups']:,} row groups, {facts['rows']:,} rows",
        f"read in {facts['seconds']:.2f} s: {facts['rows_per_s']:,} rows/s",
        f"bad rows (ids that are missing or above 2^63): {facts['bad_rows']:,}",
    ]
    lines += [f"left out by where: {facts['filtered_rows']:,}"] if where else []
    for name, column in facts["columns"].items():
        parts = [column["type"], f"{column['missing']:,} missing"]
        parts += [f"{column['least']} to {column['largest']}"] if "least" in column else []
        if "lengths" in column:
            of = column["lengths"]
            parts.append(f"lengths: half up to {of['p50']}, 99 % up to {of['p99']}, the longest {of['most']}")
        lines.append(f"  {name}: " + ", ".join(parts))
    return "\n".join(lines), facts
