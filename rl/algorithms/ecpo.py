"""ECPO: GRPO with one ratio per item, which is bounded for beams with a negative advantage; no KL term by default.

OneRec, arXiv 2506.13695: the old policy is max(sg(pi) / (1 + clip + delta), old), where sg stops the gradient. For beams with a
positive advantage this does not change the loss, since their ratios are clipped at 1 + clip.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from nonet.options import Rate
from nonet.rl.algorithms.base import (
    Algorithm,
    LossInputs,
    Normalise,
    Options,
    PolicyGradient,
    count_beams,
    has_kl,
)

if TYPE_CHECKING:
    from nonet.rl import PolicyLoss


class Ecpo(PolicyGradient):
    """Options of ECPO."""

    clip: Rate = 0.2
    delta: Annotated[
        float,
        Field(ge=0, description="a beam with a negative advantage has a ratio of at most 1 + clip + delta"),
    ] = 0.1
    normalise: Normalise = None


def compute_loss(policy: LossInputs, options: Options) -> PolicyLoss:
    """Compute the clipped loss with one ratio per item, bounded by `clip_early`."""
    from nonet.rl import clip_early
    from nonet.rl.algorithms.grpo import compute_clipped_loss

    bound = partial(clip_early, max_ratio=1 + options["clip"] + options["delta"])
    return compute_clipped_loss(policy, options, level="item", bound_log_ratio=bound)


SPEC = Algorithm(
    Ecpo,
    "nonet.rl.algorithms.grpo:compute_advantages",
    compute_loss,
    needs_reference=has_kl,
    counted=count_beams,
    weighted=True,
)
