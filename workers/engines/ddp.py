"""Data parallel: every rank has the whole model and optimizer, gradients are summed in one all-reduce a step."""

from nonet.workers.engines.base import EngineOptions, Options, TrainEngine


def _count_buffer(options: Options, ranks: int) -> float:
    """Return the size of the flat buffer in which gradients are summed, in units of all fp32 gradients."""
    return 1.0 if ranks > 1 else 0.0


SPEC = TrainEngine("nonet.workers.engines._ddp:Ddp", EngineOptions, buffer=_count_buffer)
