"""The checking part of a stage kind: whether the items, groups and data of a run are what a stage needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from nonet.samples.sequences import Sequences


class PlannedGroup(Protocol):
    """The attributes of a planned group of processes that a stage kind may use."""

    @property
    def name(self) -> str:
        """The name of the group."""
        ...

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that each process of the group holds."""
        ...

    @property
    def resource(self) -> str:
        """Ray's name of the device; "CPU" on cpu."""
        ...

    @property
    def workers(self) -> int:
        """The number of workers."""
        ...

    @property
    def devices(self) -> float:
        """The number of devices per worker; 0 on cpu."""
        ...


class StageChecks:
    """The methods of `StageKind` that check a stage before it runs; by default, any stage can run."""

    def list_item_columns(self, stage_options: Any) -> tuple[str, ...]:
        """Return the names of the item columns that the stage reads."""
        return ()

    def check_items(self, name: str, stage_options: Any, items: Any) -> None:
        """Check that the items have what the stage reads of them.

        Args:
            name: The name of the stage.
            stage_options: The options of the stage.
            items: The item table (`pyarrow.Table`); without rows if only its columns are known.

        Raises:
            ConfigError: The items lack a column, or no item may be recommended.
        """

    def check_groups(self, name: str, stage_options: Any, groups: tuple[PlannedGroup, ...]) -> None:
        """Check that the stage can run in the groups that are planned for it.

        Args:
            name: The name of the stage.
            stage_options: The options of the stage.
            groups: The groups that work in the stage.

        Raises:
            ConfigError: The stage cannot run in these groups.
        """

    def check_data(self, name: str, stage_options: Any, seq: Sequences) -> None:
        """Check that the data contain something to learn from in the stage.

        Args:
            name: The name of the stage.
            stage_options: The options of the stage.
            seq: The sequences of all users.

        Raises:
            ConfigError: The data contain nothing to learn from.
        """
