"""`nonet bench rewards`: a reward that sleeps 50 ms per user, for 64 users on four workers, compared with 0.8 s of sleep.

The path is a run's: beams stay where they were made, each worker takes its share of them, and scores stay with the workers.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nonet.controller.groups import RewardHandles
from nonet.rl import to_wire
from nonet.types import Jagged, Rollouts
from nonet.workers.roles import RewardWorker
from nonet.workers.runtime import DistributeWorker, WorkerGroup, ensure_ray, method

_SLEEP_S, _USERS, _WORKERS, _WIDTH = 0.05, 64, 4, 16
_SLOW = f"""
import time
import numpy as np
import nonet


@nonet.reward
def slow(item):
    time.sleep({_SLEEP_S} * len(item))
    return np.ones(item.shape)
"""


class BeamMaker(DistributeWorker):
    """A worker that makes beams of one item each."""

    @method(collect="concat")
    def make(self) -> dict[str, Any]:
        """Make rollouts in wire format."""
        item = np.zeros((_USERS, _WIDTH), np.int64)
        rollouts = Rollouts(
            uid=np.array([f"bench/0/{user}" for user in range(_USERS)]),
            user_id=np.arange(_USERS),
            item_id=item,
            item=item,
            sid=np.zeros((_USERS, _WIDTH, 3), np.int32),
            logp=np.zeros((_USERS, _WIDTH, 3), np.float32),
            valid=np.ones((_USERS, _WIDTH), bool),
            target=Jagged(np.zeros(_USERS, np.int64), np.arange(_USERS + 1)),
            history=Jagged(np.zeros(_USERS, np.int64), np.arange(_USERS + 1)),
            scene=np.zeros(_USERS, np.int64),
            weights_version=0,
            catalogue_version="",
            step=0,
        )
        return to_wire(rollouts)


def bench_rewards(rounds: int = 7) -> dict[str, Any]:
    """Return the median seconds of scoring beside the time that the workers sleep."""
    ensure_ray()
    with TemporaryDirectory() as folder:
        pq.write_table(pa.table({"item_id": [1]}), Path(folder) / "items.parquet")
        (Path(folder) / "slow.py").write_text(_SLOW)
        beams = WorkerGroup(BeamMaker, cpus=0.05, threads=0)
        slow = WorkerGroup(
            RewardWorker, "slow", "slow.py", folder, {}, workers=_WORKERS, cpus=0.05, threads=0
        )
        try:
            slow.open({"sequences": folder}).get(120.0)
            handles, seconds = RewardHandles({"slow": slow}, {"slow": 60.0}), []
            for _ in range(rounds + 1):
                made = beams.make().settle(60.0)
                began = time.perf_counter()
                handles.score(made)
                seconds.append(time.perf_counter() - began)
        finally:
            slow.stop()
            beams.stop()
    ideal, wall = _SLEEP_S * _USERS / _WORKERS, statistics.median(seconds[1:])
    rows = [
        {"users": _USERS, "workers": _WORKERS, "sleep_ms": 1e3 * _SLEEP_S, "wall_s": wall, "ideal_s": ideal}
    ]
    return {"rows": rows, "ratio": {"wall over ideal": wall / ideal}}
