"""DeepSpeed ZeRO: `zero` says what ranks divide: 1 the optimizer, 2 gradients while they are added up too, 3 the copy of the weights.

`deepspeed:` passes keys through under DeepSpeed's own names. Weights are whole between steps.
"""

from typing import Annotated, Any

from pydantic import Field, model_validator

from nonet.suggest import did_you_mean
from nonet.workers.engines.base import EngineOptions, Options, TrainEngine

# Keys of https://www.deepspeed.ai/docs/config-json that this engine leaves to the user.
_PASSED = ("zero_optimization", "comms_logger", "wall_clock_breakdown", "flops_profiler", "steps_per_print")
_OF_ZERO = ("reduce_bucket_size", "allgather_bucket_size", "allgather_partitions", "overlap_comm")


class Deepspeed(EngineOptions):
    zero: Annotated[int, Field(ge=1, le=3)] = 1
    deepspeed: Annotated[
        dict[str, Any], Field(description="keys of DeepSpeed's own configuration, such as zero_optimization")
    ] = {}

    @model_validator(mode="after")
    def _known(self) -> "Deepspeed":
        _check(self.deepspeed, _PASSED, "deepspeed")
        _check(self.deepspeed.get("zero_optimization") or {}, _OF_ZERO, "deepspeed.zero_optimization")
        return self


def _check(given: Options, known: tuple[str, ...], where: str) -> None:
    for key in given:
        if key not in known:
            raise ValueError(
                f"{where}: there is no key {key!r} to pass; there are {', '.join(known)}.{did_you_mean(key, known)}"
            )


def _divides(options: Options) -> int:
    return 3 if options["zero"] == 3 else 1


def _copies(options: Options, ranks: int) -> tuple[float, float]:
    """ZeRO's flat weights, and its part of them in fp32; a step has gradients times the number of ranks, and ZeRO's of them."""
    return (1 + 1 / ranks, 2.0) if ranks > 1 and options["zero"] < 3 else (0.0, 0.0)


def _unsupported(options: Options) -> str | None:
    return "zero: 3 (weights are whole between steps)" if options["zero"] == 3 else None


SPEC = TrainEngine(
    "nonet.workers.engines._deepspeed:Deepspeed",
    Deepspeed,
    divides=_divides,
    copies=_copies,
    unsupported=_unsupported,
    optimizers=("adamw",),
    needs="deepspeed",
)
