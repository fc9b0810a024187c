"""FSDP2: PyTorch's fully_shard divides the optimizer among the ranks; weights are whole between steps."""

from nonet.workers.engines.base import EngineOptions, Options, TrainEngine


def _get_division(options: Options) -> int:
    return 1


def _count_copies(options: Options, ranks: int) -> tuple[float, float]:
    """Its part, with gradients; a step gathers the whole copy, and its gradients, at once, and its part of their sum."""
    return (2 / ranks, 2 + 1 / ranks) if ranks > 1 else (0.0, 0.0)


SPEC = TrainEngine(
    "nonet.workers.engines._fsdp2:Fsdp2", EngineOptions, divides=_get_division, copies=_count_copies
)
