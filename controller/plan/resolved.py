"""ResolvedRun: the values that are derived once from a scenario, for planning, checks and worker setups.

It depends on the scenario alone, so a plan can be made on a machine without the data. The module imports neither torch nor
Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nonet.controller.cluster import Elastic
from nonet.controller.scenario import Role, Scenario, StageKind, make_table_arguments
from nonet.embedding.tables import TableSpec
from nonet.errors import ConfigError
from nonet.models import ModelContext, ModelSize
from nonet.suggest import suggest_inline
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
        feature_dims=scenario.sparse.get_feature_dims(),
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


def scale_roles(scenario: Scenario, workers_by_role: Mapping[str, int]) -> Scenario:
    """Return a scenario in which some roles and rewards have another number of workers, in every stage that has them.

    Roles that share the processes or devices of a role get as many workers as it has.

    Args:
        scenario: The scenario.
        workers_by_role: The number of workers by the name of a role or a reward. A reward is also found by the name of its
            group, such as "rl.reward.novelty".

    Raises:
        ConfigError: There is no such role, it shares the workers of another one, or the number is not possible.
    """
    roles = _fill_roles(scenario, scenario.roles)
    rewards = {
        f"{stage}.reward.{name}": (stage, name)
        for stage, options in scenario.stages.items()
        for name in getattr(options, "rewards", {})
    }
    for name, workers in workers_by_role.items():
        if workers < 1:
            raise ConfigError(f"{name}={workers}: the number of workers must be at least 1")
        if name in roles:
            scenario = _scale_role(scenario, roles[name], name, workers)
            continue
        groups = [group for group, (_, reward) in rewards.items() if name in (group, reward)]
        if not groups:
            known_names = [*roles, *(reward for _, reward in rewards.values())]
            raise ConfigError(
                f"there is no role or reward {name!r}{suggest_inline(name, known_names)}; they are {', '.join(known_names)}"
            )
        for group in groups:
            scenario = _scale_reward(scenario, *rewards[group], workers)
    return scenario


def _scale_role(scenario: Scenario, role: Role, name: str, workers: int) -> Scenario:
    """Return a scenario in which a role has this many workers, wherever it does not share those of another role.

    Args:
        scenario: The scenario.
        role: The role of the whole run, with its defaults.
        name: The name of the role.
        workers: The number of workers.

    Raises:
        ConfigError: The role shares the workers of another one in all stages, or the number is out of its bounds.
    """
    all_roles = [{**scenario.roles, name: role}, *(stage.roles for stage in scenario.stages.values())]
    own_roles = [roles[name] for roles in all_roles if name in roles and not _find_host(roles[name])]
    if not own_roles:
        host = _find_host(role)
        raise ConfigError(f"{name} shares the workers of {host}; change those: {host}={workers}")
    for own in own_roles:
        if isinstance(own.workers, Elastic) and not own.workers.min <= workers <= own.workers.max:
            raise ConfigError(
                f"{name}={workers}: roles.{name}.workers is between {own.workers.min} and {own.workers.max} in the scenario"
            )
    base, *stage_roles = [
        {other: _change_workers(other, own, name, workers) for other, own in roles.items()}
        for roles in all_roles
    ]
    stages = {
        stage: options.model_copy(update={"roles": roles})
        for (stage, options), roles in zip(scenario.stages.items(), stage_roles, strict=True)
    }
    return scenario.model_copy(update={"roles": base, "stages": stages})


def _find_host(role: Role) -> str | None:
    """Return the role whose workers or devices a role shares; None if it has its own."""
    return role.fuse or role.collocate


def _change_workers(other: str, own: Role, name: str, workers: int) -> Role:
    """Return a role with another number of workers if it is the role `name`, or shares with it and states the same number."""
    is_named = other == name and not _find_host(own)
    states_same = _find_host(own) == name and "workers" in own.model_fields_set
    return own.model_copy(update={"workers": workers}) if is_named or states_same else own


def _scale_reward(scenario: Scenario, stage: str, name: str, workers: int) -> Scenario:
    """Return a scenario in which a reward of a stage has this many workers."""
    options: Any = scenario.stages[stage]
    reward = options.rewards[name].model_copy(update={"workers": workers})
    changed = options.model_copy(update={"rewards": {**options.rewards, name: reward}})
    return scenario.model_copy(update={"stages": {**scenario.stages, stage: changed}})


def derive_model_size(scenario: Scenario) -> ModelSize:
    """Return the shape of the scenario's model, computed by the model's spec."""
    tokenizer_options = scenario.tokenizer.get_options()
    context = ModelContext(
        int(tokenizer_options.get("levels", 3)),
        int(tokenizer_options.get("codes", 64)),
        scenario.data.history,
        scenario.sparse.get_feature_dims(),
    )
    return scenario.model.spec.size(scenario.model.get_options(), context)


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
