"""Submit a scenario as a Ray job whose working directory is the scenario's folder and whose entry point is `nonet run`.

All files that the scenario names are sent, even if `.gitignore` excludes them: tables, stores, models,
rewards, and the files beside them. Of the other files, those are sent that Ray would take. Before it starts
the run, the job compares the checksums of all named files.
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

from nonet.controller.scenario import check_runnable, find_scenario, load_scenario, to_document
from nonet.controller.setup import find_files_beside, list_named_files
from nonet.errors import ConfigError, NonetError

_POLL_S = 2.0
_LIST = "submitted-files.json"
_NEVER = (
    ".git",
    "__pycache__",
    ".gitignore",
    ".rayignore",
)  # with the last two, Ray would again exclude what they name


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
    scenario = load_scenario(path, changes)[0]
    check_runnable(scenario)
    named = sorted(
        _find_named_files(to_document(scenario), path.parent) | _find_files_beside(scenario, path.parent)
    )
    try:
        client = JobSubmissionClient(address)
        options = " ".join(f"--set {shlex.quote(change)}" for change in changes)
        with tempfile.TemporaryDirectory(prefix="nonet-submit-") as staged:
            stage_files(path.parent, path, named, Path(staged))
            job = client.submit_job(
                entrypoint=f"python -m nonet.deploy.run.submit && nonet run {shlex.quote(path.name)} {options}".strip(),
                runtime_env={"working_dir": staged},
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise NonetError(f"cannot submit to {address}: {' '.join(str(error).split())}") from None
    print(f"job {job}", flush=True)
    shown = 0
    while wait:
        log, state = client.get_job_logs(job), client.get_job_status(job)
        sys.stdout.write(log[shown:])
        sys.stdout.flush()
        shown = len(log)
        if state.is_terminal():
            return 0 if state == JobStatus.SUCCEEDED else 1
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
        place = staging_dir / file.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file.resolve(), place)
        except OSError:  # another filesystem
            shutil.copyfile(file, place)
    sums = {str(file.relative_to(folder)): _hash_file(file) for file in (*scenario_files, scenario)}
    (staging_dir / _LIST).write_text(json.dumps(sums), encoding="utf-8")


def check_arrived(folder: Path) -> None:
    """Compare the files that arrived with those that were submitted.

    Args:
        folder: The job's working directory.

    Raises:
        ConfigError: A file is missing or differs.
    """
    sums: dict[str, str] = json.loads((folder / _LIST).read_text(encoding="utf-8"))
    wrong = [
        name
        for name, sha256 in sums.items()
        if not (folder / name).is_file() or _hash_file(folder / name) != sha256
    ]
    if wrong:
        raise ConfigError(
            f"{len(wrong)} of {len(sums)} files that the scenario names did not arrive completely, the first is {wrong[0]}; "
            "submit again"
        )


def _iterate_files(folder: Path) -> Iterator[Path]:
    """Yield the files that Ray takes from a working directory: all that .gitignore and .rayignore do not exclude."""
    from ray._private.runtime_env.packaging import get_excludes_from_ignore_files

    def walk(path: Path, excludes: list[Any]) -> Iterator[Path]:
        excludes = [*excludes, *get_excludes_from_ignore_files(path, include_gitignore=True)]
        for each in sorted(path.iterdir()):
            if each.name in _NEVER or any(excluded(each) for excluded in excludes):
                continue
            if each.is_dir():
                yield from walk(each, excludes)
            elif each.is_file():
                yield each

    yield from walk(folder.absolute(), [])


def _find_named_files(value: Any, folder: Path) -> set[Path]:
    """Return the files below a folder that the text of a scenario names, including files of folders and patterns.

    Raises:
        ConfigError: A relative path leads out of the folder, whose files alone are sent.
    """
    if isinstance(value, dict):
        return set().union(*(_find_named_files(part, folder) for part in value.values()))
    if isinstance(value, list):
        return set().union(*(_find_named_files(part, folder) for part in value))
    if not isinstance(value, str) or not value or "://" in value or "\n" in value or os.path.isabs(value):
        return set()
    text = value.partition(".py:")[0] + (".py" if ".py:" in value else "")
    found = [Path(each) for each in glob.glob(str(Path(glob.escape(str(folder))) / text), recursive=True)]
    root = folder.absolute()
    files: set[Path] = set()
    for path in found:
        inside = Path(os.path.normpath(path.absolute()))
        if inside == root:
            continue
        if not inside.is_relative_to(root):
            raise ConfigError(
                f"{value} is outside of {folder}, and only files in that folder are sent with the job; move it there, or give an "
                "absolute path that all nodes of the cluster have"
            )
        files |= {inside} if inside.is_file() else {each for each in inside.rglob("*") if each.is_file()}
    return files


def _find_files_beside(scenario: Any, folder: Path) -> set[Path]:
    """Return the files beside the user's own files that a scenario names."""
    root = folder.absolute()
    beside = [
        other
        for use in list_named_files(scenario)
        if (root / use).is_file()
        for other in find_files_beside(root / use)
    ]
    return {path for path in beside if path.is_relative_to(root)}


def _hash_file(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


if __name__ == "__main__":  # in the job, before its run
    try:
        check_arrived(Path.cwd())
    except ConfigError as error:
        print(f"nonet: {error}", file=sys.stderr)
        sys.exit(2)
