"""Checks of the data of a scenario, which are read and split as by the tokenise stage, or of a sample of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from nonet.controller.scenario import (
    Scenario,
    StageOptions,
    check_validation_interval,
)
from nonet.controller.scenario.settings import (
    describe_lost_labels,
    describe_unknown_items,
    list_data_warnings,
)
from nonet.controller.setup.file_checks import FileChecks
from nonet.controller.setup.from_run import find_warm_start
from nonet.controller.setup.run_files import make_data_setup
from nonet.controller.setup.worker_setup import make_baseline_options, make_stage_setups
from nonet.errors import ConfigError, DataError
from nonet.models.baselines.kinds import BASELINES
from nonet.models.tokenizer import check_signals, check_tokenizer
from nonet.rl.rewards import describe_missing_column
from nonet.samples.batches.graphs import read_edges
from nonet.samples.profiles import describe_lists, measure_profile
from nonet.samples.sequences import TRAIN, Sequences
from nonet.samples.stores import StoreJoins
from nonet.samples.tables import describe_rewritten_ids, find_files, find_parquet
from nonet.suggest import suggest_sentence
from nonet.workers.roles.artifacts import DataSetup, check_sequences


def check_data(
    scenario: Scenario,
    folder: Path,
    joins: StoreJoins,
    checks: FileChecks,
    reward_columns: Sequence[tuple[str, str]],
) -> None:
    """Read and split the data, and check them against the scenario; warnings about the data are added to `checks`.

    Of data that are prepared on disk, and of tables that are too large, only a sample is read.

    Raises:
        ConfigError: A column that the scenario names is missing.
        DataError: The tables cannot be read, or contain too few users, items or events.
    """
    init = scenario.init
    warm_start = (
        find_warm_start(scenario)
        if init is not None and checks.accept_address("init.from", init.source)
        else None
    )
    reads_tokenizer = checks.accept_addresses("tokenizer", scenario.tokenizer.get_options())
    data = make_data_setup(scenario, folder, warm_start and warm_start.known)
    options, paths = data.options, data.list_tables()
    if not checks.accept_addresses("data", paths):
        return
    is_sampled = checks.max_table_bytes is not None and any(
        _measure_table(path, key) > checks.max_table_bytes for key, path in paths.items()
    )
    ids: dict[str, Any]
    is_continued = False
    if is_sampled or data.is_prepared_on_disk():
        interactions, item_schema = data.sample_tables()
        seq, items, event_columns = None, item_schema.empty_table(), interactions.column_names
        catalogue = data.make_catalogue(item_schema)
        ids = {"user": interactions["user_id"], "item": interactions["item_id"]}
    else:
        built = checks.build_sequences(data)
        seq, items = built.sequences, built.items
        catalogue = items
        # A run shows these notes when it begins.
        if built.unknown is not None and checks.max_table_bytes is not None:
            note = describe_unknown_items({"unknown_items": built.unknown.to_facts()})
            checks.warnings += [note] if note else []
        label_files = {name: asdict(counts) for name, counts in (built.labels or {}).items()}
        note = describe_lost_labels({"label_files": label_files})
        if note and checks.max_table_bytes is not None:
            checks.warnings.append(note)
        event_columns = seq.feature_columns
        try:
            check_sequences(seq, data)
        except DataError as error:
            # Why a target holds for no event may be what happened to its labels.
            raise DataError(f"{error}. {note}") if note else error from None
        is_continued = data.choose_new_targets(seq) is not None  # raises DataError if no event is new
        joins.check_ids(np.asarray(items["item_id"][:1]), seq.user_id)
        ids = {"user": np.asarray(seq.user_id), "item": np.asarray(items["item_id"])}
    notes = (describe_rewritten_ids(role_ids, role) for role, role_ids in ids.items())
    checks.warnings += [note for note in notes if note is not None]
    _check_reward_columns(reward_columns, items.column_names, scenario.data.columns)
    for name, stage in scenario.stages.items():
        _check_stage_columns(name, stage, items.column_names)
        stage.kind.check_items(name, stage, items)
    scenario.model.spec.check_columns(scenario, event_columns, items.schema)
    for name, graph in data.graphs.items():
        if graph.table is not None:
            read_edges(name, graph, ids if seq is not None else None)
    if scenario.model.spec.makes_lists and reads_tokenizer:
        check_tokenizer(items, data.tokenizer, folder)
    check_signals(data.votes.get("signals", ()), items)
    baselines = make_baseline_options(scenario) if scenario.model.spec.makes_lists else {}
    for config in baselines.values():
        BASELINES.get(config["use"]).check_items(catalogue, config)
    if seq is not None:
        _check_sequence_lengths(scenario, seq, is_continued=is_continued)
        notes = scenario.model.spec.check_events(scenario, seq)
        if checks.max_table_bytes is not None:  # A run shows these notes when it begins.
            checks.warnings += notes or ()
        columns = describe_lists(items)
        profile = measure_profile(seq.offsets, seq.item, seq.time, len(items), columns=columns)
        features, makes_lists = scenario.sparse.get_feature_dims(), scenario.model.spec.makes_lists
        checks.warnings += list_data_warnings(profile, options.split, features, makes_lists=makes_lists)


def _check_sequence_lengths(scenario: Scenario, seq: Sequences, *, is_continued: bool) -> None:
    """Raise ConfigError if the data give stages too few steps or nothing to learn from."""
    is_train = seq.split == TRAIN
    labelled = {name: int((seq.find_labelled(name) & is_train).sum()) for name in seq.targets}
    setups = make_stage_setups(scenario, users=len(seq), events=int(is_train.sum()), labelled=labelled)
    if not is_continued:  # the few steps of a continued run may be validated at their end only
        check_validation_interval(scenario, {name: setup.steps for name, setup in setups.items()})
    for name, stage in scenario.stages.items():
        stage.kind.check_data(name, stage, seq)


def hash_tables(data: DataSetup) -> dict[str, str]:
    """Return a hash of the contents of the files of each table by its key in `data`.

    Raises:
        DataError: A file cannot be read.
    """
    hashes: dict[str, str] = {}
    for key, path in data.list_tables().items():
        contents = [identity for _, identity in find_files(path, key).identify(key)]
        hashes[key] = hashlib.sha256(json.dumps(contents).encode()).hexdigest()
    return hashes


def _measure_table(path: str, key: str) -> int:
    """Return the bytes of the files of a table."""
    filesystem, files = find_parquet(path, key)
    return sum(info.size for info in filesystem.get_file_info(files))


def _check_reward_columns(
    reward_columns: Sequence[tuple[str, str]], item_columns: Sequence[str], renamed_columns: Mapping[str, str]
) -> None:
    """Raise ConfigError if a reward reads a column that the items lack.

    Args:
        reward_columns: Pairs (name of the reward, column that it reads).
        item_columns: The columns of the items.
        renamed_columns: Column of the user's tables by the name that the run gives it.
    """
    for name, column in reward_columns:
        if column not in item_columns:
            raise ConfigError(describe_missing_column(name, column, item_columns, renamed_columns))


def _check_stage_columns(name: str, stage: StageOptions, item_columns: Sequence[str]) -> None:
    """Raise ConfigError if a stage reads a column that the items lack."""
    for column in set(stage.kind.list_item_columns(stage)) - set(item_columns):
        raise ConfigError(
            f"stages.{name}.column: items have no column {column!r}; they have {', '.join(item_columns)}."
            f"{suggest_sentence(column, item_columns)}"
        )
