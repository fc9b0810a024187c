"""Shadow: a copy of a model's parameters as a module of its own, which FSDP2 or DeepSpeed divides among the ranks.

The model stays whole on every rank, so that losses may call any of its functions, fused rollouts may read it, and a rank
without a share of a step may call no backward. What moves is the shadow: the gradients that a rank added up go into it as the
loss sum(p * gradient), whose gradient they are, so every rank has exactly one backward a step. The library adds them up over the
ranks and steps its own part of the optimizer; the moved weights are copied back. Where the model's own precision is lower, the
clones keep what it cannot hold: they are the master weights, and checkpoints have them.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Shadow(torch.nn.Module):
    """Clones of parameters in fp32, in their order; a module each, so that ZeRO 3 holds no more than one of them whole."""

    def __init__(self, parameters: list[torch.nn.Parameter]):
        super().__init__()
        self.clones = torch.nn.ModuleList(_Clone(p) for p in parameters)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        """The scalar whose gradient is `gradients`."""
        total = torch.zeros((), device=gradients[0].device, requires_grad=True)
        for clone, gradient in zip(self.clones, gradients, strict=True):
            total = clone(total, gradient)
        return total


class _Clone(torch.nn.Module):
    def __init__(self, parameter: torch.nn.Parameter):
        super().__init__()
        self.weight = torch.nn.Parameter(parameter.detach().to(torch.float32, copy=True), requires_grad=True)

    def forward(self, total: Tensor, gradient: Tensor) -> Tensor:
        """Behind `total`, whose gradient tells ZeRO 3 that the clone's backward is over and its pieces are enough again."""
        return total + (self.weight * gradient).sum()
