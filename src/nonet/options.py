"""The base model of all options, which rejects unknown keys, and the types of common option values."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# Types of option values: positive integers, integers from 0 on, positive numbers, shares below 1, and names.
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Word = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_\-]*$")]


class StrictModel(BaseModel):
    """Base class of all options: instances are frozen, and unknown keys, other types and infinite numbers are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True, allow_inf_nan=False
    )
