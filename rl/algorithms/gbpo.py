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
    from nonet.rl import bound_gradient, compute_policy_loss

    return compute_policy_loss(
        policy.logp_UWL,
        policy.old_UWL,
        policy.advantage_UW,
        policy.valid_UW,
        ref_UWL=policy.ref_UWL,
        clip=None,
        kl=options["kl"],
        estimator=options["estimator"],
        bound_log_ratio=bound_gradient,
        weight_UW=policy.weight_UW,
    )


SPEC = Algorithm(
    Gbpo, "nonet.rl.algorithms.grpo:compute_advantages", compute_loss, needs_reference=has_kl, weighted=True
)
