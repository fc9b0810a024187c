"""FSDP2: PyTorch's fully_shard divides weights, gradients and optimizer among the ranks, block by block."""

from nonet.workers.engines.base import EngineOptions, Options, TrainEngine


def _get_division(options: Options) -> int:
    """Return 3: ranks divide the optimizer, the gradients and the weights."""
    return 3


SPEC = TrainEngine("nonet.workers.engines._fsdp2:Fsdp2", EngineOptions, divides=_get_division)
