"""Checks of a scenario and its data, in the order in which all commands make them, before a process is started.

There are three levels:

1. The scenario alone (`check_scenario`), which `plan` checks.
2. The files of this machine (`check_files`), which `nonet plan` and `nonet submit` check too.
3. What is elsewhere, such as URIs of tables and networked stores, which only a run checks (`check`, `check_resumed`).
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from nonet.controller.cluster import Env
from nonet.controller.plan import get_feature_dims
from nonet.controller.record import RunFolder
from nonet.controller.scenario import (
    LIBRARY,
    Scenario,
    StageOptions,
    check_reward,
    check_runnable,
    check_scenario,
    check_validation_interval,
    is_own_code,
)
from nonet.controller.scenario.settings import describe_unknown_items, list_data_warnings
from nonet.controller.setup.from_run import find_warm_start
from nonet.controller.setup.own_files import read_copies
from nonet.controller.setup.run_files import make_data_setup
from nonet.controller.setup.worker_setup import (
    list_reward_options,
    load_between_class,
    make_run_setup,
    make_source_options,
    make_stage_setups,
)
from nonet.errors import ConfigError
from nonet.models.tokenizer import check_tokenizer
from nonet.plugins import PluginFiles, parse_file
from nonet.rl.rewards import describe_missing_column, find_reward, list_columns, load_reward
from nonet.samples.profiles import measure_profile
from nonet.samples.sequences import TRAIN, Sequences
from nonet.samples.stores import StoreJoins, StoreNotFoundError, open_store
from nonet.samples.tables import find_parquet
from nonet.suggest import suggest_sentence
from nonet.workers.roles import BuiltData, DataSetup, check_sequences

_MAX_TABLE_BYTES = 1 << 28  # of larger tables, a plan reads a sample, so that it takes seconds


@dataclass
class FileChecks:
    """Which files and addresses of a scenario are opened, and what the checks of them found.

    Attributes:
        opens_addresses: Whether addresses of other machines are opened, such as URIs of tables and networked stores.
        allows_absent: Whether an absolute path that does not exist here may exist where the run will be.
        max_table_bytes: The size above which only the schema and one row group of a table are read; None for no limit.
        warnings: Warnings about joined stores and about the data, one sentence each.
        unchecked: What was not opened, each as "key: value".
    """

    opens_addresses: bool = True
    allows_absent: bool = False
    max_table_bytes: int | None = None
    warnings: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    _newest_tables: tuple[DataSetup, BuiltData] | None = None

    def build_sequences(self, data: DataSetup) -> BuiltData:
        """Return the sequences and items of data, which are read once for successive scenarios with the same data."""
        if self._newest_tables is None or self._newest_tables[0] != data:
            self._newest_tables = (data, data.build_with_facts())
        return self._newest_tables[1]

    def can_open(self, key: str, address: str) -> bool:
        """Return whether an address or a path is opened from here; if not, add it to `unchecked`.

        Args:
            key: The key of the scenario that has the address.
            address: A URI, a path, a pattern of paths, `lmdb:FOLDER` or `file.py:NAME`.
        """
        path = address.removeprefix("lmdb:")
        path = parse_file(path) or path
        is_absent = self.allows_absent and Path(path).is_absolute() and not glob.glob(path)
        if self.opens_addresses or not ("://" in address or is_absent):
            return True
        self.unchecked.append(f"{key}: {address}")
        return False

    def can_open_all(self, key: str, options: Mapping[str, Any]) -> bool:
        """Return whether all texts among options are opened from here; those that are not are added to `unchecked`."""
        texts = {name: value for name, value in options.items() if isinstance(value, str)}
        are_opened = [self.can_open(f"{key}.{name}", value) for name, value in texts.items()]
        return all(are_opened)


def check(scenario: Scenario, folder: Path, checks: FileChecks | None = None) -> list[str]:
    """Check everything that a run of a scenario needs, before any process is started.

    Args:
        scenario: The scenario.
        folder: The folder that relative paths in the scenario start from.
        checks: The checks of similar scenarios, to which the warnings are added; None if there are none.

    Returns:
        Warnings about the data, one sentence each.

    Raises:
        ConfigError: A key is wrong, or this version cannot run it.
        DataError: The tables cannot be read, or contain too few users, items or events.
        StoreError: A store cannot be read.
    """
    check_scenario(scenario)
    check_runnable(scenario)
    return _check_all_files(scenario, folder, checks or FileChecks()).warnings


def check_files(scenario: Scenario, folder: Path, *, allows_absent: bool = False) -> FileChecks:
    """Check the files of this machine that a scenario names, and open no address of another machine.

    Args:
        scenario: A scenario that `check_scenario` accepts.
        folder: The folder that relative paths in the scenario start from.
        allows_absent: Whether an absolute path that does not exist here may exist where the run will be.

    Returns:
        The warnings, and what was not checked.

    Raises:
        ConfigError: A key is wrong.
        DataError: The tables cannot be read, or contain too few users, items or events.
        StoreError: A store cannot be read.
    """
    checks = FileChecks(opens_addresses=False, allows_absent=allows_absent, max_table_bytes=_MAX_TABLE_BYTES)
    return _check_all_files(scenario, folder, checks)


def check_resumed(scenario: Scenario, run: RunFolder) -> None:
    """Check everything that a resumed run needs; not its tables, which a run with a checkpoint has read.

    Args:
        scenario: The scenario of the run.
        run: The folder of the run, with copies of the user's own files.

    Raises:
        ConfigError: A key is wrong, this version cannot run it, or a copy was changed.
        StoreError: A store cannot be read.
    """
    check_scenario(scenario)
    check_runnable(scenario)
    with closing(StoreJoins(scenario.data.join)) as joins:
        _check_definition(scenario, read_copies(run), joins, FileChecks())


def _check_all_files(scenario: Scenario, folder: Path, checks: FileChecks) -> FileChecks:
    """Check the files and addresses of a scenario: first those that define the run, then its data."""
    files = PluginFiles(str(folder))
    with closing(_select_joins(scenario, checks)) as joins:
        reward_columns = _check_definition(scenario, files, joins, checks)
        source = scenario.data.source
        if checks.can_open_all("data.source", source.get_options()):
            source_options = make_source_options(scenario)
            source.spec.check({key: value for key, value in source_options.items() if key != "use"})
        _check_data(scenario, folder, joins, checks, reward_columns)
    return checks


def _check_definition(
    scenario: Scenario, files: PluginFiles, joins: StoreJoins, checks: FileChecks
) -> list[tuple[str, str]]:
    """Check the packages, the model's files, rewards, steps between rollout and rewards, and stores of a scenario.

    Returns:
        Pairs (name of a reward, column of the items that it reads).
    """
    _check_engine(scenario, checks)
    model = scenario.model
    if checks.can_open_all("model", model.get_options()):
        model.spec.check_files(scenario)
    reward_columns = list(_check_rewards(scenario, files, checks))
    for stage_name, stage in scenario.stages.items():
        for step in getattr(stage, "between", ()):
            key = f"stages.{stage_name}.between"
            if not isinstance(step.use, str) or _has_code(key, step.use, files, checks):
                load_between_class(step, files, where=key)
    _check_joins(scenario, joins, checks)
    stored = scenario.data.sequences
    if stored is not None and checks.can_open("data.sequences.use", stored.use):
        with suppress(StoreNotFoundError):  # the tokenise stage creates it
            open_store(stored.use, **stored.options).close()
    for name in sorted({pool for _, pool in scenario.list_pool_names()} & set(scenario.pools)):
        _check_environment(f"pools.{name}.env", scenario.pools[name].env or Env(), checks)
    return reward_columns


def _is_ray_local() -> bool:
    """Return whether runs start Ray on this machine, so that all workers are here."""
    return os.environ.get("RAY_ADDRESS", "local") == "local"


def _check_environment(key: str, env: Env, checks: FileChecks) -> None:
    """Raise ConfigError if the interpreter of a pool does not exist, where all workers are on this machine.

    Args:
        key: The key of the environment in the scenario.
        env: The environment.
        checks: The checks, to which interpreters and images are added that may be on other machines.
    """
    is_elsewhere = checks.allows_absent or not _is_ray_local()
    if env.python and not is_elsewhere and shutil.which(env.python) is None:
        raise ConfigError(
            f"{key}.python: there is no executable {env.python}; give the path of an interpreter"
        )
    if not checks.opens_addresses:
        texts = {"image": env.image, "python": env.python if is_elsewhere else None}
        checks.unchecked += [f"{key}.{name}: {value}" for name, value in texts.items() if value]


def _check_rewards(scenario: Scenario, files: PluginFiles, checks: FileChecks) -> Iterator[tuple[str, str]]:
    """Check the rewards and their options; those that are shipped are constructed, which checks the folders that they name.

    Yields:
        Pairs (name of the reward, column that it reads), without the joined columns.
    """
    joined_columns = StoreJoins(scenario.data.join).names
    for stage, name, options in list_reward_options(scenario):
        key, use = f"stages.{stage}.rewards.{name}", options.use or name
        opens_options = checks.can_open_all(key, options.get_options())
        if isinstance(use, str) and not (checks.can_open(key, use) and _has_code(key, use, files, checks)):
            continue
        target = find_reward(files.make_absolute(use) if files.copies else use, files.folder, name=name)
        check_reward(target, name, options)
        columns = list_columns(target)
        if isinstance(use, str) and "://" in use:
            columns = options.get_options().get("columns", ())
            check_reachable = getattr(target, "check_reachable", None)
            if check_reachable is not None and _is_ray_local():  # workers elsewhere may reach other servers
                check_reachable(f"reward {name!r}", options.timeout_s)
        elif isinstance(use, str) and not is_own_code(use) and opens_options:
            reward = load_reward(use, options=options.get_options(), name=name)
            columns = (*reward.columns, *getattr(reward, "opened_columns", ()))
        yield from ((name, column) for column in columns if column not in joined_columns)


def _has_code(key: str, use: str, files: PluginFiles, checks: FileChecks) -> bool:
    """Return whether the user's own code is on this machine, as far as it may be on another one only.

    The files of a shipped scenario are the user's, who has them beside a copy of the scenario.
    """
    file = parse_file(use)
    if not is_own_code(use) or not checks.allows_absent:
        return True
    if file is None:
        is_absent = find_spec(use.partition(":")[0].partition(".")[0]) is None
    else:
        is_shipped = Path(files.folder).resolve() == LIBRARY.resolve()
        is_absent = (is_shipped or Path(file).is_absolute()) and not files.resolve_path(file).is_file()
    if is_absent:
        checks.unchecked.append(f"{key}: {use}")
    return not is_absent


def _check_engine(scenario: Scenario, checks: FileChecks) -> None:
    """Raise ConfigError if the package of the trainers' engine is not installed where the run will be."""
    engine = scenario.roles["trainer"].engine if "trainer" in scenario.roles else None
    package = engine.spec.needs if engine is not None else None
    if engine is None or package is None or find_spec(package) is not None:
        return
    if checks.allows_absent:
        checks.unchecked.append(f"roles.trainer.engine: the package {package}")
        return
    raise ConfigError(f"roles.trainer.engine: {package} is not installed: pip install 'nonet[{engine.use}]'")


