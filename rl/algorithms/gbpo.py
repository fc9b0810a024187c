"""GBPO: no clip; gradients are bounded by those of a binary cross-entropy, so bad beams that became unlikely stay stable.

OneRec-V2, arXiv 2508.20900: the old policy is max(old, sg(pi)) for good beams, max(old, 1 - sg(pi)) for bad ones, per level.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nonet.rl.algorithms.base import Algorithm, Normalise, Options, Policy, PolicyGradient, has_kl

if TYPE_CHECKING:
    from nonet.rl import PolicyLoss


class Gbpo(PolicyGradient):
    """Options of GBPO."""

    normalise: Normalise = None


def loss(policy: Policy, options: Options) -> PolicyLoss:
    """Compute the policy loss without a clip, with ratios bounded by `gradient_bounded`."""
    from nonet.rl import gradient_bounded, policy_loss

    return policy_loss(
        policy.logp_UWL,
        policy.old_UWL,
        policy.advantage_UW,
        policy.valid_UW,
        ref_UWL=policy.ref_UWL,
        clip=None,
        kl=options["kl"],
        estimator=options["estimator"],
        held=gradient_bounded,
        weight_UW=policy.weight_UW,
    )


SPEC = Algorithm(Gbpo, "nonet.rl.algorithms.grpo:advantage", loss, has_kl, weighted=True)
