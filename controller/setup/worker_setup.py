"""Settings that workers receive, derived from a scenario. Workers do not read the scenario itself.

The options of a part, such as a model or a source, are {"use": name or reference, ...} with its keyword arguments.
"""

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
    list_event_needs,
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

_CONTINUED_RATE = 0.1  # the default of `init.rate`


def make_run_setup(scenario: Scenario) -> RunSetup:
    """Return the settings of a run that all roles share."""
    sparse = scenario.sparse
    arguments_by_table, table_by_feature = {}, {}
    for name, table in sparse.tables.items():
        arguments_by_table[name] = make_table_arguments(sparse.defaults, table)
        for feature in table.features or [name]:
            table_by_feature[feature] = name
    return RunSetup(
        seed=scenario.seed,
        history=scenario.data.history,
        model=make_model_options(scenario),
        tables=arguments_by_table,
        features=table_by_feature,
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
            name: scenes
            for name, stage in scenario.stages.items()
            if (scenes := stage.kind.make_scenes(stage))
        },
        target=next(iter(get_targets(scenario)), None),
    )


def make_source_options(scenario: Scenario) -> dict[str, Any]:
    """Return the arguments of `open_source`: the source, its options and, if the scenario names one, the engine.

    The options are limited to the time before the held-out events, if the split has such a time, and name what stages read of
    events.
    """
    data = scenario.data
    takes_engine = data.source.spec.engines != ("local",)
    engine_option = {"engine": data.engine} if data.engine and takes_engine else {}
    options = data.source.spec.needs(data.source.get_options(), list_event_needs(scenario))
    training_end = get_training_end({"use": data.split.use, **data.split.get_options()})
    options = data.source.spec.until(options, training_end)
    return {"use": data.source.address, **options, **engine_option}


def _make_engine_options(scenario: Scenario) -> dict[str, Any]:
    """Return the arguments of `make_engine` for the trainers' engine; empty without an engine."""
    role = scenario.roles.get("trainer")
    engine = role.engine if role else None
    return {"use": engine.address, **engine.get_options()} if engine else {}


def make_model_options(scenario: Scenario) -> dict[str, Any]:
    """Return the arguments of `build_model`."""
    model = scenario.model
    # The levels and codes of the semantic ids are known only when the artifacts are opened.
    tasks = model.spec.list_tasks(scenario)
    context = ModelContext(levels=0, codes=0, history=scenario.data.history, tasks=tasks)
    memory_option = {"memory": model.list_voters()} if model.list_voters() else {}
    if model.list_signals():
        memory_option["memory_signals"] = model.list_signals()
    build_options = model.spec.make_build_options(model.get_options(), context)
    return {"use": model.address, **memory_option, **build_options}


def make_baseline_options(scenario: Scenario) -> dict[str, dict[str, Any]]:
    """Return the arguments of `make_baseline` for each baseline of the evaluation, by its name."""
    return scenario.evaluate.make_baseline_configs(scenario.model.spec.list_baselines(scenario.data.graph))


def get_targets(scenario: Scenario) -> dict[str, str]:
    """Return the condition on target events (`target`) of each stage that has one, and of its tasks, by name."""
    return dict(list_event_needs(scenario).targets)


def list_reward_options(scenario: Scenario) -> Iterator[tuple[str, str, Any]]:
    """Yield (name of the stage, name of the reward, its `RewardOptions`) of every reward."""
    for stage_name, stage in scenario.stages.items():
        for name, options in getattr(stage, "rewards", {}).items():
            yield stage_name, name, options


def make_rollout_options(scenario: Scenario) -> dict[str, dict[str, Any]]:
    """Return the options that rollouts receive for each stage that rolls out, by the name of the stage."""
    return {
        name: stage.kind.make_rollout_options(stage)
        for name, stage in scenario.stages.items()
        if stage.kind.rolls_out
    }


