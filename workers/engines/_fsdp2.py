"""Fsdp2: PyTorch's fully_shard divides weights, gradients and optimizer among the trainers; each updates its own part.

A rank keeps some rows of every parameter. The rows of a block are gathered before the block runs, in the forward and again
in the backward pass, and its gradients are summed by a reduce-scatter as soon as they are known. So every forward pass is a
collective call: all ranks must take the same number of them (`division/divided_model.py`). Muon gathers one matrix at a time.
Source: Zhao et al. 2023, arXiv 2304.11277.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nonet.muon import Muon, orthogonalise
from nonet.stored_tensors import StoredTensors
from nonet.workers import SaveOptions, load_model
from nonet.workers.engines._ddp import BESIDE, MASTERS, Ddp, compute_clip_factor, read_masters
from nonet.workers.engines.base import OptimizerOptions
from nonet.workers.engines.division import ShardedModel, build_mesh, is_divided
from nonet.workers.runtime import Membership


class Fsdp2(Ddp):
    """FSDP2, or `Ddp` on a single rank.

    Its checkpoints have the format of `Ddp`: any engine on any number of ranks can read them.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        model: torch.nn.Module,
        learning: OptimizerOptions,
        member: Membership,
    ):
        self._replicate = options.get("replicate", 1)
        self._build: Callable[[], torch.nn.Module] | None = None  # Builds the model again.
        self._sharded = self._divide(model, member) if member.n_trainers > 1 else None
        super().__init__(options, model, learning, member)

    @classmethod
    def build(
        cls,
        options: Mapping[str, Any],
        build: Callable[[], torch.nn.Module],
        device: torch.device,
        learning: OptimizerOptions,
        member: Membership,
    ) -> Fsdp2:
        """Make the engine of a model that several ranks build part by part (`ShardedModel.build`)."""
        if member.n_trainers > 1:
            mesh = build_mesh(member, device.type, options.get("replicate", 1))
            model = ShardedModel.build(build, mesh, device).module
        else:
            model = build().to(device)
        engine = cls(options, model, learning, member)
        engine._build = build
        return engine

    @property
    def _shards(self) -> ShardedModel:
        """The divided model; only for several ranks."""
        assert self._sharded is not None
        return self._sharded

    def change_process_group(self, member: Membership) -> None:
        """Continue in another process group with a new optimizer.

        The weights stay if this rank keeps its part of them. Otherwise a checkpoint must be loaded before the next step.
        """
        was_alone, had = self._sharded is None, (self.member.rank, self.member.n_trainers)
        self.member = member
        if member.n_trainers > 1:
            keeps_part = had == (member.rank, member.n_trainers)
            self._sharded = (
                self._divide(self.model, member)
                if was_alone
                else self._shards.move_to(
                    self._build_mesh(member, self._shards.mesh.device_type), keeps_part=keeps_part
                )
            )
            self.model = self._sharded.module
        elif not was_alone:
            self.model, self._sharded = self._shards.build_empty(), None
        self.restart()

    def restart(self) -> None:
        """Create a new optimizer over the current weights."""
        if self._sharded is None:
            super().restart()
            return
        self.masters = []
        self._shards.drop_gradients()
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Create the optimizer over this rank's parts of the parameters."""
        if self._sharded is None:
            return super().make_optimizer()
        parts, muon_indices = self._shards.parts, self.find_hidden_positions()
        matrices = [parts[index] for index in muon_indices]
        others = [part for index, part in enumerate(parts) if index not in set(muon_indices)]
        index_by_id = {id(parts[index]): index for index in muon_indices}
        return _DividedMuon(
            self._shards, index_by_id, matrices, others, weight_decay=self.learning.weight_decay
        )

    def find_hidden_positions(self) -> list[int]:
        """Return the indices, among the trained parameters, of the hidden matrices; [] if the optimizer is not Muon."""
        if self._sharded is None or self.learning.use != "muon":
            return super().find_hidden_positions()
        self.reshard()
        return self._sharded.find_indices(self.model.hidden_matrices())  # type: ignore[operator]

    def reshard(self) -> None:
        """Release gathered weights, which an update of the parts makes stale."""
        if self._sharded is not None:
            self._shards.reshard()

    def collect_gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's parts, which are summed over the ranks already."""
        return super().collect_gradients() if self._sharded is None else self._shards.collect_gradients()

    def clip(self, sparse_norm: float = 0.0) -> float:
        """Clip the gradients. Returns their norm before clipping."""
        if self._sharded is None:
            return super().clip(sparse_norm)
        self.reshard()
        gradients = self.collect_gradients()
        scalar_squares = self._shards.sum_scalar_gradients()
        self._shards.sum_tensor_gradients()
        trained = [index for index, part in enumerate(self._shards.parts) if part.requires_grad]
        squares = sum(
            float((gradient.double() ** 2).sum()) / self._shards.count_holders(index)
            for index, gradient in zip(trained, gradients, strict=True)
            if gradient.ndim
        )
        all_squares = self.member.sum_over_ranks(squares)[0] + scalar_squares
        norm = math.hypot(math.sqrt(all_squares), sparse_norm)
        torch._foreach_mul_(gradients, compute_clip_factor(norm, self.learning.clip))
        return norm

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update this rank's parts of the weights."""
        if self._sharded is None:
            super().step(lr)
            return
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self._shards.drop_gradients()

    def skip(self) -> None:
        """Drop the gradients of a step that is skipped."""
        if self._sharded is None:
            super().skip()
        else:
            self._shards.drop_gradients()

    def snapshot(self, saving: SaveOptions = BESIDE) -> Callable[[Path], list[Path]]:
        """Snapshot model and optimizer, and return the function that writes this rank's files (`EngineRuntime.snapshot`).

        Every rank writes slices, of what it has itself.
        """
        if self._sharded is None:
            return super().snapshot(saving)
        state = self.optimizer.state_dict()
        moments = {
            f"{index}.{slot}": (value, model_index if value.ndim else None)
            for index, model_index in enumerate(self._list_model_indices())
            for slot, value in state["state"].get(index, {}).items()
        }
        saved = [self._shards.save_weights(saving), self._shards.save_like("optimizer", moments, saving)]
        masters = self._shards.save_masters(MASTERS, saving)
        return self.make_writer([*saved, *([masters] if masters else [])], state["param_groups"], saving)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Load the weights of a checkpoint, and its optimizer state if `optimizer` is true."""
        if self._sharded is None:
            super().load(folder, optimizer=optimizer)
            return
        self.reshard()
        load_model(self.model, folder)
        self._shards.load_masters(read_masters(folder) if optimizer else None)
        self.optimizer = self.make_optimizer()
        if optimizer:
            self.load_optimizer(folder)

    def device_tensors(self) -> Iterable[Tensor]:
        """Return this rank's parts of weights, gradients and optimizer states, and the buffers."""
        if self._sharded is None:
            return super().device_tensors()
        self.reshard()
        states = [
            value
            for slots in self.optimizer.state.values()
            for value in slots.values()
            if isinstance(value, Tensor)
        ]
        return [*self._shards.list_tensors(), *states]

    def _list_model_indices(self) -> list[int]:
        """Return, for each parameter of the optimizer in its order, its index among the model's parameters."""
        index_by_id = {id(part): index for index, part in enumerate(self._shards.parts)}
        return [index_by_id[id(p)] for group in self.optimizer.param_groups for p in group["params"]]

    def read_moment(self, stored: StoredTensors, key: str, index: int) -> Tensor:
        """Read this rank's part of a moment, given the parameter's index in the optimizer."""
        if self._sharded is None:
            return super().read_moment(stored, key, index)
        return self._shards.read_like(stored, key, self._list_model_indices()[index])

    def _divide(self, model: torch.nn.Module, member: Membership) -> ShardedModel:
        """Divide the weights of a model among the trainers, unless they are divided already."""
        if is_divided(model):
            return model.division  # type: ignore[return-value]
        device = next(model.parameters()).device
        return ShardedModel(model, self._build_mesh(member, device.type), device, self._build)

    def _build_mesh(self, member: Membership, device_type: str) -> DeviceMesh:
        """Build the device mesh of the trainers."""
        return build_mesh(member, device_type, self._replicate)


