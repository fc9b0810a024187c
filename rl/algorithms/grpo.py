"""GRPO: advantages relative to a user's other beams, a clipped ratio per level, and a KL term to a reference.

Shao et al., arXiv 2402.03300. `normalise: gdpo` normalises every reward separately (GDPO, arXiv 2601.05242), and is the
default for several rewards: in a group where only one of them varies, dividing by the standard deviation of the sum cancels
the weight of that reward. Without `kl` no reference is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from nonet.rl.algorithms.base import Algorithm, Clip, Normalise, Options, Policy, PolicyGradient, has_kl

if TYPE_CHECKING:
    from torch import Tensor

    from nonet.rl import Advantages, Draws, PolicyLoss


class Grpo(PolicyGradient):
    """Options of GRPO."""

    kl: Annotated[float, Field(ge=0)] = 0.01
    clip: Clip = 0.2
    normalise: Normalise = None


def advantage(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    valid_UW: Tensor,
    options: Options,
    reduce: Callable[[Tensor], Tensor],
    draws: Draws | None = None,
) -> Advantages:
    """Normalise the weighted sum, or each reward separately, in each user's group of beams."""
    from nonet.rl import gdpo, grpo, weighed, weighted_sum

    how = options["normalise"] or ("gdpo" if len(rewards) > 1 else "group")
    if how == "gdpo":
        return weighed(gdpo(rewards, weights, valid_UW, reduce=reduce), draws, valid_UW)
    return weighed(grpo(weighted_sum(rewards, weights), valid_UW), draws, valid_UW)


def loss(policy: Policy, options: Options) -> PolicyLoss:
    """Compute the clipped loss with its KL term."""
    return clipped(policy, options)


def clipped(policy: Policy, options: Options, level: str = "token") -> PolicyLoss:
    """Compute the clipped loss at a level ("token", "sequence" or "item") with the options of a policy gradient."""
    from nonet.rl import policy_loss

    return policy_loss(
        policy.logp_UWL,
        policy.old_UWL,
        policy.advantage_UW,
        policy.valid_UW,
        ref_UWL=policy.ref_UWL,
        clip=options["clip"],
        kl=options["kl"],
        level=level,
        estimator=options.get("estimator", "k3"),
        weight_UW=policy.weight_UW,
    )


SPEC = Algorithm(Grpo, advantage, loss, has_kl, weighted=True, corrects=("token", "sequence"))
