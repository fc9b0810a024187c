"""Joins item and user columns from stores to samples as they are made, each as of its sample's time.

`Join` describes a join in a scenario, and `StoreJoin` reads its store. `StoreJoins` has the joins of a run: it opens their stores
in the process that reads, and returns
columns for models (`read_event_columns`) and for rewards (`read_beam_columns`). Missing values are NONE for an id, NaN for a
number and "" for text, never zero.
"""

# Shapes: N events or keys, U prompts, W beams.

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator

from nonet.errors import ConfigError, DataError
from nonet.options import StrictModel
from nonet.samples.stores.addresses import check_address, open_store
from nonet.samples.stores.base import Store, simplify_type
from nonet.samples.tables import as_numbers

ITEM, USER = "item", "user"


class Join(StrictModel):
    """Columns of a store that are added to samples and rollouts as they are read (`nonet.samples.stores`)."""

    use: Annotated[
        str,
        Field(
            description="a folder of packed segments, lmdb:FOLDER, redis://HOST:PORT/NAME or hbase://HOST:PORT/TABLE; passwords "
            "are read from the environment"
        ),
    ]
    columns: Annotated[
        list[str] | dict[str, str],
        Field(
            min_length=1,
            description="names, or a mapping from names to those in the store; for HBase to `family:qualifier type`",
        ),
    ]
    on: Annotated[
        Literal["item", "user"] | None,
        Field(description="which ids are the keys of the store; by default the name of the join"),
    ] = None
    as_of: Annotated[
        Literal["time", "newest"] | None,
        Field(
            description="time: the newest version before the event; newest: the current version. By default time if the store "
            "has versions"
        ),
    ] = None
    options: Annotated[
        dict[str, Any],
        Field(
            description="options of the store: timeout, attempts, and those that docs/how-to/stores.md lists"
        ),
    ] = {}

    @field_validator("use")
    @classmethod
    def _check_use(cls, use: str) -> str:
        """Check that the address is valid and has no password."""
        try:
            check_address(use)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return use

    @property
    def sources(self) -> dict[str, str]:
        """The name in the store of each column, by its name in the run."""
        return _map_columns(self.columns)

    def open(self, name: str) -> StoreJoin:
        """Open the store of the join `data.join.<name>`. Raises ConfigError that names the key of the scenario."""
        try:
            return StoreJoin.open(self.use, self.columns, self.as_of, self.options)
        except ConfigError as error:
            raise type(error)(f"data.join.{name}: {error}") from None


