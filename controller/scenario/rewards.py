"""Options of rewards, and of the workers between rollout and rewards."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from nonet.options import Count, Positive, Rate, StrictModel

_TOLERANCE = 0.02  # share of a floor by which a mean may be below the floor, as means vary from step to step


class Ramp(StrictModel):
    """A weight that stays at `start`, then changes linearly to `end` and stays there."""

    start: float
    end: float
    steps: Annotated[Positive, Field(description="steps of the stage from start to end")]
    after: Annotated[Count, Field(description="steps before the weight begins to change")] = 0

    def compute_weight(self, step: int) -> float:
        """Return the weight at a step of the stage, counted from 0."""
        progress = min(1.0, max(0.0, (step - self.after) / self.steps))
        return self.start + progress * (self.end - self.start)


class RewardOptions(BaseModel):
    """The options of one reward; keys that are no fields here are the keyword arguments of the reward itself."""

    model_config = ConfigDict(
        extra="allow", frozen=True, strict=True, arbitrary_types_allowed=True, allow_inf_nan=False
    )
    use: Any = None
    weight: Annotated[
        float | Ramp, Field(description="the weight in the sum of rewards, or {start, end, steps, after}")
    ] = 1.0
    at_least: Annotated[
        float | None,
        Field(
            description="a floor of its mean per beam; while the mean is lower, a multiplier adds to its weight"
        ),
    ] = None
    timeout_s: Rate = 60.0
    pool: str | None = None
    workers: Positive = 1

    def get_options(self) -> dict[str, Any]:
        """Return the keyword arguments of the reward itself."""
        return dict(self.model_extra or {})

    def compute_weight(self, step: int) -> float:
        """Return the reward's weight at a step of its stage, without the multiplier of a floor."""
        return self.weight.compute_weight(step) if isinstance(self.weight, Ramp) else self.weight


def is_above_floor(mean: float, floor: float) -> bool:
    """Return whether a mean reward meets a floor, or misses it by at most 2 % of the floor."""
    return mean >= floor - _TOLERANCE * abs(floor)


class BetweenStep(BaseModel):
    """The options of a step between rollout and rewards, which the user's own workers run.

    Keys that are no fields here are the keyword arguments of the worker.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, arbitrary_types_allowed=True)
    use: Any
    pool: str | None = None
    workers: Positive = 1

    def get_options(self) -> dict[str, Any]:
        """Return the keyword arguments of the worker."""
        return dict(self.model_extra or {})
