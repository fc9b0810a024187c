"""ResolvedRun: the values that are derived once from a scenario, for planning, checks and worker setups.

It depends on the scenario alone, so a plan can be made on a machine without the data. The module imports neither torch nor
Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nonet.controller.scenario import Role, Scenario, StageKind, make_table_arguments
from nonet.embedding.tables import TableSpec
from nonet.models import ModelContext, ModelSize
from nonet.workers.roles.kinds import get_shipped_roles


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A scenario with its sizes, roles, stage kinds and table budgets.

    Attributes:
        scenario: The scenario from which the other attributes are derived.
        size: The shape of the model.
        feature_dims: The width of each sparse feature.
        table_budgets: The bytes of each table over all shards; None if they depend on the data.
        kinds: The kind of each stage.
        roles: All roles with their defaults, before any stage changes them.
        stage_roles: All roles of each stage: the roles of the run with the changes that the stage makes.
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

    def get_roles(self, stage: str | None) -> Mapping[str, Role]:
        """Return the roles of a stage; those of the whole run for None."""
        return self.roles if stage is None else self.stage_roles[stage]


def resolve_run(scenario: Scenario) -> ResolvedRun:
    """Derive sizes, roles and stage kinds from a scenario.

    Raises:
        ConfigError: A name in the scenario is unknown, or its options are wrong.
    """
    return ResolvedRun(
        scenario=scenario,
        size=derive_model_size(scenario),
        feature_dims=get_feature_dims(scenario),
        table_budgets=get_table_budgets(scenario),
        kinds={name: body.kind for name, body in scenario.stages.items()},
        roles=_fill_roles(scenario, scenario.roles),
        stage_roles={
            name: _fill_roles(scenario, scenario.roles | body.roles) for name, body in scenario.stages.items()
        },
    )


def _fill_roles(scenario: Scenario, named_roles: Mapping[str, Role]) -> dict[str, Role]:
    """Return the named roles, and the shipped roles that are not named with their defaults."""
    roles = dict(named_roles)
    for name, kind in get_shipped_roles().items():
        if kind.lists and not scenario.model.spec.makes_lists:
            continue
        roles.setdefault(name, Role(**(kind.default or {})))
    return roles


def derive_model_size(scenario: Scenario) -> ModelSize:
    """Return the shape of the scenario's model, computed by the model's spec."""
    tokenizer_options = scenario.tokenizer.get_options()
    context = ModelContext(
        int(tokenizer_options.get("levels", 3)),
        int(tokenizer_options.get("codes", 64)),
        scenario.data.history,
        get_feature_dims(scenario),
    )
    return scenario.model.spec.size(scenario.model.get_options(), context)


def get_feature_dims(scenario: Scenario) -> dict[str, int]:
    """Return the width of each sparse feature."""
    defaults = scenario.sparse.defaults
    return {
        feature: table.dim or defaults.dim
        for name, table in scenario.sparse.tables.items()
        for feature in table.features or [name]
    }


def get_table_budgets(scenario: Scenario) -> dict[str, int | None]:
    """Return the budget of each table in bytes over all shards; None if it depends on the data."""
    return {name: table.budget for name, table in scenario.sparse.tables.items()}


def count_hot_row_bytes(scenario: Scenario) -> int:
    """Return the bytes of hot rows that the tables' tiers keep on the device of each shard."""
    return sum(_count_tier_bytes(scenario, name, "device") for name in scenario.sparse.tables)


def count_shard_bytes(scenario: Scenario, shards: int) -> float:
    """Return the bytes of rows in the host memory of each shard.

    For each table, this is the smaller of its host tier and its share of the budget. If only one of them is set, it is used.
    """
    budgets = get_table_budgets(scenario)
    sizes = [
        (_count_tier_bytes(scenario, name, "host"), (budget or 0) / shards)
        for name, budget in budgets.items()
    ]
    return sum(min(tier, share) if tier and share else tier or share for tier, share in sizes)


def _count_tier_bytes(scenario: Scenario, name: str, tier: str) -> int:
    """Return the bytes of one tier of a table on each shard, from its option in bytes or rows; 0 if it has no such tier."""
    table, defaults = scenario.sparse.tables[name], scenario.sparse.defaults
    rows, tier_bytes = (table.tiers and getattr(table.tiers, key) for key in (f"{tier}_rows", tier))
    return int(tier_bytes or (rows or 0) * TableSpec(**make_table_arguments(defaults, table)).row_bytes)
