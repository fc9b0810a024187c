"""UnitSharder: applies fully_shard to the units of a model, whose weights are gathered and released together.

Each block is a unit, whose weights are gathered while it runs and released after it. The weights outside the blocks, such as
embeddings and heads, are the root unit: they are gathered by the first forward pass and released by the backward pass. Modules
outside the blocks whose weights have fewer bits than fp32 are units of their own, because all weights of a unit are computed in
one dtype. Frozen weights are divided in their own dtype, and so are the modules outside the blocks that have them, such as word
embeddings: their units are gathered when they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nonet.workers.engines._blocks import find_blocks
from nonet.workers.engines.division.divided_model import is_reduced

_FROZEN = "is_frozen_weight"
"""Attribute of the frozen weights of a model that is not divided yet."""


class UnitSharder:
    """Applies fully_shard to the units of a model.

    Args:
        model: The model, which is changed in place.
        mesh: The device mesh of the ranks that divide it.
        frozen_names: Names of its frozen weights.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, frozen_names: Sequence[str]):
        self._model, self._mesh = model, mesh
        self._sharded_ids: set[int] = set()  # Ids of the parameters of the units so far.
        self._scalars = {parameter for parameter in model.parameters() if not parameter.ndim}
        for name in frozen_names:
            setattr(model.get_parameter(name), _FROZEN, True)

    def divide(self) -> tuple[list[Any], list[Any]]:
        """Divide the weights. Returns the units, the root last, and those that are blocks."""
        model: Any = self._model
        blocks = [block for block in find_blocks(model) if next(block.parameters(), None) is not None]
        uniform = [block for block in blocks if len({p.dtype for p in self._list_trained(block)}) <= 1]
        in_block, in_uniform = (
            {id(module) for block in some for module in block.modules()} for some in (blocks, uniform)
        )
        apart = [
            module
            for module in model.modules()
            if module is not model
            and (
                (
                    id(module) not in in_uniform
                    and any(map(is_reduced, self._list_trained(module, recurse=False)))
                )
                or (id(module) not in in_block and any(map(_is_frozen, module.parameters(recurse=False))))
            )
        ]
        for unit in apart:
            self._shard_unit(unit, releases=False)
        for unit in blocks:
            self._shard_unit(unit, releases=True)
        self._shard_unit(model, releases=False)
        units: list[Any] = [*apart, *blocks, model]
        for unit in units:
            # Losses are divided by the number of targets on all ranks, so gradients are summed. A unit sums
            # those of all its parameters, also where a rank has used only some.
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(1.0)
            unit.set_reduce_scatter_unused_params(True)
        return units, blocks

    def _list_trained(self, module: nn.Module, recurse: bool = True) -> list[nn.Parameter]:
        """Return the parameters of a module that are neither frozen weights nor in a unit already."""
        return [
            parameter
            for parameter in module.parameters(recurse)
            if id(parameter) not in self._sharded_ids and not _is_frozen(parameter)
        ]

    def _shard_unit(self, unit: nn.Module, releases: bool) -> None:
        """Apply fully_shard to a unit.

        Args:
            unit: The unit.
            releases: Whether its weights are released after the forward pass, and gathered again for the backward pass.
        """
        trained = self._list_trained(unit)
        reduced = next((parameter.dtype for parameter in trained if parameter.dtype.itemsize < 4), None)
        policy = MixedPrecisionPolicy(
            param_dtype=reduced, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        reduced_ids = {id(parameter) for parameter in trained if is_reduced(parameter)}
        for module in unit.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in reduced_ids and isinstance(parameter, DTensor):
                    # The dtype of a DTensor cannot be changed in place.
                    master = nn.Parameter(parameter.detach().float(), parameter.requires_grad)
                    module.register_parameter(name, master)
                elif id(parameter) in reduced_ids:
                    parameter.data = parameter.data.float()
        fully_shard(
            unit,
            mesh=self._mesh,
            reshard_after_forward=releases,
            mp_policy=policy,
            ignored_params=self._scalars,
        )
        self._sharded_ids.update(map(id, unit.parameters()))


def _is_frozen(parameter: Tensor) -> bool:
    """Return whether a parameter that is not divided yet is a frozen weight."""
    return getattr(parameter, _FROZEN, False)
