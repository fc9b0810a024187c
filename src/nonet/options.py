"""The base model of all options, which rejects unknown keys, and the types of common option values."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Word = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_\-]*$")]


class StrictModel(BaseModel):
    """Base class of all options: refuses unknown keys, other types and infinite numbers; instances are frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True, allow_inf_nan=False
    )
