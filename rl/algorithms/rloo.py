"""RLOO: the policy gradient with the mean reward of the other beams as a baseline.

Ahmadian et al., arXiv 2402.14740. A beam is one action, so there is one ratio per item. It is clipped only if `clip` is set. The
gradient is unbiased if beams are sampled with known probabilities. If the beams are not independent samples (drawn without
replacement, with a sampled tail, or with an added target), `nonet.rl.draws` defines the baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from nonet.rl.algorithms.base import Algorithm, Clip, LossInputs, Options, PolicyGradient, count_beams, has_kl

if TYPE_CHECKING:
    from torch import Tensor

    from nonet.rl import Advantages, Draws, PolicyLoss


class Rloo(PolicyGradient):
    """Options of RLOO."""

    clip: Clip | None = None


def compute_advantages(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    valid_UW: Tensor,
    options: Options,
    reduce: Callable[[Tensor], Tensor],
    draws: Draws | None = None,
) -> Advantages:
    """Compute the weighted sum of the rewards minus a leave-one-out baseline.

    With `draws`, the mean reward of the other prompts is subtracted first, so that a constant in the reward adds no noise.
    """
    from nonet.rl import leave_one_out, subtract_shift, sum_rewards

    reward_UW = sum_rewards(rewards, weights)
    if draws is not None:
        reward_UW = subtract_shift(reward_UW, valid_UW, draws, reduce)
    return leave_one_out(reward_UW, valid_UW, draws)


def compute_loss(policy: LossInputs, options: Options) -> PolicyLoss:
    """Compute the clipped loss with one ratio per item."""
    from nonet.rl.algorithms.grpo import compute_clipped_loss

    return compute_clipped_loss(policy, options, level="item")


SPEC = Algorithm(
    Rloo, compute_advantages, compute_loss, needs_reference=has_kl, counted=count_beams, weighted=True
)
