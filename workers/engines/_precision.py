"""Precision: in what a step computes its losses, and the scale of their gradients where that is fp16.

Weights, gradients and optimizer stay fp32; products are taken in the named type by torch.autocast, before any engine, so every
engine has it. fp16's gradients are taken of a loss times a power of two: where one of any rank is not finite, the step moves
nothing, neither dense weights nor rows, and the scale is halved. After `grow_every` steps that moved it is doubled. In every
precision a step whose loss or gradient is not finite moves nothing: it would make all weights NaN for good.
Source: Micikevicius et al. 2018, arXiv 1710.03740.
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

from nonet.workers.devices import get_device as known
from nonet.workers.engines.base import EngineRuntime

_FILE = "precision.json"
_MOST = 2.0**24  # a scale beyond it gains nothing, and its product with a loss must stay in fp32


class StepPrecision:
    """Of one stage: `use` is fp32, bf16 or fp16; `scale` and `grow_every` are fp16's."""

    def __init__(self, use: str = "fp32", scale: float = 65536.0, grow_every: int = 2000):
        self.use, self._grow_every = use, grow_every
        self.scales = use == "fp16"
        self.scale, self._moved = (scale if self.scales else 1.0), 0

    def cast(self, device: str) -> AbstractContextManager[Any]:
        """Where losses are computed; on a device named `kind` or `kind:number`."""
        return known(device).autocast(self.use)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss whose gradients are taken."""
        return loss * self.scale if self.scales else loss

    def unscale_gradients(self, gradients: Iterable[Tensor]) -> bool:
        """Take the scale out of gradients, in place; whether all are finite."""
        if not self.scales:
            return True
        own = list(gradients)
        torch._foreach_mul_(own, 1.0 / self.scale)
        return are_all_finite(own)

    def update_loss_scale(self, step_applied: bool) -> None:
        """Change the scale after a step that moved, or was skipped."""
        if not self.scales:
            return
        self._moved = self._moved + 1 if step_applied else 0
        if not step_applied:
            self.scale = max(1.0, self.scale / 2)
        elif self._moved % self._grow_every == 0:
            self.scale = min(_MOST, self.scale * 2)

    def get_state(self) -> dict[str, float]:
        """What a commit keeps; nothing where there is no scale."""
        return {"scale": self.scale, "moved": self._moved} if self.scales else {}

    def load(self, folder: Path) -> None:
        """Go on from a commit's folder; as it was made where that has none."""
        if self.scales and (folder / _FILE).exists():
            state = json.loads((folder / _FILE).read_text())
            self.scale, self._moved = float(state["scale"]), int(state["moved"])


def write_precision(state: Mapping[str, float], folder: Path) -> list[Path]:
    """Write `Precision.get_state` into a commit's folder."""
    path = folder / _FILE
    path.write_text(json.dumps(state))
    return [path]


def are_all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether every number is finite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def poison(gradients: Sequence[Tensor]) -> None:
    """Set one number of a rank's gradients to NaN: so the norm of all ranks is NaN, without a call among them."""
    for gradient in gradients:
        if gradient.numel():
            gradient.view(-1)[0] = math.nan
            return


def list_gradients(engine: EngineRuntime) -> list[Tensor]:
    """Return an engine's gradients, those of its model's parameters where it has no `gradients`."""
    own = getattr(engine, "collect_gradients", None)
    if own is not None:
        return list(own())
    return [p.grad for p in engine.model.parameters() if p.grad is not None]


def skip_step(engine: EngineRuntime) -> None:
    """Drop the gradients of a step that is not taken."""
    own = getattr(engine, "skip", None)
    if own is not None:
        own()
    else:
        torch._foreach_zero_(list_gradients(engine))
