"""Format of a scenario's tables: the columns that have a role, and the texts that stand for a missing value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any

from nonet.errors import ConfigError

MISSING = ("NA", "N/A", "n/a", "nan", "NaN", "None", "null", "NULL", "\\N", "<NA>", "")
"""Texts that stand for a missing value where a scenario does not list its own (`data.missing`)."""
ROLES = {"user": "user_id", "item": "item_id", "time": "timestamp", "event": "event", "rating": "rating"}


@dataclass(frozen=True, slots=True)
class TableFormat:
    """How the tables of a scenario are read.

    Attributes:
        columns: the name or role that Nonet uses -> the name in the file.
        missing: texts that stand for a missing value: they are no ids of users or items, and no categories.
    """

    columns: Mapping[str, str] = dataclass_field(default_factory=dict[str, str])
    missing: tuple[str, ...] = MISSING

    @classmethod
    def from_options(
        cls, columns: Mapping[str, str] | None, missing: Collection[str] | None = None
    ) -> TableFormat:
        """Return the format of `data.columns` and `data.missing`, which are None where a scenario leaves them out.

        Raises ConfigError where `missing` is no list of texts: settings are derived from data before a scenario is checked.
        """
        texts: Any = [] if missing is None else missing
        if isinstance(texts, str) or not all(isinstance(text, str) for text in _to_list(texts)):
            raise ConfigError(
                f"data.missing is {missing!r}; it must be a list of texts. Quote each one, such as missing: ['NA', '?']."
            )
        return cls(dict(columns or {}), MISSING if missing is None else tuple(missing))

    @property
    def own_missing(self) -> list[str] | None:
        """The sorted missing texts where they differ from the default, for fingerprints; None where they do not."""
        return None if set(self.missing) == set(MISSING) else sorted(self.missing)

    def replace_columns(self, columns: Mapping[str, str]) -> TableFormat:
        """Return a format with other column names and the same missing texts."""
        return TableFormat(dict(columns), self.missing)


def _to_list(value: Any) -> list[Any]:
    """Return the elements of a list or tuple, or the value itself as the only one."""
    return list(value) if isinstance(value, list | tuple) else [value]


Columns = Mapping[str, str] | TableFormat | None
"""What readers take: the names of columns alone, or the whole format."""


def to_table_format(columns: Columns) -> TableFormat:
    """Return the format that a reader was given; names of columns alone come with the default missing texts."""
    return columns if isinstance(columns, TableFormat) else TableFormat.from_options(columns)
