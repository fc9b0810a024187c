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
from nonet.workers import SaveOptions, read_tensors
from nonet.workers.engines._ddp import BESIDE, MASTERS, Ddp, is_reduced, read_masters
from nonet.workers.engines._shadow import Shadow
from nonet.workers.engines.base import OptimizerOptions
from nonet.workers.runtime import Membership

_MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}  # the names of a commit, and torch's
_SUPPORTED = ((0, 16), (0, 20))  # versions, as in pyproject.toml
_AT_ONCE = 1 << 22  # elements that ranks gather or reduce together: 16 MB


class Deepspeed(Ddp):
    """DeepSpeed's ZeRO; on a single rank it is plain AdamW.

    A commit has the format of `Ddp`: any engine on any number of ranks can read it.

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
        super().__init__(
            options, model, learning.model_copy(update={"use": "adamw"}), member
        )  # until a stage says its own

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
        self._divide()

    def _divide(self) -> None:
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

    def make_masters(self) -> list[torch.nn.Parameter]:
        """Return the masters as `Ddp` does on a single rank; else the shadow has the fp32 copies."""
        return super().make_masters() if self.member.n_trainers == 1 else list(self.model.parameters())

    def _build_config(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration."""
        whole, largest = sum(self._sizes), max(self._sizes)
        bucket = (
            -(-max(largest, min(whole, _AT_ONCE)) // 64) * 64
        )  # of elements; DeepSpeed wants an even number
        zero: dict[str, Any] = {"stage": self.options.get("zero", 1)}
        zero |= {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
        if zero["stage"] == 3:  # no parameter stays whole, none is gathered before its turn
            zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
            zero |= {"stage3_max_live_parameters": largest, "stage3_max_reuse_distance": 0}
        if self.options.get("offload", "none") == "optimizer":
            zero["offload_optimizer"] = {"device": "cpu"}
        own = dict(self.options.get("deepspeed") or {})
        zero |= own.pop("zero_optimization", {})
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.learning.clip,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **own,
            "zero_optimization": zero,
        }

    def clip(self, sparse_norm: float = 0.0) -> float:
        """Return the norm of all gradients; DeepSpeed clips as it steps, by a threshold that accounts for the sparse norm."""
        if self._engine is None:
            return super().clip(sparse_norm)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        broken = not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        if self.member.sum_over_trainers(float(broken))[0]:
            return math.nan  # a skipped step does not reach DeepSpeed
        with self._among_trainers():
            self._engine.backward(self._engine(gradients) * self.member.n_trainers)
        zero = self._engine.optimizer
        if self.options.get("zero", 1) == 3:
            dense = float(torch.linalg.vector_norm(torch.stack(zero._get_norm_groups())))
        else:
            dense = float(zero.scaled_global_norm())
        norm, most = math.hypot(dense, sparse_norm), self.learning.clip
        zero.clip_grad = most * (dense + 1e-6) / (norm + 1e-6) if sparse_norm else most
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
            for index, whole in self._pieces.gather_whole():
                ordered[index].copy_(whole)
        else:
            for p, shadow in zip(parameters, self._shadows, strict=True):
                p.copy_(shadow)
        torch._foreach_zero_([p.grad for p in parameters if p.grad is not None])

    def snapshot(self, saving: SaveOptions = BESIDE) -> Callable[[Path], list[Path]]:
        """Snapshot model and optimizer; moments are gathered some parameters at a time, and a rank keeps those that it writes."""
        if self._engine is None:
            return super().snapshot(saving)
        slots = (*_MOMENTS, "step") if self._steps else ()
        shape = {
            f"{index}.{slot}": torch.empty(() if slot == "step" else whole, device="meta")
            for index, whole in enumerate(self._shapes)
            for slot in slots
        }
        own = self.list_own_names("optimizer", shape, saving)
        moments = {name: torch.tensor(float(self._steps)) for name in shape if name.endswith(".step")}
        for slot in _MOMENTS if self._steps else ():
            for index, whole in self._pieces.gather_whole(_MOMENTS[slot]):
                if (name := f"{index}.{slot}") in own:
                    moments[name] = whole.clone()
        groups = self.optimizer.state_dict()["param_groups"]
        return self.make_writer(shape, moments, groups, saving, self._gather_masters(saving))

    def _map_reduced_names(self) -> dict[int, str]:
        """Return the names of parameters of reduced precision by their position in the optimizer's order."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        ordered = _sort_matrices_first(list(self.model.parameters()))
        return {at: names[id(p)] for at, p in enumerate(ordered) if is_reduced(p)}

    def _gather_masters(self, saving: SaveOptions) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the shapes of all fp32 copies, and those that this rank writes."""
        names = self._map_reduced_names()
        if not names:
            return {}, {}
        shape = {name: torch.empty(self._shapes[at], device="meta") for at, name in names.items()}
        own = self.list_own_names(MASTERS, shape, saving)
        return shape, {
            names[at]: whole.clone() for at, whole in self._pieces.gather_whole() if names.get(at) in own
        }

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read the weights of a commit, and its optimizer on request."""
        if self.member.n_trainers == 1:
            super().load(folder, optimizer=optimizer)
            return
        super().load(folder, optimizer=False)
        self._divide()  # of the weights that were read
        if not optimizer:
            return
        kept = read_masters(folder)
        for at, name in self._map_reduced_names().items():
            if name in kept:
                self._pieces.set_weights(at, kept[name])
        for key, value in read_tensors(folder / "optimizer.safetensors").items():
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
    """The elements start:stop of a flattened parameter that a rank holds, as flat[at : at + stop - start]."""

    flat: Tensor
    at: int
    start: int
    stop: int

    def select_from(self, flat_tensor: Tensor) -> Tensor:
        """Return the elements of this piece in a tensor with the layout of `flat_tensor`."""
        return flat_tensor[self.at : self.at + self.stop - self.start]


class _RankPieces:
    """The pieces that ZeRO keeps on each rank, by parameter in the optimizer's order."""

    def __init__(self, zero: Any, ordered: list[Any], shapes: list[torch.Size], member: Membership):
        self._zero, self._shapes, self._member = zero, shapes, member
        self._device = ordered[0].device
        self._mine = torch.distributed.get_rank(member.trainers)
        ranks, place = range(member.n_trainers), {id(p): index for index, p in enumerate(ordered)}
        layout = (
            _locate_separate_pieces
            if hasattr(zero, "fp32_partitioned_groups_flat")
            else _locate_contiguous_pieces
        )
        self._of_rank = [
            dict(sorted((place[id(p)], piece) for p, piece in layout(zero, ordered, shapes, rank)))
            for rank in ranks
        ]

    def gather_whole(self, slot: str | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield the position of each parameter and its whole moment, or its weights, on the device.

        All ranks must iterate to the end.
        """
        for places in self._batch_positions():
            sizes = [[pieces[at].stop - pieces[at].start for at in places] for pieces in self._of_rank]
            longest = max(map(sum, sizes))
            mine = torch.zeros(longest, device=self._device)
            filled = torch.cat([self._read_piece(self._of_rank[self._mine][at], slot) for at in places])
            mine[: len(filled)] = filled
            parts = [torch.empty_like(mine) for _ in sizes]
            torch.distributed.all_gather(parts, mine, group=self._member.trainers)
            by_rank = [part[: sum(each)].split(each) for part, each in zip(parts, sizes, strict=True)]
            for number, at in enumerate(places):
                yield at, torch.cat([split[number] for split in by_rank]).view(self._shapes[at])

    def set_moment(self, index: int, slot: str, value: Tensor) -> None:
        """Set this rank's piece of a moment of the optimizer's `index`-th parameter."""
        piece = self._of_rank[self._mine][index]
        state = self._zero.optimizer.state[piece.flat]
        if slot not in state:
            state[slot] = torch.zeros_like(piece.flat, requires_grad=False)
        piece.select_from(state[slot]).copy_(value.reshape(-1)[piece.start : piece.stop])

    def set_weights(self, index: int, value: Tensor) -> None:
        """Set this rank's piece of the optimizer's `index`-th parameter."""
        piece = self._of_rank[self._mine][index]
        piece.select_from(piece.flat.detach()).copy_(value.reshape(-1)[piece.start : piece.stop])

    def set_steps(self, steps: int) -> None:
        """Set the number of steps of the optimizer."""
        for piece in self._of_rank[self._mine].values():
            self._zero.optimizer.state[piece.flat]["step"] = torch.tensor(float(steps))

    def iterate_tensors(self) -> Iterator[Tensor]:
        """Yield this rank's pieces on its device, and their moments."""
        flats = {id(piece.flat): piece.flat for piece in self._of_rank[self._mine].values()}
        for flat in flats.values():
            slots = self._zero.optimizer.state.get(flat, {})
            yield from (t for t in (flat, *slots.values()) if t.device == self._device)

    def _read_piece(self, piece: _RankPiece, slot: str | None) -> Tensor:
        """Return a piece of a moment, or of the weights, on the device."""
        flat = piece.flat if slot is None else self._zero.optimizer.state[piece.flat][slot]
        return piece.select_from(flat.detach()).to(self._device)

    def _batch_positions(self) -> Iterator[list[int]]:
        """Yield positions of parameters that are gathered together."""
        bucket, elements = [], 0
        for at, shape in enumerate(self._shapes):
            if bucket and elements + shape.numel() > _AT_ONCE:
                yield bucket
                bucket, elements = [], 0
            bucket.append(at)
            elements += shape.numel()
        if bucket:
            yield bucket


def _locate_contiguous_pieces(
    zero: Any, ordered: list[Any], shapes: list[torch.Size], rank: int
) -> Iterator[tuple[Any, _RankPiece]]:
    """Yield the piece of each parameter under ZeRO 1 and 2.

    The parameters of a group are concatenated and split into one piece for each rank.
    """
    for flat, parameters in zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True):
        mine, begin = rank * flat.numel(), 0
        for p in parameters:
            start, stop = (min(max(edge - begin, 0), p.numel()) for edge in (mine, mine + flat.numel()))
            yield p, _RankPiece(flat, begin + start - mine if stop > start else 0, start, stop)
            begin += p.numel()


def _locate_separate_pieces(
    zero: Any, ordered: list[Any], shapes: list[torch.Size], rank: int
) -> Iterator[tuple[Any, _RankPiece]]:
    """Yield the piece of each parameter under ZeRO 3.

    Every parameter is split into one piece for each rank; the last ones are padded.
    """
    for p, shape in zip(ordered, shapes, strict=True):
        group, at, elements = zero.grad_position[zero.get_param_id(p)]
        start, stop = (min(edge * int(elements), shape.numel()) for edge in (rank, rank + 1))
        yield p, _RankPiece(zero.fp32_partitioned_groups_flat[group], int(at), start, stop)


def _sort_matrices_first(parameters: list[Any]) -> list[Any]:
    """Sort parameters in the order of `Ddp`'s optimizer, which the files of a commit have."""
    return sorted(parameters, key=lambda p: p.ndim <= 1)


def _import_deepspeed(device: str) -> Any:
    """Import DeepSpeed for a device.

    Raises:
        ConfigError: It is not installed, or in a version that was not tested.
    """
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")  # a worker sees the device that is its own
    try:
        import deepspeed  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError("engine deepspeed needs DeepSpeed: pip install 'nonet[deepspeed]'") from None
    version = tuple(int(part) for part in deepspeed.__version__.split("+")[0].split(".")[:2])
    if not _SUPPORTED[0] <= version < _SUPPORTED[1]:
        least, below = (".".join(map(str, bound)) for bound in _SUPPORTED)
        raise ConfigError(
            f"engine deepspeed reads DeepSpeed's own attributes and was tested with {least} up to, but not with, {below}; "
            f"{deepspeed.__version__} is installed: pip install 'nonet[deepspeed]'"
        )
    return deepspeed


@contextmanager
def _restrict_to_trainers(deepspeed: Any, member: Membership) -> Iterator[None]:
    """Restrict the collectives of ZeRO 3 to the trainers, since embedding shards in processes of their own do not take part."""
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
