"""The k largest values of each row, where of equal values those with the lower index are selected, on any device.

`torch.topk` guarantees no order of equal values, and a stable sort of whole rows takes 4 to 6 times as long on a CPU
([64, 1024] to [64, 4096]). `select_top_k` takes the k-th value from topk, selects the larger values and the first ones equal to
it, and sorts only these k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nonet.errors import DataError


def select_top_k(scores_UN: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the min(k, N) largest values [U, k] in descending order and their indices [U, k] int64; ties to the lower index."""
    rows, n_values = scores_UN.shape
    if k >= n_values:
        return _sort_descending(
            scores_UN, torch.arange(n_values, device=scores_UN.device).expand(rows, n_values)
        )
    kth_value_U1 = scores_UN.topk(k, dim=1).values[:, -1:]
    above_UN = scores_UN > kth_value_U1
    tied_UN = scores_UN == kth_value_U1
    missing_U1 = k - above_UN.sum(1, keepdim=True)
    ties_U1 = tied_UN.sum(1, keepdim=True)
    if bool((ties_U1 < missing_U1).any()):  # only with NaN, which topk puts first but no comparison selects
        _require_no_nan(scores_UN)
    if bool((ties_U1 > missing_U1).any()):
        tied_UN &= tied_UN.cumsum(1) <= missing_U1
    index_Uk = (above_UN | tied_UN).nonzero()[:, 1].view(rows, k)
    return _sort_descending(scores_UN.gather(1, index_Uk), index_Uk)


def _sort_descending(values: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the selected values of each row, and their indices with them; raise DataError if a value is NaN."""
    values, order = values.sort(dim=1, descending=True, stable=True)
    _require_no_nan(values[:, :1])  # NaN is sorted first.
    return values, index.gather(1, order)


def _require_no_nan(scores_UN: Tensor) -> None:
    """Raise DataError if a score is NaN."""
    bad = scores_UN.isnan().any(1).nonzero()
    if len(bad):
        raise DataError(
            f"the model's scores are NaN for {len(bad)} of {len(scores_UN)} prompts, the first is row "
            f"{int(bad[0])}: its weights have diverged. Lower the learning rate."
        )
