"""ShardedModel: a model whose weights fully_shard divides among the trainers, block by block.

Each block is a unit, whose weights are gathered while it runs and released after it (`units.py`). The weights outside the blocks
are gathered by the first forward pass and released by the backward pass, so a loss may call any function of the model after
`states` or `prefill`.

A rank's part of a parameter is some of its rows, in fp32; a single number is whole on every rank. The parts of a model in
bf16 or fp16 are its master weights, which are rounded when they are gathered. On a mesh with the axis `replicate`, the ranks
of each shard group divide the model among themselves, and gradients are summed over the groups too (hybrid sharding). With the
axis `tensor`, the ranks of a tensor group compute the same samples, each with a part of the heads and hidden columns of a block;
a rank's part of such a weight is some rows of the part that its tensor rank has.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from nonet.errors import ConfigError
from nonet.stored_tensors import StoredTensors
from nonet.workers import SavedTensors, SaveOptions, TensorFiles, to_meta_tensors
from nonet.workers.devices import record_build
from nonet.workers.engines._blocks import TensorLayout, parallelise_blocks
from nonet.workers.engines.division.divided_model import (
    DIVISION,
    JointPasses,
    copy_frozen_structure,
    copy_structure,
    set_buffer,
)
from nonet.workers.engines.division.frozen_weights import leave_out_of_state, make_frozen_parameters
from nonet.workers.engines.division.mesh import TENSOR
from nonet.workers.engines.division.part_layout import PartLayout
from nonet.workers.engines.division.units import UnitSharder

_FORWARD_METHODS = ("states", "prefill", "compute_alignment_loss")
"""Methods with which a pass of a model begins, besides `forward`; what it calls afterwards finds the root's weights gathered."""
_DECODING_METHODS = ("prefill", "step")
"""Methods whose results beams are chosen by: the states of prompts, and the logits of codes."""


