"""GSPO: GRPO with one ratio per beam, the geometric mean of its levels' ratios, and a narrow clip.

Zheng et al., arXiv 2507.18071; the default clip is the paper's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nonet.rl.algorithms.base import (
    Algorithm,
    Clip,
    LossInputs,
    Normalise,
    Options,
    PolicyGradient,
    count_beams,
    has_kl,
)

if TYPE_CHECKING:
    from nonet.rl import PolicyLoss


class Gspo(PolicyGradient):
    """Options of GSPO."""

    clip: Clip = [3e-4, 4e-4]
    normalise: Normalise = None


def compute_loss(policy: LossInputs, options: Options) -> PolicyLoss:
    """Compute the clipped loss with one ratio per beam."""
    from nonet.rl.algorithms.grpo import compute_clipped_loss

    return compute_clipped_loss(policy, options, level="sequence")


SPEC = Algorithm(
    Gspo,
    "nonet.rl.algorithms.grpo:compute_advantages",
    compute_loss,
    needs_reference=has_kl,
    counted=count_beams,
    weighted=True,
)
