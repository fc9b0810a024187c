"""Warm start: dense weights and sparse rows from a finished stage of another run, for a run on other data.

`init: {from: RUN, stage: NAME}` in a scenario and `Session(from_run=, stage=)` both use this module. Rows are named by
hashed ids, so known users and items find their rows, and new ones get new rows. Semantic ids of known items are kept
(`nonet.models.tokenizer.known_sids`). Steps continue from those of the source, as rows record the step of their last
update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nonet.controller.record import Checkpoints, RunFolder, find_run, read_manifest
from nonet.controller.scenario import Init, Scenario, load_scenario
from nonet.controller.setup.worker_setup import make_run_setup
from nonet.errors import CheckpointError, ConfigError
from nonet.plugins import parse_file
from nonet.samples.sequences import load_item_keys
from nonet.workers.roles import KnownRun

_FREE = ("dropout", "use")  # options that do not change the shape of any weight; `use` is compared by itself


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The checkpoint from which a run starts.

    Attributes:
        run: The id of the source run.
        stage: The stage whose end is used.
        commit: The folder of the checkpoint.
        step: The global step of the checkpoint.
        known: What is known of the source run's data.
    """

    run: str
    stage: str
    commit: str
    step: int
    known: KnownRun

    def as_dict(self) -> dict[str, Any]:
        """Return the entries that `results/tokenise.json` contains."""
        return {name: value for name, value in asdict(self).items() if name != "known"}


def fix_sources(
    scenario: Scenario,
    *,
    resume: bool,
    run: RunFolder | None,
    from_run: str | Path | None = None,
    stage: str | None = None,
) -> Scenario:
    """Return the scenario with everything that depends on the moment fixed, for a new or a resumed run.

    Args:
        scenario: The scenario.
        resume: Whether the run is resumed.
        run: The folder of the run; None for a new one.
        from_run: The run that a new run starts from; by default the one that `init` names.
        stage: The stage of `from_run`.
    """
    if resume:
        return scenario if run is None else restore_sources(scenario, run)
    return resolve_sources(scenario) if from_run is None else set_initial_run(scenario, from_run, stage)


def set_initial_run(scenario: Scenario, run: str | Path, stage: str | None = None) -> Scenario:
    """Return the scenario with `init` set to a run.

    Args:
        scenario: The scenario.
        run: A folder, an id, a unique prefix of one, or "last".
        stage: The stage of the run; None for the last that has ended.

    Raises:
        ConfigError: There is no such run or stage.
    """
    return resolve_sources(
        scenario.model_copy(update={"init": Init.model_validate({"from": str(run), "stage": stage})})
    )


def resolve_sources(scenario: Scenario) -> Scenario:
    """Return the scenario with everything that depends on the moment fixed: files of its source, and folder and stage of `init`.

    Raises:
        ConfigError: There is no such run, or it has finished no stage.
        DataError: There are no such files.
    """
    scenario = _pin_files(scenario)
    if scenario.init is None:
        return scenario
    folder = _find_source_run(scenario.init.source)
    stage = scenario.init.stage or _find_newest_stage(folder)
    named = Init.model_validate({"from": str(folder.path), "stage": stage})
    return scenario.model_copy(update={"init": named})


def _pin_files(scenario: Scenario) -> Scenario:
    """Return the scenario with the files that its source reads now."""
    source = scenario.data.source
    pinned = source.spec.pin(source.get_options())
    if pinned == source.get_options():
        return scenario
    data = scenario.data.model_copy(update={"source": source.model_copy(update=dict(pinned))})
    return scenario.model_copy(update={"data": data})


def restore_sources(scenario: Scenario, run: RunFolder) -> Scenario:
    """Return the scenario with the source files and the initial run that were fixed when the run began.

    Keys that do not depend on the moment are kept, so that a different scenario is still detected.

    Args:
        scenario: The scenario that is given for the resume.
        run: The folder of the run.
    """
    if not run.scenario.exists():
        return scenario
    begun, _ = load_scenario(run.scenario)
    source, there = scenario.data.source, begun.data.source.get_options()
    given = source.get_options()
    moving = {name for name, value in source.spec.pin(given).items() if value != given.get(name)}
    files = {name: there[name] for name in moving if name in there}
    data = scenario.data.model_copy(update={"source": source.model_copy(update=files)})
    init = begun.init if scenario.init is not None else None
    return scenario.model_copy(update={"data": data, "init": init})


