"""The base model of all options, which rejects unknown keys, and the types of common option values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError

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


def describe_invalid(error: ValidationError) -> str:
    """Return the first thing that is wrong with values, as `key.inner: reason`; the reason alone if it is about all of them."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


def find_wrong_option(target: Any, options: Mapping[str, Any]) -> tuple[str, str] | None:
    """Find the first option that does not fit its annotation, bounds such as `Annotated[float, Field(gt=0)]` included.

    Options without an annotation, or with one that cannot be resolved here, are not checked.

    Args:
        target: The function or class that has the options as keyword arguments.
        options: The options.

    Returns:
        The name of the option and the reason; None if all options fit.
    """
    try:
        hints = get_type_hints(target.__init__ if isinstance(target, type) else target, include_extras=True)
    except Exception:  # an annotation may use a name that is imported only for type checkers
        return None
    for key in options.keys() & hints.keys():
        try:
            config = ConfigDict(arbitrary_types_allowed=True)
            TypeAdapter(hints[key], config=config).validate_python(options[key])
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            return key, f"{reason[0].lower()}{reason[1:]}"
        except PydanticUserError:  # not a type that pydantic can check
            continue
    return None
