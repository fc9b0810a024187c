"""Placements of a scenario's roles, ranked by estimated cost: fused, apart or collocated, with different numbers of workers.

Placements differ only in `roles`. They are ranked by the bytes that the fullest device or machine holds, then by the bytes
that one step of each stage moves between processes, then by the number of processes. All three follow from shapes
(`Plan.ledger`, `Plan.work`); only a run shows how fast a placement is. A placement that cannot be made, or does not fit in
memory, is listed with the reason. One that this version only plans is never chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nonet.controller.cluster import ClusterView
from nonet.controller.plan import Plan, plan
from nonet.controller.scenario import Role, Scenario
from nonet.errors import ConfigError, PlacementError
from nonet.workers.roles.kinds import get_shipped_roles

_WORKER_COUNTS = (1, 2, 4, 8)  # numbers of workers that are tried for trainer, rollout and embedding


@dataclass(frozen=True, slots=True)
class PlacedVariant:
    """One placement of a scenario.

    Attributes:
        name: The placement in words.
        roles: The `roles` of the scenario that produce it.
        plan: Its plan; None if it cannot be placed.
        refused: Why it cannot be placed; "" if it can.
    """

    name: str
    roles: dict[str, Any]
    plan: Plan | None = None
    refused: str = ""

    @property
    def processes(self) -> int:
        """The number of processes that it starts."""
        return sum(group.workers for group in self.plan.groups) if self.plan else 0

    @property
    def held_bytes(self) -> int:
        """Bytes that the fullest device or machine holds at its peak over all stages."""
        return max((line.needed for line in self.plan.ledger.lines), default=0) if self.plan else 0

    @property
    def moved_bytes(self) -> int:
        """Upper bound of the bytes that move between processes in one step of each stage, summed over stages."""
        return int(sum(count for stage in self.plan.work for _, count, _ in stage.moves)) if self.plan else 0

    @property
    def rank_key(self) -> tuple[bool, int, int, int]:
        """The sort key of placements: whether it cannot be placed, bytes held, bytes moved, processes."""
        return self.plan is None, self.held_bytes, self.moved_bytes, self.processes


@dataclass(frozen=True, slots=True)
class PlacementSearch:
    """All placements of a scenario by rank, the best first and those that cannot be made last.

    Attributes:
        scenario: The scenario.
        found: The placements.
    """

    scenario: Scenario
    found: tuple[PlacedVariant, ...]

    @property
    def choice(self) -> PlacedVariant | None:
        """The best placement; None if none can be made."""
        return next((variant for variant in self.found if variant.plan), None)

    def list_changes(self, variant: PlacedVariant) -> list[str]:
        """Return the values of `--set` that produce a placement; none if neither it nor the scenario names roles."""
        return [f"roles={_format_flow(variant.roles)}"] if variant.roles or self.scenario.roles else []


def search_placements(scenario: Scenario, view: ClusterView) -> PlacementSearch:
    """Plan every placement of a scenario and rank them.

    Args:
        scenario: The scenario.
        view: The cluster.
    """
    tried = [_try_placement(scenario, name, roles, view) for name, roles in list_variants(scenario, view)]
    return PlacementSearch(
        scenario, tuple(sorted(tried, key=lambda variant: (*variant.rank_key, variant.name)))
    )


def list_variants(scenario: Scenario, view: ClusterView) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, roles) of each placement: all combinations of the places of rollout, embedding and evaluator.

    Each of them is fused with the trainer or apart; a rollout may also be collocated with it. The number of cores of the
    largest node limits the number of workers.

    Args:
        scenario: The scenario.
        view: The cluster.
    """
    cores = max(node.total.get("CPU", 1.0) for node in view.nodes)
    worker_counts = [count for count in _WORKER_COUNTS if count <= max(1.0, cores)]
    rolls_out = any(stage_options.kind.rolls_out for stage_options in scenario.stages.values())
    apart_modes = [f"apart x{count}" for count in worker_counts]
    rollout_modes = ["fused", *apart_modes, "collocated"] if rolls_out else ["fused"]
    for trainer_count in worker_counts:
        for rollout_mode in rollout_modes:
            for shards_mode in ["fused", *apart_modes] if scenario.sparse.tables else ["fused"]:
                for evaluator in ("apart", "fused"):
                    roles = {"trainer": {"workers": trainer_count}} if trainer_count > 1 else {}
                    roles |= _make_role("rollout", rollout_mode) | _make_role("embedding", shards_mode)
                    roles |= {"evaluator": {"fuse": "trainer"}} if evaluator == "fused" else {}
                    yield (
                        f"trainer x{trainer_count}, rollout {rollout_mode}, embedding {shards_mode}, evaluator {evaluator}",
                        roles,
                    )


def _make_role(name: str, mode: str) -> dict[str, Any]:
    """Return the `roles` that place one role "fused", "collocated" or "apart xN" with N workers."""
    if mode == "fused":
        return {}
    return {
        name: {"collocate": "trainer"} if mode == "collocated" else {"workers": int(mode.rsplit("x", 1)[1])}
    }


def replace_roles(scenario: Scenario, roles: dict[str, Any]) -> Scenario:
    """Return the scenario with the given roles; the user's own roles are kept, shipped roles are replaced.

    Args:
        scenario: The scenario.
        roles: The roles as plain data.
    """
    user_roles = {n: r for n, r in scenario.roles.items() if n not in get_shipped_roles()}
    new_roles = {name: Role.model_validate(body) for name, body in roles.items()}
    return scenario.model_copy(update={"roles": {**new_roles, **user_roles}})


def _try_placement(scenario: Scenario, name: str, roles: dict[str, Any], view: ClusterView) -> PlacedVariant:
    """Plan the scenario with the given roles, or record why it cannot be placed."""
    changed = replace_roles(scenario, roles)
    try:
        return PlacedVariant(name, roles, plan(changed, view))
    except (PlacementError, ConfigError) as error:
        return PlacedVariant(name, roles, refused=str(error))


def _format_flow(value: Any) -> str:
    """Format plain dicts, strings and numbers in YAML flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_format_flow(part)}" for key, part in value.items()) + "}"
    return str(value)