def find_warm_start(scenario: Scenario) -> WarmStart | None:
    """Find the checkpoint that `init` names, and check that it fits the scenario.

    Returns:
        The checkpoint; None if the scenario has no `init`.

    Raises:
        ConfigError: The source does not exist or does not fit; the message says what differs.
    """
    named = resolve_sources(scenario).init
    if named is None or named.stage is None:
        return None
    folder, stage = _find_source_run(named.source), named.stage
    try:
        commit = Checkpoints(folder.checkpoints).find_stage_end(stage)
    except CheckpointError as error:
        raise ConfigError(f"init: {error}") from None
    source, _ = load_scenario(folder.scenario)
    _check_alike(scenario, source, folder.id)
    facts = folder.read_facts()
    if facts is None:
        raise ConfigError(f"init: {folder.id} has no results/tokenise.json; name a run with its results")
    paths = {kind: artifact["path"] for kind, artifact in facts["artifacts"].items()}
    if load_item_keys(Path(paths["sequences"])) is None:
        raise ConfigError(
            f"init: {folder.id} is of a version that names sparse rows by their position in its own data, so no other "
            "run can use them; train it again with this version"
        )
    known = KnownRun(
        folder.id, paths["sequences"], paths.get("sids"), tuple(facts["tokenizer"].get("codes", ()))
    )
    return WarmStart(folder.id, stage, str(commit), read_manifest(commit).step, known)


def _find_source_run(run: str) -> RunFolder:
    """Return the folder of the run that `init.from` names."""
    try:
        return find_run(run)
    except ConfigError as error:
        raise ConfigError(f"init.from: {error}") from None


def _find_newest_stage(folder: RunFolder) -> str:
    """Return the last stage of a run that has ended."""
    scenario, _ = load_scenario(folder.scenario)
    for name in reversed(scenario.stages):
        try:
            Checkpoints(folder.checkpoints).find_stage_end(name)
            return name
        except CheckpointError:
            continue
    raise ConfigError(
        f"init: {folder.id} has finished none of its stages {', '.join(scenario.stages)}; name a run that has"
    )


def _check_alike(scenario: Scenario, source: Scenario, name: str) -> None:
    """Raise ConfigError if weights or rows of the source would not fit."""
    for what, ours, theirs in _list_shapes(scenario, source):
        if ours != theirs:
            raise ConfigError(
                f"init: {what} is {ours!r} here and was {theirs!r} in {name}; the weights would not fit. "
                f"Set {what}: {theirs!r}, or leave init out"
            )


def _list_shapes(scenario: Scenario, source: Scenario) -> list[tuple[str, Any, Any]]:
    """Return (key, value here, value in the source) for everything that must be equal."""
    ours, theirs = make_run_setup(scenario), make_run_setup(source)
    pairs: list[tuple[str, Any, Any]] = [
        ("model.use", _drop_folder(scenario.model.use), _drop_folder(source.model.use))
    ]
    pairs += _list_pairs("model", _select_shape_options(ours.model), _select_shape_options(theirs.model))
    pairs += _list_pairs("sparse feature", ours.features, theirs.features)
    for table in ours.tables:
        mine, other = ours.make_table_specs()[table], theirs.make_table_specs().get(table)
        for key in ("dim", "optimizer", "dtype") if other is not None else ():
            value, had = getattr(mine, key), getattr(other, key)
            if key == "optimizer":
                value, had = _drop_folder(value), _drop_folder(had)
            pairs.append((f"sparse.tables.{table}.{key}", value, had))
    if scenario.model.spec.makes_lists:
        uses = _drop_folder(scenario.tokenizer.use), _drop_folder(source.tokenizer.use)
        pairs.append(("tokenizer.use", *uses))
        for key in ("levels", "codes"):
            value, had = scenario.tokenizer.get_options().get(key), source.tokenizer.get_options().get(key)
            pairs.append((f"tokenizer.{key}", value, had))
    return pairs


def _drop_folder(use: str) -> str:
    """Return a `use` without the folder of the user's own file, which is another one in the run's copy."""
    return use.rpartition("/")[2] if parse_file(use) else use


def _select_shape_options(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a model that change the shapes of its weights."""
    return {key: value for key, value in model.items() if key not in _FREE}


def _list_pairs(what: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (key, ours, theirs) for the keys of both mappings."""
    return [(f"{what}.{key}", ours.get(key), theirs.get(key)) for key in dict.fromkeys([*ours, *theirs])]
