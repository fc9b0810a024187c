"""The precision in which a step computes its losses, the loss scale of fp16, and the gradients of a step.

Weights, gradients and optimizer stay fp32; matrix products run in the stage's precision under torch.autocast,
independently of the engine. With fp16 the loss is multiplied by a power of two before the backward pass. If a gradient
of any rank is not finite, the step is skipped for dense weights and rows, and the scale is halved. After `grow_every`
applied steps it is doubled. In every precision a step whose loss or gradient is not finite is skipped, since it would
make all weights NaN. Source: Micikevicius et al. 2018, arXiv 1710.03740.
"""

# Shapes: N keys of one rank, M distinct keys that belong to one rank, D width.

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nonet.workers.devices import get_device
from nonet.workers.engines.base import EngineRuntime, PrecisionOptions
from nonet.workers.runtime import Membership

_FILE = "precision.json"
_MAX_SCALE = (
    2.0**24
)  # A larger scale gains nothing, and its product with a loss must stay in the range of fp32.


class StepPrecision:
    """The precision of one stage, and its loss scale.

    Args:
        options: Options of the stage; fp32 by default.

    Attributes:
        use: Name of the precision: "fp32", "bf16" or "fp16".
        scales: Whether losses are scaled, which is so for fp16.
        scale: The loss scale; 1 if losses are not scaled.
    """

    def __init__(self, options: PrecisionOptions | None = None):
        options = options or PrecisionOptions()
        self.use, self._grow_every = options.use, options.grow_every
        self.scales = self.use == "fp16"
        self.scale = options.scale if self.scales else 1.0
        self._steps_since_skip = 0  # Applied steps since the last one that was skipped.

    def cast(self, device: str) -> AbstractContextManager[Any]:
        """Return the autocast context for losses on a device named `kind` or `kind:number`."""
        return get_device(device).autocast(self.use)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        return loss * self.scale if self.scales else loss

    def unscale_gradients(self, gradients: Iterable[Tensor]) -> bool:
        """Divide gradients by the scale in place. Returns whether all are finite."""
        if not self.scales:
            return True
        tensors = list(gradients)
        torch._foreach_mul_(tensors, 1.0 / self.scale)
        return are_all_finite(tensors)

    def update_loss_scale(self, step_applied: bool) -> None:
        """Grow or shrink the loss scale, depending on whether the last step was applied."""
        if not self.scales:
            return
        self._steps_since_skip = self._steps_since_skip + 1 if step_applied else 0
        if not step_applied:
            self.scale = max(1.0, self.scale / 2)
        elif self._steps_since_skip % self._grow_every == 0:
            self.scale = min(_MAX_SCALE, self.scale * 2)

    def get_state(self) -> dict[str, float]:
        """Return the state for a checkpoint, {} without a scale."""
        return {"scale": self.scale, "moved": self._steps_since_skip} if self.scales else {}

    def load(self, folder: Path) -> None:
        """Read the state from a checkpoint's folder, if it has one."""
        if self.scales and (folder / _FILE).exists():
            state = json.loads((folder / _FILE).read_text())
            self.scale, self._steps_since_skip = float(state["scale"]), int(state["moved"])


def write_precision(state: Mapping[str, float], folder: Path) -> list[Path]:
    """Write `StepPrecision.get_state` into a checkpoint's folder. Returns the file."""
    path = folder / _FILE
    path.write_text(json.dumps(state))
    return [path]


def are_all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether every number is finite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def poison(gradients: Sequence[Tensor]) -> None:
    """Set one gradient of this rank to NaN, which makes the norm of all ranks NaN without another collective."""
    for gradient in gradients:
        if gradient.numel():
            gradient.view(-1)[0] = math.nan
            return


def run_backward(engine: EngineRuntime, loss: Tensor, *, is_last: bool) -> None:
    """Add the gradients of a loss to those of a step.

    Args:
        engine: The engine.
        loss: The loss.
        is_last: Whether it is the last loss of the step on this rank, so that gradients may be summed over ranks meanwhile.
    """
    backward_last = getattr(engine, "backward_last", None)
    if is_last and backward_last is not None:
        backward_last(loss)
    else:
        engine.backward(loss)


def list_gradients(engine: EngineRuntime) -> list[Tensor]:
    """Return the gradients of an engine; if it has no `collect_gradients`, those of its model's parameters."""
    collect_gradients = getattr(engine, "collect_gradients", None)
    if collect_gradients is not None:
        return list(collect_gradients())
    return [p.grad for p in engine.model.parameters() if p.grad is not None]


def skip_step(engine: EngineRuntime) -> None:
    """Drop the gradients of a step that is skipped."""
    skip = getattr(engine, "skip", None)
    if skip is not None:
        skip()
    else:
        torch._foreach_zero_(list_gradients(engine))


def compute_sparse_norm(keys: Mapping[str, Tensor], grads: Mapping[str, Tensor], member: Membership) -> float:
    """Return the norm of the sparse gradients of all ranks; a key of several ranks counts once, with the sum of its gradients.

    A key belongs to the rank `key % number of ranks`, so each rank sums about the same number of keys. This costs one more
    exchange of the gradients for each step. All ranks call it with the same tables in the same order.

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
    return math.sqrt(member.sum_over_ranks(squares)[0])


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
