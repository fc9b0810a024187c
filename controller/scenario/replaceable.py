"""Parts of a scenario that `use:` replaces: a shipped name, an installed one, or one of the user's own files.

The other keys are the options of what is named, checked by its own class as the scenario is read.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationInfo, model_validator

from nonet.controller.scenario.yaml import is_map
from nonet.errors import ConfigError
from nonet.options import Count, Positive, Rate, StrictModel
from nonet.plugins import HERE, PluginFiles, PluginRegistry, is_reference
from nonet.suggest import suggest_inline


def files_of(info: ValidationInfo[Any]) -> PluginFiles:
    """Where the own files of the scenario that is read are."""
    context: dict[str, PluginFiles] = info.context or {}
    return context.get("files", HERE)


_TOLERANCE = 0.02  # below a floor that still counts as held


class Replaceable(BaseModel):
    """A part with `use:`, whose specs are in a `registry`; or in `shipped`, where nothing of one's own can be named yet."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, arbitrary_types_allowed=True)
    registry: ClassVar[PluginRegistry[Any] | None] = None
    shipped: ClassVar[dict[str, type[StrictModel]]] = {}
    default: ClassVar[str] = ""
    use: Any = ""
    _files: PluginFiles = PrivateAttr(default=HERE)

    @model_validator(mode="before")
    @classmethod
    def _name(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"use": value}
        if is_map(value) and "use" not in value and cls.default:
            value = {"use": cls.default, **value}
        return value

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Replaceable:
        self._files = files_of(info)
        options = self._option_class()
        if options is not None:
            filled = options.model_validate(self.model_extra or {}, context=info.context).model_dump()
            object.__setattr__(self, "__pydantic_extra__", filled)
        return self

    @property
    def spec(self) -> Any:
        """What `use` names. Raises ConfigError."""
        assert self.registry is not None
        return self.registry.get(self.use, self._files)

    @property
    def address(self) -> Any:
        """`use` as other processes find it: a file as an absolute path."""
        return self._files.make_absolute(self.use)

    def options(self) -> dict[str, Any]:
        """The keyword arguments of what `use` names."""
        return dict(self.model_extra or {})

    @classmethod
    def option_classes(cls) -> dict[str, type[StrictModel]]:
        """The options of every name that comes with Nonet or is installed."""
        if cls.registry is None:
            return cls.shipped
        return {name: cls.registry.get(name).options for name in cls.registry.list_names()}

    def _option_class(self) -> type[StrictModel] | None:
        """The class that checks the other keys; None where only what is named can."""
        if self.registry is not None:
            try:
                return self.spec.options
            except ConfigError as error:
                raise ValueError(f"use: {error}") from None
        if not isinstance(self.use, str):
            return None
        if self.use not in self.shipped and not is_reference(self.use):
            near = suggest_inline(self.use, self.shipped)
            raise ValueError(
                f"use: {self.use!r}{near} is neither shipped ({', '.join(self.shipped)}) "
                "nor file.py[:Name] nor package.module:Name"
            )
        return self.shipped.get(self.use)


class Ramp(StrictModel):
    """A weight that goes from one value to another in a straight line, and stays there."""

    start: float
    end: float
    steps: Annotated[Positive, Field(description="steps of the stage from start to end")]
    after: Annotated[Count, Field(description="steps before it begins to move")] = 0

    def at(self, step: int) -> float:
        """The weight of a step in [0, steps of the stage)."""
        share = min(1.0, max(0.0, (step - self.after) / self.steps))
        return self.start + share * (self.end - self.start)


class RewardOptions(BaseModel):
    """One reward: `use`, `weight`, where it runs, and its own keyword arguments."""

    model_config = ConfigDict(
        extra="allow", frozen=True, strict=True, arbitrary_types_allowed=True, allow_inf_nan=False
    )
    use: Any = None
    weight: Annotated[float | Ramp, Field(description="what it counts; or {start, end, steps, after}")] = 1.0
    at_least: Annotated[
        float | None,
        Field(description="floor of its mean a beam: while it is lower, a multiplier adds to its weight"),
    ] = None
    timeout_s: Rate = 60.0
    pool: str | None = None
    workers: Positive = 1

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the reward itself."""
        return dict(self.model_extra or {})

    def weight_at(self, step: int) -> float:
        """What it counts at a step of its stage, a floor's multiplier aside."""
        return self.weight.at(step) if isinstance(self.weight, Ramp) else self.weight


def holds(mean: float, floor: float) -> bool:
    """Whether a mean keeps a floor of a reward, within 2 % of it."""
    return mean >= floor - _TOLERANCE * abs(floor)


class Between(BaseModel):
    """A worker of one's own between rollout and rewards: `use`, where it runs, and its own keyword arguments."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, arbitrary_types_allowed=True)
    use: Any
    pool: str | None = None
    workers: Positive = 1

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the worker."""
        return dict(self.model_extra or {})
