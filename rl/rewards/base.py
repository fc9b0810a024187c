"""Reward: the base class of rewards that have state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nonet.types import Rollouts

if TYPE_CHECKING:
    from nonet.rl.rewards.known import RunData


class Reward:
    """A reward with state: `columns` are joined to the rollouts before `score`, options reach `__init__`."""

    columns: Sequence[str] = ()
    device: str = "cpu"
    timeout_s: float = 60.0
    concurrent: bool = False
    """Whether several calls of `score` may run at once in one process. An async `score` always may."""

    def setup(self) -> None:
        """Runs once in each actor, after `self.device` and `self.timeout_s` are set: load models here, not in `__init__`."""

    def open(self, run: RunData) -> None:
        """Runs once in each actor before the first beams: what the run knows of its items."""

    def score(self, r: Rollouts) -> Any:
        """Scores [U, W] of every beam, or an awaitable of them; what stands where `r.valid` is False is not looked at."""
        raise NotImplementedError