class StoreJoin:
    """Columns of one store, aligned to keys.

    Args:
        store: The opened store.
        columns: Name -> name in the store.
        as_of: "time", "newest", or None for time if the store has versions.

    Raises:
        ConfigError: If a column does not exist, or the store cannot be read as of a time.
    """

    def __init__(self, store: Store, columns: Mapping[str, str], as_of: str | None = None):
        store.check_columns(list(columns.values()))
        if as_of == "time" and not store.versions:
            raise ConfigError(
                f"{store.name} keeps no versions, so it cannot be read as_of: time; write it with times, or say as_of: newest"
            )
        if as_of == "time" and store.kept_versions == 1:
            raise ConfigError(
                f"{store.name} keeps one version of each value (VERSIONS is 1), so it cannot be read as_of: "
                f"time; raise VERSIONS, or "
                "say as_of: newest"
            )
        self.store, self.columns = store, dict(columns)
        self._as_of = as_of
        self.timed = store.versions and as_of != "newest"
        self.rows, self.absent, self.seconds = 0, 0, 0.0
        self._counting = Lock()

    @classmethod
    def open(
        cls,
        use: str,
        columns: Sequence[str] | Mapping[str, str],
        as_of: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> StoreJoin:
        """Open the store at an address.

        Args:
            use: Address of the store.
            columns: Names, or name -> name in the store (HBase: "family:qualifier type").
            as_of: "time", "newest", or None for time if the store has versions.
            options: Options of the store.

        Raises:
            ConfigError: The store cannot be opened, or a column does not exist.
        """
        store = open_store(use, columns, **(options or {}))
        names = _map_columns(columns)
        return cls(store, {name: name for name in names} if use.startswith("hbase:") else names, as_of)

    def describe_warning(self) -> str | None:
        """Return what makes this join see values that its events could not have seen; None where nothing does."""
        if not self.store.versions and self._as_of is None:
            return (
                f"{self.store.name} keeps no versions, so events of every age get today's values, which may "
                f"come from after them; "
                "write it with times, or say as_of: newest to mean it"
            )
        if self.timed and self.store.kept_versions is not None:
            kept = self.store.kept_versions
            return (
                f"{self.store.name} keeps {kept} version{'s' if kept > 1 else ''} of each value (VERSIONS), so "
                f"older events find the "
                "values of that time gone"
            )
        return None

    @property
    def schema(self) -> dict[str, pa.DataType]:
        """Name -> type."""
        return {
            name: simplify_type(self.store.schema.field(source).type) for name, source in self.columns.items()
        }

    def read(self, keys: Any, times: np.ndarray) -> dict[str, pa.Array]:
        """Read the columns of keys [N] as of times [N] int64 unix seconds; missing values are null."""
        began = time.perf_counter()
        values, offsets = self.store.multi_get(
            keys, list(dict.fromkeys(self.columns.values())), times if self.timed else None
        )
        found = np.diff(offsets) > 0
        place = pa.array(np.where(found, offsets[:-1], 0), mask=~found)
        out = {name: values.column(source).take(place) for name, source in self.columns.items()}
        with self._counting:
            self.rows += len(found)
            self.absent += int(len(found) - found.sum())
            self.seconds += time.perf_counter() - began
        return out

    def get_counts(self) -> dict[str, float]:
        """Return the rows that were looked up, how many were found, and the seconds that took."""
        return {"rows": self.rows, "found": self.rows - self.absent, "seconds": self.seconds}

    def pop_counts(self) -> dict[str, float]:
        """Return the counts since the last call."""
        with self._counting:
            counts = self.get_counts()
            self.rows, self.absent, self.seconds = 0, 0, 0.0
        return counts


class StoreJoins:
    """The joins of a run by name; their stores are opened when they are first read, in each process anew."""

    def __init__(self, joins: Mapping[str, Join]):
        self._joins = dict(joins)
        self._opened: dict[str, StoreJoin] = {}
        self._opening = Lock()

    def __reduce__(self) -> Any:
        return StoreJoins, (self._joins,)

    def __bool__(self) -> bool:
        return bool(self._joins)

    @property
    def names(self) -> list[str]:
        """Names of the columns that samples get."""
        return [column for join in self._joins.values() for column in join.sources]

    def open_join(self, name: str) -> StoreJoin:
        """Return one join, opening its store on first use."""
        with self._opening:
            if name not in self._opened:
                self._opened[name] = self._joins[name].open(name)
            return self._opened[name]

    def _get_key(self, name: str) -> str:
        """Return which ids are the keys of a join's store: "item" or "user"."""
        return self._joins[name].on or name

    def read_event_columns(self, items: Any, users: Any, times: np.ndarray) -> dict[str, np.ndarray]:
        """Return columns of events [N]: ids int64 (text hashed, NONE if missing), other numbers float32 (NaN if missing).

        List columns are omitted because models do not read them.

        Args:
            items: Own ids of the items [N].
            users: Own ids of the users [N].
            times: Unix seconds of the events [N].
        """
        columns = {}
        for name in self._joins:
            found = self.open_join(name).read(items if self._get_key(name) == ITEM else users, times)
            columns |= {
                column: _convert_for_models(values)
                for column, values in found.items()
                if not pa.types.is_nested(values.type)
            }
        return columns

    def list_warnings(self) -> list[str]:
        """Return a sentence for each join that may see values from after its events."""
        said = ((name, self.open_join(name).describe_warning()) for name in self._joins)
        return [f"data.join.{name}: {text}" for name, text in said if text]

    def get_kinds(self) -> dict[str, str]:
        """Return the type of each column that models read: "int64" or "float32"."""
        kinds = {}
        for name in self._joins:
            for column, kind in self.open_join(name).schema.items():
                if not pa.types.is_nested(kind):
                    kinds[column] = "int64" if _is_id(kind) else "float32"
        return kinds

    def read_beam_columns(
        self,
        names: Sequence[str],
        item_id: np.ndarray,
        valid: np.ndarray,
        user_id: np.ndarray,
        times: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """Return item columns [U, W] and user columns [U] as of each prompt's time: float64 with NaN, or text with "".

        Args:
            names: Columns to read.
            item_id: Own ids of the items [U, W].
            valid: Where there is a beam [U, W] bool; elsewhere nothing is read.
            user_id: Own ids of the users [U].
            times: Unix seconds of the prompts [U].
        """
        columns: dict[str, np.ndarray] = {}
        for name, options in self._joins.items():
            wanted = [column for column in names if column in options.sources]
            if not wanted:
                continue
            join = self.open_join(name)
            if self._get_key(name) == USER:
                found = join.read(user_id, times)
                columns |= {column: _convert_for_rewards(found[column]) for column in wanted}
                continue
            row, beam = np.nonzero(valid)
            found = join.read(item_id[row, beam], times[row])
            for column in wanted:
                flat = _convert_for_rewards(found[column])
                whole = np.full(valid.shape, "" if flat.dtype.kind == "U" else np.nan, flat.dtype)
                whole[row, beam] = flat
                columns[column] = whole
        return columns

    def close(self) -> None:
        """Close the stores that were opened."""
        for join in self._opened.values():
            join.store.close()
        self._opened.clear()

    def get_counts(self) -> dict[str, dict[str, float]]:
        """Return by join the rows that this process looked up, how many it found, and the seconds that took."""
        return {name: join.get_counts() for name, join in self._opened.items()}

    def pop_counts(self) -> dict[str, dict[str, float]]:
        """Return the counts since the last call."""
        return {name: join.pop_counts() for name, join in self._opened.items()}


def _map_columns(columns: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Return the name in the store of each column; a list has the same names."""
    return dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}


def _convert_for_models(column: pa.Array) -> np.ndarray:
    if _is_id(column.type):
        return as_numbers(column)
    return _to_numbers(column, np.float32)


def _convert_for_rewards(column: pa.Array) -> np.ndarray:
    """Convert a column to float64, or to text with lists joined by `|`."""
    if pa.types.is_nested(column.type):
        return np.array(["|".join(map(str, row or ())) for row in column.to_pylist()], dtype=np.str_)
    if _is_text(column.type):
        return np.array(["" if text is None else text for text in column.to_pylist()], dtype=np.str_)
    return _to_numbers(column, np.float64)


def _to_numbers(column: pa.Array, kind: Any) -> np.ndarray:
    try:
        return column.cast(pa.float64()).to_numpy(zero_copy_only=False).astype(kind)
    except pa.ArrowException:
        raise DataError(f"a joined column is {column.type}; it wants numbers or text") from None


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_id(kind: pa.DataType) -> bool:
    return _is_text(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)
