"""Variants of a scenario's placement, ranked by prediction: fused, apart, collocated, stale, and how many workers of each.

Only `roles` and the rollout's staleness differ between variants; all else stays the same. A variant that cannot be placed, or
does not fit in memory, is listed with its reason instead of a time; one that this version only plans never is the choice,
however fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nonet.controller.cluster import ClusterView
from nonet.controller.plan import Plan, plan
from nonet.controller.predict.calibration import Calibration
from nonet.controller.predict.prediction import DataFacts, Prediction, predict
from nonet.controller.scenario import Role, Scenario, check_runnable
from nonet.errors import ConfigError, PlacementError
from nonet.workers.roles.kinds import shipped_roles

_WORKERS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to place a scenario. refused: why it cannot be, "" for one with a plan and a prediction.

    staleness   steps that beams may be older than the trainer
    missing     what of it this version only plans, "" for one that it runs
    """

    name: str
    roles: dict[str, Any]
    staleness: int = 0
    plan: Plan | None = None
    prediction: Prediction | None = None
    refused: str = ""
    missing: str = ""

    @property
    def runs(self) -> bool:
        return not self.missing

    @property
    def workers(self) -> int:
        """Processes it starts."""
        return sum(group.workers for group in self.plan.groups) if self.plan else 0

    @property
    def wall_s(self) -> float:
        """Predicted seconds of the whole; infinite where it cannot be placed."""
        return self.prediction.wall_s if self.prediction else float("inf")


@dataclass(frozen=True, slots=True)
class Search:
    """Every variant of a scenario, the fastest by prediction first, those that cannot be last."""

    scenario: Scenario
    found: tuple[Variant, ...]

    @property
    def choice(self) -> Variant | None:
        """The fastest that this version runs."""
        return next((v for v in self.found if v.prediction and v.runs), None)

    @property
    def beyond(self) -> Variant | None:
        """The fastest that this version only plans, where it would beat the choice."""
        best = next((v for v in self.found if v.prediction and not v.runs), None)
        return best if best and (self.choice is None or best.wall_s < self.choice.wall_s) else None

    def changes(self, variant: Variant) -> list[str]:
        """What to give to `--set` for a variant, one a change; nothing for the scenario as it is."""
        roles = [f"roles={_flow(variant.roles)}"] if variant.roles or self.scenario.roles else []
        stages = [
            f"stages.{name}.rollout.staleness={variant.staleness}"
            for name, body in _reinforced(self.scenario)
            if body.rollout.options().get("staleness", 0) != variant.staleness
        ]
        return roles + stages


def search(scenario: Scenario, view: ClusterView, facts: DataFacts, calibration: Calibration) -> Search:
    """Plan and predict every variant; of equally fast ones that with the fewest processes comes first."""
    tried = [
        _tried(scenario, name, roles, staleness, view, facts, calibration)
        for name, roles, staleness in variants(scenario, view)
    ]
    return Search(scenario, tuple(sorted(tried, key=lambda v: (v.wall_s, v.workers, v.staleness, v.name))))


def variants(scenario: Scenario, view: ClusterView) -> Iterator[tuple[str, dict[str, Any], int]]:
    """(name, roles, staleness) of each: trainers by rollout, embedding and evaluator, fused, apart or collocated.

    A host's cores bound the workers. Staleness is tried where rollout has a process of its own; more than the scenario
    allows, or than 1, predicts the same time: the longer side counts.
    """
    cores = max(node.total.get("CPU", 1.0) for node in view.nodes)
    counts = [count for count in _WORKERS if count <= max(1.0, cores)]
    rl = list(_reinforced(scenario))
    stale = max((body.rollout.options().get("staleness", 0) for _, body in rl), default=0) or 1
    apart = [f"apart x{n}" for n in counts]
    rollouts = [("fused", 0)]
    rollouts += [(how, old) for how in (*apart, "collocated") for old in (0, stale)] if rl else []
    for trainers in counts:
        for rollout, old in rollouts:
            for shards in ["fused", *apart] if scenario.sparse.tables else ["fused"]:
                for evaluator in ("apart", "fused"):
                    roles = {"trainer": {"workers": trainers}} if trainers > 1 else {}
                    roles |= _role("rollout", rollout) | _role("embedding", shards)
                    roles |= {"evaluator": {"fuse": "trainer"}} if evaluator == "fused" else {}
                    beside = f" with staleness {old}" if old else ""
                    yield (
                        f"trainer x{trainers}, rollout {rollout}{beside}, embedding {shards}, evaluator {evaluator}",
                        roles,
                        old,
                    )


def _reinforced(scenario: Scenario) -> Iterator[tuple[str, Any]]:
    return ((name, body) for name, body in scenario.stages.items() if body.kind.rolls_out)


def _role(name: str, how: str) -> dict[str, Any]:
    if how == "fused":
        return {}
    return {
        name: {"collocate": "trainer"} if how == "collocated" else {"workers": int(how.rsplit("x", 1)[1])}
    }


def with_roles(scenario: Scenario, roles: dict[str, Any]) -> Scenario:
    """The scenario with these roles in place of its own of the same names; the shipped roles start afresh."""
    own = {n: r for n, r in scenario.roles.items() if n not in shipped_roles()}
    made = {name: Role.model_validate(body) for name, body in roles.items()}
    return scenario.model_copy(update={"roles": {**made, **own}})


def with_staleness(scenario: Scenario, staleness: int) -> Scenario:
    """The scenario whose RL stages let beams be so many steps old."""
    stages = dict(scenario.stages)
    for name, body in _reinforced(scenario):
        options = {"use": body.rollout.use, **body.rollout.options(), "staleness": staleness}
        stages[name] = body.model_copy(update={"rollout": type(body.rollout).model_validate(options)})
    return scenario.model_copy(update={"stages": stages})


def _tried(
    scenario: Scenario,
    name: str,
    roles: dict[str, Any],
    staleness: int,
    view: ClusterView,
    facts: DataFacts,
    calibration: Calibration,
) -> Variant:
    changed = with_staleness(with_roles(scenario, roles), staleness)
    missing = _missing(changed)
    try:
        made = plan(changed, view)
    except (PlacementError, ConfigError) as error:
        return Variant(name, roles, staleness, refused=str(error), missing=missing)
    prediction = predict(changed, made, facts, calibration)
    return Variant(name, roles, staleness, made, prediction, missing=missing)


def _missing(scenario: Scenario) -> str:
    """What of a scenario this version only plans, as its refusal names it."""
    try:
        check_runnable(scenario)
    except ConfigError as error:
        return str(error).partition("does not run ")[2].removesuffix(". `nonet plan` still works.")
    return ""


def _flow(value: Any) -> str:
    """YAML flow style of plain dicts, strings and numbers."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(part)}" for key, part in value.items()) + "}"
    return str(value)
