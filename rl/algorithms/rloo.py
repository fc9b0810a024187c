"""RLOO: the policy gradient with the other beams' mean as a baseline; unbiased if the draws report their probabilities.

Ahmadian et al., arXiv 2402.14740. A beam is one action, so there is one ratio per item, and no clip unless one is given. With
draws without replacement, a sampled tail or a target that is always added, the baseline is the one of `nonet.rl.draws`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from nonet.rl.algorithms.base import Algorithm, Clip, Options, Policy, PolicyGradient, beams, has_kl

if TYPE_CHECKING:
    from torch import Tensor

    from nonet.rl import Advantages, Draws, PolicyLoss


class Rloo(PolicyGradient):
    """Options of RLOO."""

    clip: Clip | None = None


def advantage(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    valid_UW: Tensor,
    options: Options,
    reduce: Callable[[Tensor], Tensor],
    draws: Draws | None = None,
) -> Advantages:
    """Compute the weighted sum of the rewards less a leave-one-out baseline.

    For draws with weights the mean of the other prompts is subtracted first, so that a constant in the reward adds no noise.
    """
    from nonet.rl import leave_one_out, weighted_sum, without_shift

    reward_UW = weighted_sum(rewards, weights)
    if draws is not None:
        reward_UW = without_shift(reward_UW, valid_UW, draws, reduce)
    return leave_one_out(reward_UW, valid_UW, draws)


def loss(policy: Policy, options: Options) -> PolicyLoss:
    """Compute the clipped loss with one ratio per item."""
    from nonet.rl.algorithms.grpo import clipped

    return clipped(policy, options, "item")


SPEC = Algorithm(Rloo, advantage, loss, has_kl, counted=beams, weighted=True)
