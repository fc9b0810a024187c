"""FaultInjector: does what a schedule of faults says to a run in progress, on whichever nodes its processes are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nonet.controller.groups import CONTROLLER, Moment
from nonet.controller.record import RunFolder
from nonet.deploy.after.chaos.agents import FaultAgents
from nonet.deploy.after.chaos.connections import StorageProxy
from nonet.deploy.after.chaos.faults import NODE, STORAGE, Fault, get_target_roles
from nonet.workers.runtime import NAMESPACE

_POLL_S = 0.05
_ANSWER_TIMEOUT_S = 10.0  # within which a controller or an agent answers
_VICTIM_TIMEOUT_S = 60.0  # after which a target without a process counts as one that the run does not have
_MOMENT_TIMEOUT_S = 15.0  # after which a fault no longer waits for its moment
_MAX_HANG_S = 900.0  # longer than the deadlines that end a hang
# A run fails after so many losses without a new checkpoint (`SingleController`), so a schedule leaves time for one.
_MAX_FAULTS_PER_CHECKPOINT = 2


class FaultInjector:
    """A thread that does what a schedule says to one run, and measures how long the run needs to recover.

    Args:
        run: The folder of the run, which has been started.
        faults: The schedule.
        agents: The agents that disturb processes.
        report: Called with a line per fault.
        proxy: The proxy before the endpoint of the object storage; None if no fault hits the storage.
        choose_node: Returns which of some nodes may be killed, "" for none; called with the ids of the nodes of the run.

    Attributes:
        done: The faults that have happened, with what they hit.
    """

    def __init__(
        self,
        run: RunFolder,
        faults: Sequence[Fault],
        agents: FaultAgents,
        report: Callable[[str], None],
        proxy: StorageProxy | None = None,
        choose_node: Callable[[Sequence[str]], str] = lambda nodes: "",
    ):
        self._run, self._faults, self._agents, self._report = run, list(faults), agents, report
        self._proxy, self._choose_node = proxy, choose_node
        self.done: list[Fault] = []
        self._reported = 0  # number of faults
        # Of the newest fault: the losses of the run before it, when it happened, and why it could not be done.
        self._losses, self._began, self._reason = 0, 0.0, ""
        self._furthest_step = 0
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run_thread, name="chaos", daemon=True)

    def __enter__(self) -> FaultInjector:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def _run_thread(self) -> None:
        """Inject all faults, and keep an error, which `__exit__` raises."""
        try:
            self._inject_all()
        except Exception as error:
            self._error = error

    def _inject_all(self) -> None:
        """Do one fault after the other, each when the run has recovered from the one before."""
        faults_since_checkpoint, checkpoint = 0, ""
        for fault in self._faults:
            while not self._ended.wait(_POLL_S):
                progress = self._read_progress()
                if progress is None:
                    continue
                if progress["checkpoint"] != checkpoint:
                    faults_since_checkpoint, checkpoint = 0, progress["checkpoint"]
                has_room = faults_since_checkpoint < _MAX_FAULTS_PER_CHECKPOINT
                if self._follow(progress) and progress["applied"] >= fault.step and has_room:
                    break
            self._report_newest()
            if self._ended.wait(fault.delay_s):
                return
            self._inject(fault)
            faults_since_checkpoint += 1
        while not self._ended.wait(_POLL_S):
            if (progress := self._read_progress()) is not None:
                self._follow(progress)
        self._report_newest()

    def _inject(self, fault: Fault) -> None:
        """Do one fault at its moment, as soon as its target has a process."""
        progress = self._wait_for_moment(fault.moment)
        victim, self._reason, end = "", "", time.monotonic() + _VICTIM_TIMEOUT_S
        while progress is not None and not victim and not self._reason:
            self._losses, self._began = progress["losses"], time.monotonic()
            self._furthest_step = max(self._furthest_step, progress["applied"])
            done = replace(fault, hit_step=progress["applied"], moment=progress["moment"])
            victim, self._reason = self._apply(fault, progress)
            if not victim and time.monotonic() > end:
                self._reason = f"no process of {fault.target}"
            if victim or self._reason:
                self.done.append(replace(done, victim=victim))
                return
            progress = self._wait_for_moment("step")  # while workers are replaced, a role has no process

    def _follow(self, progress: dict[str, Any]) -> bool:
        """Update the newest fault: whether the run has continued from a checkpoint since, and come further than ever.

        Returns:
            Whether the run has recovered from it.
        """
        if not self.done or not self.done[-1].victim:
            return True
        fault, restarts = self.done[-1], progress["losses"] - self._losses
        if restarts > fault.restarts:
            fault = replace(fault, restarts=restarts, recovery_s=None)
        if fault.recovery_s is None and progress["applied"] > self._furthest_step:
            fault = replace(fault, recovery_s=round(time.monotonic() - self._began, 2))
        self._furthest_step = max(self._furthest_step, progress["applied"])
        self.done[-1] = fault
        return fault.recovery_s is not None

    def _report_newest(self) -> None:
        """Report the newest fault, unless it has been reported."""
        if len(self.done) == self._reported:
            return
        self._reported, fault = len(self.done), self.done[-1]
        recovery = "" if fault.recovery_s is None else f", next new step after {fault.recovery_s:.1f} s"
        restarts = f", {fault.restarts} restarts" if fault.restarts else ""
        victim = fault.victim or f"{fault.target}: {self._reason}"
        moment = "at" if fault.moment == "step" else f"during a {fault.moment} after"
        self._report(f"{fault.kind} {victim} {moment} step {fault.hit_step}{recovery}{restarts}")

    def _wait_for_moment(self, moment: Moment) -> dict[str, Any] | None:
        """Wait until the run is at a moment, and return its progress; None if the run has ended."""
        while not self._ended.wait(_POLL_S):
            progress = self._read_progress(moment, _MOMENT_TIMEOUT_S)
            if progress is not None:
                return progress
        return None

    def _read_progress(self, moment: Moment = "step", timeout_s: float = 0.0) -> dict[str, Any] | None:
        """Return the progress of the run (`ProgressReader`); None while its controller does not answer."""
        import ray
        from ray.exceptions import RayError

        try:
            controller: Any = ray.get_actor(f"{self._run.id}/{CONTROLLER}", NAMESPACE)
            return ray.get(
                controller.read_progress.remote(moment, timeout_s), timeout=timeout_s + _ANSWER_TIMEOUT_S
            )
        except (ValueError, RayError):
            return None

    def _apply(self, fault: Fault, progress: dict[str, Any]) -> tuple[str, str]:
        """Do a fault.

        Returns:
            The name of what was hit, "" if it is not there now; and why the fault cannot be done at all, "" if it can.
        """
        if fault.target == STORAGE:
            assert self._proxy is not None
            disturb = self._proxy.delay if fault.kind == "slow" else self._proxy.cut
            disturb(fault.duration_s)
            return "connections to the storage", ""
        processes = list_processes(self._run.id, progress["groups"])
        if fault.target == NODE:
            node = self._choose_node(sorted({process[2] for process in processes}))
            return self._call_agent(fault, f"node {node[:8]}", 0, node) if node else ("", "")
        found = select_process(processes, fault.target, fault.step)
        return ("", "") if found is None else self._call_agent(fault, *found[:3])

    def _call_agent(self, fault: Fault, name: str, pid: int, node: str) -> tuple[str, str]:
        """Let the agent of a node apply a fault to the node or to a process of it; return as `_apply` does."""
        try:
            if fault.target == NODE:
                self._agents.begin(node, "kill_node")
            elif fault.kind == "kill":
                self._agents.call(node, "kill", pid)
            elif fault.kind == "cut":
                self._agents.call(node, "cut_connections", pid)
            else:
                self._agents.begin(node, "suspend", pid, fault.duration_s or _MAX_HANG_S)
        except PermissionError as error:
            return "", str(error)
        except LookupError:  # the node has been lost meanwhile
            return "", ""
        return name, ""


def list_processes(run_id: str, groups: dict[str, Any]) -> list[tuple[str, int, str, tuple[str, ...]]]:
    """Return the living processes of a run.

    Args:
        run_id: The id of the run.
        groups: The number of workers and the roles of each group, by its name.

    Returns:
        The name, the process id, the node and the roles of each process, sorted by name.
    """
    import ray

    roles_by_name: dict[str, tuple[str, ...]] = {f"{run_id}/{CONTROLLER}": (CONTROLLER,)}
    for group_name, (workers, roles) in groups.items():
        for rank in range(workers):
            roles_by_name[f"{run_id}/{group_name}-{rank}"] = get_target_roles(group_name, roles)
    actors = ray._private.state.actors().values()  # pyright: ignore[reportAttributeAccessIssue]
    return sorted(
        (actor["Name"], actor["Pid"], actor["Address"]["NodeID"], roles_by_name[actor["Name"]])
        for actor in actors
        if actor["State"] == "ALIVE" and actor["Name"] in roles_by_name
    )


def select_process(
    processes: Sequence[tuple[str, int, str, tuple[str, ...]]], role: str, draw: int
) -> tuple[str, int, str, tuple[str, ...]] | None:
    """Return one of the processes of a role, which a number chooses; None if there is none."""
    found = [process for process in processes if role in process[3]]
    return found[draw % len(found)] if found else None