class ShardedModel(JointPasses):
    """A model whose parameters are divided among the ranks of a device mesh.

    Args:
        model: The model with its whole weights, or with meta tensors, whose weights are then undefined. It is changed in
            place, and its attribute `division` is this object.
        mesh: The device mesh of the ranks, from `build_mesh`.
        device: The device of the weights.
        rebuild: Builds the whole model again, which is needed for frozen weights when ranks change, because checkpoints do
            not have them; without it they stay whole on every rank.

    Raises:
        ConfigError: The version of torch is too old.

    Attributes:
        module: The model.
        mesh: The device mesh of the ranks.
        parts: This rank's part of each trained parameter, which shares the memory of the module's.
        shapes: Shape of each whole trained parameter.
        has_weights: Whether the weights are defined.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        device: torch.device,
        rebuild: Callable[[], nn.Module] | None = None,
    ):
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise ConfigError(
                f"roles.trainer.engine: fsdp2 on several workers needs torch 2.13; this is {torch.__version__}"
            )
        self.mesh, self._device, self._rebuild = mesh, device, rebuild
        self._frozen_names = make_frozen_parameters(model) if rebuild else []
        leave_out_of_state(model, self._frozen_names)
        self._skeleton = copy_structure(model)
        self._dtype_by_name = {
            name: parameter.dtype
            for name, parameter in model.named_parameters()
            if name not in self._frozen_names
        }
        self._index_by_name = {name: index for index, name in enumerate(self._dtype_by_name)}
        self.has_weights = not any(parameter.is_meta for parameter in model.parameters())
        self.module: Any = model
        self._is_in_pass = self._shares_outputs = False
        self._layout = TensorLayout({}, frozenset())
        whole: dict[str, Tensor] = {}
        if self._is_tensor_parallel:
            whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
            self._layout = parallelise_blocks(model, mesh[TENSOR])
        self._units = self._divide(model)
        allocate(model, device)
        for name, buffer in model.named_buffers():
            set_buffer(self._skeleton, name, buffer)
        parameters: dict[str, Any] = dict(model.named_parameters())
        self._sharded = [parameters[name] for name in self._dtype_by_name]  # A DTensor for each parameter.
        self.parts = [nn.Parameter(_get_local(sharded), sharded.requires_grad) for sharded in self._sharded]
        self.shapes = [sharded.shape for sharded in self._sharded]
        self._layouts = list(map(self._find_layout, range(len(self._sharded))))
        if whole and self.has_weights:
            self.take_whole(whole.items())
        self._copies: WeakSet[ShardedModel] = WeakSet()
        setattr(model, DIVISION, self)

    @classmethod
    def build(cls, build: Callable[[], nn.Module], mesh: DeviceMesh, device: torch.device) -> ShardedModel:
        """Build a model whose first weights are computed one at a time, and of which this rank keeps its part.

        A model that reads its own weights while it is built, as some of Hugging Face's do, is built whole on the host, and its
        units are moved to the device and divided one at a time.
        """
        recorded = record_build(build)
        if recorded is None:
            return cls(build(), mesh, device, build)
        sharded = cls(recorded.model, mesh, device, build)
        sharded.take_whole(recorded.replay())
        return sharded

    @property
    def _axis_names(self) -> tuple[str, ...]:
        """The names of the mesh's axes."""
        return self.mesh.mesh_dim_names or ()

    @property
    def _is_tensor_parallel(self) -> bool:
        """Whether the mesh has ranks that compute the same samples."""
        return TENSOR in self._axis_names

    @property
    def _data_axes(self) -> tuple[str, ...]:
        """The names of the axes whose ranks compute different samples."""
        return tuple(name for name in self._axis_names if name != TENSOR)

    def _divide(self, model: nn.Module) -> list[Any]:
        """Apply fully_shard to the units of a model, and make its passes collective. Returns the units, the root last."""
        mesh = self.mesh[self._data_axes] if self._is_tensor_parallel else self.mesh
        units, blocks = UnitSharder(model, mesh, self._frozen_names).divide()
        for name in _FORWARD_METHODS:
            if hasattr(model, name):
                self._register_pass(model, name)
        for name in _DECODING_METHODS if self._is_tensor_parallel else ():
            if hasattr(model, name):
                self._register_output(model, name)
        data_groups = [self.mesh.get_group(axis) for axis in self._data_axes]
        self.connect_passes(model, blocks, self.mesh.get_group("shard"), data_groups, self._device)
        return units

    def _register_pass(self, model: Any, name: str) -> None:
        """Make a pass of the model begin with a method, unless another such method calls it."""
        plain = getattr(model, name)
        register_fsdp_forward_method(model, name)
        gathering = getattr(model, name)

        @wraps(plain)
        def call(*args: Any, **named: Any) -> Any:
            if self._is_in_pass:
                return plain(*args, **named)
            self._is_in_pass = True
            try:
                if name == "compute_alignment_loss":
                    self._gather_around_blocks()  # The loss reads the weights of word embeddings without running them.
                with warnings.catch_warnings():
                    # No loss changes the states in place.
                    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
                    return gathering(*args, **named)
            finally:
                self._is_in_pass = False

        setattr(model, name, call)

    def _register_output(self, model: Any, name: str) -> None:
        """Make a method return the result of the first rank of the tensor group, in `share_outputs`."""
        plain = getattr(model, name)

        @wraps(plain)
        def call(*args: Any, **named: Any) -> Any:
            result = plain(*args, **named)
            if not self._shares_outputs:
                return result
            output = result if isinstance(result, Tensor) else result.state
            shared = output.contiguous()
            torch.distributed.broadcast(shared, group=self.mesh.get_group(TENSOR), group_src=0)
            if output is result:
                return shared
            output.copy_(shared)
            return result

        setattr(model, name, call)

    def move_to(self, mesh: DeviceMesh, *, keeps_part: bool) -> ShardedModel:
        """Return the model divided among the ranks of another device mesh.

        Args:
            mesh: The device mesh.
            keeps_part: Whether this rank has the same part in both. Otherwise the weights are undefined until a checkpoint
                is loaded.
        """
        moved = ShardedModel(copy_structure(self._skeleton), mesh, self._device, self._rebuild)
        if keeps_part and self.has_weights:
            moved._take_parts(self)
        if keeps_part:
            moved._share_frozen(self)
        else:
            for name, whole in self._iterate_frozen():
                moved._take_frozen(name, whole)
        return moved

    def build_empty(self) -> nn.Module:
        """Return the whole model for a single rank, whose weights are undefined until a checkpoint is loaded."""
        model = copy_structure(self._skeleton)
        allocate(model, self._device)
        for name, weight in self._iterate_frozen():
            path, _, own_name = name.rpartition(".")
            delattr(model.get_submodule(path), own_name)
            model.get_submodule(path).register_buffer(own_name, weight.to(self._device), persistent=False)
        return model

    def _iterate_frozen(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole frozen weights, which are computed or read again, on the host."""
        if self._rebuild is None or not self._frozen_names:
            return
        recorded = record_build(self._rebuild)
        weights = self._rebuild().named_buffers() if recorded is None else recorded.replay()
        yield from ((name, weight) for name, weight in weights if name in self._frozen_names)

    def copy_frozen(self) -> nn.Module:
        """Return a copy of the model in evaluation mode, which is divided in the same way and is not trained."""
        gc.collect()  # Copies that were dropped are reference cycles, which would keep their memory for a while.
        self.reshard()
        structure = copy_frozen_structure(self._skeleton)
        copied = ShardedModel(structure, self.mesh, self._device, self._rebuild)
        copied._take_parts(self)
        copied._share_frozen(self)
        self._copies.add(copied)
        return copied.module

    @torch.no_grad()
    def take_whole(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's parts of whole weights, given one at a time by name, and whole buffers."""
        buffers = dict(self.module.named_buffers())
        for name, whole in named:
            if name in self._index_by_name:
                index = self._index_by_name[name]
                self.parts[index].copy_(self.select_part(whole.to(self._device), index))
            elif name in self._frozen_names:
                self._take_frozen(name, whole)
            elif name in buffers:
                buffers[name].copy_(whole)
        self.has_weights = True

    @torch.no_grad()
    def _take_parts(self, other: ShardedModel) -> None:
        """Copy this rank's parts from another division of the same model."""
        for part, other_part in zip(self.parts, other.parts, strict=True):
            part.copy_(other_part)
        self.has_weights = True

    @torch.no_grad()
    def _take_frozen(self, name: str, whole: Tensor) -> None:
        """Copy this rank's part of a whole frozen weight."""
        shard = self.mesh["shard"]
        part = _get_local(self.module.get_parameter(name))
        part.copy_(_select_chunk(whole, 0, shard.size(), shard.get_local_rank()))

    def _share_frozen(self, other: ShardedModel) -> None:
        """Use the frozen weights of another division of the same model."""
        for name in self._frozen_names:
            path, _, own_name = name.rpartition(".")
            weight = other.module.get_parameter(name)
            self.module.get_submodule(path)._parameters[own_name] = weight

    def prepare_passes(self) -> None:
        """Gather the weights outside the blocks, which stay gathered while ranks take different numbers of passes."""
        self.check_weights()
        self._gather_around_blocks()

    def gather_and_release(self, block: Any) -> None:
        """Take part in gathering the weights of a block in a pass of other ranks."""
        block.unshard()
        block.reshard()

    @contextmanager
    def share_outputs(self) -> Iterator[None]:
        """Give the ranks of a tensor group the states and logits of its first rank (`divided_model.share_outputs`)."""
        self._shares_outputs = True
        try:
            yield
        finally:
            self._shares_outputs = False

    def _gather_around_blocks(self) -> None:
        """Gather the weights outside the blocks. All ranks must call it."""
        for unit in self._units:
            if unit not in self._blocks:
                unit.unshard()

    def reshard(self) -> None:
        """Release the weights that passes of this model and of its copies have left gathered."""
        for sharded in (self, *self._copies):
            for unit in sharded._units:
                unit.reshard()

    def collect_gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's parts since the last step; zeros where there are none."""
        self.check_weights()
        gradients: list[Tensor] = []
        for part, sharded in zip(self.parts, self._sharded, strict=True):
            if part.requires_grad:
                gradient = part.grad
                if gradient is None:
                    gradient = torch.zeros_like(part) if sharded.grad is None else _get_local(sharded.grad)
                    part.grad = gradient
                gradients.append(gradient)
        return gradients

    def sum_scalar_gradients(self) -> float:
        """Sum the gradients of single numbers over the ranks, and return the sum of their squares. All ranks must call it."""
        gradients = [part.grad for part in self.parts if not part.ndim and part.grad is not None]
        for gradient in gradients:
            for axis in self._data_axes:
                torch.distributed.all_reduce(gradient, group=self.mesh.get_group(axis))
        return sum(float(gradient.double() ** 2) for gradient in gradients)

    def sum_tensor_gradients(self) -> None:
        """Sum the gradients that differ among the ranks of a tensor group over them. All ranks must call it."""
        for name, part in zip(self._dtype_by_name, self.parts, strict=True):
            if name in self._layout.summed and part.grad is not None:
                torch.distributed.all_reduce(part.grad, group=self.mesh.get_group(TENSOR))

    def drop_gradients(self) -> None:
        """Release all gradients."""
        for part, sharded in zip(self.parts, self._sharded, strict=True):
            part.grad = sharded.grad = None

    def describe(self) -> dict[str, Tensor]:
        """Return the whole weights by name as meta tensors."""
        return to_meta_tensors(self._skeleton.state_dict())

    @torch.no_grad()
    def iterate_whole(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights of these names, one at a time, in the dtype in which they are computed."""
        self.check_weights()
        buffers = dict(self.module.named_buffers())
        for name in names:
            if name in buffers:
                yield name, buffers[name].detach()
            else:
                index = self._index_by_name[name]
                yield name, self._gather(self._sharded[index].detach(), index).to(self._dtype_by_name[name])

    def save_weights(self, saving: SaveOptions) -> SavedTensors:
        """Return the weights and buffers, of which each rank writes slices, in the dtype in which they are computed."""
        self.check_weights()
        parts: dict[str, tuple[Tensor, int | None]] = {}
        for name in self._skeleton.state_dict():
            if (index := self._index_by_name.get(name)) is None:
                parts[name] = self.module.get_buffer(name), None
            else:
                parts[name] = self.parts[index].detach().to(self._dtype_by_name[name]), index
        return self.save_like("model", parts, saving)

    def save_masters(self, stem: str, saving: SaveOptions) -> SavedTensors | None:
        """Return the fp32 master weights, of which each rank writes slices; None if there are none."""
        masters = {
            name: (self.parts[index].detach(), index)
            for index, (name, dtype) in enumerate(self._dtype_by_name.items())
            if dtype.itemsize < 4
        }
        return self.save_like(stem, masters, saving) if masters else None

    def save_like(
        self, stem: str, parts: Mapping[str, tuple[Tensor, int | None]], saving: SaveOptions
    ) -> SavedTensors:
        """Return tensors of which each rank writes slices.

        Args:
            stem: Name of the files without number and extension.
            parts: By name, this rank's part of a tensor and the index of the parameter that is divided as the tensor is; None
                if the tensor is whole on every rank.
            saving: How the state is saved.
        """
        mesh_shape = tuple(self.mesh.shape)
        layouts = {
            name: PartLayout(tuple(part.shape), mesh_shape) if index is None else self._layouts[index]
            for name, (part, index) in sorted(parts.items())
        }
        shapes = {
            name: torch.empty(layout.shape, dtype=parts[name][0].dtype, device="meta")
            for name, layout in layouts.items()
        }
        slices_by_rank = [
            [
                (row, piece)
                for turn, (name, layout) in enumerate(layouts.items())
                for row, piece in layout.list_written(name, rank, turn)
            ]
            for rank in range(self.mesh.size())
        ]
        own = {
            piece.key: _select_rows(parts[piece.name][0], row, piece.shape)
            for row, piece in slices_by_rank[self._rank]
        }
        pieces = [[piece for _, piece in slices] for slices in slices_by_rank]
        return SavedTensors(TensorFiles.from_slices(stem, shapes, pieces, saving.shard_bytes), own)

    def find_indices(self, parameters: Iterable[nn.Parameter]) -> list[int]:
        """Return the indices, among the trained parameters, of some of them."""
        ids = set(map(id, parameters))
        return [index for index, sharded in enumerate(self._sharded) if id(sharded) in ids]

    def gather_like(self, part: Tensor, index: int) -> Tensor:
        """Gather a tensor of the shape of a parameter, given by its index, from the parts of all ranks."""
        return self._gather(self._wrap(part, index), index)

    def select_part(self, whole: Tensor, index: int) -> Tensor:
        """Return this rank's part of a tensor of the shape of a parameter, which is given by its index."""
        pieces = [piece.select_from(whole) for _, piece in self._layouts[index].list_slices("", self._rank)]
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces) if pieces else whole.new_empty(self.parts[index].shape)

    @torch.no_grad()
    def load_part(self, stored: StoredTensors, name: str) -> Tensor:
        """Read this rank's part of a stored weight. Returns the weight as the state dict has it.

        A tensor that does not fit the model is returned as it is stored; `load_state_dict` reports it.
        """
        index = self._index_by_name.get(name, -1)
        if (
            index < 0
            or not isinstance(self._sharded[index], DTensor)
            or stored.get_shape(name) != tuple(self.shapes[index])
        ):
            return stored[name]
        for row, piece in self._layouts[index].list_slices(name, self._rank):
            _select_rows(self.parts[index], row, piece.shape).copy_(stored.read_slice(piece))
        return self._sharded[index]

    def load_masters(self, stored: StoredTensors | None) -> None:
        """Read this rank's parts of stored fp32 master weights, after the weights were loaded."""
        for name in stored or ():
            assert stored is not None
            self.load_part(stored, name)
        self.has_weights = True

    def read_like(self, stored: StoredTensors, name: str, index: int) -> Tensor:
        """Return a copy of this rank's part of a stored tensor that is divided as the parameter with this index.

        A tensor of another shape is returned whole.
        """
        if stored.get_shape(name) != tuple(self.shapes[index]):
            return stored[name].clone()
        pieces = [stored.read_slice(piece) for _, piece in self._layouts[index].list_slices(name, self._rank)]
        if not pieces:
            return torch.empty_like(self.parts[index], requires_grad=False)
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0].clone()

    @property
    def _rank(self) -> int:
        """The index of this rank in the flattened mesh."""
        rank = 0
        for size, coordinate in zip(self.mesh.shape, self.mesh.get_coordinate() or (), strict=True):
            rank = rank * size + coordinate
        return rank

    def _wrap(self, part: Tensor, index: int) -> DTensor:
        """Return the DTensor of which this rank has a part, of the shape of a parameter."""
        sharded = self._sharded[index]
        return DTensor.from_local(
            part,
            sharded.device_mesh,
            sharded.placements,
            run_check=False,
            shape=sharded.shape,
            stride=sharded.stride(),
        )

    def _gather(self, sharded: Tensor, index: int) -> Tensor:
        """Gather a tensor that is divided as the parameter with this index."""
        whole = sharded.full_tensor() if isinstance(sharded, DTensor) else sharded
        packed = self._find_packed(index)
        return _swap_leading(whole, self.mesh[TENSOR].size(), packed) if packed else whole

    def _find_packed(self, index: int) -> int:
        """Return the number of matrices that are stacked in a parameter of which each tensor rank has rows of all; else 0."""
        return self._layout.packed.get(list(self._dtype_by_name)[index], 0)

    def count_holders(self, index: int) -> int:
        """Return the number of ranks that have the same part of a parameter, which is given by its index."""
        return self._layouts[index].n_holders

    def _find_layout(self, index: int) -> PartLayout:
        """Return how the mesh divides a parameter, which is given by its index."""
        # The tensor axis is the last one; the shard axis divides what a tensor rank has.
        divided = [(self._axis_names.index(axis), dim) for axis, dim in self._list_divided_dims(index)]
        packed = self._find_packed(index) or 1
        return PartLayout(tuple(self.shapes[index]), tuple(self.mesh.shape), tuple(reversed(divided)), packed)

    def _list_divided_dims(self, index: int) -> list[tuple[str, int]]:
        """Return the axes of the mesh that divide a parameter, given by its index, each with the dimension that it divides."""
        sharded = self._sharded[index]
        if not isinstance(sharded, DTensor):
            return []
        named = zip(sharded.device_mesh.mesh_dim_names or (), sharded.placements, strict=True)
        return [(axis, placement.dim) for axis, placement in named if not placement.is_replicate()]  # type: ignore[attr-defined]

    def list_weights(self) -> list[Tensor]:
        """Return this rank's parts of trained and frozen weights, and the buffers."""
        parameters: dict[str, Any] = dict(self.module.named_parameters())
        frozen = [_get_local(parameters[name]) for name in self._frozen_names]
        return [*self.parts, *frozen, *self.module.buffers()]

    def list_tensors(self) -> list[Tensor]:
        """Return this rank's parts, their gradients, and the buffers."""
        return [*self.list_weights(), *(part.grad for part in self.parts if part.grad is not None)]


