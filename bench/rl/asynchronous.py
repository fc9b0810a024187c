"""RL stages whose rollouts do not wait beside stages that take turns: whole stages of one run on Ray, with a reward that sleeps.

A run of the small world has the same RL stage several times, with a staleness of 0 and of 1 in turn. Its reward sleeps for
each prompt as a judge behind a network would take: always the same, or lognormal, whose 99th percentile is 8 times the
median. Everything else is what any run does: rollouts answer, trainers learn, held-out users are scored.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from nonet.bench.rl.small_world import write_world

_WORKLOADS = {"even": 0.0, "lognormal": 0.894}  # sigma; 0.894 is ln 8 over the normal's 99th percentile
_SKIPPED = 2  # steps in which a stage warms up
_REWARD = '''
import asyncio

import numpy as np

import nonet


@nonet.reward
async def judge(uid, item, valid, *, mean_s: float = 0.1, sigma: float = 0.0):
    """What few took is worth more; each prompt takes a time of its own, and those of a call are asked at once."""
    draw = np.random.default_rng([hash(str(each)) & 0xFFFFFFFF for each in uid])
    await asyncio.sleep(mean_s * draw.lognormal(-(sigma**2) / 2, sigma, len(uid)).max())
    return item % 7 == 0
'''


class StageClock:
    """A recorder that keeps the time of each step of each stage, and how often groups were generated again."""

    def __init__(self) -> None:
        self.at: dict[str, list[float]] = {}
        self.aborted: dict[str, float] = {}

    def begin(self, stage: str, *more: Any) -> None:
        """Begin a stage."""
        self.at[stage] = []

    def record_step(self, stage: str, done: int, shown: Mapping[str, float]) -> None:
        """Record the time of a step."""
        self.at[stage].append(time.perf_counter())
        self.aborted[stage] = shown.get("aborted", 0.0)

    def measure_step_s(self, stage: str) -> float:
        """Return the mean seconds of a step of a stage, without its first ones and without the last, which is validated."""
        steps = [after - before for before, after in pairwise(self.at[stage][_SKIPPED:-1])]
        return sum(steps) / len(steps)

    def record_tables(self, *counts: Any) -> None:
        """Ignore the counts of tables."""

    def record_metrics(self, *values: Any, **more: Any) -> None:
        """Ignore metrics."""

    def add_event(self, *kinds: Any, **more: Any) -> None:
        """Ignore notes."""


def bench_asynchronous(
    steps: int = 14, mean_ms: float = 300.0, users: int = 32, repeats: int = 3, staleness: int = 1
) -> dict[str, Any]:
    """Run the stages, and return their steps per second.

    Args:
        steps: Steps of each stage.
        mean_ms: Milliseconds that the reward sleeps for a prompt, on average.
        users: Prompts of a step.
        repeats: How often each stage is run; those of both kinds take turns.
        staleness: Updates that may lie between the weights that answered a prompt and its own update.
    """
    # Ray's workers yield to everybody else by default: not while they are timed
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's own spelling
    from nonet.controller.record import RunFolder
    from nonet.controller.session import Session
    from nonet.controller.stages import run_stage

    clock, kinds = StageClock(), [(repeat, stale) for repeat in range(repeats) for stale in (0, staleness)]
    for name, sigma in _WORKLOADS.items():
        with TemporaryDirectory() as folder:
            scenario = write_world(Path(folder), "off")
            (Path(folder) / "judge.py").write_text(_REWARD, encoding="utf-8")
            head, _, _ = scenario.read_text(encoding="utf-8").partition("  rl: {")
            for repeat, stale in kinds:
                head += (
                    f"  {name}_{repeat}_{stale}: {{use: reinforced, steps: {steps}, users: {users}, lr: 1e-4, control: false, "
                    f"rollout: {{width: 16, staleness: {stale}}}, "
                    f"rewards: {{judge: {{use: judge.py, mean_s: {mean_ms / 1e3}, sigma: {sigma}}}}}}}\n"
                )
            roles = "roles: {rollout: {workers: 2}, embedding: {workers: 1}}\n"
            scenario.write_text(head + roles, encoding="utf-8")
            with Session(str(scenario), run=RunFolder(Path(folder) / "run")) as session:
                for stage in session.stages:
                    run_stage(session, stage, clock, lambda: False)  # type: ignore[arg-type]
    rows, ratios = [], {}
    for name in _WORKLOADS:
        seconds = {
            stale: [clock.measure_step_s(f"{name}_{each}_{stale}") for each in range(repeats)]
            for stale in (0, staleness)
        }
        rows.append(
            {
                "times": name,
                "synchronous, steps/s": 1 / median(seconds[0]),
                f"staleness {staleness}, steps/s": 1 / median(seconds[staleness]),
                "asked again": max(clock.aborted[f"{name}_{each}_{staleness}"] for each in range(repeats)),
            }
        )
        ratios[f"{name} times, against synchronous"] = median(
            turns / goes for turns, goes in zip(seconds[0], seconds[staleness], strict=True)
        )
    return {"rows": rows, "ratio": ratios}
