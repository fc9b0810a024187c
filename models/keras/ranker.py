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
    """A Keras model with its weights as torch parameters, and the weights of frozen layers as buffers.

    Args:
        compiled: The compiled functions of the model.
        values: Values of the weights, in the order of the variables.
        frozen: Values of the variables that training does not change, in their order.
        reference: The user's function as `sources/file.py:NAME`, relative to its run, or without a run as `file.py:NAME`.

    Attributes:
        compiled: The compiled functions of the model.
    """

    def __init__(
        self, compiled: CompiledModel, values: Sequence[Tensor], frozen: Sequence[Tensor], reference: str
    ):
        super().__init__()
        self.compiled, self._reference = compiled, reference
        self._optimizer: KerasOptimizer | None = None
        for variable, value in zip(compiled.variables, values, strict=True):
            self.register_parameter(variable.path, nn.Parameter(value))
        for variable, value in zip(compiled.frozen, frozen, strict=True):
            self.register_buffer(variable.path, value)

    def forward(self, pooled: Mapping[str, Tensor]) -> Tensor:
        """Compute the logits [B] or [B, T] from rows by feature: pooled [B, D], of a sequence [B, L, D], or a mask [B, L].

        They have no gradients: `compute_loss` has.
        """
        return self.compiled.compute_logits(list(self.parameters()), list(self.buffers()), pooled)

    def compute_loss(
        self,
        pooled: Mapping[str, Tensor],
        label: Tensor,
        weight: Tensor | None = None,
        step_rows: int | None = None,
    ) -> Tensor:
        """Compute the sum of the losses of rows in training mode, in nats.

        It is that of the log losses and of the losses of layers, such that the sum over ranks, divided by the number of rows of
        the step, is what `fit` of Keras computes for a batch of these rows.

        Args:
            pooled: Rows by feature.
            label: Labels [B] or [B, T].
            weight: Weights of the log losses, of the same shape; None for 1.
            step_rows: Number of rows of the step on all ranks; None for B.
        """
        rows = [pooled[name] for name in self.compiled.features]
        inputs = (pooled, label, weight, step_rows)
        return _KerasLoss.apply(self, inputs, *rows, *self.parameters())  # type: ignore[return-value]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save weights as `fit` would leave them if it ended now: averages, if the optimizer keeps any."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        averages = self._optimizer.compute_averages() if self._optimizer is not None else {}
        destination |= {f"{prefix}{path}": average for path, average in averages.items()}

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Load weights; an optimizer begins again, until its state is loaded too."""
        result = super().load_state_dict(*arguments, **options)
        if self._optimizer is not None:
            self._optimizer.reset()
        return result

    @property
    def architecture(self) -> str:
        """The configuration of the model as JSON, from which `build` makes it again."""
        return self.compiled.architecture

    @property
    def stored_options(self) -> dict[str, str]:
        """The options of `build` that make the model from a checkpoint, which are the same wherever its run is."""
        return {"architecture": self.architecture, "path": self._reference, "sources": ""}

    def make_optimizer(self, weight_decay: float) -> torch.optim.Optimizer:
        """Make the optimizer that steps the weights: the one that the model was compiled with, or AdamW.

        If there was one before, it ends as at the end of `fit`: the weights are those of `state_dict`.
        """
        with torch.no_grad():
            for path, average in (self._optimizer.compute_averages() if self._optimizer else {}).items():
                self.get_parameter(path).copy_(average)
        self._optimizer = KerasOptimizer(dict(self.named_parameters()), self.compiled, weight_decay)
        return self._optimizer


class _KerasLoss(torch.autograd.Function):
    """The loss of a ranker, whose gradients Keras computes together with it."""

    @staticmethod
    def forward(
        ctx: Any,
        ranker: KerasRanker,
        inputs: tuple[Mapping[str, Tensor], Tensor, Tensor | None, int | None],
        *tensors: Tensor,
    ) -> Tensor:
        weights, frozen = list(ranker.parameters()), list(ranker.buffers())
        loss, ctx.gradients = ranker.compiled.compute_gradients(weights, frozen, *inputs)
        ctx.compiled, ctx.count = ranker.compiled, len(inputs[1])
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        (scale,) = upstream
        gradients = torch._foreach_mul(ctx.gradients, scale.item())
        return None, None, *ctx.compiled.split_rows(gradients, ctx.count)


def write_keras_file(ranker: KerasRanker, options: Mapping[str, Any], seed: int, folder: Path) -> None:
    """Write `model.keras` into a folder (`ModelSpec.exports`); its inputs are rows, which sparse tables have."""
    ranker.compiled.save(list(ranker.parameters()), list(ranker.buffers()), folder / "model.keras")
