"""The norm of sparse gradients over all ranks; a key that several ranks have counts once, with the sum of its gradients.

Keys are assigned to ranks by their number, so a rank sums about its share of them. This costs one more exchange of
the gradients for each step.
"""

# Shapes: N keys of one rank, W ranks, D width.

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from nonet.workers.runtime import Membership


def compute_sparse_norm(keys: Mapping[str, Tensor], grads: Mapping[str, Tensor], member: Membership) -> float:
    """Return the norm of the sparse gradients of all ranks.

    All ranks call it with the same tables in the same order.

    Args:
        keys: By table, distinct keys [N].
        grads: By table, their gradients [N, D].
        member: The process group.
    """
    squares = 0.0
    for table, grad in grads.items():
        whole = grad.detach().to("cpu", torch.float32)
        if member.n_trainers > 1:
            whole = _sum_by_owner(keys[table], whole, member)
        squares += float(whole.double().square().sum())
    return math.sqrt(member.sum_over_trainers(squares)[0])


def _sum_by_owner(keys_N: Tensor, grad_ND: Tensor, member: Membership) -> Tensor:
    """Exchange gradients by key and return the sums [M, D] of the keys assigned to this rank, added in rank order."""
    ranks = member.n_trainers
    owner_N = torch.remainder(keys_N, ranks)
    order_N = torch.argsort(owner_N, stable=True)
    sends = torch.bincount(owner_N, minlength=ranks)
    comes = torch.empty_like(sends)
    torch.distributed.all_to_all_single(comes, sends, group=member.trainers)
    cuts = {
        "output_split_sizes": comes.tolist(),
        "input_split_sizes": sends.tolist(),
        "group": member.trainers,
    }
    key = keys_N.new_empty(int(comes.sum()))
    grad = grad_ND.new_empty(len(key), grad_ND.shape[1])
    torch.distributed.all_to_all_single(key, keys_N[order_N].contiguous(), **cuts)
    torch.distributed.all_to_all_single(grad, grad_ND[order_N].contiguous(), **cuts)
    distinct, place = torch.unique(key, return_inverse=True)
    return grad.new_zeros(len(distinct), grad.shape[1]).index_add_(0, place, grad)
