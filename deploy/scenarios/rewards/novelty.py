"""Reward items that few people have clicked: 1 for one never seen in training, halved every `half_life`
events.
"""

from typing import Annotated

from pydantic import Field

import nonet


@nonet.reward
def novelty(
    events,  # [U, W]: training events of each recommended item
    *,
    half_life: Annotated[float, Field(gt=0)] = 30.0,
):
    return 0.5 ** (events / half_life)
