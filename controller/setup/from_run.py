"""Warm start: a run begins with the dense weights and sparse rows of a finished stage of another run, the source run.

`init: {from: RUN, stage: NAME}` in a scenario and `Session(from_run=, stage=)` both use this module. The keys of sparse rows
are hashed ids, so users and items that the source run had keep their rows, and new ones get new rows. Semantic ids of known
items are kept (`nonet.models.tokenizer.known_sids`). Steps continue from those of the source run, as rows record the step
of their last update. With `train: new`, the run continues the source run: it trains on the events that are new, and keeps the
state of the dense optimizer.

The same module fixes what depends on the moment at which a run begins: the files that its source reads, and the run and
stage that `init` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nonet.controller.record import (
    LAST,
    PREVIOUS_RUN,
    Checkpoints,
    RunFolder,
    ValidationRecord,
    fetch_artifacts,
    find_last_finished,
    find_run,
    get_location,
    read_manifest,
)
from nonet.controller.scenario import Init, Scenario, load_scenario
from nonet.controller.setup.worker_setup import make_run_setup
from nonet.errors import CheckpointError, ConfigError
from nonet.plugins import parse_file
from nonet.workers.roles.artifacts import KnownRun

# Options of a model that are not compared: the first changes no shape of a weight, and `model.use` is compared apart.
_UNCOMPARED_OPTIONS = ("dropout", "use")
_REPLAY = 0.2  # the default of `init.replay`


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The checkpoint of a source run from which a run starts.

    Attributes:
        run: The id of the source run.
        stage: The stage that the checkpoint ends.
        commit: The folder of the checkpoint.
        step: The global step of the checkpoint.
        known: The artifacts of the source run, with its users, items and semantic ids.
        keeps_optimizer: Whether the first stage continues with the state of the checkpoint's dense optimizer.
    """

    run: str
    stage: str
    commit: str
    step: int
    known: KnownRun
    keeps_optimizer: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that `results/tokenise.json` stores as `init`: all but `known`, and no false `keeps_optimizer`."""
        unstored = {"known"} if self.keeps_optimizer else {"known", "keeps_optimizer"}
        return {name: value for name, value in asdict(self).items() if name not in unstored}


def fix_sources(
    scenario: Scenario,
    *,
    resume: bool,
    run: RunFolder | None,
    from_run: str | Path | None = None,
    stage: str | None = None,
) -> Scenario:
    """Return the scenario with its source files and initial run fixed: as they are now, or as they were when the run began.

    Args:
        scenario: The scenario.
        resume: Whether the run is resumed.
        run: The folder of the run; None for a new one.
        from_run: The source run of a new run; by default the one that `init` names.
        stage: The stage of `from_run`; by default the last that has ended.
    """
    if resume:
        return scenario if run is None else restore_sources(scenario, run)
    return resolve_sources(scenario) if from_run is None else set_initial_run(scenario, from_run, stage)


def set_initial_run(scenario: Scenario, run: str | Path, stage: str | None = None) -> Scenario:
    """Return the scenario with `init` set to a source run, and its source files and initial run fixed.

    Args:
        scenario: The scenario.
        run: The source run: a folder, an id, a unique prefix of one, or "last".
        stage: The stage of the source run; None for the last that has ended.

    Raises:
        ConfigError: There is no such run or stage.
    """
    return resolve_sources(
        scenario.model_copy(update={"init": Init.model_validate({"from": str(run), "stage": stage})})
    )


def resolve_sources(scenario: Scenario) -> Scenario:
    """Return the scenario with its source files, and the folder and stage that `init` names, fixed as they are now.

    Raises:
        ConfigError: There is no run that `init` names, or it has finished no stage.
        DataError: The files of the source do not exist.
    """
    scenario = _pin_files(scenario)
    init = scenario.init
    if init is None:
        return scenario
    source = init.source
    if init.train == "new" and source == LAST:
        newest = find_last_finished(scenario.name, scenario.storage and scenario.storage.url)
        if newest is None:
            raise ConfigError(
                f"init.from: last: no run of {scenario.name} has finished; `nonet run --continue last` trains the first one on "
                "all events"
            )
        source = get_location(newest)
    source_run = _find_source_run(source)
    stage = init.stage or _find_last_ended_stage(source_run)
    update = {"source": get_location(source_run), "stage": stage}
    return scenario.model_copy(update={"init": init.model_copy(update=update)})


def _pin_files(scenario: Scenario) -> Scenario:
    """Return the scenario with paths and patterns of its source replaced by the files that match now."""
    source = scenario.data.source
    pinned_options = source.spec.pin(source.get_options())
    if pinned_options == source.get_options():
        return scenario
    data = scenario.data.model_copy(update={"source": source.model_copy(update=dict(pinned_options))})
    return scenario.model_copy(update={"data": data})


def restore_sources(scenario: Scenario, run: RunFolder) -> Scenario:
    """Return the scenario with the source files and the initial run that were fixed when the run began.

    All other keys are kept, so that a scenario that differs from that of the run is still detected.

    Args:
        scenario: The scenario that is given for the resume.
        run: The folder of the run.
    """
    if not run.scenario.exists():
        return scenario
    stored, _ = load_scenario(run.scenario)
    source, stored_options = scenario.data.source, stored.data.source.get_options()
    options = source.get_options()
    pinned_keys = {key for key, value in source.spec.pin(options).items() if value != options.get(key)}
    stored_files = {key: stored_options[key] for key in pinned_keys if key in stored_options}
    data = scenario.data.model_copy(update={"source": source.model_copy(update=stored_files)})
    init = stored.init if scenario.init is not None else None
    return scenario.model_copy(update={"data": data, "init": init})


def find_warm_start(scenario: Scenario) -> WarmStart | None:
    """Find the checkpoint that `init` names, and check that it fits the scenario.

    Returns:
        The warm start; None if the scenario has no `init`.

    Raises:
        ConfigError: The source run does not exist or does not fit; the message says what differs.
    """
    init = resolve_sources(scenario).init
    if init is None or init.stage is None:
        return None
    source_run, stage = _find_source_run(init.source), init.stage
    try:
        checkpoint_dir = Checkpoints(source_run.checkpoints).find_stage_end(stage)
    except CheckpointError as error:
        raise ConfigError(f"init: {error}") from None
    source_scenario, _ = load_scenario(source_run.scenario)
    _check_weights_fit(scenario, source_scenario, source_run.id)
    facts = source_run.read_facts()
    if facts is None:
        raise ConfigError(f"init: {source_run.id} has no results/tokenise.json; name a run with its results")
    paths = fetch_artifacts(facts["artifacts"])
    replay = rejected = None
    if init.train == "new":
        _check_continues(scenario)
        replay = _REPLAY if init.replay is None else init.replay
        names = list(source_scenario.stages)
        has_learned = any(_has_kept_training(source_run, name) for name in names[: names.index(stage) + 1])
        rejected = None if has_learned else paths.get("targets")
    codes = tuple(facts["tokenizer"].get("codes", ()))
    known = KnownRun(source_run.id, paths["sequences"], paths.get("sids"), codes, replay, rejected)
    step = read_manifest(checkpoint_dir).step
    keeps_optimizer = (
        init.train == "new"
        and _has_kept_training(source_run, stage)
        and _has_same_optimizer(scenario, source_scenario, stage)
    )
    return WarmStart(source_run.id, stage, str(checkpoint_dir), step, known, keeps_optimizer)


def _check_continues(scenario: Scenario) -> None:
    """Raise ConfigError if a scenario cannot train on new events only."""
    for name, stage in scenario.stages.items():
        if getattr(stage, "tokens", None):
            raise ConfigError(
                f"init.train: new: stages.{name}.tokens is the same for few new events as for all; give epochs instead"
            )
        if name == PREVIOUS_RUN:
            raise ConfigError(
                f"init.train: new: stages.{name}: reports call the run before by this name; choose another"
            )
    source = scenario.data.source
    if not source.spec.trains_new:
        raise ConfigError(
            f"init.train: new: data.source: {source.use} reads the files that it names, whichever events the run before has "
            "trained on; name the new files there, and leave init.train out"
        )


def _has_kept_training(run: RunFolder, stage: str) -> bool:
    """Return whether a stage of a run has ended with other weights than those that it began with."""
    end = ValidationRecord(run, stage).end
    return end is None or not end.get("start")


def _has_same_optimizer(scenario: Scenario, source_scenario: Scenario, stage: str) -> bool:
    """Return whether the first stage is of the kind of a stage of the source run, with the same optimizer and engine."""
    source_stage, first_stage = source_scenario.stages[stage], next(iter(scenario.stages.values()))
    ours, theirs = make_run_setup(scenario).engine, make_run_setup(source_scenario).engine
    return (
        type(source_stage) is type(first_stage)
        and source_stage.optimizer == first_stage.optimizer
        and ours.get("use") == theirs.get("use")
    )


def _find_source_run(run: str) -> RunFolder:
    """Return the run that `init.from` names; errors name that key."""
    try:
        return find_run(run)
    except ConfigError as error:
        raise ConfigError(f"init.from: {error}") from None


def _find_last_ended_stage(run: RunFolder) -> str:
    """Return the name of the last stage of a run that has ended; raise ConfigError if none has."""
    scenario, _ = load_scenario(run.scenario)
    for name in reversed(scenario.stages):
        try:
            Checkpoints(run.checkpoints, fetches=False).find_stage_end(name)
            return name
        except CheckpointError:
            continue
    raise ConfigError(
        f"init: {run.id} has finished none of its stages {', '.join(scenario.stages)}; name a run that has"
    )


def _check_weights_fit(scenario: Scenario, source_scenario: Scenario, source_id: str) -> None:
    """Raise ConfigError if weights or rows of the source run would not fit the scenario."""
    for key, value, source_value in _list_shape_keys(scenario, source_scenario):
        if value != source_value:
            raise ConfigError(
                f"init: {key} is {value!r} here and was {source_value!r} in {source_id}; the weights would not fit. "
                f"Set {key}: {source_value!r}, or leave init out"
            )
    ours, theirs = make_run_setup(scenario).features, make_run_setup(source_scenario).features
    for feature in dict.fromkeys([*ours, *theirs]):
        if ours.get(feature) != theirs.get(feature):
            here, there = (
                f"the table {tables[feature]!r}" if feature in tables else "no sparse table"
                for tables in (ours, theirs)
            )
            raise ConfigError(
                f"init: the feature {feature!r} has {here} here and {there} in {source_id}; the weights would not fit. "
                f"Set sparse.tables as in {source_id}, or leave init out"
            )


def _list_shape_keys(scenario: Scenario, source_scenario: Scenario) -> list[tuple[str, Any, Any]]:
    """Return (key, value here, value in the source run) for every key whose values must be equal."""
    ours, theirs = make_run_setup(scenario), make_run_setup(source_scenario)
    rows: list[tuple[str, Any, Any]] = [
        ("model.use", _drop_folder(scenario.model.use), _drop_folder(source_scenario.model.use))
    ]
    rows += _list_value_pairs("model", _select_shape_options(ours.model), _select_shape_options(theirs.model))
    for table in ours.tables:
        our_spec, their_spec = ours.make_table_specs()[table], theirs.make_table_specs().get(table)
        for key in ("dim", "optimizer", "dtype") if their_spec is not None else ():
            our_value, their_value = getattr(our_spec, key), getattr(their_spec, key)
            if key == "optimizer":
                our_value, their_value = _drop_folder(our_value), _drop_folder(their_value)
            rows.append((f"sparse.tables.{table}.{key}", our_value, their_value))
    if scenario.model.spec.makes_lists:
        our_tokenizer, their_tokenizer = scenario.tokenizer, source_scenario.tokenizer
        rows.append(("tokenizer.use", _drop_folder(our_tokenizer.use), _drop_folder(their_tokenizer.use)))
        our_options, their_options = our_tokenizer.get_options(), their_tokenizer.get_options()
        for key in ("levels", "codes"):
            rows.append((f"tokenizer.{key}", our_options.get(key), their_options.get(key)))
    return rows


def _drop_folder(use: str) -> str:
    """Return the value of a `use` without the folder of a user's own file, which differs in the copy that a run keeps."""
    return use.rpartition("/")[2] if parse_file(use) else use


def _select_shape_options(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a model that may change the shapes of its weights, without the folders of the user's own files."""
    return {
        key: _drop_folder(value) if isinstance(value, str) else value
        for key, value in model.items()
        if key not in _UNCOMPARED_OPTIONS
    }


def _list_value_pairs(
    prefix: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Return (prefix.key, value in `ours`, value in `theirs`) for every key of either mapping; None for a missing value."""
    return [(f"{prefix}.{key}", ours.get(key), theirs.get(key)) for key in dict.fromkeys([*ours, *theirs])]
