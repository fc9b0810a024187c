"""The precision in which a step computes its losses, and the loss scale of fp16.

Weights, gradients and optimizer stay fp32; matrix products run in the stage's precision under torch.autocast,
independently of the engine. With fp16 the loss is multiplied by a power of two before the backward pass. If a gradient
of any rank is not finite, the step is skipped for dense weights and rows, and the scale is halved. After `grow_every`
applied steps it is doubled. In every precision a step whose loss or gradient is not finite is skipped, since it would
make all weights NaN. Source: Micikevicius et al. 2018, arXiv 1710.03740.
"""

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
