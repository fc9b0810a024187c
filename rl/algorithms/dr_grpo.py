"""Dr. GRPO: GRPO without division by the standard deviation, which overweights easy and hard prompts, and without a KL term.

Liu et al., arXiv 2503.20783. Its other change, dividing by a constant instead of the length of each answer, has no effect
here: all semantic ids have the same number of codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from nonet.rl.algorithms.base import Algorithm, Clip, Options, PolicyGradient, has_kl

if TYPE_CHECKING:
    from torch import Tensor

    from nonet.rl import Advantages, Draws


class DrGrpo(PolicyGradient):
    """Options of Dr. GRPO."""

    clip: Clip = 0.2


def compute_advantages(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    valid_UW: Tensor,
    options: Options,
    reduce: Callable[[Tensor], Tensor],
    draws: Draws | None = None,
) -> Advantages:
    """Compute the weighted sum of the rewards minus the mean of its group."""
    from nonet.rl import centre_groups, sum_rewards, weigh_advantages

    return weigh_advantages(centre_groups(sum_rewards(rewards, weights), valid_UW), draws, valid_UW)


SPEC = Algorithm(
    DrGrpo,
    compute_advantages,
    "nonet.rl.algorithms.grpo:compute_loss",
    needs_reference=has_kl,
    weighted=True,
    corrects=("token", "sequence"),
)
