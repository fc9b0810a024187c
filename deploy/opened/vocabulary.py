"""How the users of a run name things: the kinds of its ids, the unit of its times, and the columns of its tables.

Every command and the server convert what they are given here, so a value means the same everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from nonet.deploy.opened.items import Refused
from nonet.errors import DataError
from nonet.samples.tables import ROLES, IdKind, TableFormat, convert_ids, convert_times

# Shapes: N values.


@dataclass(frozen=True)
class Vocabulary:
    """The names of a run.

    Attributes:
        users: The kind of the ids of users.
        items: The kind of the ids of items.
        time_unit: Unit of the numbers in the run's log of events: "s", "ms", "us" or "ns".
        columns: The name of columns in the run's files, by Nonet's name or by role (`data.columns`).
        missing: Texts that stand for a missing value.
    """

    users: IdKind
    items: IdKind
    time_unit: str = "s"
    columns: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = TableFormat().missing

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Vocabulary:
        """Return the vocabulary of which `to_dict` returned the values."""
        kinds = {name: IdKind(**values[name]) for name in ("users", "items")}
        return cls(**{**values, **kinds, "missing": tuple(values["missing"])})

    def to_dict(self) -> dict[str, Any]:
        """Return the vocabulary as plain data."""
        return asdict(self)

    @property
    def table_format(self) -> TableFormat:
        """The format of files that are read for the run."""
        return TableFormat(dict(self.columns), self.missing, self.time_unit)

    @property
    def sources(self) -> dict[str, str]:
        """The name in the run's files of each column, by Nonet's name; roles (`user`) have the names of their columns."""
        return {ROLES.get(name, name): source for name, source in self.columns.items()}

    def convert_user(self, user: int | str) -> str:
        """Return a user's id as text. Raises Refused for a value that can be no id of the run."""
        try:
            return str(convert_ids([user], self.users, "user")[0])
        except DataError as error:
            raise Refused("bad_user", str(error)) from None

    def check_items(self, items: Sequence[int | str]) -> None:
        """Raise Refused if one of the values can be no id of an item of the run."""
        try:
            convert_ids(items, self.items, "item")
        except DataError as error:
            raise Refused("bad_item", str(error)) from None

    def convert_times(self, times: Sequence[Any]) -> np.ndarray:
        """Return times [N], numbers in the unit of the run's log or ISO 8601 text, as unix seconds [N] int64.

        Raises:
            Refused: A value is no moment of this unit.
        """
        try:
            return convert_times(times, self.time_unit)
        except DataError as error:
            raise Refused("bad_time", str(error)) from None

    def rename_values(self, values: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
        """Return values by Nonet's names of their columns; those may also have their names in the run's files.

        Args:
            values: Values by column.
            known: Names of the columns of events.
        """
        name_by_source = {source: name for name, source in self.sources.items()}
        return {
            name if name in known else name_by_source.get(name, name): value for name, value in values.items()
        }
