"""PPO: a value head estimates the return after each prefix of codes, and is the baseline of the advantages at each level.

Schulman et al., arXiv 1707.06347, with generalised advantage estimation (arXiv 1506.02438, no discount). The head reads the
model's detached states and has its own learning rate. Its values start at 0, so the first steps have no baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from nonet.options import Rate
from nonet.rl.algorithms.base import Algorithm, Clip, LossInputs, Options, PolicyGradient, has_kl

if TYPE_CHECKING:
    from torch import Tensor

    from nonet.rl import Advantages, Draws, PolicyLoss


class Ppo(PolicyGradient):
    """Options of PPO."""

    kl: Annotated[float, Field(ge=0)] = 0.01
    clip: Clip = 0.2
    decay: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="lambda of generalised advantage estimation: 0 uses one-step errors of the values, 1 the whole return",
        ),
    ] = 0.95
    value_lr: Annotated[Rate, Field(description="the value head's learning rate")] = 1e-2


def compute_advantages(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    valid_UW: Tensor,
    options: Options,
    reduce: Callable[[Tensor], Tensor],
    draws: Draws | None = None,
) -> Advantages:
    """Return the weighted sum of the rewards, from which `compute_loss` computes the advantages.

    `compute_loss` also applies the weights of drawn beams, so `draws` is not used here.
    """
    import torch

    from nonet.rl import Advantages, centre_groups, sum_rewards

    reward_UW = sum_rewards(rewards, weights)
    counts = centre_groups(reward_UW, valid_UW)  # only for its numbers of small and flat groups
    return Advantages(torch.where(valid_UW, reward_UW, 0.0).float(), counts.small_groups, counts.flat_groups)


def compute_loss(policy: LossInputs, options: Options) -> PolicyLoss:
    """Compute the clipped loss of advantages per level, plus half the squared error of the values.

    `policy.advantage_UW` holds the rewards that `compute_advantages` returned.

    Advantages and returns use the values from before the first pass over a rollout (Schulman et al., algorithm 1), so several
    passes have the same targets. If beams were sampled, the advantage and the error of a beam are multiplied by its weight.
    """
    from dataclasses import replace

    import torch

    from nonet.rl import compute_generalised_advantage
    from nonet.rl.algorithms.grpo import compute_clipped_loss

    assert policy.value_UWL is not None
    old_value_UWL = policy.value_UWL if policy.baseline_UWL is None else policy.baseline_UWL
    advantage_UWL, return_UWL = compute_generalised_advantage(
        policy.advantage_UW, old_value_UWL, options["decay"]
    )
    error_UWL = (policy.value_UWL - return_UWL).square() / 2
    if policy.weight_UW is not None:
        weight_UW1 = policy.weight_UW.to(error_UWL.dtype).unsqueeze(-1)
        advantage_UWL, error_UWL = advantage_UWL * weight_UW1, error_UWL * weight_UW1
    policy_loss = compute_clipped_loss(replace(policy, advantage_UW=advantage_UWL), options)
    error = torch.where(policy.valid_UW.unsqueeze(-1), error_UWL, 0.0).sum()
    return replace(policy_loss, loss=policy_loss.loss + error, more={"value_error": error.detach()})


SPEC = Algorithm(
    Ppo,
    compute_advantages,
    compute_loss,
    needs_reference=has_kl,
    value_rate=lambda options: options["value_lr"],
    more=("value_error",),
    weighted=True,
    corrects=(),
)
