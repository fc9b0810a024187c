"""FSDP2: PyTorch's fully_shard divides the optimizer among the ranks; weights are whole between steps."""

from nonet.workers.engines.base import Options, TrainEngine


def _divides(options: Options) -> int:
    return 1


SPEC = TrainEngine("nonet.workers.engines._fsdp2:Fsdp2", divides=_divides)