def _get_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; a single number is whole on every rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def build_divided(build: Callable[[], nn.Module], process_group: Any, device: torch.device) -> Any:
    """Build a model whose weights the ranks of a process group divide. All of them must call it."""
    mesh = DeviceMesh.from_group(process_group, device.type, mesh_dim_names=("shard",))
    return ShardedModel.build(build, mesh, device).module


def _select_chunk(whole: Tensor, dim: int, chunks: int, index: int) -> Tensor:
    """Return one of the chunks into which `torch.chunk` divides a dimension; it is empty if there are fewer chunks."""
    length = whole.shape[dim]
    size = -(-length // chunks)
    start, stop = (min(number * size, length) for number in (index, index + 1))
    return whole.narrow(dim, start, stop - start)


def _select_rows(part: Tensor, row: int, shape: Sequence[int]) -> Tensor:
    """Return, as a view, the rows of a part that a slice of this shape has; a single number is returned as it is."""
    return part.narrow(0, row, shape[0]) if shape else part


def _swap_leading(tensor: Tensor, outer: int, inner: int) -> Tensor:
    """Return a tensor [outer * inner * n, ..] with its rows in the order of [inner, outer, n]."""
    return tensor.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Move a model to a device, where tensors of the meta device have undefined values."""
    model._apply(
        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
    )