def _check_joins(scenario: Scenario, joins: StoreJoins, checks: FileChecks) -> None:
    """Check that the columns of joined stores fit the sparse tables.

    Args:
        scenario: The scenario.
        joins: The joins whose stores are opened.
        checks: The checks, to which the warnings of the stores are added.

    Raises:
        ConfigError: A column with a sparse table is a list, or neither whole numbers nor text.
        StoreError: A store cannot be read.
    """
    table_by_feature = make_run_setup(scenario).features
    column_kinds = joins.get_kinds()  # without columns that are lists
    for name, kind in column_kinds.items():
        # Text is int64 too, by its hash; a model of single events rounds other numbers.
        if name in table_by_feature and kind != "int64" and scenario.model.spec.makes_lists:
            raise ConfigError(
                f"sparse.tables.{table_by_feature[name]}: the joined column {name!r} is {kind}; a table has rows of ids, "
                "whole numbers or text"
            )
    for name in set(joins.names) & set(table_by_feature) - set(column_kinds):
        raise ConfigError(
            f"sparse.tables.{table_by_feature[name]}: the joined column {name!r} is a list; models read one id per event"
        )
    checks.warnings += joins.list_warnings()


def _select_joins(scenario: Scenario, checks: FileChecks) -> StoreJoins:
    """Return the joins whose stores are opened from here."""
    joins = scenario.data.join.items()
    return StoreJoins(
        {name: join for name, join in joins if checks.can_open(f"data.join.{name}.use", join.use)}
    )


