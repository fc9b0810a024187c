"""DPO and variants: the best beam of a group against worse ones, relative to a reference; no ratio and no clip.

`negatives: 1` is DPO (arXiv 2305.18290), more are S-DPO (arXiv 2406.09215). `chosen: target` is SP-DPO (self-play, arXiv
2412.09243): the user's next event against the policy's own beams. Groups whose beams all have the same reward contribute
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from nonet.options import Positive, Rate
from nonet.rl.algorithms.base import Algorithm, LossInputs, MovingReference, Options, RolloutPasses

if TYPE_CHECKING:
    from torch import Tensor

    from nonet.rl import Advantages, PolicyLoss


class Dpo(RolloutPasses):
    """Options of DPO, S-DPO and SP-DPO."""

    beta: Rate = 0.1
    negatives: Annotated[
        Positive, Field(description="worse beams against the chosen one, the worst first")
    ] = 1
    chosen: Annotated[
        Literal["best", "target"], Field(description="the beam with most reward, or what the user took next")
    ] = "best"
    reference: Literal["frozen"] | MovingReference = "frozen"


def compute_advantages(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    valid_UW: Tensor,
    options: Options,
    reduce: Callable[[Tensor], Tensor],
) -> Advantages:
    """Mark the chosen beam of each group with 1 and the rejected ones with -1; in self-play only the rejected ones."""
    import torch

    from nonet.rl import Advantages, centre_groups, select_pairs, sum_rewards

    reward_UW = sum_rewards(rewards, weights)
    counts = centre_groups(reward_UW, valid_UW)  # only for its numbers of small and flat groups
    if options["chosen"] == "target":
        # The rank of each beam by reward, the lowest first: the second argsort inverts the permutation of the first.
        rank_UW = torch.where(valid_UW, reward_UW, torch.inf).argsort(dim=1, stable=True).argsort(dim=1)
        value_UW = -1.0 * (valid_UW & (rank_UW < options["negatives"]))
    else:
        chosen_U, rejected_UW = select_pairs(reward_UW, valid_UW, options["negatives"])
        chosen_UW = torch.arange(valid_UW.shape[1], device=valid_UW.device) == chosen_U[:, None]
        value_UW = chosen_UW.float() - rejected_UW.float()
    return Advantages(value_UW.float(), counts.small_groups, counts.flat_groups)


def compute_loss(policy: LossInputs, options: Options) -> PolicyLoss:
    """Compute the preference loss of the chosen item against the rejected beams, see `compute_preference_loss`."""
    import torch

    from nonet.rl import compute_preference_loss

    assert policy.ref_UWL is not None
    log_ratio_UW = torch.where(policy.valid_UW, (policy.logp_UWL - policy.ref_UWL).sum(-1), 0.0)
    if options["chosen"] == "target":
        assert policy.target_UL is not None
        assert policy.target_ref_UL is not None
        chosen_U = (policy.target_UL - policy.target_ref_UL).sum(-1)
        assert policy.taken_UW is not None
        rejected_UW = (policy.advantage_UW < 0) & ~policy.taken_UW
    else:
        chosen_U = (log_ratio_UW * (policy.advantage_UW > 0)).sum(-1)
        rejected_UW = policy.advantage_UW < 0
    result = compute_preference_loss(chosen_U, log_ratio_UW, rejected_UW, options["beta"])
    return replace(result, ratio=result.count.to(result.loss.dtype))  # DPO has no ratio: reports a mean of 1


def count_preference_groups(valid_UW: Tensor, advantage_UW: Tensor, levels: int) -> float:
    """Count the groups with a rejected beam."""
    return float((advantage_UW < 0).any(1).sum())


SPEC = Algorithm(
    Dpo,
    compute_advantages,
    compute_loss,
    needs_reference=lambda options: True,
    needs_target=lambda options: options["chosen"] == "target",
    counted=count_preference_groups,
    more=("preferred", "margin"),
    corrects=(),
)
