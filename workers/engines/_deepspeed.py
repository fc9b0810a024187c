"""Deepspeed: DeepSpeed's ZeRO over a shadow of the parameters (`pip install 'nonet[deepspeed]'`).

ZeRO splits the parameters into flat pieces, so Muon, which needs whole matrices, is rejected. DeepSpeed averages over
the ranks; gradients are multiplied by the number of ranks, which makes the average a sum. ZeRO 1 and 2 return the
updated weights whole. Under ZeRO 3 they are gathered from the pieces, some parameters at a time. Source: Rajbhandari
et al. 2020, arXiv 1910.02054.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nonet.errors import ConfigError
from nonet.stored_tensors import StoredTensors
from nonet.workers import SavedTensors, SaveOptions
from nonet.workers.engines._ddp import BESIDE, MASTERS, Ddp, read_masters
from nonet.workers.engines.base import OptimizerOptions
from nonet.workers.engines.division import is_reduced
from nonet.workers.runtime import Membership

_MOMENTS = {
    "first": "exp_avg",
    "second": "exp_avg_sq",
}  # Name in a checkpoint: key of the state of torch's AdamW.
_SUPPORTED = (
    (0, 16),
    (0, 20),
)  # The oldest supported version and the first unsupported one, as in pyproject.toml.
_BUCKET_ELEMENTS = 1 << 22  # Elements that ranks gather or reduce together: 16 MB in fp32.


class Shadow(torch.nn.Module):
    """Clones of a model's parameters in fp32, in their order, which DeepSpeed divides among the ranks.

    The model stays whole on every rank, so that losses may call any of its functions, fused rollouts may read it, and a
    rank without a share of a step need not call backward. DeepSpeed updates the shadow: a rank computes the loss
    sum(p * gradient) of the shadow from the gradients of its model, so that the backward pass of this loss gives the
    shadow the same gradients. Every rank has exactly one such backward pass for each step, in which DeepSpeed sums the
    gradients over the ranks. The updated weights are copied back to the model. If the model has a lower precision, the
    clones are its fp32 master weights, and checkpoints have them. Each clone is a module, so that ZeRO 3 gathers only
    one of them at a time.
    """

    def __init__(self, parameters: list[torch.nn.Parameter]):
        super().__init__()
        self.clones = torch.nn.ModuleList(_Clone(p) for p in parameters)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        """Return the scalar loss whose gradients with respect to the clones are `gradients`."""
        total = torch.zeros((), device=gradients[0].device, requires_grad=True)
        for clone, gradient in zip(self.clones, gradients, strict=True):
            total = clone(total, gradient)
        return total


class _Clone(torch.nn.Module):
    """The fp32 clone of one parameter."""

    def __init__(self, parameter: torch.nn.Parameter):
        super().__init__()
        self.weight = torch.nn.Parameter(parameter.detach().to(torch.float32, copy=True), requires_grad=True)

    def forward(self, total: Tensor, gradient: Tensor) -> Tensor:
        """Add this clone's term to `total`, whose gradient tells ZeRO 3 that the backward pass of the clone is over."""
        return total + (self.weight * gradient).sum()


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
        self._engine: Any = None
        # `restart`, which the base class calls, rejects Muon; the first stage sets its own optimizer settings.
        super().__init__(options, model, learning.model_copy(update={"use": "adamw"}), member)

    def change_process_group(self, member: Membership) -> None:
        """Continue in another process group with a new optimizer."""
        self.member = member
        self.restart()

    def restart(self) -> None:
        """Create a new optimizer over the current weights."""
        if self.learning.use != "adamw":
            raise ConfigError(
                "engine deepspeed splits parameters into flat pieces and muon needs whole matrices; set optimizer: {use: adamw} "
                "in every stage, or engine: {use: fsdp2}"
            )
        super().restart()
        self._rebuild_engine()

    def _rebuild_engine(self) -> None:
        """Replace the DeepSpeed engine by a new one over the current weights; a single rank has none."""
        if self._engine is not None:
            self._engine.destroy()
        self._engine, self._steps = None, 0
        if self.member.n_trainers == 1:
            return
        shadow = Shadow(list(self.model.parameters()))
        self._shadows: list[Any] = list(shadow.parameters())
        self._sizes = [p.numel() for p in self._shadows]
        ordered = _sort_matrices_first(self._shadows)
        self._shapes = [p.shape for p in ordered]
        matrices = [p for p in ordered if p.ndim > 1]
        groups = [
            {"params": matrices, "weight_decay": self.learning.weight_decay},
            {"params": ordered[len(matrices) :], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=(0.9, 0.98)
        )
        deepspeed = _import_deepspeed(next(self.model.parameters()).device.type)
        self._among_trainers = partial(_restrict_to_trainers, deepspeed, self.member)
        with self._among_trainers():
            self._engine = deepspeed.initialize(
                model=shadow,
                optimizer=optimizer,
                config=self._build_config(),
                mpu=_TrainerTopology(self.member),
                dist_init_required=False,
            )[0]
        self._pieces = _RankPieces(self._engine.optimizer, ordered, self._shapes, self.member)

    def make_buckets(self) -> None:
        """Make no buckets, since DeepSpeed sums the gradients."""

    def make_masters(self) -> list[torch.nn.Parameter]:
        """Return the masters of `Ddp` on a single rank; on several, the parameters, since the shadow has the fp32 copies."""
        return super().make_masters() if self.member.n_trainers == 1 else list(self.model.parameters())

    def _build_config(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration: the defaults of this engine, overridden by the option `deepspeed`."""
        total, largest = sum(self._sizes), max(self._sizes)
        # DeepSpeed needs an even number of elements that holds the largest parameter: round up to a multiple of 64.
        bucket = math.ceil(max(largest, min(total, _BUCKET_ELEMENTS)) / 64) * 64
        zero: dict[str, Any] = {"stage": self.options.get("zero", 1)}
        zero |= {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
        if zero["stage"] == 3:  # No parameter stays whole, and none is gathered before it is used.
            zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
            zero |= {"stage3_max_live_parameters": largest, "stage3_max_reuse_distance": 0}
        if self.options.get("offload", "none") == "optimizer":
            zero["offload_optimizer"] = {"device": "cpu"}
        overrides = dict(self.options.get("deepspeed") or {})
        zero |= overrides.pop("zero_optimization", {})
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.learning.clip,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **overrides,
            "zero_optimization": zero,
        }

    def clip(self, sparse_norm: float = 0.0) -> float:
        """Sum the gradients of all ranks and set the threshold by which `step` clips them.

        Args:
            sparse_norm: Norm of the sparse gradients of all ranks, which is combined with the dense norm.

        Returns:
            The combined norm before clipping; NaN if a gradient of any rank is not finite.
        """
        if self._engine is None:
            return super().clip(sparse_norm)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        has_non_finite = not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        if self.member.sum_over_trainers(float(has_non_finite))[0]:
            return math.nan  # The caller skips the step, which DeepSpeed must not see.
        with self._among_trainers():
            self._engine.backward(self._engine(gradients) * self.member.n_trainers)
        zero = self._engine.optimizer
        if self.options.get("zero", 1) == 3:
            dense_norm = float(torch.linalg.vector_norm(torch.stack(zero._get_norm_groups())))
        else:
            dense_norm = float(zero.scaled_global_norm())
        norm, max_norm = math.hypot(dense_norm, sparse_norm), self.learning.clip
        # DeepSpeed scales by clip_grad / (dense_norm + 1e-6); the factor must be max_norm / (norm + 1e-6).
        zero.clip_grad = max_norm * (dense_norm + 1e-6) / (norm + 1e-6) if sparse_norm else max_norm
        return norm

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the weights with a learning rate, and set gradients to zero."""
        if self._engine is None:
            super().step(lr)
            return
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        with self._among_trainers():
            self._engine.step()
        self._steps += 1
        parameters = list(self.model.parameters())
        ordered = _sort_matrices_first(parameters)
        if self.options.get("zero", 1) == 3:
            for index, weight in self._pieces.gather_whole():
                ordered[index].copy_(weight)
        else:
            for p, shadow in zip(parameters, self._shadows, strict=True):
                p.copy_(shadow)
        torch._foreach_zero_([p.grad for p in parameters if p.grad is not None])

    def snapshot(self, saving: SaveOptions = BESIDE) -> Callable[[Path], list[Path]]:
        """Snapshot model and optimizer; moments are gathered some parameters at a time, and a rank keeps those that it writes."""
        if self._engine is None:
            return super().snapshot(saving)
        slots = (*_MOMENTS, "step") if self._steps else ()  # There are no moments before the first step.
        moment_shapes = {
            f"{index}.{slot}": torch.empty(() if slot == "step" else shape, device="meta")
            for index, shape in enumerate(self._shapes)
            for slot in slots
        }
        files = self.plan_files("optimizer", moment_shapes, saving)
        own_names = files.list_own_names(self.member.rank)
        moments = {name: torch.tensor(float(self._steps)) for name in moment_shapes if name.endswith(".step")}
        for slot in _MOMENTS if self._steps else ():
            for index, moment in self._pieces.gather_whole(_MOMENTS[slot]):
                if (name := f"{index}.{slot}") in own_names:
                    moments[name] = moment.clone()
        groups = self.optimizer.state_dict()["param_groups"]
        weights = self.model.state_dict()
        sets = [
            SavedTensors(self.plan_files("model", weights, saving), weights),
            SavedTensors(files, moments),
        ]
        return self.make_writer([*sets, *self._gather_masters(saving)], groups, saving)

    def _map_reduced_names(self) -> dict[int, str]:
        """Return the names of parameters of reduced precision by their index in the optimizer's order."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        ordered = _sort_matrices_first(list(self.model.parameters()))
        return {index: names[id(p)] for index, p in enumerate(ordered) if is_reduced(p)}

    def _gather_masters(self, saving: SaveOptions) -> list[SavedTensors]:
        """Return the fp32 copies, of which this rank has those that it writes; [] if there are none."""
        names = self._map_reduced_names()
        if not names:
            return []
        shapes = {name: torch.empty(self._shapes[index], device="meta") for index, name in names.items()}
        files = self.plan_files(MASTERS, shapes, saving)
        own_names = files.list_own_names(self.member.rank)
        own = {
            names[index]: weight.clone()
            for index, weight in self._pieces.gather_whole()
            if names.get(index) in own_names
        }
        return [SavedTensors(files, own)]

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read the weights of a checkpoint, and its optimizer on request."""
        if self.member.n_trainers == 1:
            super().load(folder, optimizer=optimizer)
            return
        super().load(folder, optimizer=False)
        self._rebuild_engine()  # Over the weights that were read.
        if not optimizer:
            return
        masters = read_masters(folder) or {}
        for index, name in self._map_reduced_names().items():
            if name in masters:
                self._pieces.set_weights(index, masters[name])
        for key, value in StoredTensors(folder / "optimizer.safetensors").items():
            index, slot = key.split(".", 1)
            if slot == "step":
                self._steps = int(value)
            else:
                self._pieces.set_moment(int(index), _MOMENTS[slot], value)
        if self._steps:
            self._pieces.set_steps(self._steps)

    def device_tensors(self) -> Iterable[Tensor]:
        """Return the tensors of `Ddp`, the shadow's parameters and the pieces on the device."""
        if self._engine is None:
            return super().device_tensors()
        copies = (getattr(shadow, "ds_tensor", shadow) for shadow in self._shadows)
        return (*super().device_tensors(), *copies, *self._pieces.iterate_tensors())


@dataclass(frozen=True, slots=True)
class _RankPiece:
    """The elements start:stop of a flattened parameter that a rank holds.

    Attributes:
        flat: Tensor of ZeRO that has these elements, and those of other parameters or padding.
        offset: Index of the first of these elements in `flat`.
        start: Index of the first of these elements in the parameter.
        stop: Index after the last one in the parameter.
    """

    flat: Tensor
    offset: int
    start: int
    stop: int

    def select_from(self, flat_tensor: Tensor) -> Tensor:
        """Return the elements of this piece in a tensor with the layout of `flat`: the weights or one of their moments."""
        return flat_tensor[self.offset : self.offset + self.stop - self.start]


class _RankPieces:
    """The pieces that ZeRO keeps on each rank, by parameter in the optimizer's order.

    Args:
        zero: The optimizer of the DeepSpeed engine.
        ordered: The shadow's parameters in the optimizer's order.
        shapes: Their whole shapes.
        member: The process group.
    """

    def __init__(self, zero: Any, ordered: list[Any], shapes: list[torch.Size], member: Membership):
        self._zero, self._shapes, self._member = zero, shapes, member
        self._device = ordered[0].device
        self._own_rank = torch.distributed.get_rank(member.trainers)
        index_by_id = {id(p): index for index, p in enumerate(ordered)}
        is_zero_3 = hasattr(zero, "fp32_partitioned_groups_flat")
        locate_pieces = _locate_separate_pieces if is_zero_3 else _locate_contiguous_pieces
        self._pieces_by_rank = [
            dict(
                sorted((index_by_id[id(p)], piece) for p, piece in locate_pieces(zero, ordered, shapes, rank))
            )
            for rank in range(member.n_trainers)
        ]

    def gather_whole(self, state_key: str | None = None) -> Iterator[tuple[int, Tensor]]:
        """Gather each parameter's moment, or its weights, from all ranks. All ranks must iterate to the end.

        Args:
            state_key: Key of the moment in the state of torch's AdamW; None for the weights.

        Yields:
            The index of a parameter, and its whole moment or weights on the device.
        """
        for batch in self._batch_indices():
            sizes_by_rank = [
                [pieces[i].stop - pieces[i].start for i in batch] for pieces in self._pieces_by_rank
            ]
            own_pieces = self._pieces_by_rank[self._own_rank]
            own_elements = torch.cat([self._read_piece(own_pieces[i], state_key) for i in batch])
            padded = torch.zeros(max(map(sum, sizes_by_rank)), device=self._device)
            padded[: len(own_elements)] = own_elements
            gathered = [torch.empty_like(padded) for _ in sizes_by_rank]
            torch.distributed.all_gather(gathered, padded, group=self._member.trainers)
            tensors_by_rank = [
                elements[: sum(sizes)].split(sizes)
                for elements, sizes in zip(gathered, sizes_by_rank, strict=True)
            ]
            for place_in_batch, index in enumerate(batch):
                whole = torch.cat([tensors[place_in_batch] for tensors in tensors_by_rank])
                yield index, whole.view(self._shapes[index])

    def set_moment(self, index: int, state_key: str, value: Tensor) -> None:
        """Set this rank's piece of a moment of the optimizer's `index`-th parameter from the whole moment."""
        piece = self._pieces_by_rank[self._own_rank][index]
        state = self._zero.optimizer.state[piece.flat]
        if state_key not in state:
            state[state_key] = torch.zeros_like(piece.flat, requires_grad=False)
        piece.select_from(state[state_key]).copy_(value.reshape(-1)[piece.start : piece.stop])

    def set_weights(self, index: int, value: Tensor) -> None:
        """Set this rank's piece of the optimizer's `index`-th parameter from the whole parameter."""
        piece = self._pieces_by_rank[self._own_rank][index]
        piece.select_from(piece.flat.detach()).copy_(value.reshape(-1)[piece.start : piece.stop])

    def set_steps(self, steps: int) -> None:
        """Set the number of steps of the optimizer."""
        for piece in self._pieces_by_rank[self._own_rank].values():
            self._zero.optimizer.state[piece.flat]["step"] = torch.tensor(float(steps))

    def iterate_tensors(self) -> Iterator[Tensor]:
        """Yield this rank's pieces on its device, and their moments."""
        flats = {id(piece.flat): piece.flat for piece in self._pieces_by_rank[self._own_rank].values()}
        for flat in flats.values():
            state = self._zero.optimizer.state.get(flat, {})
            yield from (t for t in (flat, *state.values()) if t.device == self._device)

    def _read_piece(self, piece: _RankPiece, state_key: str | None) -> Tensor:
        """Return a piece of a moment, or of the weights if the key is None, on the device."""
        flat = piece.flat if state_key is None else self._zero.optimizer.state[piece.flat][state_key]
        return piece.select_from(flat.detach()).to(self._device)

    def _batch_indices(self) -> Iterator[list[int]]:
        """Yield lists of the indices of parameters that are gathered together: 16 MB, or one parameter."""
        batch, elements = [], 0
        for index, shape in enumerate(self._shapes):
            if batch and elements + shape.numel() > _BUCKET_ELEMENTS:
                yield batch
                batch, elements = [], 0
            batch.append(index)
            elements += shape.numel()
        if batch:
            yield batch


def _locate_contiguous_pieces(
    zero: Any, ordered: list[Any], shapes: list[torch.Size], rank: int
) -> Iterator[tuple[Any, _RankPiece]]:
    """Yield the piece of each parameter under ZeRO 1 and 2.

    The parameters of a group are concatenated and split into one piece for each rank.
    """
    for flat, parameters in zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True):
        # Both are indices in the concatenated parameters of the group.
        piece_begin, parameter_begin = rank * flat.numel(), 0
        for p in parameters:
            start, stop = (
                min(max(edge - parameter_begin, 0), p.numel())
                for edge in (piece_begin, piece_begin + flat.numel())
            )
            offset = parameter_begin + start - piece_begin if stop > start else 0
            yield p, _RankPiece(flat, offset, start, stop)
            parameter_begin += p.numel()


def _locate_separate_pieces(
    zero: Any, ordered: list[Any], shapes: list[torch.Size], rank: int
) -> Iterator[tuple[Any, _RankPiece]]:
    """Yield the piece of each parameter under ZeRO 3.

    Every parameter is split into one piece for each rank; the last ones are padded.
    """
    for p, shape in zip(ordered, shapes, strict=True):
        group, offset, padded_size = zero.grad_position[zero.get_param_id(p)]
        start, stop = (min(edge * int(padded_size), shape.numel()) for edge in (rank, rank + 1))
        yield p, _RankPiece(zero.fp32_partitioned_groups_flat[group], int(offset), start, stop)


def _sort_matrices_first(parameters: list[Any]) -> list[Any]:
    """Return the matrices, then all other parameters: the order of `Ddp`'s optimizer and of the files of a checkpoint."""
    return sorted(parameters, key=lambda p: p.ndim <= 1)


def _import_deepspeed(device: str) -> Any:
    """Import DeepSpeed for a device.

    Raises:
        ConfigError: It is not installed, or in a version that was not tested.
    """
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")  # A worker sees only its own device.
    try:
        import deepspeed  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError("engine deepspeed needs DeepSpeed: pip install 'nonet[deepspeed]'") from None
    version = tuple(int(part) for part in deepspeed.__version__.split("+")[0].split(".")[:2])
    if not _SUPPORTED[0] <= version < _SUPPORTED[1]:
        oldest, untested = (".".join(map(str, bound)) for bound in _SUPPORTED)
        raise ConfigError(
            f"engine deepspeed reads DeepSpeed's own attributes and was tested with {oldest} up to, but not with, {untested}; "
            f"{deepspeed.__version__} is installed: pip install 'nonet[deepspeed]'"
        )
    # Its collective in shared memory serves inference only. On a CPU DeepSpeed would compile it first, for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextmanager
def _restrict_to_trainers(deepspeed: Any, member: Membership) -> Iterator[None]:
    """Restrict ZeRO 3's collectives to the trainers within a context, since shards in separate processes do not take part."""
    comm = deepspeed.comm
    barrier, broadcast = comm.barrier, comm.broadcast

    def choose_group(group: Any) -> Any:
        return member.trainers if group is None else group

    comm.barrier = lambda group=None, **more: barrier(choose_group(group), **more)
    comm.broadcast = lambda tensor, src, group=None, **more: broadcast(
        tensor, src, choose_group(group), **more
    )
    try:
        yield
    finally:
        comm.barrier, comm.broadcast = barrier, broadcast


class _TrainerTopology:
    """The trainers' group in the form that DeepSpeed expects (`mpu`)."""

    def __init__(self, member: Membership):
        self._member = member

    def get_data_parallel_group(self) -> Any:
        """Return the group of all trainers."""
        return self._member.trainers

    def get_data_parallel_world_size(self) -> int:
        """Return the number of trainers."""
        return self._member.n_trainers

    def get_data_parallel_rank(self) -> int:
        """Return the rank among the trainers."""
        return torch.distributed.get_rank(self._member.trainers)

    def get_model_parallel_group(self) -> Any:
        """Return None, since the model is not split."""
        return None

    def get_model_parallel_world_size(self) -> int:
        """Return 1, since the model is not split."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """Return 0, since the model is not split."""
        return 0
