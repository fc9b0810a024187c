"""The driver: it starts a run's controller, shows its events, and stops it on request.

The driver holds the run's lease and renews it. If the driver dies, a local Ray dies with it; on a shared
cluster the controller commits and stops everything. The first Ctrl-C (or SIGTERM, which `ray job stop`
sends) requests a checkpoint at the next step, the second one quits immediately.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nonet.controller.groups import CONTROLLER, Heartbeat, read_orphan_timeout_s, reap_orphaned_runs, reap_run
from nonet.controller.record import (
    FolderLock,
    RunFolder,
    count_missing,
    delete_folder,
    is_empty,
    lock_run,
    open_for_writing,
    write_token,
)
from nonet.controller.scenario import Scenario
from nonet.controller.setup import (
    START,
    clear_interruptions,
    preflight,
    read_copies,
    record_resume,
    resolve_sources,
    write_run,
    write_start,
)
from nonet.deadlines import DEFAULTS, suggest_longer_deadline
from nonet.deploy.report import write_report
from nonet.deploy.run.memory import PeakMemory
from nonet.deploy.run.panel import EventView, Panel
from nonet.deploy.run.steer import STOP_PATIENCE_S, describe_stop
from nonet.errors import ConfigError, NonetError, StorageError, WorkerFailed, WorkerLost
from nonet.storage import (
    OPENING_TIMEOUT_S,
    RunWriter,
    change_run,
    find_copy,
    find_working_owner,
    has_run,
    list_mounts,
    open_storage,
)
from nonet.trust import check_folder, guard_folder
from nonet.workers import check_ray_environment
from nonet.workers.runtime import NAMESPACE, ensure_ray

_POLL_S = 0.3  # between two polls of the controller
_ANSWER_PATIENCE_S = 10.0  # within which a controller answers a short call
_POLL_PATIENCE_S = 120.0  # within which a controller answers a poll, even if its process was suspended


class _NameTakenError(NonetError):
    """A controller of the run's name exists already, which may be that of another driver."""


