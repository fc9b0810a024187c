"""PartitionedModel: a model whose blocks ZeRO 3 divides among the trainers, while the weights around them are whole.

A rank keeps a piece of each flattened parameter of a block. DeepSpeed gathers the block when it runs, in the forward and again in
the backward pass. Embeddings, heads and frozen weights are whole on every rank, so a loss may call any function of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from nonet.errors import ConfigError
from nonet.stored_tensors import StoredTensors
from nonet.workers import SavedTensors, SaveOptions, to_meta_tensors
from nonet.workers.engines._zero.part import ZeroPart
from nonet.workers.engines._zero.pieces import save_gathered
from nonet.workers.engines.division import DIVISION, JointPasses, ShardedModel, copy_frozen_structure
from nonet.workers.runtime import Membership


class PartitionedModel(JointPasses):
    """A model after `part` has divided its blocks.

    Args:
        model: The model. Its attribute `division` is this object.
        skeleton: A copy of its structure before it was divided.
        blocks: Its blocks that are divided.
        part: Their parameters.
        member: The process group.
        device: The device of the weights.

    Attributes:
        skeleton: The structure of the whole model; its buffers are those of the model.
        has_weights: Whether the weights are defined.
    """

    def __init__(
        self,
        model: nn.Module,
        skeleton: nn.Module,
        blocks: Sequence[nn.Module],
        part: ZeroPart,
        member: Membership,
        device: torch.device,
    ):
        self.skeleton, self.has_weights = skeleton, True
        self._model, self._part, self._member = model, part, member
        self._dtype_by_name = {name: parameter.dtype for name, parameter in skeleton.named_parameters()}
        self.connect_passes(model, blocks, member.trainers, [member.trainers], device)
        setattr(model, DIVISION, self)

    def prepare_passes(self) -> None:
        """Check that the weights are defined; those around the blocks are whole already."""
        self.check_weights()

    def gather_and_release(self, block: Any) -> None:
        """Take part in gathering the weights of a block in a pass of other ranks."""
        self._part.gather_and_release(block)

    def reshard(self) -> None:
        """Do nothing: no pass leaves weights gathered."""

    def describe(self) -> dict[str, Tensor]:
        """Return the whole weights by name as meta tensors."""
        return to_meta_tensors(self.skeleton.state_dict())

    @torch.no_grad()
    def iterate_whole(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights of these names, in the dtype in which they are computed."""
        self.check_weights()
        state = self._model.state_dict()
        divided = [name for name in names if name in self._part.parameters]
        gathered = self._part.pieces.gather_whole(divided)
        for name in names:
            if name in self._part.parameters:
                _, whole = next(gathered)
                yield name, whole.to(self._dtype_by_name[name])
            else:
                yield name, state[name]
        next(gathered, None)

    def save_weights(self, saving: SaveOptions) -> SavedTensors:
        """Return the weights and buffers, of which each rank writes whole ones, in the dtype in which they are computed."""
        shapes = self.describe()
        return save_gathered("model", shapes, self.iterate_whole(list(shapes)), saving, self._member)

    @torch.no_grad()
    def load_part(self, stored: StoredTensors, name: str) -> Tensor:
        """Read this rank's piece of a stored weight. Returns the weight as the state dict has it.

        A tensor that does not fit the model is returned as it is stored; `load_state_dict` reports it.
        """
        parameter = self._part.parameters.get(name)
        if parameter is None or stored.get_shape(name) != tuple(parameter.ds_shape):
            return stored[name]
        own = self._part.pieces.select_own(name, stored[name])
        parameter.ds_tensor[: len(own)].copy_(own)
        return parameter.data

    def copy_frozen(self) -> nn.Module:
        """Return a copy of the model in evaluation mode that is not trained, which fully_shard divides."""
        structure = copy_frozen_structure(self.skeleton)
        mesh = DeviceMesh.from_group(self._member.trainers, self._device.type, mesh_dim_names=("shard",))
        copied = ShardedModel(structure, mesh, self._device)
        copied.take_whole(self.iterate_whole(list(self._dtype_by_name)))
        return copied.module

    def iterate_weight_pairs(self, frozen: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each weight of a copy by `copy_frozen` that is on this rank, with that of the model. All ranks must iterate."""
        copied: ShardedModel = getattr(frozen, DIVISION)
        whole = self.iterate_whole(list(self._dtype_by_name))
        for index, (part, (_, weight)) in enumerate(zip(copied.parts, whole, strict=True)):
            yield part, copied.select_part(weight, index)

    def list_weights(self) -> list[Tensor]:
        """Return this rank's pieces of the blocks, the whole weights around them, and the buffers."""
        weights = [getattr(parameter, "ds_tensor", parameter) for parameter in self._model.parameters()]
        return [*weights, *self._model.buffers()]


def find_divided_blocks(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that have trained weights.

    Raises:
        ConfigError: Their weights have several dtypes, which ZeRO 3 cannot divide together.
    """
    trained = [block for block in blocks if any(p.requires_grad for p in block.parameters())]
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for block in trained for p in block.parameters()})
    if len(dtypes) > 1:
        raise ConfigError(
            f"roles.trainer.engine: zero: 3 divides blocks with weights of one dtype; those of {type(trained[0]).__name__} have "
            f"{' and '.join(dtypes)}: set zero: 2 or engine: {{use: fsdp2}}"
        )
    return trained
