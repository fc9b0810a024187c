"""Ddp: the whole model and optimizer on every rank.

Gradients of all ranks are summed in buckets during the last backward pass of a step (`_gradient_buckets.py`), after the loss was
divided by the global count of targets: world 2 equals world 1 up to the order of float additions. torch's DDP wraps `forward`
alone, while the RL loss calls `prefill` and `step`; hooks of the parameters serve both.

A parameter of reduced precision (`model.precision: bf16 | fp16`) has a master weight in fp32, which the optimizer
updates: an update smaller than half a unit in the last place of bf16 would be lost at each step. The model holds the
rounded weights. A checkpoint has the masters in `master.safetensors`, beside the optimizer. Source: Micikevicius et
al. 2018, arXiv 1710.03740.
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

from nonet.muon import Muon
from nonet.stored_tensors import StoredTensors
from nonet.workers import (
    SavedTensors,
    SaveOptions,
    TensorFiles,
    batch_by_size,
    load_model,
    to_meta_tensors,
)
from nonet.workers.devices import list_training_tensors
from nonet.workers.engines._gradient_buckets import GradientBuckets
from nonet.workers.engines.base import OptimizerOptions
from nonet.workers.engines.ddp import BUCKET_ELEMENTS
from nonet.workers.engines.division import DIVISION, is_divided, is_reduced
from nonet.workers.runtime import Membership

BESIDE = SaveOptions()
"""Copies the tensors, so that later steps may run while the files are written."""
MASTERS = "master"
"""Stem of the files of fp32 copies; checkpoints of earlier versions and of fp32 models have none."""


class Ddp:
    """The default train engine (`EngineRuntime`): the whole model and optimizer on every rank."""

    def __init__(
        self,
        options: Mapping[str, Any],
        model: torch.nn.Module,
        learning: OptimizerOptions,
        member: Membership,
    ):
        self.options, self.model, self.learning, self.member = options, model, learning, member
        self._buckets: GradientBuckets | None = None
        self._bucket_group: Any = None
        self.restart()

    def change_process_group(self, member: Membership) -> None:
        """Continue in another process group."""
        self.member, self._bucket_group = member, None
        self.make_buckets()

    def restart(self) -> None:
        """Create a new optimizer over the current weights, and set gradients to zero."""
        self.masters = self.make_masters()
        self.optimizer = self.make_optimizer()
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.make_buckets()

    def make_buckets(self) -> None:
        """Make the buckets in which the gradients of several ranks are summed, with gradients of zero."""
        if self._buckets is not None:
            self._buckets.close()
            self._buckets = None
        if self.member.n_trainers == 1:
            return
        if self._bucket_group is None and self.member.trainers is not None:
            self._bucket_group = self.member.make_subgroup(list(range(self.member.n_trainers)))
        master_by_id = {id(p): master for p, master in self._iterate_reduced()}

        def get_gradient(parameter: torch.nn.Parameter) -> Tensor:
            master = master_by_id.get(id(parameter))
            gradient = parameter.grad if master is None or master.grad is None else master.grad
            assert gradient is not None
            return gradient

        self._buckets = GradientBuckets(list(self.model.parameters()), self._bucket_group, get_gradient)

    def make_masters(self) -> list[torch.nn.Parameter]:
        """Return the parameters that the optimizer updates: each parameter, or its fp32 copy."""
        return [
            torch.nn.Parameter(parameter.detach().float()) if is_reduced(parameter) else parameter
            for parameter in self.model.parameters()
        ]

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Create the optimizer: Muon for the hidden matrices and AdamW for the rest, AdamW for all, or that of the model."""
        if (make := getattr(self.model, "make_optimizer", None)) is not None:
            return make(self.learning.weight_decay)
        muon_indices = set(self.find_hidden_positions())
        muon_matrices = [self.masters[index] for index in sorted(muon_indices)]
        others = [p for index, p in enumerate(self.masters) if index not in muon_indices]
        return Muon(muon_matrices, others, weight_decay=self.learning.weight_decay)

    def find_hidden_positions(self) -> list[int]:
        """Return the indices, among the model's parameters, of the hidden matrices; [] if the optimizer is not Muon."""
        if self.learning.use != "muon":
            return []
        hidden_ids = {id(p) for p in self.model.hidden_matrices()}  # type: ignore[operator]
        return [index for index, p in enumerate(self.model.parameters()) if id(p) in hidden_ids]

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to those since the last step."""
        loss.backward()

    def backward_last(self, loss: Tensor) -> None:
        """Add the gradients of the last loss of a step, and begin to sum those of all ranks.

        Gradients of fp16 are summed in `clip`, since they are first moved to their masters.
        """
        has_fp16 = any(parameter.dtype == torch.float16 for parameter in self.model.parameters())
        if self._buckets is None or has_fp16:
            self.backward(loss)
        else:
            self._buckets.run_last_backward(loss)

    def collect_gradients(self) -> list[Tensor]:
        """Return this rank's gradients since the last step.

        Gradients of fp16 parameters are moved to their masters and accumulated there in fp32, since after unscaling
        they may be too small for fp16; bf16 has the range of fp32.
        """
        for parameter, master in self._iterate_reduced():
            if parameter.dtype != torch.float16:
                continue
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            master.grad.add_(parameter.grad)
            parameter.grad.zero_()
        pairs = zip(self.model.parameters(), self.masters, strict=True)
        gradients = [parameter.grad if master.grad is None else master.grad for parameter, master in pairs]
        return [gradient for gradient in gradients if gradient is not None]

    def clip(self, sparse_norm: float = 0.0) -> float:
        """Sum the gradients of all ranks and clip them. Returns their norm before clipping.

        Args:
            sparse_norm: Norm of the sparse gradients of all ranks, which is combined with the dense norm.
        """
        gradients, has_reduced = self.collect_gradients(), any(True for _ in self._iterate_reduced())
        if self._buckets is not None:
            self._buckets.finish()
        if not sparse_norm and not has_reduced:
            return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.learning.clip))
        if has_reduced:
            norms = torch.stack(torch._foreach_norm(gradients, 2, torch.float32))
            norm = float(torch.linalg.vector_norm(norms))
        else:
            norm = float(torch.nn.utils.get_total_norm(gradients))
        norm = math.hypot(norm, sparse_norm)
        torch._foreach_mul_(gradients, compute_clip_factor(norm, self.learning.clip))
        return norm

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the weights with a learning rate, and set gradients to zero."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        if reduced := list(self._iterate_reduced()):
            self._step_reduced(reduced)

    def _step_reduced(self, reduced: Sequence[tuple[torch.nn.Parameter, torch.nn.Parameter]]) -> None:
        """Step the masters that `optimizer.step` left out, in batches, and round all masters into the model.

        Args:
            reduced: The parameters of reduced precision with their masters. Those of fp16 have been stepped already.
        """
        stepped = [parameter for parameter in self.masters if parameter.grad is not None]
        zero_gradients = [parameter.grad for parameter in stepped]
        for parameter in stepped:
            parameter.grad = None  # An optimizer skips parameters without a gradient.
        left_out = [pair for pair in reduced if pair[0].dtype != torch.float16]
        for batch in batch_by_size(left_out, lambda pair: pair[0].numel(), BUCKET_ELEMENTS):
            for parameter, master in batch:
                assert parameter.grad is not None
                master.grad = parameter.grad.float()
            self.optimizer.step()
            for parameter, master in batch:
                master.grad = None
                parameter.grad.zero_()  # type: ignore[union-attr]
        for parameter, master in reduced:
            parameter.copy_(master)
        master_ids = {id(master) for _, master in reduced}
        for parameter, zero in zip(stepped, zero_gradients, strict=True):
            parameter.grad = None if id(parameter) in master_ids else zero

    def skip(self) -> None:
        """Drop the gradients of a step that is skipped."""
        torch._foreach_zero_(self.collect_gradients())
        for _, master in self._iterate_reduced():
            master.grad = None

    def _iterate_reduced(self) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        """Yield parameters of reduced precision with their masters."""
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            if master is not parameter:
                yield parameter, master

    def describe_weights(self) -> dict[str, Tensor]:
        """Return the whole weights by name as meta tensors, which have shapes and dtypes only."""
        division = getattr(self.model, DIVISION, None)
        return to_meta_tensors(self.model.state_dict()) if division is None else division.describe()

    def gather_weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the weights of these names, by name; if they are divided, {} on ranks other than 0. All ranks must call it."""
        if is_divided(self.model):
            gathered = getattr(self.model, DIVISION).iterate_whole(names)
            return {
                name: tensor for name, tensor in gathered if not self.member.rank
            }  # Others need no weights.
        state = self.model.state_dict()
        return {name: state[name] for name in names}

    def snapshot(self, saving: SaveOptions = BESIDE) -> Callable[[Path], list[Path]]:
        """Snapshot model and optimizer, and return the function that writes this rank's files (`EngineRuntime.snapshot`).

        The shards are divided among the ranks in turn; rank 0 also writes the indexes and optimizer.json.
        """
        weights, state = self.model.state_dict(), self.optimizer.state_dict()
        moments = {
            f"{index}.{slot}": value
            for index, slots in state["state"].items()
            for slot, value in slots.items()
        }
        named = zip(self.model.named_parameters(), self.masters, strict=True)
        masters = {name: master.detach() for (name, parameter), master in named if master is not parameter}
        sets = {"model": weights, "optimizer": moments} | ({MASTERS: masters} if masters else {})
        ranks = self.member.n_trainers
        saved = [
            SavedTensors(TensorFiles.from_tensors(stem, own, saving.shard_bytes, ranks), own)
            for stem, own in sets.items()
        ]
        return self.make_writer(saved, state["param_groups"], saving)

    def make_writer(
        self, sets: Sequence[SavedTensors], groups: Sequence[Mapping[str, Any]], saving: SaveOptions
    ) -> Callable[[Path], list[Path]]:
        """Return a function that writes this rank's files of the weights and the optimizer.

        Args:
            sets: The weights, the moments, and the fp32 copies, if there are any.
            groups: The optimizer's parameter groups, which rank 0 writes.
            saving: How the state is saved.
        """
        writers = [saved.make_writer(self.member.rank, copy=saving.copy) for saved in sets]
        return partial(_write_dense, writers, None if self.member.rank else groups)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read the weights of a checkpoint, and its optimizer on request."""
        load_model(self.model, folder)
        self.load_masters(folder if optimizer else None)
        if optimizer:
            self.load_optimizer(folder)

    @torch.no_grad()
    def load_masters(self, folder: Path | None) -> None:
        """Read the masters of a checkpoint; masters that it lacks are copied from the model's weights."""
        stored = (read_masters(folder) if folder else None) or {}
        for (name, parameter), master in zip(self.model.named_parameters(), self.masters, strict=True):
            if master is not parameter:
                master.copy_(stored.get(name, parameter))

    def load_optimizer(self, folder: Path) -> None:
        """Read the moments of a checkpoint."""
        state: dict[int, dict[str, Tensor]] = {}
        stored = StoredTensors(folder / "optimizer.safetensors")
        for key in stored:
            index, slot = key.split(".", 1)
            state.setdefault(int(index), {})[slot] = self.read_moment(stored, key, int(index))
        groups = json.loads((folder / "optimizer.json").read_text())
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def read_moment(self, stored: StoredTensors, key: str, index: int) -> Tensor:
        """Read this rank's part of a moment, given the parameter's index in the optimizer.

        It is a copy, because an offload cannot release the memory of a mapped file.
        """
        return stored[key].clone()

    def device_tensors(self) -> Iterable[Tensor]:
        """Return weights, gradients, optimizer states and masters."""
        masters = [
            tensor
            for _, master in self._iterate_reduced()
            for tensor in (master, master.grad)
            if tensor is not None
        ]
        return [*list_training_tensors(self.model, self.optimizer), *masters]


def read_masters(folder: Path) -> StoredTensors | None:
    """Return the fp32 copies in a checkpoint's dense folder by parameter, None if it has none."""
    path = folder / f"{MASTERS}.safetensors"
    has_masters = path.exists() or path.with_name(f"{path.name}.index.json").exists()
    return StoredTensors(path) if has_masters else None


def compute_clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that clips gradients of this norm, as torch.nn.utils.clip_grad_norm_ does."""
    return min(1.0, max_norm / (norm + 1e-6))


def _write_dense(
    writers: Sequence[Callable[[Path], list[Path]]], groups: Sequence[Mapping[str, Any]] | None, folder: Path
) -> list[Path]:
    """Write a rank's files of a dense folder.

    Args:
        writers: Write this rank's tensors.
        groups: On rank 0, the optimizer's parameter groups; None on others.
        folder: The dense folder.

    Returns:
        The paths that were written.
    """
    paths = [path for write in writers for path in write(folder)]
    if groups is not None:
        (folder / "optimizer.json").write_text(json.dumps(groups))
        paths.append(folder / "optimizer.json")
    return paths
