"""A prediction as a person reads it: every stage's speed, where its step goes, who waits, what moves and what it holds.

A search as a person reads it: the ranking, what to set for the best that runs, and what a version that ran more would gain.
"""

from __future__ import annotations

from typing import Any

from nonet.controller.plan import gigabytes
from nonet.controller.predict.plan_search import Search, Variant
from nonet.controller.predict.prediction import Prediction, StagePrediction


def prediction_text(prediction: Prediction) -> str:
    """Lines a stage, and the whole."""
    lines = ["predicted"]
    for stage in prediction.stages:
        lines += [f"  {stage.stage:<10} {_speed(stage)}", f"  {'':<10} {_step(stage)}"]
    if prediction.evaluate_s:
        lines.append(f"  {'evaluate':<10} adds {prediction.evaluate_s:.1f} s")
    return "\n".join(
        [
            *lines,
            f"  {prediction.wall_s:.0f} s in all, {prediction.start_s:.0f} s of it starting; costs: {prediction.source}",
        ]
    )


def _speed(stage: StagePrediction) -> str:
    unit = "users/s" if stage.kind == "rl" else "rows/s"
    return f"{stage.rows_per_s:,.0f} {unit}, {stage.steps} steps in {stage.wall_s:.1f} s"


def _step(stage: StagePrediction) -> str:
    parts = ", ".join(f"{part} {1e3 * seconds:.3g} ms" for part, seconds in stage.parts.items())
    idle = ", ".join(f"{group} {share:.0%}" for group, share in stage.idle.items() if share > 0.005)
    hidden = f", of it {1e3 * stage.hidden_s:.3g} ms beside the rest by staleness" if stage.hidden_s else ""
    moved = f"; {gigabytes(stage.bytes_a_step)} a step between processes" if stage.bytes_a_step else ""
    return f"a step: {parts}{hidden}{moved}; holds {gigabytes(stage.memory_bytes)}" + (
        f"; idle: {idle}" if idle else ""
    )


_SHOWN = 12


def search_text(search: Search, most: int = _SHOWN) -> str:
    """The fastest variants, the choice among them, and the best that is only planned beside it."""
    ranked = [variant for variant in search.found if variant.prediction]
    alike = _alike(ranked)
    choice, beyond = search.choice, search.beyond
    shown = [group[0] for group in alike.values()][:most]
    shown += [variant for variant in (choice,) if variant and variant not in shown]
    alike_more = {id(group[0]): len(group) - 1 for group in alike.values()}
    wide = max((len(_rates(variant)) for variant in shown), default=0)
    lines = [f"{'predicted':>10}  {'rows/s by stage'.ljust(wide)}  variant"]
    for variant in shown:
        mark = f"  (and {alike_more[id(variant)]} more alike)" if alike_more.get(id(variant)) else ""
        mark += "  <- the choice" if variant is choice else "" if variant.runs else "  (planned only)"
        lines.append(f"{variant.wall_s:>8.1f} s  {_rates(variant).ljust(wide)}  {variant.name}{mark}")
    slower = sum(variant.wall_s > max(v.wall_s for v in shown) for variant in ranked)
    lines += [f"and {slower} slower ones"] if slower else []
    refused = [variant for variant in search.found if variant.refused]
    if refused:
        lines.append(f"{len(refused)} cannot be placed, e.g. {refused[0].name}: {refused[0].refused[:160]}")
    return "\n".join([*lines, "", *_verdict(search, choice, beyond)])


def _alike(ranked: list[Variant]) -> dict[tuple[float, bool], list[Variant]]:
    """Variants of the same predicted time that run, or don't, together: the first has the fewest processes."""
    by_time: dict[tuple[float, bool], list[Variant]] = {}
    for variant in ranked:
        by_time.setdefault((round(variant.wall_s, 3), variant.runs), []).append(variant)
    return by_time


def search_dict(search: Search) -> list[dict[str, Any]]:
    """The same for programs: every variant, the fastest first."""
    return [
        {
            "variant": v.name,
            "roles": v.roles,
            "staleness": v.staleness,
            "set": search.changes(v),
            "runs": v.runs,
            "missing": v.missing,
            "choice": v is search.choice,
            "refused": v.refused,
            "prediction": v.prediction.as_dict() if v.prediction else None,
        }
        for v in search.found
    ]


def _verdict(search: Search, choice: Variant | None, beyond: Variant | None) -> list[str]:
    lines = []
    if choice and choice.prediction:
        changes = " ".join(f"--set '{change}'" for change in search.changes(choice))
        lines += [f"costs: {choice.prediction.source}"]
        lines += [f"take the best: {changes}" if changes else "take the best: the scenario as it is"]
    if beyond:
        gain = f", {choice.wall_s / beyond.wall_s - 1:.0%} faster" if choice else ""
        lines.append(
            f"planned only{gain}: {beyond.name} ({beyond.wall_s:.1f} s); this version does not run {beyond.missing}"
        )
    return lines


def _rates(variant: Variant) -> str:
    stages = variant.prediction.stages if variant.prediction else ()
    return ", ".join(f"{stage.stage} {stage.rows_per_s:,.0f}" for stage in stages)
