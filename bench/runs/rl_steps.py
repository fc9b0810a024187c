"""RL steps a second with every role in a process of its own, where waiting for answers matters most."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

_APART = "roles={rollout: {workers: 1}, embedding: {workers: 1}}"
_SHORT = ["stages.pretrain.epochs=1", "checkpoint.every=100000"]
_SKIPPED = 5  # steps that warm up


class _Clock:
    """A recorder that keeps the time of each step."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def begin(self, *stage: Any) -> None:
        self.at.clear()

    def step(self, *shown: Any) -> None:
        self.at.append(time.perf_counter())

    def tables(self, *counts: Any) -> None:
        """Ignore the counts of tables."""

    def metrics(self, *values: Any, **more: Any) -> None:
        """Ignore metrics."""


def bench_rl_steps(steps: int = 60, users: int = 8) -> dict[str, Any]:
    """Return the median seconds of an RL step of the quickstart's model with separate roles and `users` prompts."""
    # Ray's workers yield to everybody else by default: not while they are timed
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's own spelling
    from nonet.controller.record import RunFolder
    from nonet.controller.session import Session
    from nonet.controller.stages import run_stage

    changes = [_APART, *_SHORT, f"stages.rl.steps={steps}", f"stages.rl.users={users}"]
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "run")
        with Session("quickstart", changes=changes, run=run) as session:
            run_stage(session, "rl", clock, lambda: False)  # type: ignore[arg-type]
    seconds = [after - before for before, after in pairwise(clock.at[_SKIPPED:])]
    middle = statistics.median(seconds)
    row = {"users": users, "steps": len(seconds), "step_s": middle, "steps/s": 1 / middle}
    return {"rows": [row], "ratio": {}}
