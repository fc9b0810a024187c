"""Shadow: a copy of a model's parameters as a separate module, which FSDP2 or DeepSpeed divides among the ranks.

The model stays whole on every rank, so that losses may call any of its functions, fused rollouts may read it, and a
rank without a share of a step need not call backward. The library (FSDP2 or DeepSpeed) updates the shadow: a rank
computes the loss sum(p * gradient) of the shadow from the gradients of its model, so that the backward pass of this
loss gives the shadow the same gradients. Every rank has exactly one such backward pass for each step, in which the
library sums the gradients over the ranks. The updated weights are copied back to the model. If the model has a lower
precision, the clones are its fp32 master weights, and checkpoints have them.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Shadow(torch.nn.Module):
    """Clones of parameters in fp32, in their order; each is a module, so that ZeRO 3 gathers only one of them at a time."""

    def __init__(self, parameters: list[torch.nn.Parameter]):
        super().__init__()
        self.clones = torch.nn.ModuleList(_Clone(p) for p in parameters)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        """Return the scalar loss whose gradients with respect to the clones are `gradients`."""
        total = torch.zeros((), device=gradients[0].device, requires_grad=True)
        for clone, gradient in zip(self.clones, gradients, strict=True):
            total = clone(total, gradient)
        return total


class _Clone(torch.nn.Module):
    """The fp32 clone of one parameter."""

    def __init__(self, parameter: torch.nn.Parameter):
        super().__init__()
        self.weight = torch.nn.Parameter(parameter.detach().to(torch.float32, copy=True), requires_grad=True)

    def forward(self, total: Tensor, gradient: Tensor) -> Tensor:
        """Add this clone's term to `total`, whose gradient tells ZeRO 3 that the backward pass of the clone is over."""
        return total + (self.weight * gradient).sum()
