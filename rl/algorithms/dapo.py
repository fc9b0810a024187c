"""DAPO: GRPO with a wider clip upwards, a mean over tokens, no KL term, and only groups whose rewards differ.

Yu et al., arXiv 2503.14476. Dynamic sampling generates beams for `oversample` times the stage's users at once, and the loss uses
only groups whose rewards differ. Unlike in the paper, it does not generate more until a step has a fixed number of such groups.
DAPO's mean over tokens equals GRPO's loss here, since all semantic ids have the same number of codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from nonet.rl.algorithms.base import Algorithm, Clip, Normalise, Options, PolicyGradient, has_kl

if TYPE_CHECKING:
    from torch import Tensor

    from nonet.rl import Advantages, Draws


class Dapo(PolicyGradient):
    """Options of DAPO."""

    clip: Clip = [0.2, 0.28]
    normalise: Normalise = None
    oversample: Annotated[
        float,
        Field(ge=1, le=16, description="number of prompts per step, as a multiple of the stage's users"),
    ] = 1.5


def compute_advantages(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    valid_UW: Tensor,
    options: Options,
    reduce: Callable[[Tensor], Tensor],
    draws: Draws | None = None,
) -> Advantages:
    """Compute GRPO's advantages, and exclude groups whose rewards are all equal from the loss."""
    from nonet.rl.algorithms.grpo import compute_advantages as compute_group_advantages

    advantages = compute_group_advantages(rewards, weights, valid_UW, options, reduce, draws)
    return replace(advantages, used_U=(advantages.value != 0).any(1))


SPEC = Algorithm(
    Dapo,
    compute_advantages,
    "nonet.rl.algorithms.grpo:compute_loss",
    needs_reference=has_kl,
    oversample=lambda options: options["oversample"],
    weighted=True,
    corrects=("token", "sequence"),
)
