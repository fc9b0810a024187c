"""The checks of a scenario that need nothing else: its tables and stores are not read, and neither torch nor Ray is imported.

`plan` makes them first, so what they refuse can be neither planned nor run. `nonet.controller.setup.preflight` adds the checks
of files and addresses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from nonet.controller.cluster import Elastic, Pool
from nonet.controller.scenario.options import RewardOptions
from nonet.controller.scenario.parts import Role
from nonet.controller.scenario.scenario import Scenario
from nonet.controller.scenario.table_options import check_tables
from nonet.controller.scenario.validation import check_validation
from nonet.errors import ConfigError
from nonet.models import Model
from nonet.rl.rewards import check_options, find_reward
from nonet.run_code import is_code_reference
from nonet.samples.batches.graphs import list_graph_features, list_read_graphs
from nonet.samples.sequences import MAX_LABELS, name_task
from nonet.samples.sources import EventNeeds
from nonet.samples.tables import list_names
from nonet.suggest import join_names, suggest_sentence
from nonet.workers.engines import ENGINES, Engine
from nonet.workers.roles import Weights
from nonet.workers.roles.kinds import get_shipped_roles


def check_scenario(scenario: Scenario) -> None:
    """Check everything that follows from a scenario alone.

    These are tables with their tiers, combinations of keys, metrics, the model's own conditions, validations, names of stages,
    options of shipped rewards, and references to steps between rollout and rewards.

    Raises:
        ConfigError: A key is wrong, or keys do not go together; the message has all of the latter.
    """
    check_tables(scenario)
    if conflicts := list(_find_conflicts(scenario)):
        raise ConfigError(
            f"{scenario.name}: no run supports {'; '.join(conflicts)}; change or remove these keys"
        )
    _check_graphs(scenario)
    _check_labels_of_targets(scenario)
    source = scenario.data.source
    source.spec.needs(
        source.get_options(), list_event_needs(scenario)
    )  # Raises an error for needs that it cannot meet.
    tasks = scenario.model.spec.list_tasks(scenario)
    for metric in scenario.evaluate.metrics:
        scenario.model.spec.check_metric(metric, scenario.evaluate.width, tasks)
    scenario.model.spec.check(scenario)
    check_validation(scenario)
    _check_stage_names(scenario)
    for stage_name, stage in scenario.stages.items():
        for name, options in getattr(stage, "rewards", {}).items():
            if not is_own_code(options.use or name):
                check_reward(find_reward(options.use or name, name=name), name, options)
        for step in getattr(stage, "between", ()):
            if isinstance(step.use, str) and not is_own_code(step.use):
                raise ConfigError(
                    f"stages.{stage_name}.between: {step.use!r} must name a class of your own, file.py:NAME or "
                    "package.module:NAME"
                )


def is_own_code(use: Any) -> bool:
    """Return whether the `use` of a reward or a step names the user's own code: a file, or a name in a module."""
    return isinstance(use, str) and "://" not in use and is_code_reference(use)


def check_reward(target: Any, name: str, options: RewardOptions) -> None:
    """Check the options of a reward against its signature.

    Args:
        target: The class or function of the reward.
        name: The name of the reward.
        options: The options of the reward.

    Raises:
        ConfigError: An option is wrong; the message also lists the keys that every reward has.
    """
    try:
        check_options(target, options.get_options(), name=name)
    except ConfigError as error:
        common_keys = ", ".join(key for key in type(options).model_fields if key != "use")
        raise ConfigError(f"{error} Every reward has {common_keys}.") from None


def _has_role_kind(name: str, role: Role) -> bool:
    """Return whether a role names its kind or has the name of a shipped one."""
    return role.use is not None or name in get_shipped_roles()


def _check_stage_names(scenario: Scenario) -> None:
    """Raise ConfigError if a stage has the name of a step of every run, or of a baseline."""
    defaults = scenario.model.spec.list_baselines(scenario.data.graph)
    baselines = scenario.evaluate.make_baseline_configs(defaults)
    reserved_names = ("tokenise", "evaluate", *baselines)
    for name in scenario.stages:
        if name in reserved_names:
            raise ConfigError(
                f"stages.{name}: {', '.join(reserved_names)} are reserved names; choose another"
            )


