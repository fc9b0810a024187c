"""The faults of `nonet chaos`: what is hit, how, at which step and at which moment. A schedule is a function of its seed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from nonet.controller.groups import CONTROLLER, Moment
from nonet.controller.plan import make_group_requests, resolve_run
from nonet.controller.scenario import Scenario
from nonet.errors import ConfigError
from nonet.random import rng

Kind = Literal["kill", "slow", "cut", "hang"]
STORAGE, NODE = "storage", "node"
# The kinds of faults of each target, which follow each other. A fault hits a process of a role (or the controller), a whole
# node, or the connections to the object storage.
_PROCESS_KINDS: tuple[Kind, ...] = ("kill", "slow", "kill", "cut")
_WORKER_KINDS: tuple[Kind, ...] = (*_PROCESS_KINDS, "kill", "hang")
KINDS_BY_TARGET: dict[str, tuple[Kind, ...]] = {
    "rollout": _WORKER_KINDS,
    "trainer": _WORKER_KINDS,
    "reward": _WORKER_KINDS,
    "embedding": _WORKER_KINDS,
    "evaluator": _PROCESS_KINDS,
    CONTROLLER: _PROCESS_KINDS,
    NODE: ("kill",),
    STORAGE: ("slow", "cut"),
}
_MOMENT_SHARES: dict[Moment, float] = {"step": 0.5, "save": 0.3, "publish": 0.2}
_SLOW_S = (1.0, 4.0)  # shorter than every deadline
_CUT_STORAGE_S = (2.0, 6.0)  # shorter than the time for which requests are repeated


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a run.

    Attributes:
        target: What is hit, one of `KINDS_BY_TARGET`.
        kind: "kill"; "slow": a process is suspended for some seconds, or connections to the storage are delayed; "cut":
            connections are closed; "hang": a process is suspended until the run has replaced it.
        moment: When it happens: "step", or while the run does "save" or "publish".
        step: The global step after which it happens, counted from 1.
        delay_s: Seconds after that step.
        duration_s: Seconds for which it lasts; 0 if it has no end of its own.
        victim: The name of what was hit; "" if there was no such process or node, or no permission.
        hit_step: The number of steps that had been applied when it happened.
        recovery_s: Seconds from the fault to the next step that had not been applied before, after the run has continued from a
            checkpoint if it did so before the next fault; None if there was no such step.
        restarts: How often the run continued from a checkpoint between this fault and the next.
    """

    target: str
    kind: Kind
    moment: Moment
    step: int
    delay_s: float
    duration_s: float
    victim: str = ""
    hit_step: int = 0
    recovery_s: float | None = None
    restarts: int = 0

    @property
    def name(self) -> str:
        """The kind and the target, such as "kill trainer"."""
        return f"{self.kind} {self.target}"


def list_targets(scenario: Scenario) -> list[str]:
    """Return the targets of faults that a run has: the roles of all its stages, its controller, nodes and storage."""
    run = resolve_run(scenario)
    requests = [request for stage in (None, *scenario.stages) for request in make_group_requests(run, stage)]
    roles = set().union(*(get_target_roles(request.name, request.roles) for request in requests))
    return [target for target in KINDS_BY_TARGET if target in {*roles, CONTROLLER, NODE, STORAGE}]


def get_target_roles(group_name: str, roles: Sequence[str]) -> tuple[str, ...]:
    """Return the roles of a group. A reward is a group of its own, rl.reward.NAME, whose role is its name."""
    return (*roles, "reward") if ".reward." in group_name else tuple(roles)


def check_targets(targets: Sequence[str], allowed: Sequence[str]) -> None:
    """Raise ConfigError if a target is none of those that a run has."""
    if unknown := [target for target in targets if target not in allowed]:
        raise ConfigError(
            f"--kill names {', '.join(unknown)}; of this scenario it takes {', '.join(allowed)}"
        )


def draw_faults(
    targets: Sequence[str],
    count: int,
    seed: int,
    steps: int,
    step_s: float,
    publishing_steps: Collection[int] = (),
) -> list[Fault]:
    """Draw the faults of a run, ordered by step. Every target has as many as any other, give or take one.

    Args:
        targets: What is hit.
        count: The number of faults.
        seed: The seed of the schedule.
        steps: The number of steps of the run.
        step_s: Seconds of a step, which bound the delays.
        publishing_steps: The global steps of the stages that publish weights, in which faults may wait for a publication.

    Raises:
        ConfigError: The first three quarters of the run have fewer steps than faults.
    """
    # Each fault moves the next one back, so that the last ones would come after the end of the run.
    last_step = steps * 3 // 4
    if count > last_step:
        raise ConfigError(
            f"--times is {count}, and the run has {steps} steps, in whose first three quarters faults begin; give at most "
            f"{last_step}"
        )
    generator = rng(seed, "chaos")
    fault_steps = sorted(int(step) for step in generator.choice(last_step, size=count, replace=False) + 1)
    order = [targets[index % len(targets)] for index in range(count)]
    generator.shuffle(order)
    next_kinds = {target: int(generator.integers(len(KINDS_BY_TARGET[target]))) for target in targets}
    moments: tuple[Moment, ...] = tuple(_MOMENT_SHARES)
    faults: list[Fault] = []
    for target, step in zip(order, fault_steps, strict=True):
        kinds = KINDS_BY_TARGET[target]
        kind = kinds[next_kinds[target] % len(kinds)]
        next_kinds[target] += 1
        moment = moments[int(generator.choice(len(moments), p=list(_MOMENT_SHARES.values())))]
        if moment == "publish" and step not in publishing_steps:
            moment = "step"
        delay_s = float(generator.random()) * step_s if moment == "step" else 0.0
        limits_s = _CUT_STORAGE_S if target == STORAGE else _SLOW_S
        has_end = kind == "slow" or target == STORAGE
        duration_s = float(generator.uniform(*limits_s)) if has_end else 0.0
        faults.append(Fault(target, kind, moment, step, round(delay_s, 3), round(duration_s, 3)))
    return faults
