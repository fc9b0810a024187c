"""Reward items that few people have clicked: 1 for one never seen in training, halved every `half_life`
events.
"""

import nonet


@nonet.reward
def novelty(events, *, half_life: float = 30.0):  # events [U, W]: training events of each recommended item
    return 0.5 ** (events / half_life)
