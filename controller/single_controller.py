"""SingleController: the actor that runs a run. It plans, calls the worker groups and writes checkpoints.

The run is executed on a thread that starts with the actor, while the methods `poll`, `renew` and `stop` can be called. Only
references to the data of workers pass through the actor. If it is killed, Ray restarts it; it then removes the processes
that are left and continues from the newest checkpoint. If a worker is lost, it does the same without being restarted. When
the lease of its driver has expired, it writes a checkpoint and stops all processes of the run, including itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from nonet.controller.groups import (
    ORPHAN_TIMEOUT_S,
    Heartbeat,
    Lease,
    Moment,
    ProgressReader,
    SessionView,
    StatusReporter,
    reap_run,
)
from nonet.controller.pipeline import Pipeline
from nonet.controller.record import (
    Checkpoints,
    FolderLock,
    Recorder,
    RunFolder,
    check_reached,
    cut_journal,
    lock_run,
)
from nonet.controller.record.tracking.kinds import TrackedRun
from nonet.controller.scenario import Scenario, flatten_document, to_document
from nonet.controller.session import Session
from nonet.controller.setup import read_interruptions, record_loss
from nonet.errors import ConfigError, NonetError, PlacementError, ServiceMissing, StorageError, is_disk_full
from nonet.storage import MountedRun, RunWriter, get_request_counts, mount, open_writer, register_work_folder
from nonet.workers import describe_activity

DONE, STOPPED, FAILED = "done", "stopped", "failed"  # the states of an outcome
_REPLACE_POLL_S = 5.0  # between two attempts to place lost workers again
_CLAIM_PATIENCE_S, _CLAIM_POLL_S = 30.0, 0.2  # how long another process may hold the folder of a detached run
_WRONG_INPUT = 2  # the exit code of a run that failed because of what its user gave
MOST_RECOVERIES = 3  # attempts that may fail in a row without a new checkpoint before the run fails


@dataclass(frozen=True, slots=True)
class ControllerTask:
    """The run that a controller executes.

    Attributes:
        scenario: The scenario.
        folder: The folder of the scenario's own files.
        run: The folder of the run.
        resume: Whether to continue from the newest checkpoint.
        detached: Whether the run needs no driver; its controller then ends when the run has ended.
        timeout_s: Seconds without a heartbeat after which workers exit, and without a renewed lease after which the run stops
            (docs/explanation/design.md, section 5).
        token: The text that the driver wrote to the folder of the run; the controller must be able to read it. It is empty for
            a run in object storage.
        mounts: The stored runs of the driver: this run, and the one that it starts from.
    """

    scenario: Scenario
    folder: str
    run: str
    resume: bool = False
    detached: bool = False
    timeout_s: float = ORPHAN_TIMEOUT_S
    token: str = ""
    mounts: tuple[MountedRun, ...] = ()


@ray.remote(num_cpus=0, concurrency_groups={"control": 4})  # pyright: ignore[reportCallIssue]
class SingleController:
    """The controller of one run."""

    def __init__(self, task: ControllerTask):
        self._task, self._run = task, RunFolder(Path(task.run))
        self._run.path.mkdir(parents=True, exist_ok=True)
        self._is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._writer, self._writer_error = self._open_writer()
        self._recorder = self._open_recorder()
        self._stop_requested = threading.Event()
        self._outcome: dict[str, Any] | None = None
        self._expired_at: float | None = None
        self._lease = Lease(task.timeout_s, detached=task.detached)
        self._own_handle = ray.get_runtime_context().current_actor
        self._session: Session | None = None
        self._restarts = sum("seconds" not in part for part in read_interruptions(self._run))
        self._missing_place = ""  # why the lost workers of the run cannot be placed
        self._status = StatusReporter(
            self._run,
            self._recorder.list_since,
            self._view_run,
            detached=task.detached,
            publish=self._publish_status,
        )
        self._progress = ProgressReader(
            self._run, self._list_groups, lambda: len(read_interruptions(self._run))
        )
        self._lease_heartbeat = Heartbeat(self._check_lease, every_s=task.timeout_s / 6)
        self._task_thread = threading.Thread(target=self._run_task, name="conduct", daemon=True)
        self._task_thread.start()

    def _open_writer(self) -> tuple[RunWriter | None, NonetError | None]:
        """Open the run for writing if it is in object storage; return the writer, or the error that the run fails with.

        The first life of this actor goes on with what the driver prepared, and with nothing else: it may have waited for nodes
        while another process has started a run of the same name.
        """
        after_epoch = None
        try:
            for mounted in self._task.mounts:
                if mounted.path == self._task.run and not self._is_restarted:
                    after_epoch = mounted.epoch
                mount_here = register_work_folder if mounted.path == self._task.run else mount
                mount_here(mounted)
            timeout_s = self._task.scenario.deadlines.storage
            writer = open_writer(self._run.path, timeout_s=timeout_s, after_epoch=after_epoch)
        except NonetError as error:
            return None, error
        if writer:
            writer.start_commits()
        return writer, None

    def _open_recorder(self) -> Recorder:
        """Open the recorder of the run, with the trackers that the scenario names."""
        scenario = self._task.scenario
        facts = dict(flatten_document(to_document(scenario)))
        run = TrackedRun(self._run.id, self._run.path, scenario.name, facts)
        return Recorder(self._run.path, self._run.id, scenario.tracking, run)

    def _publish_status(self, status: Mapping[str, Any]) -> None:
        """Give the status of the run to its trackers, with what the controller counts."""
        counts = {
            "restarts": self._restarts,
            "tracking": self._recorder.get_tracking(),
            "storage": get_request_counts(),
        }
        self._recorder.set_status({**status, **counts})

    @ray.method(concurrency_group="control")
    def poll(self, seen: int) -> dict[str, Any]:
        """Renew the lease, and return the new events and the outcome of the run.

        Args:
            seen: The number of events that the caller has seen.

        Returns:
            {"pid", "events", "outcome"}. The outcome is None while the run works, then {"state": done | stopped | failed,
            "error", "traceback", "exit_code"}. After a restart, the pid changes and the numbers of events begin again.
        """
        self._lease.renew()
        if warning := self._lease_heartbeat.pop_warning():
            self._recorder.add_event("note", text=warning)
        outcome = self._outcome  # read before the events, so that no event follows an outcome
        return {"pid": os.getpid(), "events": self._recorder.list_since(seen), "outcome": outcome}

    @ray.method(concurrency_group="control")
    def get_folder(self) -> str:
        """Return the path of the folder of the run."""
        return str(self._run.path)

    @ray.method(concurrency_group="control")
    def read_progress(self, moment: Moment, timeout_s: float) -> dict[str, Any]:
        """Return how far the run is, when it is at a moment or after a time (`ProgressReader`)."""
        return self._progress.read(moment, timeout_s)

    @ray.method(concurrency_group="control")
    def renew(self) -> None:
        """Renew the lease of the driver."""
        self._lease.renew()

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """Stop at the next step boundary, after a checkpoint."""
        self._stop_requested.set()

    def _run_task(self) -> None:
        """Run the task and store its outcome for `poll`."""
        try:
            if self._writer_error is not None:
                raise self._writer_error
            if self._task.token and not self._is_restarted:
                check_reached(self._run, self._task.token, f"the controller, on {socket.gethostname()},")
            if self._task.detached:
                self._lock = self._claim_folder()  # held until this process ends; else the driver holds it
            outcome = {"state": DONE if self._run_with_recoveries() else STOPPED}
        except Exception as error:
            outcome = self._describe_failure(error)
        with contextlib.suppress(Exception):
            self._run.write_json("outcome.json", {key: outcome.get(key) for key in ("state", "error")})
        self._status.finish(outcome)  # before the last commit, which stores it
        with contextlib.suppress(Exception):
            self._recorder.close(outcome["state"])
        try:
            if self._writer:
                is_wrong = outcome.get("exit_code") == _WRONG_INPUT
                self._close_writer(discards=is_wrong and not self._task.resume)
        except NonetError as error:  # the run has not ended well, if its end cannot be stored
            if outcome["state"] != FAILED:
                outcome = _make_failure(str(error), "", error.exit_code)
                self._status.finish(outcome)
        self._outcome = outcome  # the driver ends this process when it sees it
        if self._task.detached or self._lease.is_expired:
            self._end_actor()

    def _claim_folder(self) -> FolderLock:
        """Lock the folder of the run, and wait for drivers that hold it: until this actor exists, or while they look for it."""
        deadline = time.monotonic() + _CLAIM_PATIENCE_S
        while True:
            try:
                return lock_run(self._run)
            except ConfigError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_CLAIM_POLL_S)

    def _describe_failure(self, error: Exception) -> dict[str, Any]:
        """Return the outcome of a run that an error ended."""
        if is_disk_full(error):
            free_bytes = shutil.disk_usage(self._run.path).free
            return _make_failure(
                f"a disk is full: {' '.join(str(error).split())}; the run is in {self._run.path}, whose disk has "
                f"{free_bytes / 1e6:,.1f} MB free: make room, then nonet resume {self._run.id}",
                "",
                exit_code=1,
            )
        if isinstance(error, NonetError):
            return _make_failure(str(error), getattr(error, "traceback", ""), error.exit_code)
        return _make_failure(f"{type(error).__name__}: {error}", traceback.format_exc(), exit_code=1)

    def _close_writer(self, *, discards: bool) -> None:
        """Store the end of the run; one that failed without a checkpoint because of wrong input is deleted instead."""
        assert self._writer is not None
        self._writer.stop_commits()
        is_discarded = False
        if discards:
            with contextlib.suppress(StorageError):  # the end of the run is stored instead
                is_discarded = self._writer.discard()
        self._writer.close(commit=not is_discarded)

    def _run_with_recoveries(self) -> bool:
        """Run the pipeline, after a lost worker again from the newest checkpoint; return whether it reached its end."""
        resume, left = self._task.resume, MOST_RECOVERIES  # attempts left
        replacement_end = 0.0  # monotonic seconds until when a run that has lost workers waits for places
        if self._is_restarted:
            replacement_end = time.monotonic() + self._task.scenario.deadlines.replace
            resume = self._remove_processes()
            self._recorder.add_event("note", text="the controller was restarted")
            self._record_loss("the controller was restarted")
        while True:
            before = self._find_newest_checkpoint()
            session = Session(
                self._task.scenario,
                folder=Path(self._task.folder),
                run=self._run,
                resume=resume,
                life_s=self._task.timeout_s,
                writer=self._writer,
            )
            self._session = session
            try:
                return Pipeline(session, self._recorder, self._stop_requested.is_set).run()
            except (PlacementError, ServiceMissing) as error:
                if (
                    time.monotonic() > replacement_end
                    or self._lease.is_expired
                    or self._stop_requested.is_set()
                ):
                    raise
                self._wait_for_place(error)
                resume = self._remove_processes()
                continue
            except (NonetError, RayError) as error:
                loss = session.describe_loss(error)
                left = MOST_RECOVERIES if self._find_newest_checkpoint() != before else left - 1
                if loss is None or left < 1 or self._lease.is_expired:
                    raise
            resume = self._remove_processes()
            start = "its newest checkpoint" if resume else "the beginning"
            self._recorder.add_event("note", text=f"{loss}; continuing from {start}")
            self._record_loss(loss)
            replacement_end = time.monotonic() + self._task.scenario.deadlines.replace
            self._missing_place = ""

    def _record_loss(self, why: str) -> None:
        """Record and count that the run continues after a loss."""
        record_loss(self._run, why)
        self._restarts += 1

    def _wait_for_place(self, error: NonetError) -> None:
        """Show why the lost workers of a run cannot be placed or opened, if it has changed, and wait a moment."""
        reason = str(error)
        if reason != self._missing_place:
            limit = self._task.scenario.deadlines.replace
            subject = "nodes" if isinstance(error, PlacementError) else "an actor"
            self._recorder.add_event("note", text=f"waiting at most {limit:g} s for {subject}: {reason}")
        self._missing_place = reason
        self._stop_requested.wait(_REPLACE_POLL_S)

    def _view_run(self) -> SessionView:
        """Return what the status shows of the current session and of the storage."""
        return replace(self._view_session(), outage=self._writer.describe_outage() if self._writer else "")

    def _view_session(self) -> SessionView:
        """Return the parts of the current session that the status shows."""
        session, thread_id = self._session, self._task_thread.ident or 0
        if session is None:
            return SessionView("start")
        phase, groups, probes = session.progress.phase, session.progress.processes, session.progress.probes

        def describe_own_activity(elapsed_s: float) -> str:
            return describe_activity("the controller", phase or "a stage", elapsed_s, thread_id).describe()

        isolated = [entry.describe() for entry in probes.list_isolated()] if probes else []
        if groups is None and self._missing_place:
            missing_place = self._missing_place
            return SessionView(
                "replace", activity=lambda _: f"waits for nodes: {missing_place}", isolated=isolated
            )
        if groups is None:
            return SessionView(phase, activity=describe_own_activity, isolated=isolated)
        roles = {group.name: group.roles for group in groups.binding.groups}
        return SessionView(
            phase, roles, dict(groups.hosts), describe_own_activity, groups.silent_workers, isolated
        )

    def _list_groups(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        """Return the number of workers and the roles of each group that the run has now."""
        view = self._view_session()
        return {
            name: (view.hosts[name].world, tuple(roles))
            for name, roles in dict(view.groups).items()
            if name in view.hosts
        }

    def _find_newest_checkpoint(self) -> Path | None:
        """Return the folder of the run's newest checkpoint; None if it has none."""
        newest = Checkpoints(self._run.checkpoints, fetches=False).find_newest()
        return newest[0] if newest else None

    def _remove_processes(self) -> bool:
        """Remove the processes of a failed attempt, and clear the journal if there is no checkpoint.

        Returns:
            Whether there is a checkpoint to continue from.
        """
        reap_run(self._run.id)
        if self._find_newest_checkpoint() is not None:
            return True
        if self._run.journal.exists():
            cut_journal(self._run.journal, 0)
        return False

    def _check_lease(self) -> None:
        """Stop the run with a checkpoint when the lease has expired; end all processes if that takes another timeout."""
        if not self._lease.is_expired:
            return
        if self._expired_at is None:
            self._expired_at = time.monotonic()
            self._stop_requested.set()
        if self._outcome is not None or time.monotonic() - self._expired_at > self._task.timeout_s:
            self._end_actor()

    def _end_actor(self) -> None:
        """Remove the processes of the run, and end this actor without a restart."""
        self._lease_heartbeat.stop()
        reap_run(self._run.id)
        ray.kill(self._own_handle, no_restart=True)


def _make_failure(error: str, traceback_text: str, exit_code: int) -> dict[str, Any]:
    """Return the outcome of a failed run."""
    return {"state": FAILED, "error": error, "traceback": traceback_text, "exit_code": exit_code}
