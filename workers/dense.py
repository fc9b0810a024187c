"""Dense: the model's dense part and its optimizers, one step at a time.

Matrices that the model names in `hidden_matrices()` move by Muon (Jordan et al. 2024, torch.optim.Muon), the rest by AdamW:
with both, the quickstart's model needs a third fewer steps for the same validation recall.

Gradients of all ranks are summed as one flat buffer in one all-reduce, after the loss was divided by the global count of
targets: world 2 equals world 1 up to float addition's order. torch's DDP wraps `forward` alone, while the RL loss calls
`prefill` and `step`; one flat all-reduce serves both and fixes the order of the sum.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nonet.errors import CheckpointError
from nonet.workers.files import read_tensors, write_tensors
from nonet.workers.gang import Membership

_MUON_RATE = 20 / 3  # Muon's rate for each of AdamW's: 0.02 beside 3e-3


@dataclass(frozen=True, slots=True)
class LearningRate:
    """peak, share of the steps spent warming up, then cosine or linear decay to zero, or none."""

    peak: float
    warmup: float = 0.05
    decay: str = "cosine"

    def at(self, step: int, steps: int) -> float:
        """The rate of a step in [0, steps)."""
        warm = max(1, round(self.warmup * steps))
        if step < warm:
            return self.peak * (step + 1) / warm
        left = (steps - step) / max(1, steps - warm)
        shape = {"cosine": 0.5 * (1 - math.cos(math.pi * left)), "linear": left}
        return self.peak * shape.get(self.decay, 1.0)


class Dense:
    """A model with its optimizers. `model` is shared by reference with fused roles."""

    def __init__(
        self,
        model: torch.nn.Module,
        membership: Membership,
        *,
        weight_decay: float = 0.01,
        clip_norm: float = 1.0,
    ):
        self.model, self.member = model, membership
        self._weight_decay, self._clip_norm = weight_decay, clip_norm
        self.restart()

    def restart(self) -> None:
        """Fresh optimizers, as each stage begins with."""
        hidden = list(getattr(self.model, "hidden_matrices", list)())
        named = {id(p) for p in hidden}
        rest = [p for p in self.model.parameters() if id(p) not in named]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in rest if p.ndim > 1], "weight_decay": self._weight_decay},
            {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
        ]
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "adamw": torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98))
        }
        if hidden:
            self.optimizers["muon"] = torch.optim.Muon(
                hidden, lr=0.0, weight_decay=self._weight_decay, momentum=0.95
            )

    def step(self, lr: float) -> float:
        """Sum gradients over ranks, clip, move. Returns the gradient norm before clipping."""
        if self.member.world > 1:
            self._sum_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        for name, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = lr * (_MUON_RATE if name == "muon" else 1.0)
            optimizer.step()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        return float(norm)

    def total(self, *values: float) -> list[float]:
        """Sums of these numbers over the trainer ranks."""
        if self.member.world == 1:
            return list(values)
        whole = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(whole, group=self.member.trainers)
        return whole.tolist()

    def save(self, folder: Path) -> None:
        """model.safetensors, and a .safetensors and .json of each optimizer, under `folder`."""
        write_tensors(folder / "model.safetensors", self.model.state_dict())
        for name, optimizer in self.optimizers.items():
            state = optimizer.state_dict()
            moments = {
                f"{index}.{slot}": value
                for index, slots in state["state"].items()
                for slot, value in slots.items()
            }
            write_tensors(folder / f"{name}.safetensors", moments)
            (folder / f"{name}.json").write_text(json.dumps(state["param_groups"]))

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read what `save` wrote; the optimizers too when the same stage goes on."""
        load_model(self.model, folder)
        if not optimizer:
            return
        for name, mover in self.optimizers.items():
            state: dict[int, dict[str, Tensor]] = {}
            for key, value in read_tensors(folder / f"{name}.safetensors").items():
                index, slot = key.split(".", 1)
                state.setdefault(int(index), {})[slot] = value
            mover.load_state_dict(
                {"state": state, "param_groups": json.loads((folder / f"{name}.json").read_text())}
            )

    def _sum_gradients(self) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        torch.distributed.all_reduce(flat, group=self.member.trainers)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def load_model(model: torch.nn.Module, folder: Path) -> None:
    """Put the weights of a commit's dense folder into a model. Raises CheckpointError when they do not fit."""
    try:
        model.load_state_dict(read_tensors(folder / "model.safetensors"))
    except RuntimeError as error:
        raise CheckpointError(
            f"{folder}: the weights do not fit this model: {' '.join(str(error).split())[:300]}"
        ) from None
