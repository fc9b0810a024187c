"""Ddp: the whole model and optimizer on every rank.

Gradients of all ranks are summed as one flat buffer in one all-reduce, after the loss was divided by the global count of
targets: world 2 equals world 1 up to float addition's order. torch's DDP wraps `forward` alone, while the RL loss calls
`prefill` and `step`; one flat all-reduce serves both and fixes the order of the sum.

A parameter of reduced precision (`model.precision: bf16 | fp16`) has a copy in fp32, its master weight, which the optimizer
moves: a move smaller than half a unit in the last place of bf16 would be lost each step. The model holds the rounded weights.
Masters are in a checkpoint as `master.safetensors`, beside the optimizer. Source: Micikevicius et al. 2018, arXiv 1710.03740.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nonet.models import Muon
from nonet.workers import (
    SaveOptions,
    TensorShards,
    copy_to_host,
    load_model,
    read_tensors,
    to_meta_tensors,
    write_tensors,
)
from nonet.workers.devices import list_training_tensors
from nonet.workers.engines.base import OptimizerSettings
from nonet.workers.runtime import Membership

BESIDE = SaveOptions()  # later steps
_AT_ONCE = 1 << 24  # elements
MASTERS = "master"
"""The stem of the files of fp32 copies; checkpoints written before there were any, and those of fp32 models, have none."""


class Ddp:
    """A model with its optimizer. `model` is shared by reference with fused roles."""

    def __init__(
        self,
        options: Mapping[str, Any],
        model: torch.nn.Module,
        learning: OptimizerSettings,
        member: Membership,
    ):
        self.options, self.model, self.learning, self.member = options, model, learning, member
        self.restart()

    def change_process_group(self, member: Membership) -> None:
        self.member = member

    def restart(self) -> None:
        self.masters = self.make_masters()
        self.optimizer = self.make_optimizer()
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def make_masters(self) -> list[torch.nn.Parameter]:
        """Return what the optimizer moves: each parameter, or its copy in fp32."""
        return [
            torch.nn.Parameter(parameter.detach().float()) if is_reduced(parameter) else parameter
            for parameter in self.model.parameters()
        ]

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Muon for the hidden matrices, AdamW for the rest; or AdamW for all."""
        hidden = set(self.find_hidden_positions())
        every = self.masters
        others = [p for at, p in enumerate(every) if at not in hidden]
        return Muon([every[at] for at in sorted(hidden)], others, weight_decay=self.learning.weight_decay)

    def find_hidden_positions(self) -> list[int]:
        """Places among the parameters of the matrices that Muon moves."""
        if self.learning.optimizer != "muon":
            return []
        hidden = {id(p) for p in self.model.hidden_matrices()}  # type: ignore[operator]
        return [at for at, p in enumerate(self.model.parameters()) if id(p) in hidden]

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def collect_gradients(self) -> list[Tensor]:
        """Return this rank's gradients since the last step. Those of fp16 are copied to fp32 for the step, for what they become
        when their scale is taken out may be too small for fp16; bf16 has the range of fp32."""
        for parameter, master in self._iterate_reduced():
            if parameter.dtype != torch.float16:
                continue
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            master.grad.add_(parameter.grad)
            parameter.grad.zero_()
        pairs = zip(self.model.parameters(), self.masters, strict=True)
        found = [parameter.grad if master.grad is None else master.grad for parameter, master in pairs]
        return [gradient for gradient in found if gradient is not None]

    def clip(self, sparse_norm: float = 0.0) -> float:
        gradients, reduced = self.collect_gradients(), any(True for _ in self._iterate_reduced())
        if self.member.n_trainers > 1:
            self._sum_gradients()
        if not sparse_norm and not reduced:
            return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.learning.clip_norm))
        if reduced:
            norms = torch.stack(torch._foreach_norm(gradients, 2, torch.float32))
            norm = float(torch.linalg.vector_norm(norms))
        else:
            norm = float(torch.nn.utils.get_total_norm(gradients))
        norm = math.hypot(norm, sparse_norm)
        torch._foreach_mul_(gradients, compute_clip_factor(norm, self.learning.clip_norm))
        return norm

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        if reduced := list(self._iterate_reduced()):
            self._step_reduced(reduced)

    def _step_reduced(self, reduced: Sequence[tuple[torch.nn.Parameter, torch.nn.Parameter]]) -> None:
        """Step the masters that have no gradient in fp32 yet, some at a time, and round all of them into the model."""
        stepped = [parameter for parameter in self.masters if parameter.grad is not None]
        zeros = [parameter.grad for parameter in stepped]
        for parameter in stepped:
            parameter.grad = None  # an optimizer leaves out what has none
        for some in _batch_by_size([pair for pair in reduced if pair[0].dtype != torch.float16]):
            for parameter, master in some:
                assert parameter.grad is not None
                master.grad = parameter.grad.float()
            self.optimizer.step()
            for parameter, master in some:
                master.grad = None
                parameter.grad.zero_()  # type: ignore[union-attr]
        for parameter, master in reduced:
            parameter.copy_(master)
        masters = {id(master) for _, master in reduced}
        for parameter, zero in zip(stepped, zeros, strict=True):
            parameter.grad = None if id(parameter) in masters else zero

    def skip(self) -> None:
        """Drop the gradients of a step that is not taken."""
        torch._foreach_zero_(self.collect_gradients())
        for _, master in self._iterate_reduced():
            master.grad = None

    def _iterate_reduced(self) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        """Parameters of reduced precision and their masters."""
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            if master is not parameter:
                yield parameter, master

    def describe_weights(self) -> dict[str, Tensor]:
        return to_meta_tensors(self.model.state_dict())

    def gather_weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        state = self.model.state_dict()
        return {name: state[name] for name in names}

    def snapshot(self, saving: SaveOptions = BESIDE) -> Callable[[Path], list[Path]]:
        """Ranks write the shards of model and optimizer in turn, rank 0 the first, the indexes and optimizer.json."""
        state = self.optimizer.state_dict()
        moments = {
            f"{index}.{slot}": value
            for index, slots in state["state"].items()
            for slot, value in slots.items()
        }
        named = zip(self.model.named_parameters(), self.masters, strict=True)
        masters = {name: master.detach() for (name, parameter), master in named if master is not parameter}
        return self.make_writer(moments, moments, state["param_groups"], saving, (masters, masters))

    def list_own_names(self, stem: str, tensors: Mapping[str, Tensor], saving: SaveOptions) -> set[str]:
        """The tensors that this rank writes; of `named` only names and sizes count."""
        files = TensorShards.from_tensors(stem, tensors, saving.shard_bytes).select_rank_files(
            self.member.rank, self.member.n_trainers
        )
        return {name for names in files.values() for name in names}

    def make_writer(
        self,
        moment_shapes: Mapping[str, Tensor],
        moments: Mapping[str, Tensor],
        groups: Sequence[Mapping[str, Any]],
        saving: SaveOptions,
        masters: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] = ({}, {}),
    ) -> Callable[[Path], list[Path]]:
        """What writes this rank's files: the whole weights, and `moments`, which may lack what other ranks write; `shape`: all of
        them, as meta tensors will do. `masters`: the same two of fp32 copies, by the names of their parameters."""
        model, files, sets = self.model.state_dict(), {}, []
        parts = [("model", model, model), ("optimizer", moment_shapes, moments)]
        for stem, outlined, tensors in (*parts, *([(MASTERS, *masters)] if masters[0] else [])):
            shards = TensorShards.from_tensors(stem, outlined, saving.shard_bytes)
            sets.append((shards, sum(tensor.nbytes for tensor in outlined.values())))
            for file, names in shards.select_rank_files(self.member.rank, self.member.n_trainers).items():
                mine = {name: tensors[name] for name in names}
                files[file] = copy_to_host(mine) if saving.copy else mine
        rank_0 = (sets, groups) if self.member.rank == 0 else ((), None)
        return partial(write_dense, files, *rank_0)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        load_model(self.model, folder)
        self.load_masters(folder if optimizer else None)
        if optimizer:
            self.load_optimizer(folder, lambda index, value: value.clone())

    @torch.no_grad()
    def load_masters(self, folder: Path | None) -> None:
        """Read the masters of a checkpoint; where there is none, or it has none, they are the model's weights."""
        kept = {} if folder is None else read_masters(folder)
        names = [name for name, _ in self.model.named_parameters()]
        for name, parameter, master in zip(names, self.model.parameters(), self.masters, strict=True):
            if master is not parameter:
                master.copy_(kept.get(name, parameter))

    def load_optimizer(self, folder: Path, select_part: Callable[[int, Tensor], Tensor]) -> None:
        """Moments of a commit; `part` gives this rank's of a parameter's, by its place in the optimizer."""
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in read_tensors(folder / "optimizer.safetensors").items():
            index, slot = key.split(".", 1)
            # never the value itself: a mapped file's memory cannot be given back
            state.setdefault(int(index), {})[slot] = select_part(int(index), value)
        groups = json.loads((folder / "optimizer.json").read_text())
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def list_device_tensors(self) -> Iterable[Tensor]:
        masters = [
            tensor
            for _, master in self._iterate_reduced()
            for tensor in (master, master.grad)
            if tensor is not None
        ]
        return [*list_training_tensors(self.model, self.optimizer), *masters]

    def _sum_gradients(self) -> None:
        gradients = self.collect_gradients()
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        torch.distributed.all_reduce(flat, group=self.member.trainers)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _batch_by_size(
    pairs: Sequence[tuple[torch.nn.Parameter, torch.nn.Parameter]],
) -> Iterator[list[tuple[torch.nn.Parameter, torch.nn.Parameter]]]:
    """Yield pairs whose gradients in fp32 are there at once: 64 MB, or one parameter."""
    some: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []
    elements = 0
    for pair in pairs:
        if some and elements + pair[0].numel() > _AT_ONCE:
            yield some
            some, elements = [], 0
        some.append(pair)
        elements += pair[0].numel()
    if some:
        yield some


