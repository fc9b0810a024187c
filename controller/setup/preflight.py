"""Checks of a scenario and its data that run before a process is started or a file is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nonet.controller.plan import get_feature_dims
from nonet.controller.scenario import (
    Scenario,
    check_runnable,
    check_tables,
    check_validation,
    check_validation_interval,
)
from nonet.controller.scenario.settings import list_data_warnings
from nonet.controller.setup.from_run import find_warm_start
from nonet.controller.setup.run_files import make_data_setup
from nonet.controller.setup.worker_setup import (
    list_reward_options,
    load_between_class,
    make_baseline_options,
    make_run_setup,
    make_source_options,
    make_stage_setups,
)
from nonet.embedding.tiers import TierSettings
from nonet.errors import ConfigError
from nonet.models.tokenizer import check_tokenizer
from nonet.plugins import PluginFiles
from nonet.rl.rewards import check_options, describe_missing_column, find_reward, list_columns
from nonet.samples.profiles import measure_profile
from nonet.samples.sequences import TRAIN
from nonet.samples.stores import StoreJoins, StoreNotFoundError, open_store
from nonet.suggest import suggest_sentence
from nonet.workers.roles import DataSetup, check_sequences


def check(scenario: Scenario, folder: Path) -> list[str]:
    """Check everything that a run of a scenario needs, before any process is started.

    Args:
        scenario: The scenario.
        folder: The folder that relative paths in the scenario start from.

    Returns:
        Warnings about the data, one sentence each.

    Raises:
        ConfigError: A key is wrong, or this version cannot run it.
        DataError: The tables cannot be read, or contain too few users, items or events.
    """
    check_runnable(scenario)
    _check_engine(scenario)
    return [*check_definition(scenario, folder), *check_data(scenario, folder)]


def check_definition(scenario: Scenario, folder: Path) -> list[str]:
    """Check the parts of a scenario that need neither its data nor the packages of this machine.

    These are the sparse tables, metrics, features, rewards with their options, steps between rollout and rewards, and joins.

    Args:
        scenario: A scenario that this version can run.
        folder: The folder that relative paths in the scenario start from.

    Returns:
        Warnings of the joined stores, one sentence each.

    Raises:
        ConfigError: A key or an option is wrong.
        StoreError: A store that is joined cannot be read.
    """
    check_tables(scenario)
    _check_tiers(scenario)
    for metric in scenario.evaluate.metrics:
        scenario.model.spec.check_metric(metric, scenario.evaluate.width)
    scenario.model.spec.check(scenario)
    check_validation(scenario)
    reserved_names = ("tokenise", "evaluate", *make_baseline_options(scenario))
    for name in scenario.stages:
        if name in reserved_names:
            raise ConfigError(
                f"stages.{name}: {', '.join(reserved_names)} are reserved names; choose another"
            )
    for _, name, options in list_reward_options(scenario):
        _check_reward(find_reward(options.use or name, folder, name=name), name, options)
    for stage_name, stage in scenario.stages.items():
        for step in getattr(stage, "between", ()):
            load_between_class(step, PluginFiles(str(folder)), where=f"stages.{stage_name}.between")
    warnings = _check_joins(scenario)
    if (stored := scenario.data.sequences) is not None:
        with suppress(StoreNotFoundError):  # the tokenise stage creates it
            open_store(stored.use, **stored.options).close()
    scenario.data.source.spec.check(make_source_options(scenario))
    return warnings


def _check_engine(scenario: Scenario) -> None:
    """Raise ConfigError if the package of the trainers' engine is not installed."""
    engine = scenario.roles["trainer"].engine if "trainer" in scenario.roles else None
    package = engine.spec.needs if engine is not None else None
    if engine is not None and package is not None and find_spec(package) is None:
        raise ConfigError(
            f"roles.trainer.engine: {package} is not installed: pip install 'nonet[{engine.use}]'"
        )


def _check_joins(scenario: Scenario) -> list[str]:
    """Open every joined store, check that its columns fit the sparse tables, and close it.

    Returns:
        The warnings of the stores, one sentence each.

    Raises:
        ConfigError: A column with a sparse table is a list, or neither whole numbers nor text.
        StoreError: A store cannot be read.
    """
    joins = StoreJoins(scenario.data.join)
    table_by_feature = make_run_setup(scenario).features
    try:
        column_kinds = joins.get_kinds()  # without columns that are lists
        for name, kind in column_kinds.items():
            if name in table_by_feature and kind != "int64":  # text is int64 too, by its hash
                raise ConfigError(
                    f"sparse.tables.{table_by_feature[name]}: the joined column {name!r} is {kind}; a table has rows of ids, "
                    "whole numbers or text"
                )
        for name in set(joins.names) & set(table_by_feature) - set(column_kinds):
            raise ConfigError(
                f"sparse.tables.{table_by_feature[name]}: the joined column {name!r} is a list; models read one id per event"
            )
        return joins.list_warnings()
    finally:
        joins.close()


