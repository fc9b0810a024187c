"""The files of a scenario: its tables, for the tokenise stage, and what is stored of it in the folder of a run."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path
from typing import Any

from nonet import yaml
from nonet.atomic import make_folder, write_whole
from nonet.controller.record import RunFolder
from nonet.controller.scenario import (
    LIBRARY,
    Scenario,
    flatten_document,
    load_scenario,
    select_fixed_keys,
    to_document,
)
from nonet.controller.setup.own_files import keep_copies
from nonet.controller.setup.worker_setup import get_targets, make_source_options
from nonet.errors import ConfigError
from nonet.plugins import load_heavy
from nonet.samples.preparation import BuildOptions
from nonet.samples.sequences import MASK
from nonet.suggest import join_names
from nonet.trust import check_folder, guard_folder
from nonet.workers.roles.artifacts import DataSetup, KnownRun

START = "command.json"  # how the run was started


def make_data_setup(scenario: Scenario, folder: Path, known_run: KnownRun | None = None) -> DataSetup:
    """Return the settings of the tokenise stage.

    Args:
        scenario: The scenario.
        folder: The folder that relative paths in the scenario start from.
        known_run: The artifacts of the run from which weights are taken; None without a warm start.
    """
    data = scenario.data
    makes_lists = scenario.model.spec.makes_lists
    resolve = partial(_resolve_path, scenario, folder)
    graphs = {
        name: graph.model_copy(update={"table": graph.table and resolve(f"graph.{name}.table", graph.table)})
        for name, graph in data.graph.items()
    }
    return DataSetup(
        options=BuildOptions(
            resolve("interactions", data.interactions),
            items=resolve("items", data.items) if data.items else None,
            columns=dict(data.columns),
            keep=data.keep.model_dump(),
            split={"use": data.split.use, **data.split.get_options()},
            targets=get_targets(scenario),
            where=data.where,
            repeats=data.repeats if makes_lists else MASK,
            missing=data.table_format.missing,
            drop_unknown_items=data.unknown_items == "drop",
            vectors={name: resolve(f"vectors.{name}", path) for name, path in data.vectors.items()},
        ),
        tokenizer={"use": scenario.tokenizer.address, **scenario.tokenizer.get_options()},
        folder=str(folder),
        seed=scenario.seed,
        known=known_run,
        transitions=scenario.model.make_count_options(),
        votes=scenario.model.make_vote_options() or {},
        chooses_votes=scenario.model.chooses_votes,
        prepare=data.prepare,
        compress=data.events,
        labels=tuple(
            options.model_copy(update={"path": resolve("labels.path", options.path)})
            for options in data.labels
        ),
        drop_unlabelled=not makes_lists,  # a model that makes lists keeps events without a label in histories
        stored=data.sequences,
        source=make_source_options(scenario),
        graphs=graphs,
        cache=_locate_cache(data.cache, folder),
    )


def _locate_cache(cache: str, folder: Path) -> str | None:
    """Return the folder of the cache of artifacts as `DataSetup` has it. `folder` is that of the scenario."""
    return {"node": None, "none": ""}.get(cache, str(folder / os.path.expanduser(cache)))


def _resolve_path(scenario: Scenario, folder: Path, key: str, path: str) -> str:
    """Resolve a path that is relative to the scenario's folder; URIs, built-in data and absolute paths are returned unchanged.

    Args:
        scenario: The scenario.
        folder: The folder of the scenario.
        key: The key in `data` that holds the path, for messages.
        path: The path.

    Raises:
        ConfigError: The scenario is a shipped one, which comes without data.
    """
    if ":" in path or Path(path).is_absolute():
        return path
    if folder.resolve() == LIBRARY.resolve():
        raise ConfigError(
            f"data.{key}: {path} is relative to the scenario, and {scenario.name} is shipped without data. `nonet new "
            f"{scenario.name} DIR` puts it beside the tables that `nonet import` wrote to DIR; or give a whole path: "
            f'--set data.{key}="$PWD/DIR/{path}"'
        )
    return str(folder / path)


def write_run(scenario: Scenario, folder: Path, run: RunFolder) -> str:
    """Write the scenario and copies of the user's own files into the run's folder, unless they are there already.

    Args:
        scenario: The scenario.
        folder: The folder that relative paths in the scenario start from.
        run: The folder of the run.

    Returns:
        The SHA-256 of the stored scenario's file.

    Raises:
        ConfigError: The folder holds a run of another scenario, or a file is missing.
    """
    make_folder(run.path)
    guard_folder(run.path, approves=False)
    if run.scenario.exists():
        check_same(scenario, run)
    if not run.sources_list.exists():
        keep_copies(scenario, folder, run)
    if not run.scenario.exists():
        write_whole(run.scenario, yaml.dump(to_document(scenario)).encode())
    check_folder(run.path, run.id)
    return hashlib.sha256(run.scenario.read_bytes()).hexdigest()


def write_start(run: RunFolder, folder: Path, command: str, *, detached: bool = False) -> None:
    """Write how a run is started: the folder of its scenario, the command unless it is empty, and whether it is detached."""
    record = ({"command": command} if command else {}) | ({"detached": True} if detached else {})
    run.write_json(START, {**record, "folder": str(folder.absolute())})


def get_scenario_folder(run: RunFolder) -> Path:
    """Return the folder of the scenario of a run, which relative paths in it start from."""
    start = run.read_json(START) or {}
    return Path(start.get("folder", Path.cwd()))  # earlier versions did not store it


def resolve_paths(folder: Path, scenario: Scenario, document: dict[str, Any]) -> None:
    """Make paths of tables and of the tokenizer's files in the document of a scenario absolute.

    Args:
        folder: The folder that relative paths in the scenario start from.
        scenario: The scenario.
        document: Its document, which is changed.
    """
    folder, data = folder.absolute(), document["data"]

    def resolve(options: dict[str, Any], key: str) -> None:
        if options.get(key) and ":" not in options[key]:
            options[key] = str(folder / options[key])

    for key in ("interactions", "items"):
        resolve(data, key)
    for labels in data.get("labels") or []:
        resolve(labels, "path")
    for graph in (data.get("graph") or {}).values():
        resolve(graph, "table")
    resolve_options = load_heavy(scenario.tokenizer.spec.resolve_paths)
    document["tokenizer"] |= resolve_options(scenario.tokenizer.get_options(), folder)


def check_same(scenario: Scenario, run: RunFolder) -> None:
    """Check that a run's folder holds the same scenario, apart from deadlines and values of `env.vars`.

    Args:
        scenario: The scenario.
        run: The folder of the run.

    Raises:
        ConfigError: The folder holds a run of another scenario.
    """
    stored, _ = load_scenario(run.scenario)
    before, now = (select_fixed_keys(to_document(each)) for each in (stored, scenario))
    if before != now:
        values = dict(flatten_document(before)), dict(flatten_document(now))
        keys = sorted(
            key for key in values[0].keys() | values[1].keys() if values[0].get(key) != values[1].get(key)
        )
        raise ConfigError(
            f"{run.path} is a run of another scenario ({run.scenario}), which differs in {join_names(keys[:3])}"
            f"{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}; resume it without the change, or start another run"
        )
