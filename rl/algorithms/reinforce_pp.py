"""REINFORCE++: advantages whitened over the whole batch, and a clipped ratio per level.

Hu et al., arXiv 2501.03262. `baseline: batch` subtracts the batch's mean; `group` first subtracts each group's mean
(REINFORCE++-baseline). The paper subtracts the KL from the reward before whitening; here it is a term of the loss, and k2 has
the gradient of that KL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from nonet.rl.algorithms.base import Algorithm, Clip, Options, PolicyGradient, has_kl

if TYPE_CHECKING:
    from torch import Tensor

    from nonet.rl import Advantages, Draws


class ReinforcePp(PolicyGradient):
    """Options of REINFORCE++."""

    kl: Annotated[float, Field(ge=0)] = 0.01
    estimator: Literal["k1", "k2", "k3"] = "k2"
    clip: Clip = 0.2
    baseline: Literal["batch", "group"] = "batch"


def compute_advantages(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    valid_UW: Tensor,
    options: Options,
    reduce: Callable[[Tensor], Tensor],
    draws: Draws | None = None,
) -> Advantages:
    """Whiten the weighted sum of the rewards over the batch, after subtracting the group's mean if `baseline` is "group"."""
    from nonet.rl import sum_rewards, weigh_advantages, whiten_batch

    subtract_group_mean = options["baseline"] == "group"
    advantages = whiten_batch(
        sum_rewards(rewards, weights), valid_UW, baseline=subtract_group_mean, reduce=reduce
    )
    return weigh_advantages(advantages, draws, valid_UW)


SPEC = Algorithm(
    ReinforcePp,
    compute_advantages,
    "nonet.rl.algorithms.grpo:compute_loss",
    needs_reference=has_kl,
    weighted=True,
    corrects=("token", "sequence"),
)