def _check_reward(target: Any, name: str, options: Any) -> None:
    """Raise ConfigError if the options of a reward are wrong; the message also lists the keys that every reward has.

    Args:
        target: The class or function of the reward.
        name: The name of the reward.
        options: The options of the reward (`RewardOptions`).
    """
    try:
        check_options(target, options.get_options(), name=name)
    except ConfigError as error:
        common_keys = ", ".join(key for key in type(options).model_fields if key != "use")
        raise ConfigError(f"{error} Every reward has {common_keys}.") from None


def _check_tiers(scenario: Scenario) -> None:
    """Raise ConfigError if the tiers of a table do not fit its rows."""
    setup = make_run_setup(scenario)
    specs = setup.make_table_specs()
    for name, tiers in setup.tiers.items():
        try:
            TierSettings.from_settings(specs[name], tiers).check(specs[name])
        except ConfigError as error:
            raise ConfigError(f"sparse.tables.{name}.tiers: {error}") from None


def check_data(scenario: Scenario, folder: Path) -> list[str]:
    """Read and split the data, and check them against the scenario.

    Of data that are prepared on disk, only a sample is read.

    Args:
        scenario: A scenario that `check_definition` accepts.
        folder: The folder that relative paths in the scenario start from.

    Returns:
        Warnings about the data, one sentence each.

    Raises:
        ConfigError: A column that the scenario names is missing.
        DataError: The tables cannot be read, or contain too few users, items or events.
    """
    warm_start = find_warm_start(scenario)
    reward_columns = _list_reward_columns(scenario, folder)
    data = make_data_setup(scenario, folder, warm_start and warm_start.known)
    if data.is_prepared_on_disk():
        return _check_sample(scenario, data, folder, reward_columns)
    seq, items = data.build()
    check_sequences(seq, data)
    _check_reward_columns(reward_columns, items.column_names, scenario.data.columns)
    _check_stage_columns(scenario, items.column_names)
    scenario.model.spec.check_columns(scenario, seq.feature_columns, items.schema)
    if scenario.model.spec.makes_lists:
        check_tokenizer(items, data.tokenizer, folder)
    setups = make_stage_setups(scenario, users=len(seq), events=int((seq.split == TRAIN).sum()))
    check_validation_interval(scenario, {name: setup.steps for name, setup in setups.items()})
    for name, stage in scenario.stages.items():
        stage.kind.check_data(name, stage, seq)
    profile = measure_profile(seq.offsets, seq.item, seq.time, len(items))
    return list(list_data_warnings(profile, data.options.split, get_feature_dims(scenario)))


def _list_reward_columns(scenario: Scenario, folder: Path) -> list[tuple[str, str]]:
    """Return (name of the reward, column) for each column of the items that a reward reads, without joined columns."""
    joined_columns = StoreJoins(scenario.data.join).names
    return [
        (name, column)
        for _, name, options in list_reward_options(scenario)
        for column in list_columns(find_reward(options.use or name, folder, name=name))
        if column not in joined_columns
    ]


def _check_sample(
    scenario: Scenario, data: DataSetup, folder: Path, reward_columns: Sequence[tuple[str, str]]
) -> list[str]:
    """Check one row group of the events and the columns of the items; the tokenise stage checks the rest when it reads it.

    Returns:
        No warnings, as a sample does not show them.
    """
    interactions, items = data.sample_tables()
    _check_reward_columns(reward_columns, items.names, scenario.data.columns)
    _check_stage_columns(scenario, items.names)
    scenario.model.spec.check_columns(scenario, interactions.column_names, items)
    if scenario.model.spec.makes_lists:
        check_tokenizer(items.empty_table(), data.tokenizer, folder)
    return []


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


def _check_stage_columns(scenario: Scenario, item_columns: Sequence[str]) -> None:
    """Raise ConfigError if a stage reads a column that the items lack."""
    for name, stage in scenario.stages.items():
        for column in set(stage.kind.list_item_columns(stage)) - set(item_columns):
            raise ConfigError(
                f"stages.{name}.column: items have no column {column!r}; they have {', '.join(item_columns)}."
                f"{suggest_sentence(column, item_columns)}"
            )
