"""The k largest of each row, ties to the lower index, on any device.

`torch.topk` promises nothing about ties, and a stable sort of whole rows takes 4 to 6 times as long on a CPU
([64, 1024] to [64, 4096]). This takes the k-th value from topk, picks the winners and the first ties, and sorts
those k alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nonet.errors import DataError


def select_top_k(scores_UN: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the min(k, N) largest values [U, k] in descending order and their indices [U, k] int64; ties to the lower index."""
    users, size = scores_UN.shape
    if k >= size:
        return _order(scores_UN, torch.arange(size, device=scores_UN.device).expand(users, size))
    last_U1 = scores_UN.topk(k, dim=1).values[:, -1:]
    above_UN = scores_UN > last_U1
    tied_UN = scores_UN == last_U1
    room_U1 = k - above_UN.sum(1, keepdim=True)
    ties_U1 = tied_UN.sum(1, keepdim=True)
    if bool((ties_U1 < room_U1).any()):  # only NaN, which topk puts first, leaves fewer than k
        _refuse_nan(scores_UN)
    if bool((ties_U1 > room_U1).any()):
        tied_UN &= tied_UN.cumsum(1) <= room_U1
    index_Uk = (above_UN | tied_UN).nonzero()[:, 1].view(users, k)
    return _order(scores_UN.gather(1, index_Uk), index_Uk)


def _order(values: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    values, order = values.sort(dim=1, descending=True, stable=True)
    _refuse_nan(values[:, :1])
    return values, index.gather(1, order)


def _refuse_nan(scores_UN: Tensor) -> None:
    """Raise DataError if a score is NaN."""
    bad = scores_UN.isnan().any(1).nonzero()
    if len(bad):
        raise DataError(
            f"the model's scores are NaN for {len(bad)} of {len(scores_UN)} prompts, the first is row "
            f"{int(bad[0])}: its weights have diverged. Lower the learning rate."
        )
