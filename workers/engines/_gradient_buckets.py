"""GradientBuckets: the sums of all ranks' gradients, bucket by bucket, while the backward pass goes on.

Buckets have parameters in reverse order, since their gradients are known first. The sum of a bucket begins when the last of its
gradients is known, and sums begin in the order of the buckets on every rank. The last bucket is summed in `finish` only: until
then a rank can set a gradient in it to NaN, which all ranks then have. Gradients of fp32 parameters are views of their bucket and
are summed in place; others are copied to fp32, and only a few of these copies exist at a time. Source: Li et al. 2020, arXiv
2006.15704.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nonet.workers import batch_by_size
from nonet.workers.engines.ddp import BUCKET_ELEMENTS, COPIES_IN_FLIGHT


@dataclass(slots=True)
class _Bucket:
    """Parameters whose gradients are summed together.

    Attributes:
        parameters: The parameters.
        flat: The memory of their gradients; None if they are copied.
        awaited: Ids of the parameters whose gradients the current backward pass will still add.
    """

    parameters: Sequence[nn.Parameter]
    flat: Tensor | None
    awaited: set[int] = field(default_factory=set)


class GradientBuckets:
    """Sums the gradients of the parameters of a model over the ranks of a process group.

    Args:
        parameters: The parameters, in the order of the model.
        group: A process group that is used for nothing else, because ranks begin sums at different times.
        get_gradient: Returns the gradient of a parameter that is not fp32.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Any,
        get_gradient: Callable[[nn.Parameter], Tensor],
    ):
        self._group, self._get_gradient = group, get_gradient
        self._buckets = [
            _Bucket(bucket, _allocate_gradients(bucket))
            for same_kind in _split_by_kind(parameters[::-1])
            for bucket in batch_by_size(same_kind, Tensor.numel, BUCKET_ELEMENTS)
        ]
        self._bucket_by_id = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        # The nodes of the graph that add gradients to the parameters; they exist as long as they are referred to.
        self._node_by_id = {id(p): torch.autograd.graph.get_gradient_edge(p).node for p in trained}
        self._hooks = [p.register_post_accumulate_grad_hook(self._record_gradient) for p in trained]
        self._sums: deque[tuple[Sequence[Tensor], Tensor, Any]] = (
            deque()
        )  # With the gradients that were copied.
        self._next = 0  # Index of the first bucket whose sum has not begun.
        self._is_last_pass, self._knows_awaited = False, False

    def run_last_backward(self, loss: Tensor) -> None:
        """Add the gradients of the last loss of a step, and begin to sum all buckets but the last one."""
        self._is_last_pass, self._knows_awaited = True, False
        try:
            loss.backward()
        finally:
            self._is_last_pass = False
        self._begin_sums(len(self._buckets) - 1)

    def finish(self) -> None:
        """Wait until all gradients are summed. All ranks must call it once in each step."""
        self._begin_sums(len(self._buckets))
        while self._sums:
            self._finish_sum()
        self._next = 0

    def close(self) -> None:
        """Stop to watch the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _record_gradient(self, parameter: Tensor) -> None:
        """Record that the gradient of a parameter was added, and begin the sums of the buckets that are complete."""
        if not self._is_last_pass:
            return
        if not self._knows_awaited:
            # Only while a backward pass runs can torch tell which parameters it will reach.
            self._knows_awaited = True
            for bucket in self._buckets:
                bucket.awaited = {
                    id(p)
                    for p in bucket.parameters
                    if id(p) in self._node_by_id
                    and torch._C._will_engine_execute_node(self._node_by_id[id(p)])  # type: ignore[attr-defined]
                }
        self._bucket_by_id[id(parameter)].awaited.discard(id(parameter))
        complete = self._next
        while complete < len(self._buckets) - 1 and not self._buckets[complete].awaited:
            complete += 1
        self._begin_sums(complete)

    def _begin_sums(self, stop: int) -> None:
        """Begin the sums of the buckets before an index."""
        for bucket in self._buckets[self._next : stop]:
            gradients: Sequence[Tensor] = ()
            values = bucket.flat
            if values is None:
                if sum(bool(copied) for copied, _, _ in self._sums) == COPIES_IN_FLIGHT:
                    self._finish_sum()
                gradients = list(map(self._get_gradient, bucket.parameters))
                values = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
            work = torch.distributed.all_reduce(values, group=self._group, async_op=True)
            self._sums.append((gradients, values, work))
        self._next = max(self._next, stop)

    def _finish_sum(self) -> None:
        """Wait for the oldest sum, and copy it into the gradients that were copied."""
        gradients, values, work = self._sums.popleft()
        work.wait()
        start = 0
        for gradient in gradients:
            gradient.copy_(values[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()


def _allocate_gradients(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """Make the gradients of fp32 parameters views of one tensor of zeros, and return it; None for other parameters."""
    if parameters[0].dtype != torch.float32:
        return None
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes), device=parameters[0].device)
    for parameter, gradient in zip(parameters, flat.split(sizes), strict=True):
        parameter.grad = gradient.view_as(parameter)
    return flat


def _split_by_kind(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield the longest runs of parameters of one dtype and device."""
    run: list[nn.Parameter] = []
    for parameter in parameters:
        if run and (parameter.dtype, parameter.device) != (run[0].dtype, run[0].device):
            yield run
            run = []
        run.append(parameter)
    if run:
        yield run
