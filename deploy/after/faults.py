"""Faults of a run in progress: which process is killed or stopped at which step, and how that is done on any node.

The schedule is a function of a seed. A fault happens when the run has applied a number of steps, and a moment later, so that
some faults fall into saves and publications.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nonet.controller.groups import CONTROLLER
from nonet.controller.record import RunFolder, read_journal
from nonet.errors import ConfigError
from nonet.random import rng

ROLES = ("rollout", "trainer", "reward", "embedding", "evaluator", CONTROLLER)
_HANG_SHARE = 0.25  # of all faults; the others are kills
_MAX_HANG_S = 4.0  # shorter than every deadline
_POLL_S = 0.05
_PROCESS_TIMEOUT_S = 60.0  # after which a role without a process counts as one that the run does not have
# A run fails after so many losses without a new checkpoint (`SingleController`), so a schedule leaves time for one.
_MAX_FAULTS_PER_CHECKPOINT = 2


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a run.

    Attributes:
        role: The role whose process is hit, or "controller".
        step: The global step after which it happens, counted from 1.
        delay_s: Seconds after that step.
        hang_s: Seconds for which the process is stopped; 0 if it is killed.
        process: The name of the process that was hit; "" if the role had none at that time.
        hit_step: The number of steps that had been applied when it happened.
        recovery_s: Seconds from the fault to the next step that had not been applied before; None if there was none.
    """

    role: str
    step: int
    delay_s: float
    hang_s: float
    process: str = ""
    hit_step: int = 0
    recovery_s: float | None = None

    @property
    def kind(self) -> str:
        """What happens: "kill" or "hang"."""
        return "hang" if self.hang_s else "kill"


def draw_faults(roles: Sequence[str], count: int, seed: int, steps: int, step_s: float) -> list[Fault]:
    """Draw the faults of a run, ordered by step. Every role has as many as any other, give or take one.

    Args:
        roles: The roles to hit.
        count: The number of faults.
        seed: The seed of the schedule.
        steps: The number of steps of the run.
        step_s: Seconds of a step, which bound the delays.

    Raises:
        ConfigError: A role is unknown, or the first three quarters of the run have fewer steps than faults.
    """
    if unknown := [role for role in roles if role not in ROLES]:
        raise ConfigError(f"--kill names {', '.join(unknown)}; it takes {', '.join(ROLES)}")
    last_step = (
        steps * 3 // 4
    )  # each fault moves the next one back, so that the last ones would come after the run's end
    if count > last_step:
        raise ConfigError(
            f"--times is {count}, and the run has {steps} steps, in whose first three quarters faults begin; give at most "
            f"{last_step}"
        )
    generator = rng(seed, "chaos")
    fault_steps = sorted(int(step) for step in generator.choice(last_step, size=count, replace=False) + 1)
    order = [roles[index % len(roles)] for index in range(count)]
    generator.shuffle(order)
    return [
        Fault(
            role=role,
            step=step,
            delay_s=float(generator.random()) * step_s,
            hang_s=float(generator.uniform(1.0, _MAX_HANG_S)) if generator.random() < _HANG_SHARE else 0.0,
        )
        for role, step in zip(order, fault_steps, strict=True)
    ]


class FaultInjector:
    """A thread that does what a schedule says to one run, and measures how long the run needs to recover.

    Args:
        run: The folder of the run, which the thread waits for.
        faults: The schedule.
        report: Called with a line per fault.

    Attributes:
        done: The faults that have happened, with what they hit.
    """

    def __init__(self, run: RunFolder, faults: Sequence[Fault], report: Callable[[str], None]):
        self._run, self._faults, self._report = run, list(faults), report
        self.done: list[Fault] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._inject_all, name="chaos", daemon=True)

    def __enter__(self) -> FaultInjector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _inject_all(self) -> None:
        """Do one fault after the other, each when the run has recovered from the one before."""
        faults_since_checkpoint, checkpoint = 0, ""
        for fault in self._faults:
            while not self._ended.wait(_POLL_S):
                newest = self._find_newest_checkpoint()
                if newest != checkpoint:
                    faults_since_checkpoint, checkpoint = 0, newest
                has_room = faults_since_checkpoint < _MAX_FAULTS_PER_CHECKPOINT
                if count_applied_steps(self._run) >= fault.step and has_room:
                    break
            if self._ended.wait(fault.delay_s):
                return
            self._inject(fault)
            faults_since_checkpoint += 1

    def _inject(self, fault: Fault) -> None:
        """Do one fault, and wait until the run has applied a step that it had not applied before."""
        hit_step, began = count_applied_steps(self._run), time.monotonic()
        while not (
            process := inject_fault(self._run, fault)
        ):  # while workers are replaced, a role has no process
            if time.monotonic() - began > _PROCESS_TIMEOUT_S or self._ended.wait(_POLL_S):
                break
        done = replace(fault, process=process, hit_step=hit_step)
        while process and not self._ended.wait(_POLL_S):
            if count_applied_steps(self._run) > hit_step:
                done = replace(done, recovery_s=round(time.monotonic() - began, 2))
                break
        self.done.append(done)
        recovery = "" if done.recovery_s is None else f", next step after {done.recovery_s:.1f} s"
        self._report(f"{done.kind} {process or f'no process of {fault.role}'} at step {hit_step}{recovery}")

    def _find_newest_checkpoint(self) -> str:
        """Return the name of the newest checkpoint that has a manifest, "" without one."""
        return max(
            (path.parent.name for path in self._run.checkpoints.glob("step-*/manifest.json")), default=""
        )


def count_applied_steps(run: RunFolder) -> int:
    """Return the number of steps that a run has applied, by its journal; after a recovery, it starts at the checkpoint."""
    return max(
        (record["applied"] + 1 for record in read_journal(run.journal) if "applied" in record), default=0
    )


def inject_fault(run: RunFolder, fault: Fault) -> str:
    """Kill or stop one process of a role, on whichever node it is, and return its name; "" if there is none."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    found = find_process(run, fault.role, fault.step)
    if found is None:
        return ""
    name, pid, node = found

    @ray.remote(num_cpus=0, max_retries=0)
    def send_signals(pid: int, hang_s: float) -> None:
        """Kill a process of this node, or stop it for some seconds."""
        import os
        import time

        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if hang_s else signal.SIGKILL)
            if hang_s:
                time.sleep(hang_s)
                os.kill(pid, signal.SIGCONT)

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    ray.get(send_signals.options(scheduling_strategy=strategy).remote(pid, fault.hang_s))
    return name


def find_process(run: RunFolder, role: str, draw: int) -> tuple[str, int, str] | None:
    """Return name, process id and node of a living process of a role; None if there is none now.

    Args:
        run: The folder of the run, whose status names the groups.
        role: One of `ROLES`.
        draw: A number that chooses among several processes.
    """
    import ray

    groups = (run.read_json(run.status.name) or {}).get("groups", {})
    names = {f"{run.id}/{CONTROLLER}"} if role == CONTROLLER else set[str]()
    for group_name, group in groups.items():
        if any(role == group_role or f".{role}." in group_role for group_role in group["roles"]):
            names |= {f"{run.id}/{group_name}-{rank}" for rank in range(group["workers"])}
    actors = ray._private.state.actors().values()  # pyright: ignore[reportAttributeAccessIssue]
    living = sorted(
        (actor["Name"], actor["Pid"], actor["Address"]["NodeID"])
        for actor in actors
        if actor["State"] == "ALIVE" and actor["Name"] in names
    )
    return living[draw % len(living)] if living else None
