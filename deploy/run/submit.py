"""Submit a scenario as a Ray job whose working directory is the scenario's folder and whose entry point is `nonet run`.

All files that the scenario names are sent, even if `.gitignore` excludes them: tables, stores, models,
rewards, and the files beside the rewards' files. Of the other files, those are sent that Ray would upload.
Before the job starts the run, it compares the checksums of all named files.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nonet.controller.scenario import (
    LIBRARY,
    check_runnable,
    check_scenario,
    find_scenario,
    load_scenario,
    read_document,
    to_document,
)
from nonet.controller.setup import find_files_beside, list_named_files
from nonet.deploy.run.api import ScenarioFile
from nonet.deploy.run.planning import check_files
from nonet.errors import ConfigError, NonetError

_POLL_S = 2.0  # between two reads of the job's log
_CHECKSUM_FILE = "submitted-files.json"  # sha256 by path of the files that the scenario names
# Names that are never sent. If the last two were sent, Ray would again exclude the files that they name.
_NEVER_SENT = (".git", "__pycache__", ".gitignore", ".rayignore")


def submit_job(source: str, address: str, changes: list[str], wait: bool) -> int:
    """Submit a job and optionally follow its log.

    Args:
        source: A scenario's file or the name of a shipped one.
        address: The address of the cluster's dashboard.
        changes: Changes of the scenario, `a.b=c`.
        wait: Whether to follow the log to the end.

    Returns:
        The job's exit code; 0 when not waiting.

    Raises:
        ConfigError: The scenario names a file that cannot be sent.
        NonetError: The cluster does not accept the job.
    """
    from ray.job_submission import JobStatus, JobSubmissionClient

    path = find_scenario(source)
    scenario, folder = load_scenario(path, changes)
    check_scenario(scenario)
    check_runnable(scenario)
    check_files(ScenarioFile(scenario, folder), allows_absent=True)  # the job checks the rest
    scenario_files = sorted(
        _find_named_files(to_document(scenario), path.parent)
        | _find_files_beside(scenario, path.parent)
        | _find_parents(path)
    )
    try:
        client = JobSubmissionClient(address)
        options = " ".join(f"--set {shlex.quote(change)}" for change in changes)
        with tempfile.TemporaryDirectory(prefix="nonet-submit-") as staging_dir:
            stage_files(path.parent, path, scenario_files, Path(staging_dir))
            job_id = client.submit_job(
                entrypoint=f"python -m nonet.deploy.run.submit && nonet run {shlex.quote(path.name)} {options}".strip(),
                runtime_env={"working_dir": staging_dir},
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise NonetError(f"cannot submit to {address}: {' '.join(str(error).split())}") from None
    print(f"job {job_id}", flush=True)
    printed_chars = 0
    while wait:
        log, status = client.get_job_logs(job_id), client.get_job_status(job_id)
        sys.stdout.write(log[printed_chars:])
        sys.stdout.flush()
        printed_chars = len(log)
        if status.is_terminal():
            return 0 if status == JobStatus.SUCCEEDED else 1
        time.sleep(_POLL_S)
    return 0


def stage_files(folder: Path, scenario: Path, scenario_files: list[Path], staging_dir: Path) -> None:
    """Link or copy the files of a job into a folder, and list the checksums of the files that the scenario names.

    Args:
        folder: The scenario's folder.
        scenario: The scenario's file.
        scenario_files: Files below the folder that the scenario names.
        staging_dir: An empty folder.
    """
    for file in {*_iterate_files(folder), *scenario_files, scenario}:
        staged_file = staging_dir / file.relative_to(folder)
        staged_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file.resolve(), staged_file)
        except OSError:  # another filesystem
            shutil.copyfile(file, staged_file)
    checksums = {str(file.relative_to(folder)): _hash_file(file) for file in (*scenario_files, scenario)}
    (staging_dir / _CHECKSUM_FILE).write_text(json.dumps(checksums), encoding="utf-8")


def check_arrived(folder: Path) -> None:
    """Check in the job that the files that the scenario names have arrived unchanged.

    Args:
        folder: The job's working directory.

    Raises:
        ConfigError: A file is missing or differs.
    """
    checksums: dict[str, str] = json.loads((folder / _CHECKSUM_FILE).read_text(encoding="utf-8"))
    wrong_names = [
        name
        for name, sha256 in checksums.items()
        if not (folder / name).is_file() or _hash_file(folder / name) != sha256
    ]
    if wrong_names:
        raise ConfigError(
            f"{len(wrong_names)} of {len(checksums)} files that the scenario names did not arrive completely, "
            f"the first is {wrong_names[0]}; "
            "submit again"
        )


def _iterate_files(folder: Path) -> Iterator[Path]:
    """Yield the files that Ray uploads from a working directory: all that .gitignore and .rayignore do not exclude."""
    from ray._private.runtime_env.packaging import get_excludes_from_ignore_files

    def walk(path: Path, excludes: list[Any]) -> Iterator[Path]:
        """Yield the files below a folder; `excludes` are predicates of the ignore files of the folders above."""
        excludes = [*excludes, *get_excludes_from_ignore_files(path, include_gitignore=True)]
        for child in sorted(path.iterdir()):
            if child.name in _NEVER_SENT or any(is_excluded(child) for is_excluded in excludes):
                continue
            if child.is_dir():
                yield from walk(child, excludes)
            elif child.is_file():
                yield child

    yield from walk(folder.absolute(), [])


def _find_named_files(value: Any, folder: Path) -> set[Path]:
    """Return the files below a folder that a scenario's texts name, including the files of folders and patterns.

    Args:
        value: A part of the scenario's document: a map, a list, a text or another value.
        folder: The scenario's folder.

    Raises:
        ConfigError: A relative path leads out of the folder, whose files alone are sent.
    """
    if isinstance(value, dict):
        return set().union(*(_find_named_files(part, folder) for part in value.values()))
    if isinstance(value, list):
        return set().union(*(_find_named_files(part, folder) for part in value))
    if not isinstance(value, str) or not value or "://" in value or "\n" in value or os.path.isabs(value):
        return set()
    pattern = value.partition(".py:")[0] + (".py" if ".py:" in value else "")  # `file.py:NAME` names a file
    matches = glob.glob(str(Path(glob.escape(str(folder))) / pattern), recursive=True)
    root = folder.absolute()
    files: set[Path] = set()
    for match in matches:
        path = Path(os.path.normpath(Path(match).absolute()))
        if path == root:
            continue
        if not path.is_relative_to(root):
            raise ConfigError(
                f"{value} is outside of {folder}, and only files in that folder are sent with the job; move it there, or give an "
                "absolute path that all nodes of the cluster have"
            )
        files |= {path} if path.is_file() else {child for child in path.rglob("*") if child.is_file()}
    return files


def _find_files_beside(scenario: Any, folder: Path) -> set[Path]:
    """Return the files of the scenario's folder that are beside the Python files that a scenario names."""
    root = folder.absolute()
    files_beside = [
        file_beside
        for named_file in list_named_files(scenario)
        if (root / named_file).is_file()
        for file_beside in find_files_beside(root / named_file)
    ]
    return {path for path in files_beside if path.is_relative_to(root)}


def _find_parents(path: Path) -> set[Path]:
    """Return the files that a scenario extends, except shipped ones, which the cluster has.

    Raises:
        ConfigError: One is outside of the scenario's folder, whose files alone are sent.
    """
    parents = {parent for parent in read_document(path).parents if parent.parent != LIBRARY}
    for parent in sorted(parents):
        if not parent.is_relative_to(path.parent):
            raise ConfigError(
                f"extends: {parent} is outside of {path.parent}, and only files in that folder are sent with the job; "
                "move it there"
            )
    return parents


def _hash_file(path: Path) -> str:
    """Return the sha256 of a file's content as hexadecimal digits."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


if __name__ == "__main__":  # in the job, before its run
    try:
        check_arrived(Path.cwd())
    except ConfigError as error:
        print(f"nonet: {error}", file=sys.stderr)
        sys.exit(2)
