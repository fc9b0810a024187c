"""The options of a role: its pool, number of workers, topology and engine, and the options of its kind."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
    model_validator,
)

from nonet.controller.cluster import Elastic, Topology
from nonet.errors import ConfigError
from nonet.options import Positive, StrictModel
from nonet.plugins import HERE, PluginFiles
from nonet.replaceable import get_files
from nonet.suggest import suggest_inline
from nonet.workers.engines import Engine
from nonet.workers.roles.kinds import ROLES, RoleKind


class Role(StrictModel):
    """The options of a role. A role of the user's own names its kind by `use`, whose options are further keys."""

    model_config = ConfigDict(extra="allow")
    use: Annotated[str | None, Field(description="the kind of role, unless its name is that of a kind")] = (
        None
    )
    pool: str | None = None
    workers: Positive | Elastic = 1
    topology: Topology = Topology()
    engine: Engine | None = None
    fuse: str | None = None
    collocate: str | None = None

    _files: PluginFiles = PrivateAttr(default=HERE)

    @model_validator(mode="after")
    def _check_own_options(self, info: ValidationInfo) -> Role:
        """Validate and complete the further keys of a role that names its kind; reject those of other roles."""
        self._files = get_files(info)
        further_keys = self.model_extra or {}
        if self.use is None:
            if further_keys:
                known_keys = [name for name in type(self).model_fields if name != "use"]
                key = next(iter(further_keys))
                raise ValueError(
                    f"{key}: unknown key{suggest_inline(key, known_keys)}; known keys: {', '.join(sorted(known_keys))}"
                )
            return self
        try:
            kind = self.find_kind("")
        except ConfigError as error:
            raise ValueError(f"use: {error}") from None
        completed = kind.options.model_validate(further_keys).model_dump()
        object.__setattr__(self, "__pydantic_extra__", completed)  # the model is frozen
        return self

    @model_serializer(mode="wrap")
    def _omit_workers_of_host(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit the default of `workers` if the role shares with another one, which then has this many."""
        document = handler(self)
        if (self.fuse or self.collocate) and "workers" not in self.model_fields_set:
            document.pop("workers", None)
        return document

    def find_kind(self, name: str) -> RoleKind:
        """Return the kind of a role.

        Args:
            name: The name of the role in the scenario, which matters only without `use`.

        Returns:
            The kind that `use` names, else the shipped kind of that name, else an empty kind that can only be planned.
        """
        if self.use is None and name not in ROLES.list_shipped():
            return RoleKind("")
        return ROLES.get(self.use or name, self._files)

    @property
    def own_options(self) -> dict[str, Any]:
        """The keyword arguments for the class of the role's workers."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _check_sharing(self) -> Role:
        """Check that at most one of `fuse` and `collocate` is given."""
        if self.fuse and self.collocate:
            raise ValueError(
                "has both fuse and collocate; fuse shares the process, collocate only the device: choose one"
            )
        return self
