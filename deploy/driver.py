"""The driver: starts a run's controller, shows what it says, and stops it when asked.

It holds the run: when it ends, a local Ray ends with it; on a shared cluster the controller and its workers are its own and
end too. The first Ctrl-C (or SIGTERM, as `ray job stop` sends) asks for a commit at the next step, the second leaves.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nonet.controller import preflight
from nonet.controller.run_folder import RunFolder
from nonet.controller.scenario import Scenario
from nonet.deploy.memory import PeakMemory
from nonet.deploy.panel import Panel
from nonet.deploy.report import write_report
from nonet.errors import NonetError, WorkerFailed
from nonet.models.baselines import BASELINES

_POLL_S = 0.3
_STOP_S = 120.0


class Run:
    """A run under way or over: its folder, its state (running, done, stopped), and its report."""

    def __init__(self, folder: RunFolder, work: Any, controller: Any, memory: PeakMemory):
        self.folder, self.id = folder, folder.id
        self._work, self._controller, self._memory = work, controller, memory
        self.state = "running"
        self._began = time.time()
        self._all_ours = (
            "RAY_ADDRESS" not in os.environ
        )  # a shared cluster's processes are not below this one

    @property
    def report(self) -> dict[str, Any]:
        """report.json of a finished run."""
        return self.folder.read_json("report.json")

    def wait(self, panel: Panel | None = None) -> Run:
        """Show events until the end. Raises what made the run fail."""
        import ray

        seen, view = 0, EventView(panel)
        asked_at: float | None = None
        with _interrupts() as interrupted:
            while True:
                done, _ = ray.wait([self._work], timeout=_POLL_S)
                events = [] if done else ray.get(self._controller.poll.remote(seen))
                seen += len(events)
                view.show(events)
                if done:
                    break
                if interrupted.count and asked_at is None:
                    asked_at = time.monotonic()
                    view.note("stopping after this step; once more to leave at once")
                    self._controller.stop.remote()
                if interrupted.count > 1 or (asked_at and time.monotonic() - asked_at > _STOP_S):
                    self.state = "stopped"
                    self.close()
                    return self
            view.show(ray.get(self._controller.poll.remote(seen)))
        return self._ended(ray.get(self._work))

    def stop(self) -> None:
        """Ask for a commit at the next step, then the end."""
        self._controller.stop.remote()

    def close(self) -> None:
        """End the controller and what it started."""
        import ray

        self._memory.__exit__()
        if self._controller is not None:
            ray.kill(self._controller)
            self._controller = None

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
    import ray

    if not resume:
        preflight.check(scenario, folder)
    memory = PeakMemory().__enter__()
    from nonet.controller.single_controller import SingleController
    from nonet.workers.hosts import ensure_ray

    ensure_ray()
    if command:
        run.write_json("command.json", {"command": command})
    controller = SingleController.options(name=f"{run.id}/controller").remote(
        scenario, str(folder), str(run.path), resume
    )  # type: ignore[attr-defined]
    try:
        return Run(run, controller.run.remote(), controller, memory)
    except ray.exceptions.RayError as error:
        raise NonetError(f"the controller did not start: {error}") from None


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
        if event["name"] in BASELINES:
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


class _Interrupts:
    count = 0


@contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    """Counts SIGINT and SIGTERM instead of dying of them; only where signals can be caught."""
    seen = _Interrupts()
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