def _check_data(
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
        find_warm_start(scenario) if init is not None and checks.can_open("init.from", init.source) else None
    )
    reads_tokenizer = checks.can_open_all("tokenizer", scenario.tokenizer.get_options())
    data = make_data_setup(scenario, folder, warm_start and warm_start.known)
    options, labels = data.options, data.labels
    paths = {"interactions": options.interactions, "items": options.items}
    paths |= {"labels.path": labels and labels.path}
    if not checks.can_open_all("data", paths):
        return
    is_sampled = checks.max_table_bytes is not None and any(
        _measure_table(path, key) > checks.max_table_bytes for key, path in paths.items() if path
    )
    if is_sampled or data.is_prepared_on_disk():
        interactions, item_schema = data.sample_tables()
        seq, items, event_columns = None, item_schema.empty_table(), interactions.column_names
    else:
        built = checks.build_sequences(data)
        seq, items = built.sequences, built.items
        if (
            built.unknown is not None and checks.max_table_bytes is not None
        ):  # A run shows this note when it begins.
            note = describe_unknown_items({"unknown_items": built.unknown.to_facts()})
            checks.warnings += [note] if note else []
        event_columns = seq.feature_columns
        check_sequences(seq, data)
        joins.check_ids(np.asarray(items["item_id"][:1]), seq.user_id)
    _check_reward_columns(reward_columns, items.column_names, scenario.data.columns)
    for name, stage in scenario.stages.items():
        _check_stage_columns(name, stage, items.column_names)
        stage.kind.check_items(name, stage, items)
    scenario.model.spec.check_columns(scenario, event_columns, items.schema)
    if scenario.model.spec.makes_lists and reads_tokenizer:
        check_tokenizer(items, data.tokenizer, folder)
    if seq is not None:
        _check_sequence_lengths(scenario, seq)
        profile = measure_profile(seq.offsets, seq.item, seq.time, len(items))
        checks.warnings += list_data_warnings(profile, options.split, get_feature_dims(scenario))


def _check_sequence_lengths(scenario: Scenario, seq: Sequences) -> None:
    """Raise ConfigError if the data give stages too few steps or nothing to learn from."""
    setups = make_stage_setups(scenario, users=len(seq), events=int((seq.split == TRAIN).sum()))
    check_validation_interval(scenario, {name: setup.steps for name, setup in setups.items()})
    for name, stage in scenario.stages.items():
        stage.kind.check_data(name, stage, seq)


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
