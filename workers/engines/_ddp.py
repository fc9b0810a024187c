"""Ddp: the whole model and optimizer on every rank.

Gradients of all ranks are summed as one flat buffer in one all-reduce, after the loss was divided by the global count of
targets: world 2 equals world 1 up to float addition's order. torch's DDP wraps `forward` alone, while the RL loss calls
`prefill` and `step`; one flat all-reduce serves both and fixes the order of the sum.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nonet.models import Muon
from nonet.workers import host_copy, load_model, outline, read_tensors, write_tensors
from nonet.workers.devices import tensors_of
from nonet.workers.engines.base import Learning
from nonet.workers.runtime import Membership


class Ddp:
    """A model with its optimizer. `model` is shared by reference with fused roles."""

    def __init__(
        self, options: Mapping[str, Any], model: torch.nn.Module, learning: Learning, member: Membership
    ):
        self.options, self.model, self.learning, self.member = options, model, learning, member
        self.restart()

    def change_process_group(self, member: Membership) -> None:
        self.member = member

    def restart(self) -> None:
        self.optimizer = self.make_optimizer()
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Muon for the hidden matrices, AdamW for the rest."""
        hidden = self.model.hidden_matrices()  # type: ignore[operator]
        named = {id(p) for p in hidden}
        others = [p for p in self.model.parameters() if id(p) not in named]
        return Muon(hidden, others, weight_decay=self.learning.weight_decay)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip(self) -> float:
        if self.member.n_trainers > 1:
            self._sum_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.learning.clip_norm)
        return float(norm)

    def step(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def outline(self) -> dict[str, Tensor]:
        return outline(self.model.state_dict())

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        state = self.model.state_dict()
        return {name: state[name] for name in names}

    def snapshot(self) -> Callable[[Path], list[Path]]:
        """Rank 0 writes model.safetensors, optimizer.safetensors and optimizer.json; the others nothing."""
        if self.member.rank:
            return lambda folder: []
        state = self.optimizer.state_dict()
        moments = {
            f"{index}.{slot}": value
            for index, slots in state["state"].items()
            for slot, value in slots.items()
        }
        tensors = {"model": host_copy(self.model.state_dict()), "optimizer": host_copy(moments)}
        return partial(_write, tensors, json.dumps(state["param_groups"]))

    def load(self, folder: Path, *, optimizer: bool) -> None:
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

    def device_tensors(self) -> Iterable[Tensor]:
        return tensors_of(self.model, self.optimizer)

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
