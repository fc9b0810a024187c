"""How runs are named and found.

On command lines, RUN is a folder, an id `<name>-<yyyymmdd-hhmmss>-<4 hex>` under `$NONET_RUNS` (by default ./runs, and
~/nonet-runs for Ray jobs), a unique prefix of an id, or `last`. A run in a folder of several runs is named by both names, such
as `seeds/seed-7`. A stored run is named by its address, such as s3://bucket/runs/ID; once this machine has a local copy of
it, its id is sufficient.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from nonet.controller.record.run_folder import RunFolder, find_runs_root, is_running
from nonet.errors import ConfigError, StorageError
from nonet.storage import (
    OPENING_TIMEOUT_S,
    fetch_known,
    find_copy,
    find_local_runs,
    has_run,
    is_storage_address,
    join_address,
    make_local_folder,
    mount_view,
    open_storage,
    read_address,
)
from nonet.trust import guard_folder

LAST = "last"
"""The name that stands for the newest run."""
_SHOWN_RUNS = 8  # number of runs that an error lists


def find_run(run: str | Path) -> RunFolder:
    """Return the run that RUN names; `last` is the newest one directly under the root of all runs.

    Raises:
        ConfigError: There is no such run, or several, and the message lists runs that there are; or Nonet 0.1 wrote the run.
    """
    if is_storage_address(str(run)):
        return _open_stored(str(run).rstrip("/"))
    for folder in _list_places(run):
        if _is_run(folder):
            return _open_run(RunFolder(folder.absolute()))
    known_runs = list_runs()
    if str(run) == LAST and known_runs:
        return _open_run(known_runs[-1])
    matching = [known for known in known_runs if known.id.startswith(str(run))]
    if not matching:
        if group := find_group(run):
            names = _join_names(list_grouped_runs(group))
            raise ConfigError(f"{run} is a folder of several runs; name one of them: {names}")
        known_runs = list_all_runs()
        matching = [known for known in known_runs if name_run(known).startswith(str(run))]
    if len(matching) == 1:
        return _open_run(matching[0])
    problem = f"{len(matching)} runs start with {str(run)!r}" if matching else f"there is no run {str(run)!r}"
    raise ConfigError(f"{problem} under {find_runs_root()}; the newest runs: {_join_names(known_runs)}")


def find_stored_run(storage_address: str, run_id: str) -> RunFolder | None:
    """Return the run of an id in an object storage; None if there is none.

    Raises:
        ConfigError: The storage cannot be read.
    """
    address = join_address(storage_address, run_id)
    try:
        return find_run(address) if has_run(address) else None
    except StorageError as error:
        raise ConfigError(f"storage: {error}") from None


def list_stored_runs(place: str) -> list[RunFolder]:
    """Return the runs at an address of object storage, oldest first, with only the files that describe them.

    Raises:
        ConfigError: The storage cannot be read, or has no run at the address.
    """
    names, runs = _fetch_descriptions(place)
    if not runs:
        raise ConfigError(
            f"there is no run at {place}; it has: {', '.join(names[:_SHOWN_RUNS]) or 'nothing'}"
        )
    return runs


def list_runs_by_name(scenario_name: str, storage_address: str | None) -> Iterator[RunFolder]:
    """Yield the runs of scenarios of a name, newest first.

    Args:
        scenario_name: The name.
        storage_address: The object storage that the runs are in; None for runs directly under the root of all runs.

    Raises:
        ConfigError: The storage cannot be read.
    """
    if storage_address is None:
        runs = [run for run in list_runs() if not read_address(run.path)]
    else:
        _, runs = _fetch_descriptions(storage_address)
    # A run stores its scenario as YAML with one key a line; a name is one word.
    line = re.compile(rf"^name: *['\"]?{re.escape(scenario_name)}['\"]? *$", re.MULTILINE)
    return (
        run
        for run in reversed(runs)
        if line.search(run.scenario.read_text(encoding="utf-8", errors="replace"))
    )


def find_last_finished(scenario_name: str, storage_address: str | None) -> RunFolder | None:
    """Return the newest finished run of `list_runs_by_name`; None if there is none."""
    return next(
        (run for run in list_runs_by_name(scenario_name, storage_address) if run.report.exists()), None
    )


def _fetch_descriptions(place: str) -> tuple[list[str], list[RunFolder]]:
    """Return the names at an address of object storage, and the runs among them, oldest first."""
    try:
        names = open_storage(place, retry_timeout_s=OPENING_TIMEOUT_S).list_names()
        runs = [run for name in names if (run := _fetch_description(place, name)) is not None]
    except StorageError as error:
        raise ConfigError(f"storage: {error}") from None
    return names, _sort_by_start([run.path for run in runs])


def _fetch_description(place: str, run_id: str) -> RunFolder | None:
    """Fetch what lists show of a stored run; return None if there is no run of this id."""
    folder = fetch_known(join_address(place, run_id))
    return folder and RunFolder(folder)


def find_group(name: str | Path) -> Path | None:
    """Return the folder of several runs that a path, or a path under the root of all runs, names; None if there is none."""
    groups = (folder for folder in _list_places(name) if not _is_run(folder) and list_grouped_runs(folder))
    folder = next(groups, None)
    return folder and folder.absolute()


def name_run(run: RunFolder) -> str:
    """Return the name by which `find_run` finds a run: its path under the root of all runs, or else its whole path."""
    root = find_runs_root()
    if read_address(run.path):
        return run.id
    return str(run.path.relative_to(root) if run.path.is_relative_to(root) else run.path)


def get_location(run: RunFolder) -> str:
    """Return the address of a stored run, or the path of another one, by either of which `find_run` finds it."""
    return read_address(run.path) or str(run.path)


def list_runs() -> list[RunFolder]:
    """Return the runs directly under the root of all runs, in the order in which their scenarios were written."""
    return _sort_by_start([*find_runs_root().glob("*"), *find_local_runs()])


def list_grouped_runs(folder: Path) -> list[RunFolder]:
    """Return the runs in a folder that `--seeds`, `tune`, `tradeoff` or `board` filled, in the order of `list_runs`."""
    return _sort_by_start([*folder.glob("*"), *folder.glob("trials/*/*"), *folder.glob("*/seed-*")])


def list_all_runs() -> list[RunFolder]:
    """Return all runs under the root of all runs, also those in folders of several runs, in the order of `list_runs`."""
    folders = [*find_runs_root().glob("*"), *find_local_runs()]
    groups = [folder for folder in folders if not _is_run(folder)]
    return _sort_by_start([*folders, *(run.path for group in groups for run in list_grouped_runs(group))])


def _list_places(name: str | Path) -> list[Path]:
    """Return the folders that a name may stand for: itself as a path, a folder under the root of all runs, a local copy."""
    copies = [folder for folder in find_local_runs() if folder.name == str(name)]
    return [Path(name), find_runs_root() / name, *copies] if str(name) else []


def _open_run(run: RunFolder) -> RunFolder:
    """Return a run; of a stored one, a view of its newest state, unless the folder is mounted already.

    Raises:
        ConfigError: The storage cannot be read, or has no such run; or Nonet 0.1 wrote the run.
    """
    address = None if find_copy(run.path) else read_address(run.path)
    if address:
        return _open_stored(address)
    guard_folder(run.path)
    run.check_version()
    return run


def _open_stored(address: str) -> RunFolder:
    """Return a view of the newest state of a stored run; in an outage of the storage, the folder of a run that works here.

    Raises:
        ConfigError: The storage cannot be read, or has no such run.
    """
    try:
        run = RunFolder(mount_view(address, OPENING_TIMEOUT_S).path)
    except StorageError as error:
        place, _, run_id = address.rpartition("/")
        work_folder = RunFolder(make_local_folder(place, run_id))
        if is_running(work_folder):
            guard_folder(work_folder.path)
            return work_folder
        raise ConfigError(f"storage: {error}") from None
    guard_folder(run.path, is_view=True)
    return run


def _is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run."""
    return (folder / "scenario.yaml").is_file()


def _sort_by_start(folders: Iterable[Path]) -> list[RunFolder]:
    """Return the folders that are runs, in the order in which they were started."""
    return sorted((RunFolder(folder) for folder in folders if _is_run(folder)), key=read_start_time)


def read_start_time(run: RunFolder) -> float:
    """Return when a run was started, in unix seconds; a local copy of a stored run knows it by its status only."""
    started_s = None
    with suppress(ConfigError):  # a damaged status is reported where it is needed
        started_s = run.read_status().get("started") if read_address(run.path) else None
    return started_s if isinstance(started_s, int | float) and started_s else run.scenario.stat().st_mtime


def _join_names(runs: list[RunFolder]) -> str:
    """Return the names of the newest of some runs, for an error."""
    names = [name_run(run) for run in runs[-_SHOWN_RUNS:]]
    return ("..., " if len(runs) > _SHOWN_RUNS else "") + ", ".join(names) if names else "none"
