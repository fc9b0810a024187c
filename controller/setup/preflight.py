"""Checks of a scenario and its data, in the order in which all commands make them, before a process is started.

There are three levels:

1. The scenario alone (`check_scenario`), which `plan` checks.
2. The files of this machine (`check_files`), which `nonet plan` and `nonet submit` check too.
3. What is elsewhere, such as URIs of tables and networked stores, which only a run checks (`check`, `check_resumed`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path

from nonet.addresses import check_readable, is_address
from nonet.controller.cluster import Env
from nonet.controller.plan import derive_model_size, format_bytes
from nonet.controller.record import RunFolder
from nonet.controller.record.tracking.kinds import TRACKERS
from nonet.controller.scenario import (
    LIBRARY,
    Scenario,
    check_reward,
    check_scenario,
    is_own_code,
)
from nonet.controller.setup.data_checks import check_data
from nonet.controller.setup.file_checks import FileChecks
from nonet.controller.setup.own_files import read_copies
from nonet.controller.setup.worker_setup import (
    list_reward_options,
    load_between_class,
    make_run_setup,
    make_source_options,
)
from nonet.errors import ConfigError
from nonet.plugins import PluginFiles, parse_file
from nonet.rl.rewards import find_reward, list_columns, load_reward
from nonet.samples.stores import StoreJoins, StoreNotFoundError, open_store

_MAX_TABLE_BYTES = 1 << 28  # of larger tables, a plan reads a sample, so that it takes seconds


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
    """Check everything that a resumed run needs, except for its tables, which a run with a checkpoint has read.

    Args:
        scenario: The scenario of the run.
        run: The folder of the run, with copies of the user's own files.

    Raises:
        ConfigError: A key is wrong, this version cannot run it, or a copy was changed.
        StoreError: A store cannot be read.
    """
    check_scenario(scenario)
    with closing(StoreJoins(scenario.data.join)) as joins:
        _check_definition(scenario, read_copies(run), joins, FileChecks())


def check_free_space(scenario: Scenario, run: RunFolder) -> None:
    """Check that the disk of a run's folder has room for the dense part of one checkpoint.

    Raises:
        ConfigError: It has less than the weights and one moment of the optimizer take.
    """
    size = derive_model_size(scenario)
    needed_bytes = size.learned * (size.weight_bytes + 4.0)
    free_bytes = shutil.disk_usage(next(path for path in (run.path, *run.path.parents) if path.exists())).free
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"{run.path} has {format_bytes(free_bytes)} free, and a checkpoint of the model takes at least "
            f"{format_bytes(needed_bytes)}; make room, or name a folder on another disk with --run-dir"
        )


def _check_all_files(scenario: Scenario, folder: Path, checks: FileChecks) -> FileChecks:
    """Check the files and addresses of a scenario: first those that define the run, then its data."""
    files = PluginFiles(str(folder))
    with closing(_select_joins(scenario, checks)) as joins:
        reward_columns = _check_definition(scenario, files, joins, checks)
        source = scenario.data.source
        if checks.accept_addresses("data.source", source.get_options()):
            source_options = make_source_options(scenario)
            source.spec.check({key: value for key, value in source_options.items() if key != "use"})
        check_data(scenario, folder, joins, checks, reward_columns)
    return checks


def _check_definition(
    scenario: Scenario, files: PluginFiles, joins: StoreJoins, checks: FileChecks
) -> list[tuple[str, str]]:
    """Check the packages, the model's files, rewards, steps between rollout and rewards, and stores of a scenario.

    Returns:
        Pairs (name of a reward, column of the items that it reads).
    """
    _check_engine(scenario, checks)
    _check_trackers(scenario, checks)
    _check_model_packages(scenario, checks)
    model = scenario.model
    if checks.accept_addresses("model", model.get_options()):
        model.spec.check_files(scenario)
    reward_columns = list(_check_rewards(scenario, files, checks))
    for stage_name, stage in scenario.stages.items():
        for step in getattr(stage, "between", ()):
            key = f"stages.{stage_name}.between"
            if not isinstance(step.use, str) or _has_code(key, step.use, files, checks):
                load_between_class(step, files, where=key)
    _check_joins(scenario, joins, checks)
    stored = scenario.data.sequences
    if stored is not None and checks.accept_address("data.sequences.use", stored.use):
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
        opens_options = checks.accept_addresses(key, options.get_options())
        if isinstance(use, str) and not (
            checks.accept_address(key, use) and _has_code(key, use, files, checks)
        ):
            continue
        model = options.get_options().get("model")
        if isinstance(model, str) and opens_options and not (isinstance(use, str) and is_address(use)):
            check_readable(model, f"{key}.model")
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


def _check_model_packages(scenario: Scenario, checks: FileChecks) -> None:
    """Raise ConfigError if a package of the model is not installed where the run will be, in a pool without own packages."""
    model = scenario.model
    packages = model.spec.list_packages(model.get_options())
    missing = [(name, extra) for name, extra in packages.items() if find_spec(name) is None]
    for role in ("trainer", "evaluator") if missing else ():
        pool, (package, extra) = scenario.find_pool(role), missing[0]
        env = (pool and pool.env) or Env()
        if env.python or env.pip or env.image:
            continue
        if not checks.allows_absent:
            raise ConfigError(
                f"model.use: {package} is not installed for the {role}: pip install 'nonet[{extra}]', or give the role a pool "
                "whose env.python has it"
            )
        checks.unchecked.append(f"model.use: the package {package} for the {role}")


def _check_trackers(scenario: Scenario, checks: FileChecks) -> None:
    """Raise ConfigError if the package of a tracker is not installed where the run will be."""
    for name, tracker in (scenario.tracking or {}).items():
        package = tracker.spec.needs
        if not package or find_spec(package) is not None:
            continue
        if not checks.allows_absent:
            extra = f"'nonet[{tracker.use}]'" if tracker.use in TRACKERS.list_shipped() else package
            raise ConfigError(f"tracking.{name}: {package} is not installed: pip install {extra}")
        checks.unchecked.append(f"tracking.{name}: the package {package}")


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
        {name: join for name, join in joins if checks.accept_address(f"data.join.{name}.use", join.use)}
    )
