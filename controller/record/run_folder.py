"""The folder of a run: the paths in it, and how a new one is made."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nonet.atomic import make_folder, open_file, read_json, refuse_damage, write_whole
from nonet.controller.record.folder_lock import HOLDER, LOCK, FolderLock, lock_folder
from nonet.errors import ConfigError
from nonet.storage import (
    MountedRun,
    fetch,
    find_work_folder,
    join_address,
    make_local_folder,
    open_work_folder,
    read_address,
    register_work_folder,
    remove,
)
from nonet.trust import guard_work_folder, is_guarded

_MAX_LINE_BYTES = 1 << 16  # of a metric
_FACTS = "results/tokenise.json"  # the results of the tokenise stage
# The versions of a run's catalogue after the first (which is in _FACTS), the newest last.
CATALOGUES = "catalogues.json"


PREVIOUS_RUN = "previous_run"
"""The name of the model that a continued run starts from, which is evaluated beside its stages."""


def make_control_name(stage: str) -> str:
    """Return the name of the control of an RL stage that uses as much computation as the stage.

    A control is finetuned on the events of the RL stage, from the checkpoint that the stage begins from. Its results are
    stored under this name.
    """
    return f"{stage}_control"


def make_passes_name(stage: str) -> str:
    """Return the name of the control of an RL stage that makes as many passes over the events as the stage does."""
    return f"{stage}_control_passes"


def make_rerank_name(stage: str) -> str:
    """Return the name of the lists that the model makes before an RL stage, re-ranked by the rewards of the stage."""
    return f"{stage}_rerank"


def list_subjects_beside(stage: str) -> tuple[str, ...]:
    """Return the names of the models and lists that may be evaluated in addition to the model of a stage."""
    return (
        make_control_name(stage),
        make_passes_name(stage),
        make_rerank_name(stage),
        make_unselected_name(stage),
    )


def make_unselected_name(stage: str) -> str:
    """Return the name of a stage's own best checkpoint, for a stage that ended with the checkpoint that it began from."""
    return f"{stage}_unselected"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run."""

    path: Path

    @property
    def id(self) -> str:
        """The id of the run, which is the name of its folder."""
        return self.path.name

    @property
    def scenario(self) -> Path:
        """The file of the run's scenario, with all defaults."""
        return self.path / "scenario.yaml"

    @property
    def sources(self) -> Path:
        """The folder with copies of the `file.py` files that the scenario names."""
        return self.path / "sources"

    @property
    def sources_list(self) -> Path:
        """The file that lists the path that the scenario uses and the hash of each copy in `sources`."""
        return self.path / "sources.json"

    @property
    def checkpoints(self) -> Path:
        """The folder that holds the checkpoints."""
        return self.path / "checkpoints"

    @property
    def results(self) -> Path:
        """The folder that holds the evaluation results of all stages."""
        return self.path / "results"

    @property
    def journal(self) -> Path:
        """The file of the journal (`Journal`)."""
        return self.path / "journal.jsonl"

    @property
    def metrics(self) -> Path:
        """The file with the metrics of all steps."""
        return self.path / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        """The file of the Chrome trace of all workers."""
        return self.path / "trace.json"

    @property
    def report(self) -> Path:
        """The file of the report, which exists when the run has finished."""
        return self.path / "report.json"

    @property
    def status(self) -> Path:
        """The file with what the run does and waits for, which its controller writes while it works."""
        return self.path / "status.json"

    @property
    def stop_request(self) -> Path:
        """The file whose existence asks the driver of the run to stop it after a checkpoint."""
        return self.path / "stop-request"

    def find_artifacts(self) -> dict[str, str]:
        """Return the artifact folder of each kind, in the newest version of the catalogue, after fetching them if needed.

        Raises:
            ConfigError: The run has not tokenised its data yet.
        """
        facts = self.read_facts()
        if facts is None:
            raise ConfigError(f"{self.id} has not tokenised its data yet: there is nothing to recommend from")
        later_versions = self.read_catalogues()
        artifacts = later_versions[-1]["artifacts"] if later_versions else facts["artifacts"]
        return fetch_artifacts(artifacts)

    def fetch_artifacts(self, artifacts: Mapping[str, Any]) -> dict[str, str]:
        """Return the folder of each kind of artifacts in the facts of this run, after fetching them if needed.

        Raises:
            ConfigError: The facts name no sequences, without which no run can be opened, or are damaged otherwise.
        """
        with refuse_damage(self.path / _FACTS):
            if "sequences" not in artifacts:
                raise ValueError("it names no sequences")
            return fetch_artifacts(artifacts)

    def read_facts(self) -> dict[str, Any] | None:
        """Return the results of the tokenise stage with absolute artifact paths, or None before that stage.

        Raises:
            ConfigError: They are damaged, or Nonet 0.1 wrote them.
        """
        self.check_version()
        facts = self.read_json(_FACTS)
        with refuse_damage(self.path / _FACTS):
            return facts if facts is None else self._change_artifact_paths(facts, self._make_absolute)

    def check_version(self) -> None:
        """Raise ConfigError if Nonet 0.1 wrote the run: it named artifacts by absolute paths, and counted no duplicates."""
        try:
            facts = self.read_json(_FACTS) or {}
            with refuse_damage(self.path / _FACTS):
                path, counts = Path(facts["artifacts"]["sequences"]["path"]), dict(facts["data"])
        except ConfigError:  # what is damaged or missing is reported where it is needed
            return
        if path.is_absolute() and "duplicates" not in counts:
            raise ConfigError(
                f"{self.path} is a run of Nonet 0.1, and this version opens runs of 0.2 and later; open it with Nonet 0.1, or "
                "run its scenario again"
            )

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        """Write the results of the tokenise stage, with paths relative to the run so that its folder can be moved."""
        self.write_json(_FACTS, self._change_artifact_paths(facts, self._make_relative))

    def describe_owner(self) -> dict[str, str] | None:
        """Return what tells this run from others, for folders and addresses that belong to one run.

        Copies of a run have the same, whatever their folder is called.

        Returns:
            {"run": the run's id, "data": a hash of its artifacts, "start": a hash of its first metric, "" before that}; None
                before the run has tokenised its data.
        """
        facts = self.read_json(_FACTS)
        if facts is None:
            return None
        with refuse_damage(self.path / _FACTS):
            hashes = sorted(str(artifact.get("sha256")) for artifact in facts.get("artifacts", {}).values())
        first_line = b""
        if self.metrics.exists():
            with open_file(self.metrics) as file:
                first_line = file.readline(_MAX_LINE_BYTES)
        return {
            "run": self.id,
            "data": hashlib.sha256("\n".join(hashes).encode()).hexdigest(),
            "start": hashlib.sha256(first_line).hexdigest() if first_line.endswith(b"\n") else "",
        }

    def read_catalogues(self) -> list[dict[str, Any]]:
        """Return the versions of the catalogue after the first, oldest first, with absolute artifact paths.

        Raises:
            ConfigError: Their file is damaged.
        """
        stored = self.read_json(CATALOGUES) or {"versions": []}
        with refuse_damage(self.path / CATALOGUES):
            return [
                self._change_artifact_paths(version, self._make_absolute) for version in stored["versions"]
            ]

    def write_catalogues(self, versions: Iterable[Mapping[str, Any]]) -> None:
        """Write the versions of the catalogue after the first, oldest first, with paths relative to the run."""
        self.write_json(
            CATALOGUES,
            {"versions": [self._change_artifact_paths(version, self._make_relative) for version in versions]},
        )

    def _change_artifact_paths(
        self, record: Mapping[str, Any], convert_path: Callable[[str], str]
    ) -> dict[str, Any]:
        """Return a copy of a record in which `convert_path` has converted every artifact path."""
        artifacts = {
            kind: {**artifact, "path": convert_path(artifact["path"])}
            for kind, artifact in record.get("artifacts", {}).items()
        }
        return {**record, "artifacts": artifacts}

    def _make_absolute(self, path: str) -> str:
        """Return the absolute path of an artifact from its recorded path; one outside of the run's folder is recorded so."""
        return str(self.path / path)

    def _make_relative(self, path: str) -> str:
        """Return a path relative to the run's folder; a path outside the folder is returned as it is."""
        root = self.path.absolute()
        is_inside = Path(path).is_absolute() and Path(path).is_relative_to(root)
        return str(Path(path).relative_to(root)) if is_inside else path

    def clear_records(self) -> None:
        """Delete the journal, the metrics and the copies of sources, so that a run without a checkpoint starts again."""
        for path in (self.journal, self.metrics, self.sources_list, self.sources):
            remove(path, "the run starts again")

    def write_json(self, name: str, value: Any) -> Path:
        """Write a JSON file atomically and sync it to disk.

        Args:
            name: The path of the file within the run.
            value: The value to write.

        Returns:
            The absolute path of the file.
        """
        path = self.path / name
        make_folder(path.parent)
        write_whole(path, json.dumps(value, indent=1, allow_nan=False).encode())
        return path

    def read_json(self, name: str) -> Any:
        """Return the value in a JSON file that `write_json` wrote, or None if there is no such file.

        Raises:
            ConfigError: The file is damaged, or no regular file.
        """
        try:
            return read_json(self.path / name)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_status(self) -> dict[str, Any]:
        """Return the content of `status`, empty if there is none. Raises ConfigError if it is damaged."""
        status = self.read_json(self.status.name)
        with refuse_damage(self.status):
            return {**(status or {})}