class DriverRun:
    """A run in progress or finished, as the driver's process sees it.

    Args:
        folder: The run's folder.
        controller: The handle of the controller's actor.
        memory: The running measurement of the memory of this process and its descendants.
        timeout_s: Seconds after the last renewal of the lease at which the controller regards the driver as dead.
        lock: The lock of the run's folder, which is released at the end.
        warnings: Warnings about the run's data.
        resumes: Whether the run continues, so that its folder stays whatever ends it.
        start_timeout_s: Seconds within which Ray must have started a controller, or restarted one that is gone.

    Attributes:
        folder: The run's folder.
        id: The run's id.
        state: "running", "done", "stopped" or "failed".
        was_interrupted: Whether Ctrl-C was pressed, after which a run that was at its end may be done nevertheless.
        warnings: Warnings about the run's data.
    """

    def __init__(
        self,
        folder: RunFolder,
        controller: Any,
        memory: PeakMemory,
        timeout_s: float,
        lock: FolderLock,
        warnings: Sequence[str] = (),
        resumes: bool = False,
        start_timeout_s: float = DEFAULTS.start,
    ):
        self.warnings, self._resumes, self._start_timeout_s = list(warnings), resumes, start_timeout_s
        self.folder, self.id, self._folder_lock = folder, folder.id, lock
        self._controller: Any = controller  # None after `close`
        self._has_answered = False
        self._memory = memory
        self.state, self.was_interrupted = "running", False
        self._start_time = time.time()
        # Processes of a shared cluster are not children of this one, so their memory is not known.
        self._measures_all_memory = "RAY_ADDRESS" not in os.environ
        self._lease = Heartbeat(self._renew, timeout_s / 6)  # several tries before the lease expires

    def _renew(self) -> None:
        """Renew the lease at the controller, and stop the run if `nonet stop` requested it.

        After `ray.shutdown()` this does nothing, because a remote call would implicitly join another cluster.
        """
        import ray

        if ray.is_initialized():
            self._controller.renew.remote()
            self._take_stop_request()

    def _take_stop_request(self) -> None:
        """Stop the run if `nonet stop` requested it, and delete the request's file to acknowledge the request."""
        if self.folder.stop_request.exists():
            self.stop()
            self.folder.stop_request.unlink(missing_ok=True)

    @property
    def report(self) -> dict[str, Any]:
        """The contents of report.json of a finished run."""
        return self.folder.read_json("report.json")

    def wait(self, panel: Panel | None = None) -> DriverRun:
        """Wait for the end of the run and show its events.

        Args:
            panel: The panel that shows the events; None to show none.

        Returns:
            This run. If it has ended before, this method returns immediately.

        Raises:
            WorkerFailed: The run failed.
            WorkerLost: The controller is gone.
        """
        if self._controller is None:
            return self
        next_event, controller_pid, view = 0, 0, EventView(panel)
        stop_requested_s: float | None = None  # in monotonic seconds
        with _count_interrupts() as interrupts:
            while True:
                answer = self._poll_controller(next_event)
                if answer["pid"] != controller_pid:
                    if controller_pid:  # the controller was restarted: its event numbers start at 0 again
                        next_event = 0
                    controller_pid = answer["pid"]
                    answer = self._poll_controller(next_event)
                if missing := count_missing(answer["events"], next_event):
                    view.note(f"{missing} events were not shown; metrics.jsonl has all steps")
                next_event = answer["events"][-1]["number"] + 1 if answer["events"] else next_event
                view.show(answer["events"])
                if warning := self._lease.pop_warning():
                    view.note(warning)
                if answer["outcome"]:
                    return self._finish(answer["outcome"])
                self._take_stop_request()
                if interrupts.count and stop_requested_s is None:
                    stop_requested_s, self.was_interrupted = time.monotonic(), True
                    view.note("stopping after this step; press Ctrl-C again to quit immediately")
                    self._controller.stop.remote()
                takes_too_long = stop_requested_s and time.monotonic() - stop_requested_s > STOP_PATIENCE_S
                if interrupts.count > 1 or takes_too_long:
                    self.state = "stopped"
                    self.close()
                    return self
                time.sleep(_POLL_S)

    def _poll_controller(self, first_event: int) -> dict[str, Any]:
        """Poll the controller, waiting while Ray restarts it.

        Args:
            first_event: The number of the first event to return.

        Returns:
            {"events": events in order, "outcome": outcome of the run or None while it is in progress, "pid": process id
            of the controller}.

        Raises:
            WorkerLost: The controller does not come back.
        """
        import ray
        from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

        deadline_s = time.monotonic() + self._start_timeout_s
        suggestion, patience_s = suggest_longer_deadline(self._start_timeout_s), _POLL_PATIENCE_S
        if not self._has_answered:  # it may wait for a node
            patience_s = max(patience_s, self._start_timeout_s)
        while True:
            try:
                answer: Any = ray.get(self._controller.poll.remote(first_event), timeout=patience_s)
                self._has_answered = True
                return answer
            except ActorUnavailableError as error:  # Ray is restarting it
                last_error: Exception = error
            except GetTimeoutError as error:
                last_error, deadline_s = error, 0.0
                if self._has_answered:
                    suggestion = ""
            except RayActorError as error:  # waiting longer does not help
                last_error, deadline_s, suggestion = error, 0.0, ""
            if time.monotonic() > deadline_s:
                self.close()
                raise WorkerLost(
                    f"the controller is gone ({' '.join(str(last_error).split())[:200]}){suggestion}; "
                    f"if it has a checkpoint, continue with: nonet resume {self.id}"
                ) from None
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Ask the controller to write a checkpoint at the next step and to end the run, unless it has ended."""
        if self._controller is not None:
            self._controller.stop.remote()

    def close(self) -> None:
        """Stop the controller and everything that it started, and release the run's folder."""
        self._stop_processes()
        self._folder_lock.close()

    def _stop_processes(self) -> None:
        """Stop the controller and everything that it started."""
        import ray

        self._lease.stop()
        self._memory.__exit__()
        if self._controller is not None:
            ray.kill(self._controller, no_restart=True)
            reap_run(self.id)
            self._controller = None

    def _finish(self, outcome: dict[str, Any]) -> DriverRun:
        """Record the outcome, stop everything, and write the report of a run that is done.

        The folder of a new run that failed because of wrong input before its first checkpoint is deleted.

        Raises:
            WorkerFailed: The run failed.
        """
        self.state, has_wrong_input = outcome["state"], outcome.get("exit_code") == 2
        self._stop_processes()
        with self._folder_lock:  # held until the folder is complete or deleted
            if self.state == "done":
                with change_run(self.folder.path):  # which brings the folder of a stored run up to date
                    self._complete_report()
            elif self.state == "failed" and has_wrong_input and not self._resumes and self._is_discarded():
                delete_folder(self.folder)
        if self.state == "failed":
            raise WorkerFailed(
                outcome["error"], traceback=outcome.get("traceback", ""), caller_fault=has_wrong_input
            )
        return self

    def _is_discarded(self) -> bool:
        """Return whether a failed run has no checkpoint; the controller of a stored run has then deleted it from the storage."""
        if copy := find_copy(self.folder.path):
            try:
                return not has_run(copy.address)
            except StorageError:
                return False
        return not list(self.folder.checkpoints.glob("step-*"))

    def _complete_report(self) -> None:
        """Add the memory and the duration that this process has measured to the report, and write its page."""
        earlier_s = sum(part.get("seconds", 0) for part in self.report.get("interruptions", ()))
        total_s = round(earlier_s + time.time() - self._start_time, 3)
        wall_s = self.report["wall_s"] | {"total": total_s}
        report = self.report | {
            "peak_rss_bytes": self._memory.peak_bytes if self._measures_all_memory else 0,
            "wall_s": wall_s,
        }
        self.folder.write_json("report.json", report)
        write_report(self.folder.path)


