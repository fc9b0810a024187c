"""GRPO: advantages relative to a user's other beams, a clipped ratio a level, a KL term to the stage's first weights.

`normalise: gdpo` normalises every reward by itself (GDPO, arXiv 2601.05242). Without `kl` no reference is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from nonet.options import Rate, StrictModel
from nonet.rl.algorithms.base import Algorithm, Options, Policy

if TYPE_CHECKING:
    from torch import Tensor

    from nonet.rl import Advantages, PolicyLoss


class Grpo(StrictModel):
    kl: Annotated[float, Field(ge=0)] = 0.01
    clip: Rate | Annotated[list[Rate], Field(min_length=2, max_length=2)] = 0.2
    normalise: Literal["group", "gdpo"] = "group"


def advantage(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    valid_UW: Tensor,
    options: Options,
    reduce: Callable[[Tensor], Tensor],
) -> Advantages:
    """Normalised in each user's group of beams, by the weighted sum or by reward."""
    from nonet.rl import gdpo, grpo, weighted_sum

    if options["normalise"] == "gdpo":
        return gdpo(rewards, weights, valid_UW, reduce=reduce)
    return grpo(weighted_sum(rewards, weights), valid_UW)


def loss(policy: Policy, options: Options) -> PolicyLoss:
    """The clipped loss with its KL term."""
    from nonet.rl import policy_loss

    return policy_loss(
        policy.logp_UWL,
        policy.old_UWL,
        policy.advantage_UW,
        policy.valid_UW,
        ref_UWL=policy.ref_UWL,
        clip=options["clip"],
        kl=options["kl"],
    )


def needs_reference(options: Mapping[str, Any]) -> bool:
    """Only a KL term looks at it."""
    return options["kl"] > 0


SPEC = Algorithm(Grpo, advantage, loss, needs_reference)
