"""Deepspeed: DeepSpeed's ZeRO steps the model (`pip install 'nonet[deepspeed]'`).

ZeRO splits the parameters into flat pieces, so Muon, which needs whole matrices, is rejected. Under ZeRO 1 and 2 all parameters
are one part (`ZeroPart`), whose weights are whole on every rank. Under ZeRO 3 the blocks are divided (`PartitionedModel`), and
the weights around them are a second part, which is stepped as under ZeRO 1. Source: Rajbhandari et al. 2020, arXiv 1910.02054.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nonet.errors import ConfigError
from nonet.stored_tensors import StoredTensors
from nonet.workers import SavedTensors, SaveOptions, load_model
from nonet.workers.engines import (
    BESIDE,
    MASTERS,
    Ddp,
    OptimizerOptions,
    compute_clip_factor,
    read_masters,
)
from nonet.workers.engines._blocks import find_blocks
from nonet.workers.engines._zero.part import ZeroPart
from nonet.workers.engines._zero.partitioned_model import PartitionedModel, find_divided_blocks
from nonet.workers.engines._zero.pieces import save_gathered
from nonet.workers.engines.division import allocate, copy_structure, is_reduced, save_model
from nonet.workers.runtime import Membership

_MOMENTS = {
    "first": "exp_avg",
    "second": "exp_avg_sq",
}  # Name in a checkpoint: key of the state of torch's AdamW.


class Deepspeed(Ddp):
    """DeepSpeed's ZeRO; on a single rank it is plain AdamW.

    A checkpoint has the format of `Ddp`: any engine on any number of ranks can read it.

    Args:
        options: `zero`, the stage; `offload`, whether the optimizer is in host memory; `deepspeed`, keys of
            DeepSpeed's own configuration.
        model: The model.
        learning: The optimizer settings; replaced when a stage begins.
        member: The process group.

    Raises:
        ConfigError: The optimizer is not AdamW.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        model: torch.nn.Module,
        learning: OptimizerOptions,
        member: Membership,
    ):
        # `restart` rejects Muon; the first stage sets its own optimizer settings.
        learning = learning.model_copy(update={"use": "adamw"})
        self.options, self.model, self.learning, self.member = options, model, learning, member
        self._buckets, self._bucket_group = None, None  # DeepSpeed sums the gradients of several ranks.
        self._device = next(model.parameters()).device
        self._parts: list[ZeroPart] = []  # None on a single rank.
        self._partitioned: PartitionedModel | None = None  # Under ZeRO 3 on several ranks.
        self._divide()
        self.restart()

    def change_process_group(self, member: Membership) -> None:
        """Continue in another process group with a new optimizer.

        The weights of ZeRO 3 stay if this rank keeps its part of them. Otherwise a checkpoint must be loaded next.
        """
        keeps_part = (self.member.rank, self.member.n_trainers) == (member.rank, member.n_trainers)
        self.member, partitioned, parts = member, self._partitioned, self._parts
        for part in parts:
            part.destroy()
        if partitioned is not None:
            self.model = copy_structure(partitioned.skeleton)
            allocate(self.model, self._device)
        self._divide()
        if partitioned is not None and self._partitioned is not None:
            self._partitioned.has_weights = keeps_part and partitioned.has_weights
            for part, old_part in zip(self._parts, parts, strict=True):
                part.copy_weights_from(old_part, keeps_part)
        gc.collect()  # A divided model is a reference cycle, which would keep its memory for a while.
        self.restart()

    def _divide(self) -> None:
        """Divide the model into the parts that DeepSpeed engines update; on a single rank there are none."""
        named = dict(self.model.named_parameters())
        # The order of `Ddp`'s optimizer and of the files of a checkpoint: matrices, then all others.
        self._names = sorted(named, key=lambda name: named[name].ndim <= 1)
        self._parts, self._partitioned = [], None
        if self.member.n_trainers == 1:
            return
        self._shapes = {name: parameter.shape for name, parameter in named.items()}
        self._reduced_names = [name for name in self._names if is_reduced(named[name])]
        skeleton = copy_structure(self.model)
        self.masters = list(skeleton.parameters())  # Their shapes are those of the whole weights.
        zero = self.options.get("zero", 1)
        blocks = find_divided_blocks(find_blocks(self.model)) if zero == 3 else []
        ids_in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
        in_blocks = {name: p for name, p in named.items() if id(p) in ids_in_blocks}
        around = {name: p for name, p in named.items() if id(p) not in ids_in_blocks}
        if around:
            self._parts.append(self._make_part(torch.nn.ParameterList(around.values()), around, min(zero, 2)))
        if blocks:
            part = self._make_part(torch.nn.ModuleList(blocks), in_blocks, 3)
            self._parts.append(part)
            self._partitioned = PartitionedModel(
                self.model, skeleton, blocks, part, self.member, self._device
            )

    def _make_part(self, module: torch.nn.Module, parameters: Mapping[str, Any], zero: int) -> ZeroPart:
        """Make the part of these parameters, which are those of a module."""
        return ZeroPart(module, parameters, zero, self.options, self.learning, self.member, self._device)

    def restart(self) -> None:
        """Create a new optimizer over the current weights."""
        if self.learning.use != "adamw":
            raise ConfigError(
                "engine deepspeed splits parameters into flat pieces and muon needs whole matrices; set optimizer: {use: adamw} "
                "in every stage, or engine: {use: fsdp2}"
            )
        self._steps = 0
        if not self._parts:
            super().restart()
            return
        self.optimizer = self.make_optimizer()  # Of the shapes alone: a checkpoint has its groups.
        for part in self._parts:
            part.restart(self.learning)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to those since the last step."""
        loss.backward()
        for part in self._parts:
            part.finish_pass()

    def collect_gradients(self) -> list[Tensor]:
        """Return this rank's gradients since the last step."""
        if not self._parts:
            return super().collect_gradients()
        return [gradient for part in self._parts for gradient in part.collect_gradients()]

    def clip(self, sparse_norm: float = 0.0) -> float:
        """Sum the gradients of all ranks and clip them. Returns their norm before clipping.

        Args:
            sparse_norm: Norm of the sparse gradients of all ranks, which is combined with the dense norm.
        """
        if not self._parts:
            return super().clip(sparse_norm)
        gradients = [gradient for part in self._parts for gradient in part.sum_gradients()]
        norms = torch._foreach_norm(gradients, 2, torch.float64)
        squares = float(torch.stack([n.cpu() for n in norms]).square().sum())
        norm = math.hypot(math.sqrt(self.member.sum_over_ranks(squares)[0]), sparse_norm)
        torch._foreach_mul_(gradients, compute_clip_factor(norm, self.learning.clip))
        return norm

    def step(self, lr: float) -> None:
        """Update the weights with a learning rate, and forget the gradients."""
        if not self._parts:
            super().step(lr)
            return
        with torch.no_grad():
            for part in self._parts:
                part.step(lr)
        self._steps += 1

    def skip(self) -> None:
        """Drop the gradients of a step that is skipped."""
        if not self._parts:
            super().skip()
        for part in self._parts:
            part.drop_gradients()

    def snapshot(self, saving: SaveOptions = BESIDE) -> Callable[[Path], list[Path]]:
        """Snapshot model and optimizer; tensors are gathered some at a time, and a rank keeps those that it writes."""
        if not self._parts:
            return super().snapshot(saving)
        slots = (*_MOMENTS, "step") if self._steps else ()  # There are no moments before the first step.
        shapes = {
            f"{index}.{slot}": torch.empty(() if slot == "step" else self._shapes[name], device="meta")
            for index, name in enumerate(self._names)
            for slot in slots
        }
        moments = save_gathered("optimizer", shapes, self._gather_moments(), saving, self.member)
        saved = [save_model(self.model, self.member.n_trainers, saving), moments, *self._save_masters(saving)]
        return self.make_writer(saved, self.optimizer.state_dict()["param_groups"], saving)

    def _save_masters(self, saving: SaveOptions) -> list[SavedTensors]:
        """Return the fp32 copies of weights of reduced precision; [] if there are none."""
        shapes = {name: torch.empty(self._shapes[name], device="meta") for name in self._reduced_names}
        gathered = self._gather(self._reduced_names)
        return [save_gathered(MASTERS, shapes, gathered, saving, self.member)] if shapes else []

    def _gather_moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole moments by their names in a checkpoint. All ranks must iterate to the end."""
        for slot, key in _MOMENTS.items() if self._steps else ():
            for name, moment in self._gather(self._names, key):
                yield f"{self._names.index(name)}.{slot}", moment
        for index in range(len(self._names) if self._steps else 0):
            yield f"{index}.step", torch.tensor(float(self._steps))

    def _gather(self, names: Iterable[str], state_key: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield moments of parameters, or their fp32 weights, by the names of the parameters (`RankPieces.gather_whole`)."""
        names = list(names)
        return chain.from_iterable(
            part.pieces.gather_whole([name for name in names if name in part.parameters], state_key)
            for part in self._parts
        )

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read the weights of a checkpoint, and its optimizer on request."""
        if not self._parts:
            super().load(folder, optimizer=optimizer)
            return
        load_model(self.model, folder)
        if self._partitioned is not None:
            self._partitioned.has_weights = True
        self.restart()
        part_by_name = {name: part for part in self._parts for name in part.parameters}
        for part in self._parts:
            part.copy_weights_to_masters()
        if not optimizer:
            return
        masters = read_masters(folder) or {}
        for name in self._reduced_names:
            if name in masters:
                part_by_name[name].pieces.set_weights(name, masters[name])
        for key, value in StoredTensors(folder / "optimizer.safetensors").items():
            index, slot = key.split(".", 1)
            name = self._names[int(index)]
            if slot == "step":
                self._steps = int(value)
            else:
                part_by_name[name].pieces.set_moment(name, _MOMENTS[slot], value)
        for part in self._parts if self._steps else ():
            part.pieces.set_steps(self._steps)

    def device_tensors(self) -> Iterable[Tensor]:
        """Return what this rank keeps on its device between steps."""
        if not self._parts:
            return super().device_tensors()
        return [*(tensor for part in self._parts for tensor in part.list_tensors()), *self.model.buffers()]
