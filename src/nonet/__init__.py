"""Nonet: generative recommendation from clicks to reinforcement learning, under one controller on Ray.

Everything public is here and loaded on first use: `import nonet` loads neither torch nor Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "DistributeWorker": "nonet.workers.worker",
    "WorkerGroup": "nonet.workers.group",
    "GroupFuture": "nonet.workers.future",
    "method": "nonet.workers.method",
    "Shard": "nonet.workers.method",
    "Replicate": "nonet.workers.method",
    "PerRank": "nonet.workers.method",
    "reward": "nonet.rl.reward",
    "Reward": "nonet.rl.reward",
    "Rollouts": "nonet.types",
    "Session": "nonet.controller.session",
    "scenario": "nonet.deploy.api",
    "run": "nonet.deploy.api",
    "start": "nonet.deploy.api",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nonet' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from nonet.controller.session import Session
    from nonet.deploy.api import run, scenario, start
    from nonet.rl.reward import Reward, reward
    from nonet.types import Rollouts
    from nonet.workers.future import GroupFuture
    from nonet.workers.group import WorkerGroup
    from nonet.workers.method import PerRank, Replicate, Shard, method
    from nonet.workers.worker import DistributeWorker
