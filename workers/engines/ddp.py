"""Data parallel: every rank has the whole model and optimizer, gradients are summed in one all-reduce a step."""

from nonet.workers.engines.base import EngineOptions, Options, TrainEngine


def _buffer(options: Options, ranks: int) -> float:
    """Return the flat buffer that gradients are summed in, in units of the fp32 gradients."""
    return 1.0 if ranks > 1 else 0.0


SPEC = TrainEngine("nonet.workers.engines._ddp:Ddp", EngineOptions, buffer=_buffer)
