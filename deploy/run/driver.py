"""The driver: starts a run's controller, shows what it says, and stops it when asked.

It holds the run's lease and renews it: when it dies, a local Ray dies with it, and on a shared cluster the controller commits and
ends everything. The first Ctrl-C (or SIGTERM, as `ray job stop` sends) asks for a commit at the next step, the second leaves.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nonet.controller.groups import CONTROLLER, Heartbeat, orphan_timeout_s, reap, reap_run
from nonet.controller.record import Held, RunFolder, claim, leave_token, missing
from nonet.controller.scenario import Scenario
from nonet.controller.setup import preflight, read_copies, settled
from nonet.deploy.report import write_report
from nonet.deploy.run.memory import PeakMemory
from nonet.deploy.run.panel import Panel
from nonet.errors import ConfigError, NonetError, WorkerFailed, WorkerLost
from nonet.workers import check_ray_environment

_POLL_S = 0.3
_STOP_S = 120.0
_RESTART_S = 120.0


class Run:
    """A run under way or over: its folder, its state (running, done, stopped), its report, and warnings about its data."""

    def __init__(
        self,
        folder: RunFolder,
        controller: Any,
        memory: PeakMemory,
        timeout_s: float,
        lock: Held,
        warnings: Sequence[str] = (),
    ):
        self.warnings = list(warnings)
        self.folder, self.id, self._held = folder, folder.id, lock
        self._controller: Any = controller
        self._memory = memory
        self.state = "running"
        self._began = time.time()
        self._all_ours = (
            "RAY_ADDRESS" not in os.environ
        )  # a shared cluster's processes are not below this one
        self._lease = Heartbeat(self._renew, timeout_s / 6)

    def _renew(self) -> None:
        """Tell the controller that its driver lives; never where Ray was shut down, for a call would join another cluster."""
        import ray

        if ray.is_initialized():
            self._controller.renew.remote()
            self._take_stop_request()

    def _take_stop_request(self) -> None:
        """Stop where `nonet stop` asked for it; removing the file is the answer."""
        if self.folder.stop_request.exists():
            self.stop()
            self.folder.stop_request.unlink(missing_ok=True)

    @property
    def report(self) -> dict[str, Any]:
        """report.json of a finished run."""
        return self.folder.read_json("report.json")

    def wait(self, panel: Panel | None = None) -> Run:
        """Show events until the end; a run that has ended answers at once. Raises what made the run fail."""
        if self._controller is None:
            return self
        seen, pid, view = 0, 0, EventView(panel)
        asked_at: float | None = None
        with _interrupts() as interrupted:
            while True:
                answer = self._polled(seen)
                if answer["pid"] != pid:  # another process conducts: its events begin anew
                    seen, pid = (0, answer["pid"]) if pid else (seen, answer["pid"])
                    answer = self._polled(seen)
                if dropped := missing(answer["events"], seen):
                    view.note(f"{dropped} steps went by unseen; metrics.jsonl has all")
                seen = answer["events"][-1]["number"] + 1 if answer["events"] else seen
                view.show(answer["events"])
                if warning := self._lease.warning():
                    view.note(warning)
                if answer["outcome"]:
                    return self._ended(answer["outcome"])
                self._take_stop_request()
                if interrupted.count and asked_at is None:
                    asked_at = time.monotonic()
                    view.note("stopping after this step; once more to leave at once")
                    self._controller.stop.remote()
                if interrupted.count > 1 or (asked_at and time.monotonic() - asked_at > _STOP_S):
                    self.state = "stopped"
                    self.close()
                    return self
                time.sleep(_POLL_S)

    def _polled(self, seen: int) -> dict[str, Any]:
        """What the controller says; while Ray restarts it, waits. Raises WorkerLost when it is gone for good."""
        import ray
        from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

        deadline = time.monotonic() + _RESTART_S
        while True:
            try:
                return ray.get(self._controller.poll.remote(seen), timeout=_RESTART_S)
            except ActorUnavailableError as error:
                gone: Exception = error
            except (RayActorError, GetTimeoutError) as error:
                gone, deadline = error, 0.0
            if time.monotonic() > deadline:
                self.close()
                raise WorkerLost(
                    f"the controller is gone ({' '.join(str(gone).split())[:200]}); "
                    f"if there is a commit, go on with: nonet resume {self.id}"
                ) from None
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Ask for a commit at the next step, then the end; nothing where the run has ended."""
        if self._controller is not None:
            self._controller.stop.remote()

    def close(self) -> None:
        """End the controller and what it started."""
        import ray

        self._lease.stop()
        self._memory.__exit__()
        if self._controller is not None:
            ray.kill(self._controller, no_restart=True)
            reap_run(self.id)
            self._controller = None
        self._held.close()

    def _ended(self, outcome: dict[str, Any]) -> Run:
        self.state = outcome["state"]
        self.close()
        if self.state == "failed":
            if not list(self.folder.checkpoints.glob("step-*")) and outcome["exit_code"] == 2:
                shutil.rmtree(
                    self.folder.path, ignore_errors=True
                )  # the caller's mistake, found before the first commit
            raise WorkerFailed(
                outcome["error"],
                traceback=outcome.get("traceback", ""),
                caller_fault=outcome["exit_code"] == 2,
            )
        if self.state == "done":
            wall_s = self.report["wall_s"] | {"total": round(time.time() - self._began, 3)}
            report = self.report | {
                "peak_rss_bytes": self._memory.peak_bytes if self._all_ours else 0,
                "wall_s": wall_s,
            }
            self.folder.write_json("report.json", report)
            write_report(self.folder.path)
        return self


