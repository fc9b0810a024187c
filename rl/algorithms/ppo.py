"""PPO: a value head says what each prompt and prefix is worth; advantages are what came beyond it, level by level.

Schulman et al., arXiv 1707.06347, with generalised advantages (arXiv 1506.02438, no discount). The head reads the model's
states and never moves them; it has a rate of its own. Its first answers are 0, so the first steps are those without a baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from nonet.options import Rate
from nonet.rl.algorithms.base import Algorithm, Clip, Options, Policy, PolicyGradient, has_kl

if TYPE_CHECKING:
    from torch import Tensor

    from nonet.rl import Advantages, Draws, PolicyLoss


class Ppo(PolicyGradient):
    kl: Annotated[float, Field(ge=0)] = 0.01
    clip: Clip = 0.2
    decay: Annotated[
        float,
        Field(ge=0, le=1, description="lambda of generalised advantages: how far a surprise reaches back"),
    ] = 0.95
    value_lr: Annotated[Rate, Field(description="the value head's learning rate")] = 1e-2


def advantage(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    valid_UW: Tensor,
    options: Options,
    reduce: Callable[[Tensor], Tensor],
    draws: Draws | None = None,
) -> Advantages:
    """The weighted sum as it is: its loss takes the values off."""
    import torch

    from nonet.rl import Advantages, centred, weighted_sum

    reward_UW = weighted_sum(rewards, weights)
    seen = centred(reward_UW, valid_UW)
    return Advantages(torch.where(valid_UW, reward_UW, 0.0).float(), seen.small_groups, seen.flat_groups)


def loss(policy: Policy, options: Options) -> PolicyLoss:
    """The clipped loss of advantages a level, and half the squared error of the values."""
    from dataclasses import replace

    import torch

    from nonet.rl import generalised_advantage
    from nonet.rl.algorithms.grpo import clipped

    assert policy.value_UWL is not None
    advantage_UWL, return_UWL = generalised_advantage(policy.advantage_UW, policy.value_UWL, options["decay"])
    found = clipped(replace(policy, advantage_UW=advantage_UWL), options)
    error = (policy.value_UWL - return_UWL).square() / 2
    error = torch.where(policy.valid_UW.unsqueeze(-1), error, 0.0).sum()
    return replace(found, loss=found.loss + error, more={"value_error": error.detach()})


SPEC = Algorithm(
    Ppo,
    advantage,
    loss,
    has_kl,
    value_rate=lambda options: options["value_lr"],
    more=("value_error",),
    corrects=(),
)