def make_role_specs(scenario: Scenario, run: RunFolder) -> dict[str, RoleSpec]:
    """Return how the workers of every role, reward and step between are made, by the name of their role.

    References to `file.py` become references to the copies that the run keeps.

    Args:
        scenario: The scenario.
        run: The folder of the run.

    Raises:
        ConfigError: A copy was changed, or a step between rollout and rewards does not fit.
    """
    shared_arguments = {"run": make_run_setup(scenario), "evaluate": scenario.evaluate.locate_baselines()}
    copies = read_copies(run)
    resolved = resolve_run(scenario)
    roles = dict(resolved.roles)  # these take precedence over roles of a stage with the same name
    for stage_roles in resolved.stage_roles.values():
        roles = {**stage_roles, **roles}
    kinds = {name: role.find_kind(name) for name, role in roles.items()}
    # Roles that share the process of another role without being named in the scenario.
    kinds |= {other: ROLES.get(other) for kind in kinds.values() for other in kind.beside}
    classes = {name: scenario.model.spec.roles.get(name, kind.cls) for name, kind in kinds.items()}
    specs = {
        name: RoleSpec(
            _make_picklable(load_heavy(classes[name])),
            tuple(shared_arguments[argument] for argument in kind.args),
            _get_own_options(roles.get(name)),
        )
        for name, kind in kinds.items()
    }
    for stage, name, options in list_reward_options(scenario):
        specs[f"{stage}.reward.{name}"] = make_reward_spec(scenario, run, name, options)
    for stage, names in list_between_roles(scenario).items():
        for name, step in zip(names, scenario.stages[stage].between, strict=True):  # pyright: ignore[reportAttributeAccessIssue]
            worker = load_between_class(step, copies, f"stages.{stage}.between")
            specs[name] = RoleSpec(_make_picklable(worker), (), step.get_options() or None)
    return specs


def make_reward_spec(scenario: Scenario, run: RunFolder, name: str, options: Any) -> RoleSpec:
    """Return how a worker of a reward is made.

    Args:
        scenario: The scenario.
        run: The folder of the run.
        name: The name of the reward.
        options: The options of the reward (`RewardOptions`).
    """
    use = read_copies(run).make_absolute(options.use or name)
    arguments = name, use, str(run.sources), options.get_options(), scenario.data.join, options.timeout_s
    return RoleSpec(load_heavy(ROLES.get("reward").cls), arguments)


def list_between_roles(scenario: Scenario) -> dict[str, list[str]]:
    """Return the role names of the steps between rollout and rewards, in order, by the name of their stage."""
    step_counts = {name: len(getattr(stage, "between", ())) for name, stage in scenario.stages.items()}
    return {
        name: [f"{name}.between.{index}" for index in range(count)]
        for name, count in step_counts.items()
        if count
    }


def load_between_class(step: Any, files: PluginFiles, where: str) -> type[DistributeWorker]:
    """Return the worker class that a step between rollout and rewards names.

    Args:
        step: The options of the step (`BetweenStep`).
        files: The location of the user's own files.
        where: The path of the step in the scenario, for messages.

    Raises:
        ConfigError: The class is not a DistributeWorker, or has no `apply` method that takes and returns rollouts.
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


def _make_picklable(cls: Any) -> Any:
    """Return a class unchanged; if it is from the user's own file, register it with Ray to be pickled by value.

    Workers cannot import the module of such a file.
    """
    module = sys.modules[cls.__module__]
    if module.__name__.startswith(OWN):
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(module)
    return cls


def _get_own_options(role: Role | None) -> dict[str, Any] | None:
    """Return the keyword arguments for the class of a role's workers; None if there are none."""
    return (role.own_options or None) if role else None