def start(
    scenario: Scenario, folder: Path, run: RunFolder, *, resume: bool = False, command: str = ""
) -> Run:
    """Check everything, then start the run; returns at once."""
    timeout_s = orphan_timeout_s()
    warnings: list[str] = []
    if not resume:
        scenario = settled(scenario)
        warnings = preflight.check(scenario, folder)
    check_ray_environment()
    there = run.path.exists()
    lock = claim(run)
    try:
        run.stop_request.unlink(missing_ok=True)
        read_copies(run) if resume else run.begin_anew()
        memory = PeakMemory().__enter__()
        controller = _controller(scenario, folder, run, resume, command)
        return Run(run, controller, memory, timeout_s, lock, warnings)
    except BaseException:
        lock.close()
        if not there and not run.scenario.exists():  # nothing was begun: `last` must not mean it
            shutil.rmtree(run.path, ignore_errors=True)
        raise


def start_detached(
    scenario: Scenario, folder: Path, run: RunFolder, *, resume: bool = False, command: str = ""
) -> None:
    """As `start`, for a run that goes on without this process. Raises ConfigError without a cluster that outlives it."""
    if not os.environ.get("RAY_ADDRESS") or os.environ["RAY_ADDRESS"] == "local":
        raise ConfigError(
            "a detached run needs a cluster that outlives this process: set RAY_ADDRESS (e.g. auto), or leave --detach out"
        )
    if not resume:
        scenario = settled(scenario)
        preflight.check(scenario, folder)
    check_ray_environment()
    with claim(run):  # its controller will hold it
        read_copies(run) if resume else run.begin_anew()
    _controller(scenario, folder, run, resume, command, detached=True)


def _controller(
    scenario: Scenario, folder: Path, run: RunFolder, resume: bool, command: str, *, detached: bool = False
) -> Any:
    """Make the run's controller, after what earlier runs left without one has been ended."""
    from ray.exceptions import RayError

    from nonet.controller import SingleController, Task
    from nonet.workers.runtime import NAMESPACE, ensure_ray

    ensure_ray()
    if "RAY_ADDRESS" in os.environ:
        reap()
    if command:
        run.write_json("command.json", {"command": command})
    task = Task(scenario, str(folder), str(run.path), resume, detached, orphan_timeout_s(), leave_token(run))
    try:
        return SingleController.options(  # pyright: ignore[reportAttributeAccessIssue]
            name=f"{run.id}/{CONTROLLER}", namespace=NAMESPACE, lifetime="detached", max_restarts=-1
        ).remote(task)
    except (RayError, ValueError) as error:
        raise NonetError(f"the controller did not start: {error}") from None


def stop_run(run: str, timeout_s: float = _STOP_S) -> str:
    """Stop a run on the cluster that RAY_ADDRESS names: a commit at the next step, then everything ends.

    Args:
        run: The run's id.
        timeout_s: Seconds to wait for its end; it is ended without a commit after that.

    Returns:
        What was done.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    from nonet.workers.runtime import NAMESPACE, ensure_ray

    ensure_ray()
    try:
        controller = ray.get_actor(f"{run}/{CONTROLLER}", NAMESPACE)
    except ValueError:
        left = reap_run(run)
        return f"{run} has no controller; ended {left} processes and placement groups it had left"
    deadline = time.monotonic() + timeout_s
    try:
        ray.get(controller.stop.remote(), timeout=10.0)
        while time.monotonic() < deadline and not ray.get(controller.poll.remote(0), timeout=10.0)["outcome"]:  # pyright: ignore[reportCallIssue, reportArgumentType]
            time.sleep(_POLL_S)
    except (RayActorError, GetTimeoutError):
        pass  # it left by itself, or does not answer: either way what is left is ended below
    with contextlib.suppress(Exception):
        ray.kill(controller, no_restart=True)
    reap_run(run)
    return f"stopped {run}"


class EventView:
    """The controller's events on a panel, or nowhere."""

    def __init__(self, panel: Panel | None):
        self._panel = panel
        self._shown: dict[str, list[list[str]]] = {}
        self._last: str | None = None

    def note(self, text: str) -> None:
        if self._panel:
            self._panel.note(text)

    def show(self, events: list[dict[str, Any]]) -> None:
        """Show events in their order."""
        if self._panel is None:
            return
        for event in events:
            getattr(self, f"_{event['kind']}")(event)

    def _note(self, event: dict[str, Any]) -> None:
        self.note(event["text"])

    def _stage(self, event: dict[str, Any]) -> None:
        assert self._panel
        self._panel.stage(event["stage"], event["steps"], done=event["done"])

    def _step(self, event: dict[str, Any]) -> None:
        assert self._panel
        self._panel.step(event["stage"], event["step"], event["metrics"])

    def _result(self, event: dict[str, Any]) -> None:
        assert self._panel
        metrics = event["metrics"]
        self._panel.table(f"{event['name']} (test, full ranking)", list(metrics), [list(metrics.values())])
        if event.get("baseline") or not event["shown"]:
            return
        before = self._shown.get(self._last or "")
        rows = [
            {
                "user_id": event["users"][i]["user_id"],
                "target": event["users"][i]["target"],
                "recommended": titles,
            }
            | ({"before": before[i]} if before else {})
            for i, titles in enumerate(event["shown"][:3])
        ]
        self._panel.users(f"after {event['name']}", rows)
        self._shown[event["name"]], self._last = event["shown"], event["name"]


@contextmanager
def _interrupts() -> Iterator[SimpleNamespace]:
    """Counts SIGINT and SIGTERM instead of dying of them; only where signals can be caught."""
    seen = SimpleNamespace(count=0)
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def count(*_: object) -> None:
        seen.count += 1

    before = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
