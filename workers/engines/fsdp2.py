"""FSDP2: PyTorch's fully_shard divides the optimizer among the ranks; weights are whole between steps."""

from nonet.workers.engines.base import EngineOptions, Options, TrainEngine


def _get_division(options: Options) -> int:
    """Return 1: ranks divide the optimizer, while weights and gradients of the model are whole between steps."""
    return 1


def _count_copies(options: Options, ranks: int) -> tuple[float, float]:
    """Return the copies that a rank keeps and those that a step adds, in units of the whole weights.

    A rank keeps its part of the shadow and of its gradients; a step adds the whole shadow, its gradients and the rank's part
    of their sum.
    """
    return (2 / ranks, 2 + 1 / ranks) if ranks > 1 else (0.0, 0.0)


SPEC = TrainEngine(
    "nonet.workers.engines._fsdp2:Fsdp2", EngineOptions, divides=_get_division, copies=_count_copies
)
