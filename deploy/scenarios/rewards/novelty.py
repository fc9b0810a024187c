"""Reward items that few users have interacted with."""

from typing import Annotated

from pydantic import Field

import nonet


@nonet.reward
def novelty(
    events,  # [U, W]: training events of each recommended item
    *,
    half_life: Annotated[float, Field(gt=0)] = 30.0,
):
    """Return 1 for items without training events, halved every `half_life` events."""
    return 0.5 ** (events / half_life)
