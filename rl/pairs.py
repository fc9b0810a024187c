"""Losses of preferences between beams of one group, against a reference: DPO and its kin.

m = log-probability of the whole item less the reference's. DPO (arXiv 2305.18290): -log sigmoid(beta (m_c - m_r)). S-DPO
(arXiv 2406.09215): one chosen against several rejected at once, -log sigmoid(-log sum_r exp(beta (m_r - m_c))); with one
rejected it is DPO. SP-DPO (self-play, arXiv 2412.09243): the chosen one is what the user took next, the rejected are the
policy's own beams.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nonet.rl.loss import PolicyLoss

# Shapes: U users, W beams, L levels.


def chosen_and_rejected(preferred_UW: Tensor, valid_UW: Tensor, negatives: int) -> tuple[Tensor, Tensor]:
    """The best beam of each group [U], -1 where none is better than another, and which of the worse ones stand against it
    [U, W]: the `negatives` worst; ties to the likelier beam."""
    lowest = preferred_UW.masked_fill(~valid_UW, torch.inf)
    highest = preferred_UW.masked_fill(~valid_UW, -torch.inf)
    best_U = highest.argmax(1)
    top_U1 = highest.gather(1, best_U[:, None])
    worse_UW = valid_UW & (preferred_UW < top_U1)
    order_UW = lowest.masked_fill(~worse_UW, torch.inf).argsort(dim=1, stable=True).argsort(dim=1)
    return best_U.masked_fill(~worse_UW.any(1), -1), worse_UW & (order_UW < negatives)


def preference_loss(chosen_U: Tensor, margin_UW: Tensor, rejected_UW: Tensor, beta: float) -> PolicyLoss:
    """S-DPO's loss of log-ratios to the reference: of the chosen [U] and of all beams [U, W], those `rejected` against it.

    A sum over users with a rejected beam, with its count; `kl` is 0, `ratio` counts users whose chosen is ahead of all
    rejected, `more` has the mean margin between them.
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