def start(
    scenario: Scenario, folder: Path, run: RunFolder, *, resume: bool = False, command: str = ""
) -> DriverRun:
    """Check the scenario and its data, then start the run without waiting for it.

    Args:
        scenario: The scenario.
        folder: The folder that the scenario's files are relative to.
        run: The run's folder.
        resume: Whether to continue from the newest complete checkpoint.
        command: The command that started the run, for the report.

    Returns:
        The run in progress.

    Raises:
        ConfigError: The scenario, its data or the folder is not usable.
        NonetError: The controller did not start.
    """
    started, _ = _start(scenario, folder, run, resume, command)
    assert started is not None
    return started


def start_detached(scenario: Scenario, folder: Path, run: RunFolder, *, command: str = "") -> list[str]:
    """Start a new run that continues without this process.

    Args:
        scenario: The scenario.
        folder: The folder that the scenario's files are relative to.
        run: The run's folder.
        command: The command that started the run, for the report.

    Returns:
        Warnings about the run's data.

    Raises:
        ConfigError: There is no cluster that outlives this process, or the scenario is not usable.
        NonetError: The controller did not start.
    """
    if os.environ.get("RAY_ADDRESS") in (None, "", "local"):
        raise ConfigError(
            "a detached run needs a cluster that outlives this process: set RAY_ADDRESS (such as auto), or omit --detach"
        )
    return _start(scenario, folder, run, False, command, detached=True)[-1]


def _start(
    scenario: Scenario, folder: Path, run: RunFolder, resume: bool, command: str, *, detached: bool = False
) -> tuple[DriverRun | None, list[str]]:
    """Check the scenario and its data, prepare the records of the run, and start its controller.

    The folder stays locked until the controller exists, so that a driver that locks it later finds the controller.

    Returns:
        The run in progress, which is None if it is detached, and warnings about the data.
    """
    warnings: list[str] = []
    if resume:
        preflight.check_resumed(scenario, run)
    else:
        scenario = resolve_sources(scenario)
        warnings = preflight.check(scenario, folder)
    run = open_for_writing(run)
    preflight.check_free_space(scenario, run)
    check_ray_environment()
    timeout_s, writer, is_starting = read_orphan_timeout_s(), None, False
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(lock_run(run))
        was_empty = is_empty(run)
        try:
            _end_earlier_controller(run, resume)
            run.stop_request.unlink(missing_ok=True)
            writer = _prepare_records(scenario, folder, run, resume, command, detached=detached)
            is_starting = True
            controller = _start_controller(scenario, folder, run, resume, detached)
            if detached:
                return None, warnings
            memory, limit_s = PeakMemory().__enter__(), scenario.deadlines.start
            started = DriverRun(run, controller, memory, timeout_s, lock, warnings, resume, limit_s)
            stack.pop_all()
            return started, warnings
        except BaseException as error:
            # Files that the controller of another driver may work on stay.
            if not isinstance(error, _NameTakenError) and (not is_starting or _end_own_controller(run)):
                _delete_unstarted(run, None if resume else writer, was_empty=was_empty)
            raise


