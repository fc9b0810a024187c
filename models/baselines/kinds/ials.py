"""The keys of iALS (`models/baselines/_implicit.py`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from nonet.models.baselines.kinds.base import BaselineSpec, require_implicit
from nonet.options import Positive, StrictModel


class IalsOptions(StrictModel):
    """The keys of iALS."""

    factors: Annotated[Positive, Field(description="width of the vectors of users and items")] = 64
    iterations: Annotated[Positive, Field(description="number of times that both are solved for")] = 15


SPEC = BaselineSpec("nonet.models.baselines._implicit:Ials", IalsOptions, check_items=require_implicit)
