"""Variants of a scenario's placement, ranked by prediction: fused, apart, collocated, and how many workers of each.

Only `roles` differ between variants; what is trained stays the same. A variant that cannot be placed or remembered in memory is
listed with its reason instead of a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nonet.controller.calibration import Calibration
from nonet.controller.cluster import ClusterView
from nonet.controller.options import Reinforced, Role
from nonet.controller.plan import Plan, plan
from nonet.controller.predict import DataFacts, Prediction, predict
from nonet.controller.scenario import Scenario
from nonet.controller.support import check_runnable
from nonet.errors import ConfigError, PlacementError

_WORKERS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to place a scenario. refused: why it cannot be, "" for one with a plan and a prediction.

    runs    whether this version runs it, or only plans it
    """

    name: str
    roles: dict[str, Any]
    plan: Plan | None = None
    prediction: Prediction | None = None
    refused: str = ""
    runs: bool = True

    def change(self) -> str:
        """What to give to `--set` for this variant."""
        return "roles=" + _flow(self.roles)


def search(
    scenario: Scenario, view: ClusterView, facts: DataFacts, calibration: Calibration
) -> list[Variant]:
    """Every variant, the fastest by prediction first, those that cannot be last."""
    found = [
        _tried(scenario, name, roles, view, facts, calibration) for name, roles in variants(scenario, view)
    ]
    return sorted(
        found, key=lambda v: (v.prediction is None, v.prediction.wall_s if v.prediction else 0.0, v.name)
    )


def variants(scenario: Scenario, view: ClusterView) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, roles) of each: trainers by rollout and embedding, fused, apart or collocated; a host's cores bound the workers."""
    cores = max(node.total.get("CPU", 1.0) for node in view.nodes)
    counts = [count for count in _WORKERS if count <= max(1.0, cores)]
    rl = any(isinstance(body, Reinforced) for body in scenario.stages.values())
    sparse = bool(scenario.sparse.tables)
    for trainers in counts:
        rollouts = ["fused", *(f"apart x{n}" for n in counts), "collocated"] if rl else ["fused"]
        for rollout in rollouts:
            for shards in ["fused", *(f"apart x{n}" for n in counts)] if sparse else ["fused"]:
                roles = {"trainer": {"workers": trainers}} if trainers > 1 else {}
                roles |= _role("rollout", rollout) | _role("embedding", shards)
                yield f"trainer x{trainers}, rollout {rollout}, embedding {shards}", roles


def _role(name: str, how: str) -> dict[str, Any]:
    if how == "fused":
        return {}
    return {
        name: {"collocate": "trainer"} if how == "collocated" else {"workers": int(how.rsplit("x", 1)[1])}
    }


def with_roles(scenario: Scenario, roles: dict[str, Any]) -> Scenario:
    """The scenario with these roles in place of its own of the same names; trainer, rollout and embedding start afresh."""
    kept = {n: r for n, r in scenario.roles.items() if n not in ("trainer", "rollout", "embedding")}
    made = {name: Role.model_validate(body) for name, body in roles.items()}
    return scenario.model_copy(update={"roles": {**made, **kept}})


def _tried(
    scenario: Scenario,
    name: str,
    roles: dict[str, Any],
    view: ClusterView,
    facts: DataFacts,
    calibration: Calibration,
) -> Variant:
    changed = with_roles(scenario, roles)
    try:
        check_runnable(changed)
        runs = True
    except ConfigError:
        runs = False
    try:
        made = plan(changed, view)
    except PlacementError as error:
        return Variant(name, roles, refused=str(error), runs=runs)
    return Variant(name, roles, made, predict(changed, made, facts, calibration), runs=runs)


def search_text(found: list[Variant], most: int = 12) -> str:
    """The ranking as a person reads it; what to set for the best that runs."""
    lines = [f"{'predicted':>10}  {'rows/s by stage':<34}  variant"]
    for variant in [v for v in found if v.prediction][:most]:
        prediction = variant.prediction
        assert prediction is not None
        rates = ", ".join(f"{stage.stage} {stage.rows_per_s:,.0f}" for stage in prediction.stages)
        planned = "" if variant.runs else "  (planned only)"
        lines.append(f"{prediction.wall_s:>8.1f} s  {rates:<34}  {variant.name}{planned}")
    refused = [v for v in found if v.refused]
    more = sum(v.prediction is not None for v in found) - most
    if more > 0:
        lines.append(f"and {more} slower ones")
    if refused:
        lines.append(f"{len(refused)} cannot be placed, e.g. {refused[0].name}: {refused[0].refused[:160]}")
    best = next((v for v in found if v.prediction and v.runs), None)
    if best and best.prediction:
        lines += ["", f"costs: {best.prediction.source}", f"take the best: --set '{best.change()}'"]
    return "\n".join(lines)


def _flow(value: Any) -> str:
    """YAML flow style of plain dicts, strings and numbers."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(part)}" for key, part in value.items()) + "}"
    return str(value)
