"""Fsdp2: PyTorch's fully_shard over a copy of the parameters ("shadow"); each rank updates its part of the weights.

A rank's part of a parameter is some of its rows. Gradients are summed by a reduce-scatter, and updated weights are
returned by an all-gather. Muon gathers one matrix at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from nonet.models import Muon, orthogonalise
from nonet.workers import SaveOptions
from nonet.workers.engines._ddp import BESIDE, MASTERS, Ddp, compute_clip_factor, is_reduced, read_masters
from nonet.workers.engines._shadow import Shadow
from nonet.workers.runtime import Membership


class Fsdp2(Ddp):
    """FSDP2, or `Ddp` on a single rank.

    Its checkpoints have the format of `Ddp`: any engine on any number of ranks can read them.
    """

    def change_process_group(self, member: Membership) -> None:
        """Continue in another process group with a new optimizer."""
        self.member = member
        self.restart()

    def restart(self) -> None:
        """Create a new optimizer over the current weights."""
        self._parameters: list[torch.nn.Parameter] = list(self.model.parameters())
        if self.member.n_trainers > 1:
            self._rebuild_shadow()
        super().restart()

    def _rebuild_shadow(self) -> None:
        """Create a new shadow of the current weights, divided among the ranks."""
        self._mesh = DeviceMesh.from_group(self.member.trainers, self._parameters[0].device.type)
        self._shadow: Any = fully_shard(Shadow(self._parameters), mesh=self._mesh)
        # Gradients are summed, since the loss is already divided by the number of targets on all ranks.
        self._shadow.set_force_sum_reduction_for_comms(True)
        self._shadow.set_gradient_divide_factor(1.0)
        self._shards: list[Any] = list(self._shadow.parameters())  # A DTensor for each parameter.
        # This rank's part of each parameter, which shares the memory of the DTensor.
        self._local_parts = [torch.nn.Parameter(shard.to_local()) for shard in self._shards]

    def make_masters(self) -> list[torch.nn.Parameter]:
        """Return the fp32 master weights as `Ddp` does on a single rank; otherwise the parameters, as the shadow is in fp32."""
        return super().make_masters() if self.member.n_trainers == 1 else list(self.model.parameters())

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Create the optimizer over this rank's parts of the parameters."""
        if self.member.n_trainers == 1:
            return super().make_optimizer()
        muon_indices = self.find_hidden_positions()
        matrices = [self._local_parts[index] for index in muon_indices]
        others = [part for index, part in enumerate(self._local_parts) if index not in set(muon_indices)]
        shape_by_id = {id(self._local_parts[index]): self._shards[index].shape for index in muon_indices}
        return _DividedMuon(
            self._mesh, shape_by_id, matrices, others, weight_decay=self.learning.weight_decay
        )

    def clip(self, sparse_norm: float = 0.0) -> float:
        """Sum the gradients of all ranks into this rank's parts and clip them. Returns their norm before clipping."""
        if self.member.n_trainers == 1:
            return super().clip(sparse_norm)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        self._shadow(gradients).backward()
        for part, shard in zip(self._local_parts, self._shards, strict=True):
            part.grad, shard.grad = shard.grad.to_local(), None
        squares = sum(float((p.grad.double() ** 2).sum()) for p in self._local_parts if p.grad is not None)
        norm = math.hypot(math.sqrt(self.member.sum_over_trainers(squares)[0]), sparse_norm)
        gradients = [part.grad for part in self._local_parts if part.grad is not None]
        torch._foreach_mul_(gradients, compute_clip_factor(norm, self.learning.clip))
        return norm

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update this rank's parts of the weights, and gather the weights from all ranks."""
        super().step(lr)
        if self.member.n_trainers == 1:
            return
        for p, shard in zip(self._parameters, self._shards, strict=True):
            p.copy_(shard.full_tensor())
            if p.grad is not None:
                p.grad.zero_()

    def snapshot(self, saving: SaveOptions = BESIDE) -> Callable[[Path], list[Path]]:
        """Snapshot model and optimizer, and return the function that writes this rank's files (`EngineRuntime.snapshot`).

        Moments are gathered one at a time, and a rank keeps only those that it writes.
        """
        if self.member.n_trainers == 1:
            return super().snapshot(saving)
        state = self.optimizer.state_dict()
        parts = {
            f"{index}.{slot}": (value, model_index)
            for index, model_index in enumerate(self._list_model_indices())
            for slot, value in state["state"].get(index, {}).items()
        }
        shapes = {
            name: torch.empty(self._shards[i].shape if part.ndim else (), dtype=part.dtype, device="meta")
            for name, (part, i) in parts.items()
        }
        own_names, moments = self.list_own_names("optimizer", shapes, saving), {}
        for name, (part, model_index) in parts.items():
            full_tensor = self._gather_whole(part, model_index) if part.ndim else part
            if name in own_names:
                moments[name] = full_tensor
        return self.make_writer(shapes, moments, state["param_groups"], saving, self._gather_masters(saving))

    def _gather_masters(self, saving: SaveOptions) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return all fp32 master weights by name as meta tensors, and those that this rank writes with their values."""
        index_by_name = {
            name: index
            for index, (name, parameter) in enumerate(self.model.named_parameters())
            if is_reduced(parameter)
        }
        shapes = {
            name: torch.empty(self._shards[i].shape, device="meta") for name, i in index_by_name.items()
        }
        own_names, masters = self.list_own_names(MASTERS, shapes, saving) if shapes else set(), {}
        for name, index in index_by_name.items():
            # A collective call, so it must run on every rank.
            full_tensor = self._gather_whole(self._local_parts[index].detach(), index)
            if name in own_names:
                masters[name] = full_tensor
        return shapes, masters

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Load the weights of a checkpoint, and its optimizer state if `optimizer` is true."""
        super().load(folder, optimizer=False)
        if self.member.n_trainers > 1:
            self._rebuild_shadow()  # The shadow must have the weights that were loaded.
            self.optimizer = self.make_optimizer()
        if optimizer:
            self.load_masters(folder)
            self.load_optimizer(folder, self._select_part)

    @torch.no_grad()
    def load_masters(self, folder: Path | None) -> None:
        """Load this rank's parts of the master weights of a checkpoint."""
        if self.member.n_trainers == 1:
            super().load_masters(folder)
            return
        masters = {} if folder is None else read_masters(folder)
        for (name, _), part in zip(self.model.named_parameters(), self._local_parts, strict=True):
            if name in masters:
                part.copy_(_shard_rows(masters[name].to(part.device), self._mesh))

    def device_tensors(self) -> Iterable[Tensor]:
        """Return the tensors of `Ddp` and this rank's parts of the parameters."""
        parts = () if self.member.n_trainers == 1 else self._local_parts
        return (*super().device_tensors(), *parts)

    def _list_model_indices(self) -> list[int]:
        """Return, for each parameter of the optimizer in its order, its index among the model's parameters."""
        index_by_id = {id(part): index for index, part in enumerate(self._local_parts)}
        return [index_by_id[id(p)] for group in self.optimizer.param_groups for p in group["params"]]

    def _gather_whole(self, part: Tensor, model_index: int) -> Tensor:
        """Gather a tensor of the shape of a parameter, given by its index in the model, from the parts of all ranks."""
        shard = self._shards[model_index]
        return DTensor.from_local(
            part, self._mesh, [Shard(0)], run_check=False, shape=shard.shape, stride=shard.stride()
        ).full_tensor()

    def _select_part(self, index: int, value: Tensor) -> Tensor:
        """Return a copy of this rank's part of a moment, given the parameter's index in the optimizer."""
        if self.member.n_trainers == 1 or not value.ndim:
            return value.clone()
        return _shard_rows(value, self._mesh).clone()