def _find_conflicts(scenario: Scenario) -> Iterator[str]:
    """Yield every key that does not go with another key or with the model, with its value or a remark in parentheses."""
    model = scenario.model
    if scenario.weights.shard != Weights().shard and not model.spec.makes_lists:
        yield f"weights.shard with model.use: {model.use}"
    yield from _find_source_conflicts(scenario)
    yield from _find_role_conflicts("roles", scenario.roles, scenario)
    yield from _find_evaluator_conflicts("roles", scenario.roles, model)
    engine = scenario.roles["trainer"].engine if "trainer" in scenario.roles else None
    for name, stage in scenario.stages.items():
        yield from _find_role_conflicts(f"stages.{name}.roles", stage.roles, scenario)
        yield from _find_evaluator_conflicts(f"stages.{name}.roles", stage.roles, model)
        trainer = stage.roles.get("trainer")
        if engine is not None and trainer is not None and (limit := _find_mesh_limit(engine, trainer)):
            yield f"stages.{name}.roles.trainer with engine {engine.use}, {limit}"
        owner, optimizers = f"model.use: {model.use}", model.spec.optimizers
        if not optimizers:
            owner = f"engine {engine.use if engine is not None else Engine.default}"
            optimizers = (engine.spec if engine is not None else ENGINES.get(Engine.default)).optimizers
        if stage.optimizer.use not in optimizers:
            supported = " or ".join(optimizers)
            yield f"stages.{name}.optimizer: {stage.optimizer.use} with {owner} (set optimizer: {{use: {supported}}})"
        if stage.kind.aligns and not model.spec.aligns:
            yield f"stages.{name}.use: {stage.use} with model.use: {model.use} (it has no words)"
        if stage.kind.rolls_out and not model.spec.makes_lists:
            yield f"stages.{name} with rewards for {model.use}, which makes no lists"
        if stage.kind.rolls_out and (stage.precision.use != "fp32" or stage.optimizer.clip_rows):
            key = "precision" if stage.precision.use != "fp32" else "optimizer.clip_rows"
            yield f"stages.{name}.{key} in a stage that rolls out"


def _check_graphs(scenario: Scenario) -> None:
    """Raise ConfigError if no sparse table has a feature of a graph."""
    graphs = scenario.data.graph
    if unread := sorted(set(graphs) - set(list_read_graphs(graphs, scenario.sparse.get_feature_dims()))):
        features = join_names(list_graph_features(unread[:1]))
        raise ConfigError(
            f"data.graph.{unread[0]} is read by no table; add one of {features} to sparse.tables.NAME.features, or remove it"
        )


def _check_labels_of_targets(scenario: Scenario) -> None:
    """Raise ConfigError if a target reads more labels than a run can try all values of."""
    names = {labels.name for labels in scenario.data.labels}
    for stage, condition in list_event_needs(scenario).targets.items():
        if len(read := sorted(names & list_names(condition))) > MAX_LABELS:
            raise ConfigError(
                f"stages.{stage}.target reads {len(read)} labels of data.labels ({join_names(read)}); a target reads at most "
                f"{MAX_LABELS}, because all of their values are tried. Put labels together in one file, or write further tasks"
            )


def list_event_needs(scenario: Scenario) -> EventNeeds:
    """Return what the stages read of events besides their items, users and times."""
    targets: dict[str, str] = {}
    for name, stage in scenario.stages.items():
        if condition := getattr(stage, "target", None):
            targets[name] = condition
            tasks = getattr(stage, "tasks", {})
            targets |= {name_task(name, task): options.target for task, options in tasks.items()}
    joins = scenario.data.join
    joined_columns = {column for join in joins.values() for column in join.sources}
    graph_features = set(list_graph_features(scenario.data.graph))
    features = set(scenario.sparse.get_feature_dims())
    propensities = {
        options.column
        for stage in scenario.stages.values()
        if (options := getattr(stage, "propensity", None)) is not None
    }
    columns = sorted((features | propensities) - {"item", "user", "event"} - joined_columns - graph_features)
    if any(getattr(stage, "weight", None) for stage in scenario.stages.values()):
        columns.append("event")
    timed_joins = tuple(name for name, join in joins.items() if join.as_of != "newest")
    return EventNeeds(targets, tuple(columns), timed_joins, scenario.data.unknown_items == "drop")


