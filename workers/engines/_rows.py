"""The norm of sparse gradients over all ranks; a key that several ranks have counts once, with the sum of its gradients.

A key belongs to the rank `key % number of ranks`, so each rank sums about the same number of keys. This costs one more
exchange of the gradients for each step.
"""

# Shapes: N keys of one rank, M distinct keys that belong to one rank, D width.

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
    for table, grad_ND in grads.items():
        summed = grad_ND.detach().to("cpu", torch.float32)
        if member.n_trainers > 1:
            summed = _sum_by_owner(keys[table], summed, member)
        squares += float(summed.double().square().sum())
    return math.sqrt(member.sum_over_trainers(squares)[0])


def _sum_by_owner(keys_N: Tensor, grad_ND: Tensor, member: Membership) -> Tensor:
    """Send the gradient of each key to the rank that the key belongs to; all ranks must call this together.

    Returns:
        The gradients [M, D] of the keys that belong to this rank, summed over the ranks in rank order.
    """
    ranks = member.n_trainers
    owner_N = torch.remainder(keys_N, ranks)
    order_N = torch.argsort(owner_N, stable=True)
    send_counts = torch.bincount(owner_N, minlength=ranks)
    receive_counts = torch.empty_like(send_counts)
    torch.distributed.all_to_all_single(receive_counts, send_counts, group=member.trainers)
    split_options = {
        "output_split_sizes": receive_counts.tolist(),
        "input_split_sizes": send_counts.tolist(),
        "group": member.trainers,
    }
    received_keys = keys_N.new_empty(int(receive_counts.sum()))
    received_grads = grad_ND.new_empty(len(received_keys), grad_ND.shape[1])
    torch.distributed.all_to_all_single(received_keys, keys_N[order_N].contiguous(), **split_options)
    torch.distributed.all_to_all_single(received_grads, grad_ND[order_N].contiguous(), **split_options)
    distinct_keys_M, key_index = torch.unique(received_keys, return_inverse=True)
    sums_MD = received_grads.new_zeros(len(distinct_keys_M), received_grads.shape[1])
    return sums_MD.index_add_(0, key_index, received_grads)