class _DividedMuon(Muon):
    """Muon for matrices whose rows are divided among ranks.

    Args:
        mesh: The device mesh of the ranks.
        shape_by_id: Shape of each whole matrix, by the `id` of this rank's part.
        *parameters: Arguments of Muon.
        **options: Keyword arguments of Muon.
    """

    def __init__(
        self, mesh: DeviceMesh, shape_by_id: Mapping[int, torch.Size], *parameters: Any, **options: Any
    ):
        super().__init__(*parameters, **options)
        self._mesh, self._shape_by_id = mesh, shape_by_id

    def _step_muon(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices: gather the momentum, orthogonalise it and apply this rank's rows of the result."""
        rate = group["lr"] * group["speed"]
        for p in parameters:
            state, shape = self.state[p], self._shape_by_id[id(p)]
            if not state:
                state["momentum"] = torch.zeros_like(p)
            assert p.grad is not None
            state["momentum"].lerp_(p.grad, 1 - group["momentum"])
            nesterov = p.grad.lerp(state["momentum"], group["momentum"])  # Nesterov momentum
            divided = DTensor.from_local(
                nesterov, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1)
            )
            update = orthogonalise(divided.full_tensor()[None])[0]
            p.mul_(1 - rate * group["weight_decay"])
            # Tall matrices take larger steps, as in `Muon`.
            p.add_(_shard_rows(update, self._mesh), alpha=-rate * max(1.0, shape[0] / shape[1]) ** 0.5)


def _shard_rows(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's rows of a tensor that is equal on every rank."""
    replicated = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    return replicated.redistribute(placements=[Shard(0)]).to_local()
