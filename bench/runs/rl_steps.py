"""Measures RL steps per second with every role in its own process, where the latency of calls matters most."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

_SEPARATE_ROLES = "roles={rollout: {workers: 1}, embedding: {workers: 1}}"
_SHORT_RUN = ["stages.pretrain.epochs=1", "checkpoint.every=100000"]
_WARMUP_STEPS = 5


class _Clock:
    """A recorder that stores the time at which each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def begin(self, *stage: Any) -> None:
        self.times.clear()

    def step(self, *shown: Any) -> None:
        self.times.append(time.perf_counter())

    def tables(self, *counts: Any) -> None:
        """Ignore the counts of tables."""

    def metrics(self, *values: Any, **more: Any) -> None:
        """Ignore metrics."""


def bench_rl_steps(steps: int = 60, users: int = 8) -> dict[str, Any]:
    """Return the median seconds of an RL step of the quickstart's model with separate roles and `users` prompts."""
    # Ray starts workers with a higher niceness by default, so other processes would slow them down.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's own spelling
    from nonet.controller.record import RunFolder
    from nonet.controller.session import Session
    from nonet.controller.stages import run_stage

    changes = [_SEPARATE_ROLES, *_SHORT_RUN, f"stages.rl.steps={steps}", f"stages.rl.users={users}"]
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "run")
        with Session("quickstart", changes=changes, run=run) as session:
            run_stage(session, "rl", clock, lambda: False)  # type: ignore[arg-type]
    seconds = [after - before for before, after in pairwise(clock.times[_WARMUP_STEPS:])]
    median_s = statistics.median(seconds)
    row = {"users": users, "steps": len(seconds), "step_s": median_s, "steps/s": 1 / median_s}
    return {"rows": [row], "ratio": {}}
