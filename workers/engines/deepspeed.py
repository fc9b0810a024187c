"""DeepSpeed ZeRO: planned, not run. `zero` says what ranks divide: 1 the optimizer, 2 gradients too, 3 weights too."""

from typing import Annotated

from pydantic import Field

from nonet.options import StrictModel
from nonet.workers.engines.base import Options, TrainEngine


class Deepspeed(StrictModel):
    zero: Annotated[int, Field(ge=0, le=3)] = 1


def _divides(options: Options) -> int:
    return options["zero"]


SPEC = TrainEngine("", Deepspeed, divides=_divides, runs=False)