class _DividedMuon(Muon):
    """Muon for matrices whose rows are divided among ranks.

    Args:
        shards: The divided model.
        index_by_id: Index of each matrix among the model's parameters, by the `id` of this rank's part.
        *parameters: Arguments of Muon.
        **options: Keyword arguments of Muon.
    """

    def __init__(
        self, shards: ShardedModel, index_by_id: Mapping[int, int], *parameters: Any, **options: Any
    ):
        super().__init__(*parameters, **options)
        self._shards, self._index_by_id = shards, index_by_id

    def _step_muon(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices: gather the momentum, orthogonalise it and apply this rank's rows of the result."""
        rate = group["lr"] * group["speed"]
        for p in parameters:
            state, index = self.state[p], self._index_by_id[id(p)]
            if not state:
                state["momentum"] = torch.zeros_like(p)
            assert p.grad is not None
            state["momentum"].lerp_(p.grad, 1 - group["momentum"])
            nesterov = p.grad.lerp(state["momentum"], group["momentum"])  # Nesterov momentum
            update = orthogonalise(self._shards.gather_like(nesterov, index)[None])[0]
            p.mul_(1 - rate * group["weight_decay"])
            # Tall matrices take larger steps, as in `Muon`.
            rows, columns = self._shards.shapes[index]
            p.add_(self._shards.select_part(update, index), alpha=-rate * max(1.0, rows / columns) ** 0.5)
