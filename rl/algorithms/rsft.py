"""Rejection-sampled finetuning (RSFT) combined with RL, as in OneRec: ECPO's loss plus a next-event loss on good prompts.

OneRec, arXiv 2506.13695: instead of a KL term, the next-event loss on the better half of the sessions keeps the policy close to
the users' behaviour. Here, a session is a prompt. `feedback` names a column of the interactions, such as a rating or a watch
time, by which the prompts of a step are ranked. The next-event loss uses the share `better` of the prompts that rank highest, and
never a prompt whose value is missing. Without `feedback`, prompts are ranked by the mean reward of the model's own beams, which
measures how easy the prompt is and not the quality of the logged session. Prompts that tie with the threshold are included, so if
most groups have the same mean, the loss uses all of them. `rl: 0` leaves only rejection-sampled finetuning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from nonet.options import Rate
from nonet.rl.algorithms.base import Algorithm, LossInputs, Options, count_beams, has_kl
from nonet.rl.algorithms.ecpo import Ecpo

if TYPE_CHECKING:
    from torch import Tensor

    from nonet.rl import Advantages, Draws, PolicyLoss


class Rsft(Ecpo):
    """Options of RSFT."""

    weight: Annotated[Rate, Field(description="weight of the next-event loss in the sum of both losses")] = (
        1.0
    )
    better: Annotated[
        float, Field(gt=0, le=1, description="share of the prompts that the next-event loss uses")
    ] = 0.5
    feedback: Annotated[
        str | None,
        Field(
            description="numeric column of the interactions that ranks prompts; by default their beams' mean reward ranks them"
        ),
    ] = None
    rl: Annotated[float, Field(ge=0, description="weight of the RL loss in the sum of both losses")] = 1.0


def compute_advantages(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    valid_UW: Tensor,
    options: Options,
    reduce: Callable[[Tensor], Tensor],
    draws: Draws | None = None,
    feedback_U: Tensor | None = None,
) -> Advantages:
    """Compute GRPO's advantages; `group_U` is 1 for the prompts of this rank that the next-event loss uses, else 0."""
    import torch

    from nonet.rl import sum_rewards
    from nonet.rl.algorithms.grpo import compute_advantages as compute_group_advantages

    advantages = compute_group_advantages(rewards, weights, valid_UW, options, reduce, draws)
    if feedback_U is None:
        reward_UW = torch.where(valid_UW, sum_rewards(rewards, weights), 0.0)
        quality_U = reward_UW.sum(1) / valid_UW.sum(1).clamp_min(1)
    else:
        quality_U = feedback_U
    has_quality_U = ~quality_U.isnan()  # False where the column has no value
    threshold = quality_U[has_quality_U].quantile(1 - options["better"]) if has_quality_U.any() else 0.0
    return replace(advantages, group_U=(has_quality_U & (quality_U >= threshold)).float())


def compute_loss(policy: LossInputs, options: Options) -> PolicyLoss:
    """Compute ECPO's loss plus the next-event loss, in which a prompt is weighted by its number of valid beams."""
    from nonet.rl.algorithms.ecpo import compute_loss as compute_ecpo_loss

    assert policy.group_U is not None
    assert policy.target_UL is not None
    ecpo = compute_ecpo_loss(policy, options)
    weight_U = policy.valid_UW.sum(1) * policy.group_U.to(policy.target_UL.device)
    next_event_loss = -(policy.target_UL.sum(-1) * weight_U).sum()
    total = options["rl"] * ecpo.loss + options["weight"] * next_event_loss
    return replace(ecpo, loss=total, more={"next_event": next_event_loss.detach()})


SPEC = Algorithm(
    Rsft,
    compute_advantages,
    compute_loss,
    needs_reference=has_kl,
    needs_target=lambda options: True,
    counted=count_beams,
    more=("next_event",),
    weighted=True,
    feedback_column=lambda options: options["feedback"],
)
