"""Reward: the base class of rewards that have state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nonet.types import Rollouts

if TYPE_CHECKING:
    from nonet.rl.rewards.known import RunData


class Reward:
    """Base class of rewards with state. `columns` are joined to the input of `score`; options are passed to `__init__`."""

    columns: Sequence[str] = ()
    device: str = "cpu"
    timeout_s: float = 60.0
    concurrent: bool = False
    """Whether several calls of `score` may run at once in one process. An async `score` always may."""

    def setup(self) -> None:
        """Load models and other resources; called once in each actor, after `self.device` and `self.timeout_s` are set."""

    def open(self, run: RunData) -> None:
        """Read what the run knows of its items; called once in each actor before the first beams."""

    def score(self, r: Rollouts) -> Any:
        """Return scores [U, W] of every beam, or an awaitable of them; values where `r.valid` is False are ignored."""
        raise NotImplementedError
