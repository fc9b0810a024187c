"""KerasRanker: a Keras model as a torch module, so that engines, checkpoints, services and rewards treat it as any other.

The weights are torch parameters, in host memory. Keras computes the loss and all gradients in one compiled call, and the
gradients enter torch's backward pass there. So the gradients of several ranks are summed, clipped and checked as those of other
models. Only the step is Keras's (`optimizer.py`).
"""

# Shapes: B rows, T tasks, D width of a feature, L events of a sequence.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nonet.models.keras.compiled import CompiledModel
from nonet.models.keras.optimizer import KerasOptimizer


class KerasRanker(nn.Module):
    """A Keras model with its weights as torch parameters.

    Args:
        compiled: The compiled functions of the model.
        values: Values of the weights, in the order of the variables.
        reference: The user's function as `file.py:NAME`, without the folder.

    Attributes:
        compiled: The compiled functions of the model.
    """

    def __init__(self, compiled: CompiledModel, values: Sequence[Tensor], reference: str):
        super().__init__()
        self.compiled, self._reference = compiled, reference
        for variable, value in zip(compiled.variables, values, strict=True):
            self.register_parameter(variable.path, nn.Parameter(value))

    def forward(self, pooled: Mapping[str, Tensor]) -> Tensor:
        """Compute the logits [B] or [B, T] from rows by feature: pooled [B, D], of a sequence [B, L, D], or a mask [B, L].

        They have no gradients: `compute_loss` has.
        """
        return self.compiled.compute_logits(list(self.parameters()), pooled)

    def compute_loss(
        self, pooled: Mapping[str, Tensor], label: Tensor, weight: Tensor | None = None
    ) -> Tensor:
        """Compute the sum of the log losses of rows with labels [B] or [B, T] and weights of the same shape, in training mode.

        The loss is in nats.
        """
        rows = [pooled[name] for name in self.compiled.features]
        return _KerasLoss.apply(self, pooled, label, weight, *rows, *self.parameters())  # type: ignore[return-value]

    @property
    def architecture(self) -> str:
        """The configuration of the model as JSON, from which `build` makes it again."""
        return self.compiled.architecture

    @property
    def stored_options(self) -> dict[str, str]:
        """The options of `build` that make the model from a checkpoint, which are the same wherever its run is."""
        return {"architecture": self.architecture, "path": self._reference, "sources": ""}

    def make_optimizer(self, weight_decay: float) -> torch.optim.Optimizer:
        """Make the optimizer that steps the weights: the one that the model was compiled with, or AdamW."""
        return KerasOptimizer(list(self.parameters()), self.compiled, weight_decay)


class _KerasLoss(torch.autograd.Function):
    """The loss of a ranker, whose gradients Keras computes together with it."""

    @staticmethod
    def forward(
        ctx: Any,
        ranker: KerasRanker,
        pooled: Mapping[str, Tensor],
        label: Tensor,
        weight: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        weights = list(ranker.parameters())
        loss, ctx.gradients = ranker.compiled.compute_gradients(weights, pooled, label, weight)
        ctx.compiled, ctx.count = ranker.compiled, len(label)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        (scale,) = upstream
        gradients = torch._foreach_mul(ctx.gradients, scale.item())
        return None, None, None, None, *ctx.compiled.split_rows(gradients, ctx.count)


def write_keras_file(ranker: KerasRanker, options: Mapping[str, Any], seed: int, folder: Path) -> None:
    """Write `model.keras` into a folder (`ModelSpec.exports`); its inputs are rows, which sparse tables have."""
    ranker.compiled.save(list(ranker.parameters()), folder / "model.keras")
