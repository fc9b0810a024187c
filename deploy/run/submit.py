"""Submit a scenario as a Ray job: its folder becomes the job's working directory, `nonet run` its entry point.

What the scenario names travels whole, whatever `.gitignore` says: tables, stores, models, rewards and what lies beside them. Of
the other files travel those that Ray would take. The job compares the checksums of all that was named before it starts the run.
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

from nonet.controller.scenario import check_runnable, document, find, load_scenario
from nonet.controller.setup import files_beside, named_files
from nonet.errors import ConfigError, NonetError

_POLL_S = 2.0
_LIST = "submitted-files.json"
_NEVER = (
    ".git",
    "__pycache__",
    ".gitignore",
    ".rayignore",
)  # Ray would leave out again what the last two name


def submit_job(source: str, address: str, changes: list[str], wait: bool) -> int:
    """Submit a job and, if asked, follow its log.

    Args:
        source: A scenario's file or shipped name.
        address: Where the cluster's dashboard answers.
        changes: Changes of the scenario, `a.b=c`.
        wait: Whether to follow the log to the end.

    Returns:
        The job's exit code; 0 when not waiting.

    Raises:
        ConfigError: The scenario names a file that cannot travel.
        NonetError: The cluster does not take the job.
    """
    from ray.job_submission import JobStatus, JobSubmissionClient

    path = find(source)
    scenario = load_scenario(path, changes)[0]
    check_runnable(scenario)
    named = sorted(_named(document(scenario), path.parent) | _own(scenario, path.parent))
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


def stage_files(folder: Path, scenario: Path, named: list[Path], staged: Path) -> None:
    """Link or copy into `staged` what travels with a job, and list the checksums of what the scenario names.

    Args:
        folder: The scenario's folder.
        scenario: Its file.
        named: Files below the folder that it names.
        staged: An empty folder.
    """
    for file in {*_usual_files(folder), *named, scenario}:
        place = staged / file.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file.resolve(), place)
        except OSError:  # another filesystem
            shutil.copyfile(file, place)
    sums = {str(file.relative_to(folder)): _sha256(file) for file in (*named, scenario)}
    (staged / _LIST).write_text(json.dumps(sums), encoding="utf-8")


def check_arrived(folder: Path) -> None:
    """Compare what arrived with what was submitted. Raises ConfigError that names what is missing or differs."""
    sums: dict[str, str] = json.loads((folder / _LIST).read_text(encoding="utf-8"))
    wrong = [
        name
        for name, sha256 in sums.items()
        if not (folder / name).is_file() or _sha256(folder / name) != sha256
    ]
    if wrong:
        raise ConfigError(
            f"{len(wrong)} of {len(sums)} files that the scenario names did not arrive whole, the first: {wrong[0]}; submit again"
        )


def _usual_files(folder: Path) -> Iterator[Path]:
    """Yield the files that Ray takes of a working directory: all that .gitignore and .rayignore leave."""
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


def _named(value: Any, folder: Path) -> set[Path]:
    """Return the files below a folder that the text of a scenario names, of folders and patterns all of them.

    Raises:
        ConfigError: It names what lies outside the folder by a relative path, which does not travel.
    """
    if isinstance(value, dict):
        return set().union(*(_named(part, folder) for part in value.values()))
    if isinstance(value, list):
        return set().union(*(_named(part, folder) for part in value))
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
                f"{value}: it lies outside {folder}, whose files alone travel with the job; put it there, or give an absolute "
                "path that all nodes of the cluster have"
            )
        files |= {inside} if inside.is_file() else {each for each in inside.rglob("*") if each.is_file()}
    return files


def _own(scenario: Any, folder: Path) -> set[Path]:
    """Return what lies beside the files of the user's own that a scenario names."""
    root = folder.absolute()
    beside = [
        other for use in named_files(scenario) if (root / use).is_file() for other in files_beside(root / use)
    ]
    return {path for path in beside if path.is_relative_to(root)}


def _sha256(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


if __name__ == "__main__":  # in the job, before its run
    try:
        check_arrived(Path.cwd())
    except ConfigError as error:
        print(f"nonet: {error}", file=sys.stderr)
        sys.exit(2)
