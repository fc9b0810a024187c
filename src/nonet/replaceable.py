"""Parts of a scenario with a key `use`, which names a shipped plug-in, an installed one, or one in a user's own file.

The other keys of such a part are the options of the plug-in. Its option class validates them when the scenario is read.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, PrivateAttr, ValidationInfo, model_validator

from nonet.errors import ConfigError
from nonet.options import StrictModel
from nonet.plugins import HERE, PluginFiles, PluginRegistry
from nonet.run_code import is_code_reference
from nonet.suggest import suggest_inline
from nonet.yaml import is_map


def get_files(info: ValidationInfo[Any]) -> PluginFiles:
    """Return the location of the user's own files, from the context in which a scenario is validated."""
    context: dict[str, PluginFiles] = info.context or {}
    return context.get("files", HERE)


class Replaceable(BaseModel):
    """Base class of the parts of a scenario that have a key `use`.

    Attributes:
        registry: The registry of the specs that `use` may name; None for a part without one.
        shipped: For a part without a registry, the option class of each shipped name.
        default: The value of `use` if the scenario gives none; empty if it must.
        use: A name, or a reference `file.py:Name` or `package.module:Name`.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, arbitrary_types_allowed=True)
    registry: ClassVar[PluginRegistry[Any] | None] = None
    shipped: ClassVar[dict[str, type[StrictModel]]] = {}
    default: ClassVar[str] = ""
    use: Any = ""
    _files: PluginFiles = PrivateAttr(default=HERE)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema, by which a word stands for `{use: word}`."""
        return {"anyOf": [{"type": "string"}, handler(core_schema)]}

    @model_validator(mode="before")
    @classmethod
    def _normalise_use(cls, value: Any) -> Any:
        """Turn a word into `{use: word}`, and add the default `use` to a map without one."""
        if isinstance(value, str):
            value = {"use": value}
        if is_map(value) and "use" not in value and cls.default:
            value = {"use": cls.default, **value}
        return value

    @model_validator(mode="after")
    def _check_options(self, info: ValidationInfo) -> Replaceable:
        """Validate the keys other than `use`, and fill in their defaults."""
        self._files = get_files(info)
        option_class = self._find_option_class()
        if option_class is not None:
            completed = option_class.model_validate(self.model_extra or {}, context=info.context).model_dump()
            object.__setattr__(self, "__pydantic_extra__", completed)  # the model is frozen
        return self

    @property
    def spec(self) -> Any:
        """The spec that `use` names. Raises ConfigError if there is no such spec."""
        assert self.registry is not None
        return self.registry.get(self.use, self._files)

    @property
    def address(self) -> Any:
        """The value of `use` with an absolute path, so that other processes find the plug-in."""
        return self._files.make_absolute(self.use)

    def get_options(self) -> dict[str, Any]:
        """Return the keyword arguments of the plug-in: all keys but `use`."""
        return dict(self.model_extra or {})

    @classmethod
    def list_option_classes(cls) -> dict[str, type[StrictModel]]:
        """Return the option class of every shipped or installed name that `use` may have."""
        if cls.registry is None:
            return cls.shipped
        return {name: cls.registry.get(name).options for name in cls.registry.list_names()}

    def _find_option_class(self) -> type[StrictModel] | None:
        """Return the class that validates the keys other than `use`; None for a reference in a part without a registry."""
        if self.registry is not None:
            try:
                return self.spec.options
            except ConfigError as error:
                raise ValueError(f"use: {error}") from None
        if not isinstance(self.use, str):
            if not callable(self.use):
                raise ValueError(f"use: wanted one of {', '.join(self.shipped)}, got {self.use!r}")
            return None
        if self.use not in self.shipped and not is_code_reference(self.use):
            near = suggest_inline(self.use, self.shipped)
            raise ValueError(
                f"use: {self.use!r}{near} is neither shipped ({', '.join(self.shipped)}) "
                "nor file.py[:Name] nor package.module:Name"
            )
        return self.shipped.get(self.use)
