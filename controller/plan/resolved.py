"""ResolvedRun: what planning, checks and worker setups derive from a scenario, derived once.

It is built from the scenario alone, so a plan can be made where the data are elsewhere. Pure: no torch, no Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nonet.controller.plan.sizes import feature_dims, model_size, table_bytes
from nonet.controller.scenario import Role, Scenario, StageKind
from nonet.models import ModelSize
from nonet.workers.roles.kinds import shipped_roles


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A scenario with its sizes, roles, stage kinds and table budgets.

    Attributes:
        scenario: The scenario that everything else follows from.
        size: The shape of the model.
        feature_dims: The width of each sparse feature.
        table_budgets: The bytes of each table over all shards; None where only the data will tell.
        kinds: The kind of each stage.
        roles: All roles with their defaults, before any stage changes them.
        stage_roles: All roles of each stage: the run's, changed by what the stage says.
    """

    scenario: Scenario
    size: ModelSize
    feature_dims: Mapping[str, int]
    table_budgets: Mapping[str, int | None]
    kinds: Mapping[str, StageKind]
    roles: Mapping[str, Role]
    stage_roles: Mapping[str, Mapping[str, Role]]

    @property
    def budgeted_bytes(self) -> int:
        """The bytes of all tables that have a budget."""
        return sum(filter(None, self.table_budgets.values()))

    def roles_at(self, stage: str | None) -> Mapping[str, Role]:
        """Return the roles of a stage; those of the whole run for None."""
        return self.roles if stage is None else self.stage_roles[stage]


def resolve_run(scenario: Scenario) -> ResolvedRun:
    """Derive sizes, roles and stage kinds from a scenario. Raises ConfigError."""
    return ResolvedRun(
        scenario,
        model_size(scenario),
        feature_dims(scenario),
        table_bytes(scenario),
        {name: body.kind for name, body in scenario.stages.items()},
        _fill_roles(scenario, scenario.roles),
        {name: _fill_roles(scenario, scenario.roles | body.roles) for name, body in scenario.stages.items()},
    )


def _fill_roles(scenario: Scenario, named: Mapping[str, Role]) -> dict[str, Role]:
    """Add the shipped roles that a scenario does not name, with their defaults."""
    roles = dict(named)
    for name, kind in shipped_roles().items():
        if kind.lists and not scenario.model.spec.makes_lists:
            continue
        roles.setdefault(name, Role(**(kind.default or {})))
    return roles
