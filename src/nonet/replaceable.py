"""Parts of a scenario that `use:` replaces by a shipped name, an installed one, or one of the user's own files.

The other keys are the options of what `use` names. Its own class validates them when the scenario is read.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationInfo, model_validator

from nonet.errors import ConfigError
from nonet.options import StrictModel
from nonet.plugins import HERE, PluginFiles, PluginRegistry, is_reference
from nonet.suggest import suggest_inline
from nonet.yaml import is_map


def get_files(info: ValidationInfo[Any]) -> PluginFiles:
    """Return the user's own files of the scenario that is being validated."""
    context: dict[str, PluginFiles] = info.context or {}
    return context.get("files", HERE)


class Replaceable(BaseModel):
    """A part with `use:`.

    The specs that `use` may name are in a `registry`, or in `shipped` if the part cannot be replaced by code of the user's
    own yet.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, arbitrary_types_allowed=True)
    registry: ClassVar[PluginRegistry[Any] | None] = None
    shipped: ClassVar[dict[str, type[StrictModel]]] = {}
    default: ClassVar[str] = ""
    use: Any = ""
    _files: PluginFiles = PrivateAttr(default=HERE)

    @model_validator(mode="before")
    @classmethod
    def _normalise_use(cls, value: Any) -> Any:
        """Turn a word into `{use: word}`, and add the default name."""
        if isinstance(value, str):
            value = {"use": value}
        if is_map(value) and "use" not in value and cls.default:
            value = {"use": cls.default, **value}
        return value

    @model_validator(mode="after")
    def _check_options(self, info: ValidationInfo) -> Replaceable:
        """Validate the other keys and fill in their defaults."""
        self._files = get_files(info)
        options = self._find_option_class()
        if options is not None:
            filled = options.model_validate(self.model_extra or {}, context=info.context).model_dump()
            object.__setattr__(self, "__pydantic_extra__", filled)
        return self

    @property
    def spec(self) -> Any:
        """The spec that `use` names. Raises ConfigError if there is none."""
        assert self.registry is not None
        return self.registry.get(self.use, self._files)

    @property
    def address(self) -> Any:
        """`use` as other processes find it, with files as absolute paths."""
        return self._files.make_absolute(self.use)

    def get_options(self) -> dict[str, Any]:
        """Return the keyword arguments of what `use` names."""
        return dict(self.model_extra or {})

    @classmethod
    def list_option_classes(cls) -> dict[str, type[StrictModel]]:
        """Return the option class of every name that comes with Nonet or is installed."""
        if cls.registry is None:
            return cls.shipped
        return {name: cls.registry.get(name).options for name in cls.registry.list_names()}

    def _find_option_class(self) -> type[StrictModel] | None:
        """Return the class that validates the other keys; None if only the named object can."""
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
