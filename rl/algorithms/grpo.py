"""GRPO: advantages relative to a user's other beams, a clipped ratio a level, a KL term to a reference.

Shao et al., arXiv 2402.03300. `normalise: gdpo` normalises every reward by itself (GDPO, arXiv 2601.05242), and is the default
for several rewards: in a group where one of them alone has a spread, the spread of the sum takes its weight away. Without `kl`
no reference is kept.
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
    """Normalised in each user's group of beams, by the weighted sum or by reward."""
    from nonet.rl import gdpo, grpo, weighed, weighted_sum

    how = options["normalise"] or ("gdpo" if len(rewards) > 1 else "group")
    if how == "gdpo":
        return weighed(gdpo(rewards, weights, valid_UW, reduce=reduce), draws, valid_UW)
    return weighed(grpo(weighted_sum(rewards, weights), valid_UW), draws, valid_UW)


def loss(policy: Policy, options: Options) -> PolicyLoss:
    """The clipped loss with its KL term."""
    return clipped(policy, options)


def clipped(policy: Policy, options: Options, level: str = "token") -> PolicyLoss:
    """The clipped loss of tokens or of beams, by the options of a policy gradient."""
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
