"""Reward: the base class of rewards that have state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nonet.types import Rollouts

if TYPE_CHECKING:
    from nonet.rl.rewards.known import RunData


class Reward:
    """Base class of rewards with state; options of the scenario are passed to `__init__`.

    Attributes:
        columns: Names of the columns that are joined to the rollouts for `score`.
        device: Torch device on which the reward may compute.
        timeout_s: Time limit of one call of `score`.
        concurrent: Whether several calls of `score` may run at once in one process. An async `score` always may.
    """

    columns: Sequence[str] = ()
    device: str = "cpu"
    timeout_s: float = 60.0
    concurrent: bool = False

    def setup(self) -> None:
        """Load models and other resources; called once in each actor, after `self.device` and `self.timeout_s` are set."""

    def open(self, run: RunData) -> None:
        """Read data of the run's items; called once in each actor before the first beams are scored."""

    def score(self, r: Rollouts) -> Any:
        """Return scores [U, W] of every beam, or an awaitable of them; values where `r.valid` is False are ignored."""
        raise NotImplementedError
