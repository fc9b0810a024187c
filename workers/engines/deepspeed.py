"""DeepSpeed ZeRO: `zero` says what ranks divide: 1 the optimizer, 2 gradients while they are added up too.

`deepspeed:` passes keys through under DeepSpeed's own names. Weights are whole between steps.
"""

from typing import Annotated, Any

from pydantic import Field, model_validator

from nonet.options import StrictModel
from nonet.suggest import did_you_mean
from nonet.workers.engines.base import Options, TrainEngine

# Keys of https://www.deepspeed.ai/docs/config-json that this engine leaves to the user.
_PASSED = (
    *(
        "zero_optimization",
        "communication_data_type",
        "prescale_gradients",
        "comms_logger",
        "wall_clock_breakdown",
    ),
    *(
        "flops_profiler",
        "memory_breakdown",
        "dump_state",
        "steps_per_print",
        "seq_parallel_communication_data_type",
    ),
)


class Deepspeed(StrictModel):
    zero: Annotated[int, Field(ge=0, le=3)] = 1
    deepspeed: Annotated[
        dict[str, Any], Field(description="keys of DeepSpeed's own configuration, such as zero_optimization")
    ] = {}

    @model_validator(mode="after")
    def _known(self) -> "Deepspeed":
        for key in self.deepspeed:
            if key not in _PASSED:
                raise ValueError(
                    f"deepspeed: there is no key {key!r} to pass; there are {', '.join(_PASSED)}.{did_you_mean(key, _PASSED)}"
                )
        return self


def _divides(options: Options) -> int:
    return options["zero"] if options["zero"] == 3 else min(1, options["zero"])


def _unsupported(options: Options) -> str | None:
    return "zero: 3 (weights are whole between steps)" if options["zero"] == 3 else None


SPEC = TrainEngine(
    "nonet.workers.engines._deepspeed:Deepspeed",
    Deepspeed,
    divides=_divides,
    unsupported=_unsupported,
    optimizers=("adamw",),
)
