"""GBPO: a policy loss without a clip, whose gradients are bounded by those of a binary cross-entropy.

OneRec-V2, arXiv 2508.20900: at each level, the denominator of the ratio is max(old, sg(pi)) for beams with an advantage >= 0
and max(old, 1 - sg(pi)) for the others, where sg stops the gradient. So the gradient stays bounded even for beams with a negative
advantage that were unlikely under the old policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nonet.rl.algorithms.base import Algorithm, LossInputs, Normalise, Options, PolicyGradient, has_kl

if TYPE_CHECKING:
    from nonet.rl import PolicyLoss


class Gbpo(PolicyGradient):
    """Options of GBPO."""

    normalise: Normalise = None


def compute_loss(policy: LossInputs, options: Options) -> PolicyLoss:
    """Compute the policy loss without a clip, with ratios bounded by `bound_gradient`."""
    from nonet.rl import bound_gradient
    from nonet.rl.algorithms.grpo import compute_clipped_loss

    return compute_clipped_loss(policy, options, bound_log_ratio=bound_gradient)


SPEC = Algorithm(
    Gbpo, "nonet.rl.algorithms.grpo:compute_advantages", compute_loss, needs_reference=has_kl, weighted=True
)