def _find_source_conflicts(scenario: Scenario) -> Iterator[str]:
    """Yield what the source of samples does not give to the model and the stages, as its kind declares."""
    source, model = scenario.data.source, scenario.model
    unit = "users" if model.spec.makes_lists else "events"
    if unit not in source.spec.units:
        yield f"data.source: {source.use} with model.use: {model.use} (the model reads {unit}, leave data.source out)"
    if scenario.data.graph and not model.spec.reads_graphs:
        yield f"data.graph with model.use: {model.use} (a click model reads neighbours; remove data.graph)"
    if scenario.data.join and not source.spec.targets:
        yield f"data.join with data.source: {source.use}"
    for name, stage in scenario.stages.items():
        if getattr(stage, "tasks", {}) and not model.spec.has_tasks:
            yield f"stages.{name}.tasks with model.use: {model.use} (a click model predicts further labels; remove tasks)"
        if getattr(stage, "target", None) and not source.spec.targets:
            yield f"stages.{name}.target with data.source: {source.use}"
        for key in ("weight", "propensity"):
            if getattr(stage, key, None) and not source.spec.weights:
                yield f"stages.{name}.{key} with data.source: {source.use}"


def _find_role_conflicts(path: str, roles: Mapping[str, Role], scenario: Scenario) -> Iterator[str]:
    """Yield the keys of roles that do not go with another key or with the model.

    Args:
        path: The path of the roles in the scenario.
        roles: The roles, by name.
        scenario: The scenario.
    """
    for name, role in roles.items():
        if role.engine and (path, name) != ("roles", "trainer"):
            yield f"{path}.{name}.engine (a run has one engine: roles.trainer.engine)"
        elif role.engine and not scenario.model.spec.blocks and (key := _find_block_option(role)):
            yield f"{path}.{name}.engine.{key} with a model that has no blocks"
        elif role.engine and (limit := _find_engine_limit(role, scenario)):
            yield f"{path}.{name}.engine: {role.engine.use} with {limit}"
        if not _has_role_kind(name, role):
            suggestion = suggest_sentence(name, get_shipped_roles())
            yield f"{path}.{name} (a role of your own must name its kind, use: file.py:SPEC.{suggestion})"


def _find_block_option(role: Role) -> str | None:
    """Return the first option of a role's engine that is set and needs a model made of blocks; None if none is set."""
    options = role.engine.get_options() if role.engine else {}
    return next((key for key in ("recompute", "compile") if options.get(key)), None)


def _find_engine_limit(role: Role, scenario: Scenario) -> str | None:
    """Return what a role's engine does not support on the role's device and ranks; None if it supports everything."""
    if role.engine is None:
        return None
    host = role  # the role whose pool the role uses
    for name in (role.fuse, role.collocate):
        host = scenario.roles.get(name, host) if name else host
    pool = scenario.pools.get(host.pool or "cpu", Pool())
    ranks = role.workers.min if isinstance(role.workers, Elastic) else role.workers
    return (
        _find_mesh_limit(role.engine, role)
        or _find_tensor_limit(role.engine, scenario)
        or role.engine.spec.unsupported(role.engine.get_options(), pool.device, ranks)
    )


def _find_mesh_limit(engine: Engine, trainer: Role) -> str | None:
    """Return which numbers of workers the mesh of an engine does not support; None if it supports those of the trainers."""
    axes = {name: size for name, size in engine.get_axes().items() if size > 1}
    workers, multiple = trainer.workers, math.prod(axes.values())
    if axes and isinstance(workers, Elastic):
        return f"{', '.join(axes)} and workers from {workers.min} to {workers.max} (give one number)"
    if not isinstance(workers, Elastic) and workers % multiple:
        sizes = ", ".join(f"{name}: {size}" for name, size in axes.items())
        return f"{sizes} and workers: {workers} (the workers must be a multiple of {multiple})"
    return None


def _find_tensor_limit(engine: Engine, scenario: Scenario) -> str | None:
    """Return which key the engine's tensor parallelism does not support; None if it supports everything or is off."""
    if (ranks := engine.get_axes().get("tensor", 1)) == 1:
        return None
    if engine.get_options().get("compile"):
        limit: str | None = "compile: true (leave one of them out)"
    else:
        limit = scenario.model.spec.find_tensor_limit(scenario.model.get_options(), ranks)
    return limit and f"tensor: {ranks} and {limit}"


def _find_evaluator_conflicts(path: str, roles: Mapping[str, Role], model: Model) -> Iterator[str]:
    """Yield `evaluator.workers` if it may be above 1 for a model with its own evaluator.

    Args:
        path: The path of the roles in the scenario.
        roles: The roles, by name.
        model: The model.
    """
    role = roles.get("evaluator")
    if role is None:
        return
    most = role.workers.max if isinstance(role.workers, Elastic) else role.workers
    if most > 1 and "evaluator" in model.spec.roles:
        yield f"{path}.evaluator.workers above 1 with model.use: {model.use}"
