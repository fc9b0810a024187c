"""Measures RL steps per second with every role in its own process, where the latency of calls matters most."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

_SEPARATE_ROLES = "roles={rollout: {workers: 1}, embedding: {workers: 1}}"
_SHORT_RUN = ["stages.pretrain.epochs=1", "checkpoint.every=100000"]
_WARMUP_STEPS = 5


def bench_rl_steps(steps: int = 60, users: int = 8) -> dict[str, Any]:
    """Return the median seconds of an RL step of the quickstart's model with separate roles and `users` prompts."""
    # Ray starts workers with a higher niceness by default, so other processes would slow them down.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's own spelling
    from nonet.controller.record import Recorder, RunFolder
    from nonet.controller.session import Session
    from nonet.controller.stages import run_stage

    changes = [_SEPARATE_ROLES, *_SHORT_RUN, f"stages.rl.steps={steps}", f"stages.rl.users={users}"]
    times: list[float] = []

    class StepClock(Recorder):
        """A recorder that also stores the time at which each step ended."""

        def record_step(self, stage: str, step: int, values: Mapping[str, float]) -> None:
            times.append(time.perf_counter())
            super().record_step(stage, step, values)

    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "run")
        with Session("quickstart", changes=changes, run=run) as session:
            run_stage(session, "rl", StepClock(run.path, run.id), lambda: False)
    seconds = [after - before for before, after in pairwise(times[_WARMUP_STEPS:])]
    median_s = statistics.median(seconds)
    row = {"users": users, "steps": len(seconds), "step_s": median_s, "steps/s": 1 / median_s}
    return {"rows": [row], "ratio": {}}
