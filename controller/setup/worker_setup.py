"""Settings that workers receive, derived from a scenario; workers do not read the scenario itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nonet.controller.plan import compute_largest_chunk, derive_model_size, resolve_run
from nonet.controller.record import Manifest, RunFolder
from nonet.controller.scenario import (
    Role,
    Scenario,
    make_table_arguments,
    make_tier_arguments,
)
from nonet.controller.setup.own_files import read_copies
from nonet.errors import ConfigError
from nonet.models import ModelContext
from nonet.plugins import OWN, PluginFiles, load_heavy, load_reference
from nonet.samples.sequences import get_training_end
from nonet.workers.roles import SUPERVISED, RunSetup, Schedule, StageSetup
from nonet.workers.roles.kinds import ROLES
from nonet.workers.runtime import DistributeWorker, RoleSpec, Shard


def make_run_setup(scenario: Scenario) -> RunSetup:
    """Return the settings that all roles share: seed, history, model, tables, features and sources."""
    tables, features = {}, {}
    defaults = scenario.sparse.defaults
    for name, table in scenario.sparse.tables.items():
        tables[name] = make_table_arguments(defaults, table)
        for feature in table.features or [name]:
            features[feature] = name
    sparse = scenario.sparse
    return RunSetup(
        seed=scenario.seed,
        history=scenario.data.history,
        model=make_model_options(scenario),
        tables=tables,
        features=features,
        combiners={name: table.combiner for name, table in sparse.tables.items() if table.combiner},
        in_flight=sparse.in_flight,
        tiers={
            name: make_tier_arguments(table.tiers) for name, table in sparse.tables.items() if table.tiers
        },
        deadlines=scenario.deadlines,
        wire=sparse.wire,
        engine=_make_engine_options(scenario),
        source=make_source_options(scenario),
        memory=scenario.model.make_vote_options(),
        joins=scenario.data.join,
        stored=scenario.data.sequences,
        weights=scenario.weights,
        scenes={
            name: scenes for name, body in scenario.stages.items() if (scenes := body.kind.make_scenes(body))
        },
        target=next(iter(get_targets(scenario)), None),
    )


def make_source_options(scenario: Scenario) -> dict[str, Any]:
    """Return the arguments of `open_source`, with the engine if the scenario names one."""
    data = scenario.data
    engine = {"engine": data.engine} if data.engine and data.source.spec.engines != ("local",) else {}
    end = get_training_end({"use": data.split.use, **data.split.get_options()})
    options = data.source.spec.until(data.source.get_options(), end)
    return {"use": data.source.address, **options, **engine}


def _make_engine_options(scenario: Scenario) -> dict[str, Any]:
    """Return the arguments of `make_engine`; empty without an engine."""
    role = scenario.roles.get("trainer")
    engine = role.engine if role else None
    return {"use": engine.address, **engine.get_options()} if engine else {}


def make_model_options(scenario: Scenario) -> dict[str, Any]:
    """Return the arguments of `build_model`."""
    model = scenario.model
    around = ModelContext(0, 0, scenario.data.history)
    memory = {"memory": model.list_voters()} if model.list_voters() else {}
    return {"use": model.address, **memory, **model.spec.make_build_options(model.get_options(), around)}


def make_baseline_options(scenario: Scenario) -> dict[str, dict[str, Any]]:
    """Return the arguments of `make_baseline` for each baseline, by name."""
    return scenario.evaluate.make_baseline_configs(scenario.model.spec.list_baselines())


def get_targets(scenario: Scenario) -> dict[str, str]:
    """Return the target condition of each stage that has one."""
    return {
        name: target for name, body in scenario.stages.items() if (target := getattr(body, "target", None))
    }


def list_reward_options(scenario: Scenario) -> Iterator[tuple[str, str, Any]]:
    """Yield (stage, name, options) of every reward."""
    for stage, body in scenario.stages.items():
        for name, options in getattr(body, "rewards", {}).items():
            yield stage, name, options


def make_rollout_options(scenario: Scenario) -> dict[str, dict[str, Any]]:
    """Return the rollout options of each stage that rolls out."""
    return {
        name: body.kind.make_rollout_options(body)
        for name, body in scenario.stages.items()
        if body.kind.rolls_out
    }


def make_role_specs(scenario: Scenario, run: RunFolder) -> dict[str, RoleSpec]:
    """Return how the workers of every role are made; `file.py` references become the copies that the run keeps.

    Args:
        scenario: The scenario.
        run: The folder of the run.

    Raises:
        ConfigError: A copy was changed, or a step between does not fit.
    """
    arguments = {"run": make_run_setup(scenario), "evaluate": scenario.evaluate.locate_baselines()}
    copies = read_copies(run)
    resolved = resolve_run(scenario)
    named = dict(resolved.roles)
    for stage_roles in resolved.stage_roles.values():
        named = {**stage_roles, **named}
    kinds = {name: role.find_kind(name) for name, role in named.items()}
    beside = {other: ROLES.get(other) for kind in kinds.values() for other in kind.beside}
    classes = {name: scenario.model.spec.roles.get(name, kind.cls) for name, kind in (kinds | beside).items()}
    specs = {
        name: RoleSpec(
            _make_sendable(load_heavy(classes[name])),
            tuple(arguments[what] for what in kind.args),
            _get_own_options(named.get(name)),
        )
        for name, kind in (kinds | beside).items()
    }
    for stage, name, options in list_reward_options(scenario):
        specs[f"{stage}.reward.{name}"] = make_reward_spec(scenario, run, name, options)
    for stage, names in list_between_roles(scenario).items():
        for name, step in zip(names, scenario.stages[stage].between, strict=True):  # pyright: ignore[reportAttributeAccessIssue]
            worker = load_between_class(step, copies, f"stages.{stage}.between")
            specs[name] = RoleSpec(_make_sendable(worker), (), step.get_options() or None)
    return specs


def make_reward_spec(scenario: Scenario, run: RunFolder, name: str, options: Any) -> RoleSpec:
    """Return how a worker of a reward is made.

    Args:
        scenario: The scenario.
        run: The folder of the run.
        name: The name of the reward.
        options: The options of the reward.
    """
    use = read_copies(run).make_absolute(options.use or name)
    told = name, use, str(run.sources), options.get_options(), scenario.data.join, options.timeout_s
    return RoleSpec(load_heavy(ROLES.get("reward").cls), told)


def list_between_roles(scenario: Scenario) -> dict[str, list[str]]:
    """Return, by stage, the role names of the steps between rollout and rewards, in order."""
    found = {stage: len(getattr(body, "between", ())) for stage, body in scenario.stages.items()}
    return {
        stage: [f"{stage}.between.{index}" for index in range(count)]
        for stage, count in found.items()
        if count
    }


def load_between_class(step: Any, files: PluginFiles, where: str) -> type[DistributeWorker]:
    """Return the worker class that a step between rollout and rewards names.

    Args:
        step: The step.
        files: The user's own files.
        where: The path in the scenario, for messages.

    Raises:
        ConfigError: It is not a DistributeWorker, or has no `apply` method that takes and returns rollouts.
    """
    worker = (
        load_reference(step.use, files, f"{where}: {step.use!r}") if isinstance(step.use, str) else step.use
    )
    if not (isinstance(worker, type) and issubclass(worker, DistributeWorker)):
        raise ConfigError(f"{where}: {step.use!r} is {worker!r}, which is not a nonet.DistributeWorker")
    declaration = getattr(getattr(worker, "apply", None), "__nonet_method__", None)
    if declaration is None or declaration.collect != "concat" or Shard not in declaration.markers.values():
        raise ConfigError(
            f'{where}: {worker.__name__} needs a method `apply(self, rollouts)` marked @nonet.method(collect="concat", '
            "rollouts=nonet.Shard), which returns the rollouts"
        )
    return worker


def _make_sendable(cls: Any) -> Any:
    """Return a class after making it picklable by value if it is from the user's own file, which workers cannot import."""
    module = sys.modules[cls.__module__]
    if module.__name__.startswith(OWN):
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(module)
    return cls


