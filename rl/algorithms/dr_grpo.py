"""Dr. GRPO: GRPO without division by the standard deviation, which overweights easy and hard prompts, and without a KL term.

Liu et al., arXiv 2503.20783. Its other change, dividing by a constant instead of the length of each answer, has no effect
here: all semantic ids have the same number of codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from nonet.rl.algorithms.base import Algorithm, Clip, Options, Policy, PolicyGradient, has_kl

if TYPE_CHECKING:
    from torch import Tensor

    from nonet.rl import Advantages, Draws, PolicyLoss


class DrGrpo(PolicyGradient):
    """Options of Dr. GRPO."""

    clip: Clip = 0.2


def advantage(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    valid_UW: Tensor,
    options: Options,
    reduce: Callable[[Tensor], Tensor],
    draws: Draws | None = None,
) -> Advantages:
    """Compute the weighted sum of the rewards less its group's mean."""
    from nonet.rl import centred, weighed, weighted_sum

    return weighed(centred(weighted_sum(rewards, weights), valid_UW), draws, valid_UW)


def loss(policy: Policy, options: Options) -> PolicyLoss:
    """Compute GRPO's clipped loss."""
    from nonet.rl.algorithms.grpo import clipped

    return clipped(policy, options)


SPEC = Algorithm(DrGrpo, advantage, loss, has_kl, weighted=True, corrects=("token", "sequence"))
