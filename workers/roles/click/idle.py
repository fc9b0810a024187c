"""Idle: what stands in a role's place where a run has nothing for it to do; a click model's run has no rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nonet.workers.runtime import DistributeWorker, Replicate, method


class Idle(DistributeWorker):
    """Opens nothing."""

    def __init__(self, *_: Any):
        pass

    @method(folders=Replicate)
    def open(self, folders: Mapping[str, str]) -> None:
        """Nothing to open."""
