"""The format of a scenario's tables: the columns that have a role, and the texts that stand for a missing value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import Any

from nonet.errors import ConfigError

MISSING = ("NA", "N/A", "n/a", "nan", "NaN", "None", "null", "NULL", "\\N", "<NA>", "")
"""Texts that stand for a missing value if a scenario does not list its own (`data.missing`)."""
ROLES = {"user": "user_id", "item": "item_id", "time": "timestamp", "event": "event", "rating": "rating"}
"""Nonet's name of the column that has each role."""
FRACTION = "fraction of a second:"
"""The column of the nanoseconds, int64, between the second of a row's timestamp and its time."""
INTERNAL = (FRACTION, "fine time:", "unix time_s", "label time:", "label end:", "repeat:", "row:")
"""Starts of the names of columns that Nonet adds to a log, which a column of the user must not have."""


@dataclass(frozen=True, slots=True)
class TableFormat:
    """The names of columns in the files of a scenario, and the texts that stand for a missing value.

    Attributes:
        columns: The name of columns in the files, by Nonet's name or by role.
        missing: Texts that stand for a missing value, so they are no ids of users or items and no categories.
        time_unit: Unit of numeric times whose column does not name it: "s", "ms", "us" or "ns"; None to determine it from the
            values. Files that are read for a finished run have the unit of the run's log.
        keeps_fractions: Whether interactions get a column FRACTION if their times are finer than seconds.
    """

    columns: Mapping[str, str] = dataclass_field(default_factory=dict[str, str])
    missing: tuple[str, ...] = MISSING
    time_unit: str | None = None
    keeps_fractions: bool = False

    @classmethod
    def from_options(
        cls, columns: Mapping[str, str] | None, missing: Collection[str] | None = None
    ) -> TableFormat:
        """Return the format that a scenario gives.

        Args:
            columns: `data.columns`; None if the scenario does not have it.
            missing: `data.missing`; None if the scenario does not have it.

        Raises:
            ConfigError: If `missing` is no list of texts. This is checked here, because tables are read before a scenario is
                checked.
        """
        texts: Any = [] if missing is None else missing
        if isinstance(texts, str) or not all(isinstance(text, str) for text in _to_list(texts)):
            raise ConfigError(
                f"data.missing is {missing!r}; it must be a list of texts. Quote each one, such as missing: ['NA', '?']."
            )
        return cls(dict(columns or {}), MISSING if missing is None else tuple(missing))

    @property
    def own_missing(self) -> list[str] | None:
        """The missing texts, sorted, if they differ from the default; None if not. For fingerprints."""
        return None if set(self.missing) == set(MISSING) else sorted(self.missing)

    def replace_columns(self, columns: Mapping[str, str]) -> TableFormat:
        """Return a format with other column names, which is otherwise the same."""
        return replace(self, columns=dict(columns))


def _to_list(value: Any) -> list[Any]:
    """Return the elements of a list or tuple, or the value itself as the only one."""
    return list(value) if isinstance(value, list | tuple) else [value]


Columns = Mapping[str, str] | TableFormat | None
"""The argument of readers: the names of columns in the files alone, or the whole format; None for the default format."""


def to_table_format(columns: Columns) -> TableFormat:
    """Return a reader's argument as a whole format; names of columns alone get the default missing texts."""
    return columns if isinstance(columns, TableFormat) else TableFormat.from_options(columns)
