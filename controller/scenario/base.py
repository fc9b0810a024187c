"""What every part of a scenario is made of: strict frozen models, and parts that `use:` replaces.

A *replaceable* part carries `use:`. A shipped name is checked against its own class; anything else
(`file.py:Name`, `package.module:Name`, `actor://...`) keeps its other keys as keyword arguments, checked against its
signature before a device is taken.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nonet.suggest import hint

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Word = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_\-]*$")]


class Part(BaseModel):
    """Base of every part: unknown keys are errors, values are frozen and finite, types are not guessed."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True, allow_inf_nan=False
    )


class Replaceable(BaseModel):
    """A part with `use:`; `shipped` names the ones that come with Nonet and their option classes."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, arbitrary_types_allowed=True)
    shipped: ClassVar[dict[str, type[Part]]] = {}
    default: ClassVar[str] = ""
    use: Any = ""

    @model_validator(mode="before")
    @classmethod
    def _name(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"use": value}
        if isinstance(value, dict) and "use" not in value and cls.default:
            value = {"use": cls.default, **value}
        return value

    @model_validator(mode="after")
    def _check(self) -> Replaceable:
        if isinstance(self.use, str):
            known = self.shipped.get(self.use)
            if known is None and not is_reference(self.use):
                raise ValueError(
                    f"use: {self.use!r}{hint(self.use, self.shipped)} is neither shipped ({', '.join(self.shipped)}) "
                    "nor file.py[:Name] nor package.module:Name"
                )
            if known is not None:
                filled = known.model_validate(self.model_extra or {}).model_dump()
                object.__setattr__(self, "__pydantic_extra__", filled)
        return self

    def options(self) -> dict[str, Any]:
        """The keyword arguments of what `use` names."""
        return dict(self.model_extra or {})


def is_reference(use: str) -> bool:
    """Whether `use` points outside Nonet: a file, a module, an actor, a server or a store."""
    return use.endswith(".py") or ":" in use


def file_of(use: Any) -> str | None:
    """The `file.py` of `file.py[:Name]`; None for anything else."""
    path = str(use).partition(":")[0]
    return path if path.endswith(".py") else None