def _get_own_options(role: Role | None) -> dict[str, Any] | None:
    """Return the keyword arguments of a role's workers; None if there are none."""
    return (role.own_options or None) if role else None


def make_stage_setups(
    scenario: Scenario,
    users: int,
    events: int,
    chunks: Mapping[str, int | None] | None = None,
    first: int = 0,
) -> dict[str, StageSetup]:
    """Return the settings of every stage, with its number of steps.

    Args:
        scenario: The scenario.
        users: The number of rows of the sequences.
        events: The number of training events.
        chunks: The planned chunk size of a trainer, by stage; by default that of the scenario.
        first: The global step at which the run starts: that of the checkpoint from which it continues.
    """
    setups: dict[str, StageSetup] = {}
    users = events if scenario.model.spec.rows == "events" else users
    base = _make_schedule(next(iter(scenario.stages.values())).lr).peak
    size = derive_model_size(scenario)
    for name, body in scenario.stages.items():
        rows = count_epoch_rows(scenario, name, users)
        lengths = body.kind.compute_lengths(body, rows, events)
        if "ahead" in lengths:
            lengths["ahead"] = lengths["ahead"] or scenario.model.spec.ahead
        chunk = (chunks or {}).get(name) or compute_largest_chunk(scenario, body, size)
        setups[name] = StageSetup(
            name=name,
            first=first,
            lr=_make_schedule(body.lr),
            base=base,
            chunk=chunk,
            rolls_out=body.kind.rolls_out,
            phases=body.kind.trainer_phases,
            optimizer=body.optimizer,
            precision=body.precision,
            learner=body.learner or scenario.model.spec.learner or SUPERVISED,
            epochs=lengths["steps"] * lengths["users"] / max(1, rows),
            **lengths,
        )
        first += setups[name].steps
    return {
        name: replace(setup, target=name if name in get_targets(scenario) else None)
        for name, setup in setups.items()
    }


def renumber_stages(stages: Mapping[str, StageSetup], manifest: Manifest) -> dict[str, StageSetup]:
    """Renumber the global steps of the stages after a checkpoint.

    If the checkpoint ends its stage, the stage gets the length that it had there.

    Args:
        stages: The settings of all stages.
        manifest: The manifest of the checkpoint.
    """
    numbered, names, first = dict(stages), list(stages), manifest.step - manifest.stage_step
    for name in names[names.index(manifest.stage) :]:
        numbered[name] = replace(stages[name], first=first)
        first += manifest.stage_step if manifest.last and name == manifest.stage else stages[name].steps
    return numbered


def count_epoch_rows(scenario: Scenario, stage: str, rows: int) -> int:
    """Return the number of rows in an epoch of the scenario's source; that of the sequences if the source has no end.

    Args:
        scenario: The scenario.
        stage: The name of the stage.
        rows: The number of rows of the sequences.

    Raises:
        ConfigError: The source has no end, and the stage does not state its steps.
    """
    source, body = scenario.data.source, scenario.stages[stage]
    epoch = source.spec.epoch(source.get_options(), rows)
    if epoch is None and getattr(body, "steps", 1) is None:
        raise ConfigError(f"stages.{stage}: the source {source.use} has no end: set steps: to train")
    return rows if epoch is None else epoch


def _make_schedule(lr: float | Schedule) -> Schedule:
    """Return a schedule; a number alone is its peak."""
    return lr if isinstance(lr, Schedule) else Schedule(peak=lr)