def get_trained_counts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments `users`, `events` and `labelled` of `make_stage_setups` for the data that facts describe.

    Args:
        facts: The facts about the data, as the tokenise stage reports them.
    """
    if new := facts.get("new"):  # a continued run trains on these only
        # Windows have the history before new events, so that a user takes as many positions as in a run on all events.
        events = round(new["users"] * facts["trained_events"] / facts["users"])
        return {"users": new["users"], "events": max(events, new["events"]), "labelled": new["labelled"]}
    # Facts of earlier versions have no labelled events; a resumed run keeps its number of steps.
    return {
        "users": facts["users"],
        "events": facts["trained_events"],
        "labelled": facts.get("labelled_events"),
    }


def make_stage_setups(
    scenario: Scenario,
    users: int,
    events: int,
    chunks: Mapping[str, int | None] | None = None,
    first_step: int = 0,
    labelled: Mapping[str, int] | None = None,
) -> dict[str, StageSetup]:
    """Return the settings of every stage, with its number of steps, by its name.

    Args:
        scenario: The scenario.
        users: The number of rows of the sequences.
        events: The number of training events.
        chunks: The planned chunk size of a trainer, by stage; by default the chunk size of the scenario.
        first_step: The global step at which the run starts, which is above 0 after a warm start.
        labelled: The number of training events that each target labels, by stage; by default all events.
    """
    setups: dict[str, StageSetup] = {}
    base_lr = _to_schedule(next(iter(scenario.stages.values())).lr).peak
    size = derive_model_size(scenario)
    has_event_rows = scenario.model.spec.rows == "events"
    for name, stage in scenario.stages.items():
        data_rows = (labelled or {}).get(name, events) if has_event_rows else users
        epoch_rows = count_epoch_rows(scenario, name, data_rows)
        lengths = stage.kind.compute_lengths(stage, epoch_rows, events)
        if "ahead" in lengths:
            lengths["ahead"] = lengths["ahead"] or scenario.model.spec.ahead
        chunk = (chunks or {}).get(name) or compute_largest_chunk(scenario, stage, size)
        setups[name] = StageSetup(
            name=name,
            first=first_step,
            lr=_make_schedule(scenario, name),
            base=base_lr,
            chunk=chunk,
            rolls_out=stage.kind.rolls_out,
            phases=stage.kind.trainer_phases,
            optimizer=stage.optimizer,
            precision=stage.precision,
            learner=stage.learner or scenario.model.spec.learner or SUPERVISED,
            epochs=lengths["steps"] * lengths["users"] / max(1, epoch_rows),
            **lengths,
        )
        first_step += setups[name].steps
    return {
        name: replace(setup, target=name if name in get_targets(scenario) else None)
        for name, setup in setups.items()
    }


def renumber_stages(stages: Mapping[str, StageSetup], manifest: Manifest) -> dict[str, StageSetup]:
    """Return the stages with the global steps from the stage of a checkpoint on renumbered to follow the checkpoint.

    If the checkpoint ends its stage, the stage counts as many steps as it had applied there.

    Args:
        stages: The settings of all stages.
        manifest: The manifest of the checkpoint.
    """
    renumbered, names, first_step = dict(stages), list(stages), manifest.step - manifest.stage_step
    for name in names[names.index(manifest.stage) :]:
        renumbered[name] = replace(stages[name], first=first_step)
        has_ended = manifest.last and name == manifest.stage
        first_step += manifest.stage_step if has_ended else stages[name].steps
    return renumbered


def count_epoch_rows(scenario: Scenario, stage: str, rows: int) -> int:
    """Return the number of rows in an epoch of the scenario's source.

    Args:
        scenario: The scenario.
        stage: The name of the stage.
        rows: The number of rows of the sequences, which is returned for a source without end.

    Raises:
        ConfigError: The source has no end, and the stage does not state its steps.
    """
    source, stage_options = scenario.data.source, scenario.stages[stage]
    epoch_rows = source.spec.epoch(source.get_options(), rows)
    if epoch_rows is None and getattr(stage_options, "steps", 1) is None:
        raise ConfigError(f"stages.{stage}: the source {source.use} has no end: set steps: to train")
    return rows if epoch_rows is None else epoch_rows


def _make_schedule(scenario: Scenario, stage: str) -> Schedule:
    """Return the learning rate of a stage, which is a constant share of its peak if a supervised stage trains on new events."""
    schedule, init = _to_schedule(scenario.stages[stage].lr), scenario.init
    if init is None or init.train == "all" or scenario.stages[stage].kind.rolls_out:
        return schedule
    share = _CONTINUED_RATE if init.rate is None else init.rate
    return Schedule(peak=share * schedule.peak, warmup=0.0, decay="none")


def _to_schedule(lr: float | Schedule) -> Schedule:
    """Return a learning rate as a schedule; a number becomes the peak of the default schedule."""
    return lr if isinstance(lr, Schedule) else Schedule(peak=lr)
