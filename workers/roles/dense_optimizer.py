"""Dense: the model's dense part and its optimizer, one step at a time.

Gradients of all ranks are summed as one flat buffer in one all-reduce, after the loss was divided by the global count of
targets: world 2 equals world 1 up to float addition's order. torch's DDP wraps `forward` alone, while the RL loss calls
`prefill` and `step`; one flat all-reduce serves both and fixes the order of the sum.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nonet.errors import CheckpointError
from nonet.models import Muon
from nonet.workers.roles.tensor_files import host_copy, read_tensors, write_tensors
from nonet.workers.runtime import Membership


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
        weight_decay: float = 0.1,
        clip_norm: float = 1.0,
    ):
        self.model, self.member = model, membership
        self._weight_decay, self._clip_norm = weight_decay, clip_norm
        self.restart()

    def restart(self) -> None:
        """A fresh optimizer, as each stage begins with."""
        hidden = self.model.hidden_matrices()  # type: ignore[operator]
        named = {id(p) for p in hidden}
        others = [p for p in self.model.parameters() if id(p) not in named]
        self.optimizer = Muon(hidden, others, weight_decay=self._weight_decay)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def step(self, lr: float) -> float:
        """Sum gradients over ranks, clip, move. Returns the gradient norm before clipping."""
        if self.member.learners > 1:
            self._sum_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return float(norm)

    def total(self, *values: float) -> list[float]:
        """Sums of these numbers over the trainer ranks."""
        if self.member.learners == 1:
            return list(values)
        whole = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(whole, group=self.member.trainers)
        return whole.tolist()

    def copied(self) -> Callable[[Path], list[Path]]:
        """Weights and optimizer as they are, copied to the host: call it with a folder to write them, on any thread."""
        state = self.optimizer.state_dict()
        moments = {
            f"{index}.{slot}": value
            for index, slots in state["state"].items()
            for slot, value in slots.items()
        }
        tensors = {"model": host_copy(self.model.state_dict()), "optimizer": host_copy(moments)}
        return partial(_write, tensors, json.dumps(state["param_groups"]))

    def save(self, folder: Path) -> None:
        """model.safetensors, optimizer.safetensors and optimizer.json under `folder`."""
        self.copied()(folder)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read what `save` wrote; the optimizer too when the same stage goes on."""
        load_model(self.model, folder)
        if not optimizer:
            return
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in read_tensors(folder / "optimizer.safetensors").items():
            index, slot = key.split(".", 1)
            state.setdefault(int(index), {})[slot] = (
                value.clone()
            )  # a mapped file's memory cannot be given back
        groups = json.loads((folder / "optimizer.json").read_text())
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _sum_gradients(self) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        torch.distributed.all_reduce(flat, group=self.member.trainers)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _write(tensors: Mapping[str, Mapping[str, Tensor]], groups: str, folder: Path) -> list[Path]:
    """The files of a dense folder."""
    paths = [folder / f"{name}.safetensors" for name in tensors]
    for path, named in zip(paths, tensors.values(), strict=True):
        write_tensors(path, named)
    (folder / "optimizer.json").write_text(groups)
    return [*paths, folder / "optimizer.json"]


def load_model(model: torch.nn.Module, folder: Path) -> None:
    """Put the weights of a commit's dense folder into a model. Raises CheckpointError when they do not fit."""
    try:
        model.load_state_dict(read_tensors(folder / "model.safetensors"))
    except RuntimeError as error:
        raise CheckpointError(
            f"{folder}: the weights do not fit this model: {' '.join(str(error).split())[:300]}"
        ) from None
