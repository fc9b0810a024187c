"""Preference losses between beams of one group relative to a reference: DPO and variants.

The log-ratio m of an item is its log-probability minus that of the reference; c is the chosen item, r a rejected one. DPO
(arXiv 2305.18290): -log sigmoid(beta (m_c - m_r)). S-DPO (arXiv 2406.09215): one chosen against several rejected beams,
-log sigmoid(-log sum_r exp(beta (m_r - m_c))); with one rejected beam, this is DPO. SP-DPO (self-play, arXiv 2412.09243): the
chosen item is the user's next event, the rejected ones are the policy's own beams.
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
    valid_score_UW = preferred_UW.masked_fill(~valid_UW, -torch.inf)
    best_U = valid_score_UW.argmax(1)
    best_score_U1 = valid_score_UW.gather(1, best_U[:, None])
    worse_UW = valid_UW & (preferred_UW < best_score_U1)
    # The rank of each worse beam, the worst first: the second argsort inverts the permutation of the first.
    rank_UW = preferred_UW.masked_fill(~worse_UW, torch.inf).argsort(dim=1, stable=True).argsort(dim=1)
    return best_U.masked_fill(~worse_UW.any(1), -1), worse_UW & (rank_UW < negatives)


def compute_preference_loss(
    chosen_U: Tensor, log_ratio_UW: Tensor, rejected_UW: Tensor, beta: float
) -> PolicyLoss:
    """Compute the S-DPO loss from log-ratios to the reference.

    Args:
        chosen_U: Log-ratio of the chosen item of each user.
        log_ratio_UW: Log-ratio of every beam.
        rejected_UW: Mask of the rejected beams.
        beta: Scale of the log-ratios.

    Returns:
        Sums over the users with a rejected beam. `kl`, `clipped` and `ratio` are 0; `more` has the number of users whose chosen
        item has a higher log-ratio than all rejected ones ("preferred"), and the sum of
        -log sum_r exp(beta (m_r - m_c)) over users ("margin").
    """
    used_U = rejected_UW.any(1)
    excess_UW = beta * (log_ratio_UW - chosen_U[:, None])
    excess_UW = torch.where(rejected_UW, excess_UW, -torch.inf)
    excess_UW = torch.where(used_U[:, None], excess_UW, 0.0)  # a row of -inf alone would give NaN gradients
    total_excess_U = excess_UW.logsumexp(1)
    loss_U = torch.where(
        used_U, torch.nn.functional.softplus(total_excess_U), 0.0
    )  # softplus(x) = -log sigmoid(-x)
    with torch.no_grad():
        zero = loss_U.new_zeros(())
        max_excess_U = torch.where(rejected_UW, excess_UW, -torch.inf).amax(1)
        preferred = (used_U & (max_excess_U < 0)).sum().to(loss_U.dtype)
        margin = torch.where(used_U, -total_excess_U, 0.0).sum()
    return PolicyLoss(
        loss_U.sum(),
        used_U.sum(),
        kl=zero,
        clipped=zero,
        ratio=zero,
        more={"preferred": preferred, "margin": margin},
    )