def _end_own_controller(run: RunFolder) -> bool:
    """End the controller that this process has created, and return whether no other one has the name of the run."""
    import ray

    if not ray.is_initialized():
        return True
    try:
        controller: Any = ray.get_actor(f"{run.id}/{CONTROLLER}", NAMESPACE)
    except ValueError:
        return True
    if controller._actor_id.job_id.hex() != ray.get_runtime_context().get_job_id():
        return False
    ray.kill(controller, no_restart=True)
    reap_run(run.id)
    return True


def _delete_unstarted(run: RunFolder, writer: RunWriter | None, *, was_empty: bool) -> None:
    """Delete a run that has not started, so that `last` does not refer to it; this process holds the lock of its folder."""
    is_deleted = was_empty and not run.scenario.exists()
    if writer:
        with contextlib.suppress(StorageError):  # the error that ended the start is raised
            is_deleted = writer.discard()
    if is_deleted:
        delete_folder(run)


def _end_earlier_controller(run: RunFolder, resume: bool) -> None:
    """End the controller of this run whose driver has died, on a shared cluster; its lease may not have expired yet.

    The caller holds the lock of the run's folder, so no other driver works on the run.

    Args:
        run: The folder of the run.
        resume: Whether the run continues from its newest checkpoint; the controller then writes one first.

    Raises:
        ConfigError: The controller is that of another run with the same id or of a detached run, or it has finished the run.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    if "RAY_ADDRESS" not in os.environ:
        return
    ensure_ray()
    try:
        controller: Any = ray.get_actor(f"{run.id}/{CONTROLLER}", NAMESPACE)
    except ValueError:
        return
    try:
        folder = ray.get(controller.get_folder.remote(), timeout=_ANSWER_PATIENCE_S)
    except (RayActorError, GetTimeoutError):  # it ends, or hangs
        folder = str(run.path)
    if folder != str(run.path):
        raise ConfigError(
            f"the cluster already has a run {run.id}, in {folder}; choose a folder of another name with --run-dir, or stop that "
            f"run: nonet stop {run.id}"
        )
    if resume:
        stop_run(run.id)
        if run.report.exists():
            raise ConfigError(f"{run.id} has finished meanwhile: see {run.path / 'report.html'}")
    elif (run.read_json(START) or {}).get("detached"):  # its controller will lock the folder
        raise ConfigError(
            f"{run.id} is being run by a detached controller; stop it first: nonet stop {run.id}"
        )
    else:
        ray.kill(controller, no_restart=True)
        reap_run(run.id)


def _prepare_records(
    scenario: Scenario, folder: Path, run: RunFolder, resume: bool, command: str, *, detached: bool
) -> RunWriter | None:
    """Record that a run is resumed or started, and what it starts from.

    A run in object storage also gets the copies of the user's files now, because other nodes have only what is stored.

    Returns:
        The closed writer of a run in object storage, which can discard it until another process opens the run; else None.

    Raises:
        ConfigError: The storage cannot be used.
    """
    copy = find_copy(run.path)
    single_writer = scenario.storage is not None and scenario.storage.single_writer
    if copy is not None:
        _check_storage(copy.address, resume=resume, single_writer=single_writer)
    with change_run(run.path, single_writer=single_writer) as writer:
        if resume:
            guard_folder(run.path, approves=False)
            # Of the folder that workers read, which may be newer than the view.
            check_folder(run.path, run.id)
            read_copies(run)
            record_resume(run)
            return writer
        run.clear_records()
        clear_interruptions(run)
        write_start(run, folder, command, detached=detached)
        if copy is not None:
            write_run(scenario, folder, run)
    return writer


def _check_storage(address: str, *, resume: bool, single_writer: bool) -> None:
    """Check that a run can be opened in its object storage, also for a resume: the bucket may have been moved.

    Raises:
        ConfigError: The storage cannot be written or ignores conditions, or a run of this id is in progress and to be started.
    """
    try:
        if not single_writer:
            open_storage(address, retry_timeout_s=OPENING_TIMEOUT_S).check_conditions()
        owner = "" if resume else find_working_owner(address)
    except StorageError as error:
        raise ConfigError(f"storage: {error}") from None
    if owner:
        raise ConfigError(
            f"{address} is in progress: {owner} works on it; choose another name, or stop it first: nonet stop {address}"
        )


def _start_controller(scenario: Scenario, folder: Path, run: RunFolder, resume: bool, detached: bool) -> Any:
    """Stop orphaned processes of earlier runs on a shared cluster, then start this run's controller.

    Returns:
        The handle of the controller's actor.

    Raises:
        NonetError: The controller did not start, or another one has the name of the run.
    """
    from ray.exceptions import RayError

    from nonet.controller import ControllerTask, SingleController

    ensure_ray()
    if "RAY_ADDRESS" in os.environ:
        reap_orphaned_runs()
    is_stored = find_copy(run.path) is not None
    task = ControllerTask(
        scenario,
        str(folder),
        str(run.path),
        resume,
        detached,
        read_orphan_timeout_s(),
        token="" if is_stored else write_token(run),
        mounts=list_mounts(),
    )
    try:
        return SingleController.options(  # pyright: ignore[reportAttributeAccessIssue]
            name=f"{run.id}/{CONTROLLER}", namespace=NAMESPACE, lifetime="detached", max_restarts=-1
        ).remote(task)
    except ValueError as error:
        raise _NameTakenError(f"the controller did not start: {error}") from None
    except RayError as error:
        raise NonetError(f"the controller did not start: {error}") from None


def stop_run(run: str, timeout_s: float = STOP_PATIENCE_S) -> str:
    """Stop a run on the cluster that RAY_ADDRESS names: request a checkpoint at the next step, then stop everything.

    Args:
        run: The run's id.
        timeout_s: Seconds to wait for the run to end; after that it is stopped without a checkpoint.

    Returns:
        A message that says what was done.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    ensure_ray()
    try:
        controller = ray.get_actor(f"{run}/{CONTROLLER}", NAMESPACE)
    except ValueError:
        stopped_count = reap_run(run)
        return (
            f"{run} has no controller; stopped its {stopped_count} remaining processes and placement groups"
        )
    deadline_s, has_finished = time.monotonic() + timeout_s, False
    try:
        ray.get(controller.stop.remote(), timeout=_ANSWER_PATIENCE_S)
        while time.monotonic() < deadline_s:
            outcome = ray.get(controller.poll.remote(0), timeout=_ANSWER_PATIENCE_S)["outcome"]  # pyright: ignore[reportCallIssue, reportArgumentType]
            if outcome:
                has_finished = outcome["state"] == "done"
                break
            time.sleep(_POLL_S)
    except (RayActorError, GetTimeoutError):
        pass  # it ended by itself or does not answer; the rest is stopped below in either case
    with contextlib.suppress(Exception):
        ray.kill(controller, no_restart=True)
    reap_run(run)
    return describe_stop(run, has_finished=has_finished)


@contextmanager
def _count_interrupts() -> Iterator[SimpleNamespace]:
    """Count SIGINT and SIGTERM instead of terminating the process, while the context is open.

    Yields:
        An object whose `count` is the number of signals; it stays 0 in a thread other than the main one, which
        cannot catch signals.
    """
    interrupts = SimpleNamespace(count=0)
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return

    def count_interrupt(*_: object) -> None:
        interrupts.count += 1

    old_handlers = {
        number: signal.signal(number, count_interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield interrupts
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
