"""GRPO: advantages relative to a user's other beams, a clipped ratio per level, and a KL term to a reference.

Shao et al., arXiv 2402.03300. `normalise: gdpo` normalises every reward separately (GDPO, arXiv 2601.05242), and is the
default for several rewards. The reason: if only one reward varies in a group, dividing by the standard deviation of the weighted
sum would cancel the weight of that reward. If `kl` is 0, no reference policy is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from nonet.rl.algorithms.base import Algorithm, Clip, LossInputs, Normalise, Options, PolicyGradient, has_kl

if TYPE_CHECKING:
    from torch import Tensor

    from nonet.rl import Advantages, Draws, PolicyLoss


class Grpo(PolicyGradient):
    """Options of GRPO."""

    kl: Annotated[float, Field(ge=0)] = 0.01
    clip: Clip = 0.2
    normalise: Normalise = None


def compute_advantages(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    valid_UW: Tensor,
    options: Options,
    reduce: Callable[[Tensor], Tensor],
    draws: Draws | None = None,
) -> Advantages:
    """Normalise the weighted sum of the rewards, or each reward separately, in each user's group of beams."""
    from nonet.rl import normalise_groups, normalise_objectives, sum_rewards, weigh_advantages

    normalise = options["normalise"] or ("gdpo" if len(rewards) > 1 else "group")
    if normalise == "gdpo":
        return weigh_advantages(
            normalise_objectives(rewards, weights, valid_UW, reduce=reduce), draws, valid_UW
        )
    return weigh_advantages(normalise_groups(sum_rewards(rewards, weights), valid_UW), draws, valid_UW)


def compute_loss(policy: LossInputs, options: Options) -> PolicyLoss:
    """Compute the clipped loss per level, with the KL term."""
    return compute_clipped_loss(policy, options)


def compute_clipped_loss(
    policy: LossInputs,
    options: Options,
    level: str = "token",
    bound_log_ratio: Callable[..., Tensor] | None = None,
) -> PolicyLoss:
    """Compute the clipped loss with the options of a policy gradient, without a clip if they have none.

    Args:
        policy: The log-probabilities and advantages.
        options: The options of the algorithm.
        level: "token", "sequence" or "item": the kind of ratio, see `nonet.rl.loss`.
        bound_log_ratio: Bounds the ratios, see `compute_policy_loss`.
    """
    from nonet.rl import compute_policy_loss

    return compute_policy_loss(
        policy.logp_UWL,
        policy.old_UWL,
        policy.advantage_UW,
        policy.valid_UW,
        ref_UWL=policy.ref_UWL,
        clip=options.get("clip"),
        kl=options["kl"],
        level=level,
        estimator=options.get("estimator", "k3"),
        bound_log_ratio=bound_log_ratio,
        weight_UW=policy.weight_UW,
    )


SPEC = Algorithm(
    Grpo,
    compute_advantages,
    compute_loss,
    needs_reference=has_kl,
    weighted=True,
    corrects=("token", "sequence"),
)
