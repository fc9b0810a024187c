"""FSDP2: PyTorch's fully_shard divides weights, gradients and optimizer among the ranks, block by block."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from nonet.options import Positive
from nonet.workers.engines.base import EngineOptions, Options, TrainEngine


class Fsdp2Options(EngineOptions):
    """Options of the engine in a scenario."""

    replicate: Annotated[
        Positive,
        Field(
            description="number of groups of workers, each of which divides the whole model among its workers (hybrid sharding)"
        ),
    ] = 1
    tensor: Annotated[
        Positive,
        Field(
            description="number of workers that compute the same samples, each with a part of every block (tensor parallelism)"
        ),
    ] = 1


def _get_division(options: Options) -> int:
    """Return 3: ranks divide the optimizer, the gradients and the weights."""
    return 3


def _get_axes(options: Options) -> Mapping[str, int]:
    """Return the sizes of the mesh's axes around the axis `shard`."""
    return {"replicate": options.get("replicate", 1), "tensor": options.get("tensor", 1)}


SPEC = TrainEngine("nonet.workers.engines._fsdp2:Fsdp2", Fsdp2Options, divides=_get_division, axes=_get_axes)
