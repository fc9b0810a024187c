"""Preference losses between beams of one group relative to a reference: DPO and variants.

m is the log-probability of the whole item less the reference's. DPO (arXiv 2305.18290): -log sigmoid(beta (m_c - m_r)). S-DPO
(arXiv 2406.09215): one chosen against several rejected beams, -log sigmoid(-log sum_r exp(beta (m_r - m_c))); with one
rejected beam it is DPO. SP-DPO (self-play, arXiv 2412.09243): the chosen item is the user's next event, the rejected ones are
the policy's own beams.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nonet.rl.loss import PolicyLoss

# Shapes: U users, W beams, L levels.


def select_pairs(preferred_UW: Tensor, valid_UW: Tensor, negatives: int) -> tuple[Tensor, Tensor]:
    """Select the best beam of each group and the beams that are rejected against it.

    Args:
        preferred_UW: Score of each beam, higher is better.
        valid_UW: Mask of the valid beams.
        negatives: Maximum number of rejected beams per group; the worst are taken, ties go to the likelier beam.

    Returns:
        The index of the best beam [U], -1 where no beam is worse than another, and a mask [U, W] of the rejected beams.
    """
    lowest = preferred_UW.masked_fill(~valid_UW, torch.inf)
    highest = preferred_UW.masked_fill(~valid_UW, -torch.inf)
    best_U = highest.argmax(1)
    top_U1 = highest.gather(1, best_U[:, None])
    worse_UW = valid_UW & (preferred_UW < top_U1)
    order_UW = lowest.masked_fill(~worse_UW, torch.inf).argsort(dim=1, stable=True).argsort(dim=1)
    return best_U.masked_fill(~worse_UW.any(1), -1), worse_UW & (order_UW < negatives)


def compute_preference_loss(
    chosen_U: Tensor, margin_UW: Tensor, rejected_UW: Tensor, beta: float
) -> PolicyLoss:
    """Compute the S-DPO loss from log-ratios to the reference.

    Args:
        chosen_U: Log-ratio of the chosen item of each user.
        margin_UW: Log-ratio of every beam.
        rejected_UW: Mask of the rejected beams.
        beta: Scale of the log-ratios.

    Returns:
        Sums over the users with a rejected beam. `kl`, `clipped` and `ratio` are 0; `more` has the number of users whose chosen
        item is ahead of all rejected ones ("preferred") and the summed margin ("margin").
    """
    used_U = rejected_UW.any(1)
    apart_UW = beta * (margin_UW - chosen_U[:, None])
    apart_UW = torch.where(rejected_UW, apart_UW, -torch.inf)
    apart_UW = torch.where(used_U[:, None], apart_UW, 0.0)
    worst_U = apart_UW.logsumexp(1)
    loss_U = torch.where(used_U, torch.nn.functional.softplus(worst_U), 0.0)
    with torch.no_grad():
        zero = loss_U.new_zeros(())
        right = (used_U & (torch.where(rejected_UW, apart_UW, -torch.inf).amax(1) < 0)).sum().to(loss_U.dtype)
        margin = torch.where(used_U, -worst_U, 0.0).sum()
    return PolicyLoss(loss_U.sum(), used_U.sum(), zero, zero, zero, {"preferred": right, "margin": margin})