def fetch_artifacts(artifacts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the folder of each artifact by kind, after fetching those of a run in object storage.

    Args:
        artifacts: The artifacts by kind, as in the facts of a run.
    """
    folders = {kind: artifact["path"] for kind, artifact in artifacts.items()}
    for folder in folders.values():
        fetch(Path(folder))
    return folders


def is_ray_job() -> bool:
    """Return whether this process belongs to a Ray job and runs in the job's package, which Ray deletes afterwards."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ or _is_in_package(Path.cwd())


def _is_in_package(path: Path) -> bool:
    """Return whether a path is in a package that Ray unpacked for a job, by the names of Ray's folders."""
    return "working_dir_files" in path.parts and "runtime_resources" in path.parts


def find_runs_root() -> Path:
    """Return the folder of all runs: $NONET_RUNS, or ./runs; for Ray jobs nonet-runs in the home directory of the node."""
    parent, default_name = (Path.home(), "nonet-runs") if is_ray_job() else (Path.cwd(), "runs")
    return parent / os.environ.get("NONET_RUNS", default_name)


def describe_place(run: RunFolder) -> str:
    """Return the address of a stored run, or the path of a run followed by the name of this host."""
    if address := read_address(run.path):
        return address
    return f"{run.path} on {socket.gethostname()}"


def lock_run(run: RunFolder) -> FolderLock:
    """Lock the folder of a run until the lock is closed or this process ends.

    Raises:
        ConfigError: Another process holds the lock.
    """
    run.path.mkdir(parents=True, exist_ok=True)
    return lock_folder(run.path)


def open_for_writing(run: RunFolder) -> RunFolder:
    """Return the folder in which this node writes a run: of a stored run that was opened for reading, its work folder."""
    work_folder = RunFolder(open_work_folder(run.path))
    if is_guarded(run.path):
        guard_work_folder(work_folder.path, run.path)
    return work_folder


def is_empty(run: RunFolder) -> bool:
    """Return whether the folder of a run has nothing of a run, apart from locks and the address of a stored one."""
    return not any(not path.name.startswith(".") for path in run.path.iterdir())


def delete_folder(run: RunFolder) -> None:
    """Delete the folder of a run that has not started, unless services of an earlier run of this id keep something in it."""
    if not (run.path / "serving").exists():
        shutil.rmtree(run.path, ignore_errors=True)


def is_running(run: RunFolder) -> bool:
    """Return whether a process of this node holds the lock of a run's folder."""
    run = RunFolder(find_work_folder(run.path))
    if not run.path.exists():
        return False
    try:
        lock_run(run).close()
    except ConfigError:
        return True
    return False


def check_no_storage(storage_address: str | None, command: str) -> None:
    """Check that a scenario whose runs a command keeps in one folder has no storage.

    Raises:
        ConfigError: It has.
    """
    if storage_address is not None:
        raise ConfigError(
            f"storage is {storage_address}, but {command} keeps its runs in a folder; add --set storage=null"
        )


def create_run(
    name: str,
    folder: str | Path | None = None,
    storage_address: str | None = None,
    *,
    run_id: str | None = None,
) -> RunFolder:
    """Return the folder of a new run, which may not exist yet.

    Args:
        name: The name of the scenario, which is the first part of a new id.
        folder: The folder to use; by default one that is named by a new id, under the root of all runs.
        storage_address: The object storage of the run, whose local copy is returned; None for a run in a folder.
        run_id: The id of the run; by default a new one.

    Raises:
        ConfigError: The folder is in a package that Ray deletes, holds a run that is finished or can be resumed, or holds
            other files, which a failed start would delete; or both a folder and a storage are given.
    """
    run_id = run_id or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    if storage_address is not None:
        if folder is not None:
            raise ConfigError(
                f"{folder} and storage: {storage_address} name two places for one run; leave --run-dir out, or set storage=null"
            )
        path = make_local_folder(storage_address, run_id)
        register_work_folder(MountedRun(join_address(storage_address, run_id), str(path)))
        return RunFolder(path)
    if folder is not None:
        run = RunFolder(Path(folder).absolute())
        if is_ray_job() and _is_in_package(run.path):
            raise ConfigError(
                f"--run-dir {folder} is in the job's package, which Ray deletes after the job; "
                "give an absolute path, or leave --run-dir out and set NONET_RUNS"
            )
        _check_unused(run)
        return run
    return RunFolder(find_runs_root() / run_id)


def _check_unused(run: RunFolder) -> None:
    """Raise ConfigError if a folder cannot be used for a new run."""
    if run.report.exists():
        raise ConfigError(f"{run.path} holds a finished run; choose another --run-dir, or remove it")
    if run.scenario.exists() and list(run.checkpoints.glob("step-*")):
        raise ConfigError(
            f"{run.path} holds a run with checkpoints; continue it with `nonet resume {run.path}`, or choose another --run-dir"
        )
    if run.path.exists() and not run.path.is_dir():
        raise ConfigError(f"{run.path} is a file; choose a folder for --run-dir")
    if (
        run.path.exists()
        and not run.scenario.exists()  # a run that never reached a checkpoint may start again
        and {path.name for path in run.path.iterdir()} - {LOCK, HOLDER}
    ):
        raise ConfigError(
            f"{run.path} is not empty and holds no run; choose an empty or a new folder for --run-dir"
        )
