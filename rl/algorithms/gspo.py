"""GSPO: GRPO with one ratio per beam, the geometric mean of its levels' ratios, and a narrow clip.

Zheng et al., arXiv 2507.18071; the default clip is the paper's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nonet.rl.algorithms.base import (
    Algorithm,
    Clip,
    Normalise,
    Options,
    Policy,
    PolicyGradient,
    beams,
    has_kl,
)

if TYPE_CHECKING:
    from nonet.rl import PolicyLoss


class Gspo(PolicyGradient):
    """Options of GSPO."""

    clip: Clip = [3e-4, 4e-4]
    normalise: Normalise = None


def loss(policy: Policy, options: Options) -> PolicyLoss:
    """Compute the clipped loss with one ratio per beam."""
    from nonet.rl.algorithms.grpo import clipped

    return clipped(policy, options, "sequence")


SPEC = Algorithm(Gspo, "nonet.rl.algorithms.grpo:advantage", loss, has_kl, counted=beams, weighted=True)
