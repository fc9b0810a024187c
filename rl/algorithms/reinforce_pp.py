"""REINFORCE++: advantages whitened over the whole batch, a clipped ratio a level.

Hu et al., arXiv 2501.03262. `baseline: batch` takes the batch's mean off, `group` first each group's (REINFORCE++-baseline).
The paper takes the KL from the reward before whitening; here it is a term of the loss: k2 has the gradient of that KL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from nonet.rl.algorithms.base import Algorithm, Clip, Options, Policy, PolicyGradient, has_kl

if TYPE_CHECKING:
    from torch import Tensor

    from nonet.rl import Advantages, Draws, PolicyLoss


class ReinforcePp(PolicyGradient):
    kl: Annotated[float, Field(ge=0)] = 0.01
    estimator: Literal["k1", "k2", "k3"] = "k2"
    clip: Clip = 0.2
    baseline: Literal["batch", "group"] = "batch"


def advantage(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    valid_UW: Tensor,
    options: Options,
    reduce: Callable[[Tensor], Tensor],
    draws: Draws | None = None,
) -> Advantages:
    """The weighted sum, whitened over the batch."""
    from nonet.rl import weighed, weighted_sum, whitened

    of_group = options["baseline"] == "group"
    found = whitened(weighted_sum(rewards, weights), valid_UW, baseline=of_group, reduce=reduce)
    return weighed(found, draws, valid_UW)


def loss(policy: Policy, options: Options) -> PolicyLoss:
    """GRPO's."""
    from nonet.rl.algorithms.grpo import clipped

    return clipped(policy, options)


SPEC = Algorithm(ReinforcePp, advantage, loss, has_kl, weighted=True, corrects=("token", "sequence"))
