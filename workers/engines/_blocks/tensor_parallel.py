"""Tensor parallelism: torch's styles for the linear layers of a model's blocks, by the names of transformers' plans.

A block of our own has a `tensor_plan`, and a Hugging Face backbone the `base_model_tp_plan` of its configuration. Both name the
style of each layer: `colwise` divides its rows, `rowwise` its columns, and a layer of style `replicated_with_grad_allreduce`
is whole on every rank, where its gradient is that of the rank's heads alone. All other layers compute the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from nonet.errors import ConfigError
from nonet.workers.engines._blocks.block_forward import find_blocks

_STYLES: Mapping[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_OWN_HEADS = "replicated_with_grad_allreduce"


@dataclass(frozen=True)
class TensorLayout:
    """How the parameters of a model differ from whole ones.

    Attributes:
        packed: By name of a parameter, the number of matrices that its rows consist of. A rank has rows of each of them.
        summed: Names of parameters whose gradients are summed over the ranks of a tensor group.
    """

    packed: Mapping[str, int]
    summed: frozenset[str]


def parallelise_blocks(model: nn.Module, mesh: DeviceMesh) -> TensorLayout:
    """Divide the linear layers of a model's blocks among the ranks of a mesh with one axis.

    The parameters of these layers become meta tensors.

    Raises:
        ConfigError: The blocks have no plan, or it has a style that is not supported.
    """
    name_by_id = {id(module): name for name, module in model.named_modules()}
    packed: dict[str, int] = {}
    summed: set[str] = set()
    for block in find_blocks(model):
        for layer_name, style in _find_plan(model, block).items():
            layer = block.get_submodule(layer_name)
            path = name_by_id[id(layer)]
            names = [f"{path}.{name}" for name, _ in layer.named_parameters(recurse=False)]
            if style == _OWN_HEADS:
                summed.update(names)
                continue
            if style not in _STYLES:
                raise ConfigError(
                    f"roles.trainer.engine.tensor: {layer_name} of {type(block).__name__} has the style {style!r}, which is "
                    "not supported; leave tensor out"
                )
            packed_layers: Mapping[str, int] = getattr(block, "packed", {})
            if layer_name in packed_layers:
                packed |= dict.fromkeys(names, packed_layers[layer_name])
            layer.to("meta")
            parallelize_module(block, mesh, {layer_name: _STYLES[style]()}, src_data_rank=None)
    return TensorLayout(packed, frozenset(summed))


def _find_plan(model: nn.Module, block: Any) -> Mapping[str, str]:
    """Return the style of each layer of a block by its name.

    Raises:
        ConfigError: There is no plan.
    """
    if (plan := getattr(block, "tensor_plan", None)) is not None:
        return plan
    configs = (getattr(module, "config", None) for module in model.modules())
    plans = (getattr(config, "base_model_tp_plan", None) for config in configs)
    found = next(filter(None, plans), {})
    plan = {name.partition(".*.")[2]: style for name, style in found.items() if name.startswith("layers.*.")}
    if not plan:
        raise ConfigError(
            f"roles.trainer.engine.tensor: {type(block).__name__} has no plan of tensor parallelism; leave tensor out"
        )
    return plan