def is_reduced(parameter: Tensor) -> bool:
    """Whether a parameter has fewer bits than fp32, so that a move can be too small for it."""
    return parameter.is_floating_point() and parameter.element_size() < 4


def read_masters(folder: Path) -> dict[str, Tensor]:
    """Return the fp32 copies in a checkpoint's dense folder by parameter; empty where it has none."""
    path = folder / f"{MASTERS}.safetensors"
    there = path.exists() or path.with_name(f"{path.name}.index.json").exists()
    return read_tensors(path) if there else {}


def compute_clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of this norm are multiplied by, as torch.nn.utils.clip_grad_norm_ does."""
    return min(1.0, max_norm / (norm + 1e-6))


def write_dense(
    files: Mapping[str, Mapping[str, Tensor]],
    sets: Sequence[tuple[TensorShards, int]],
    groups: Sequence[Mapping[str, Any]] | None,
    folder: Path,
) -> list[Path]:
    """A rank's files of a dense folder: tensors by file; from rank 0 the indexes of sets with their bytes, and the groups."""
    paths = [folder / file for file in files]
    for path, named in zip(paths, files.values(), strict=True):
        write_tensors(path, named)
    for shards, total in sets:
        paths += shards.write_index(folder, total)
    if groups is not None:
        (folder / "optimizer.json").write_text(json.dumps(groups))
        paths.append(folder / "optimizer.json")
    return paths
