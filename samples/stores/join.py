"""Joins item and user columns from stores to samples as they are made, each as of its sample's time.

`Join` describes a join in a scenario, and `StoreJoin` reads its store. `StoreJoins` has the joins of a run: it opens their stores
in the process that reads, and returns columns for models (`read_event_columns`) and for rewards (`read_beam_columns`). Missing
values are NONE for an id, NaN for a number and "" for text, never zero.
"""

# Shapes: N events or keys, U prompts (one per user), W beams (items proposed for a prompt).

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from nonet.errors import ConfigError, DataError
from nonet.options import StrictModel
from nonet.samples.stores.addresses import check_address, check_options, open_store
from nonet.samples.stores.base import Store, simplify_type
from nonet.samples.tables import as_numbers

ITEM, USER = "item", "user"  # The kinds of ids that can be the keys of a join's store.


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
            description="options of the store: timeout_s, attempts, and those that docs/how-to/stores.md lists"
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

    @model_validator(mode="after")
    def _check_options(self) -> Join:
        """Check that stores of this kind have the options."""
        try:
            check_options(self.use, self.options)
        except ConfigError as error:
            raise ValueError(f"options: {error}") from None
        return self

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
    """Reader of columns of one store, whose results are aligned to the requested keys. It may be used by several threads.

    Args:
        store: The opened store.
        columns: The name in the store of each column, by its name in the run.
        as_of: "time" reads the newest version before each event, "newest" the current one; None reads as "time" if the store has
            versions.

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
                f"{store.name} keeps one version of each value (VERSIONS is 1), so it cannot be read as_of: time; "
                "raise VERSIONS, or say as_of: newest"
            )
        self.store, self.columns = store, dict(columns)
        self._as_of = as_of
        self.timed = store.versions and as_of != "newest"
        # The rows looked up and those not found since the last `pop_counts`, and the time that took.
        self.rows, self.absent, self.seconds = 0, 0, 0.0
        self._count_lock = Lock()

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
            as_of: As for the class.
            options: Options of the store.

        Raises:
            ConfigError: The store cannot be opened, or a column does not exist.
        """
        store = open_store(use, columns, **(options or {}))
        source_by_name = _map_columns(columns)
        # The store was opened with the mapping, so its columns have the names in the run.
        if use.startswith("hbase:"):
            source_by_name = {name: name for name in source_by_name}
        return cls(store, source_by_name, as_of)

    def describe_warning(self) -> str | None:
        """Return a warning if events may get values from after them, or may miss versions that the store has dropped.

        Returns:
            One sentence without the name of the join; None if there is nothing to warn about.
        """
        if not self.store.versions and self._as_of is None:
            return (
                f"{self.store.name} keeps no versions, so events of every age get today's values, which may "
                "come from after them; write it with times, or say as_of: newest to mean it"
            )
        if self.timed and self.store.kept_versions is not None:
            version_count = self.store.kept_versions
            return (
                f"{self.store.name} keeps {version_count} version{'s' if version_count > 1 else ''} of each value (VERSIONS), so "
                "older events find the values of that time gone"
            )
        return None

    @property
    def schema(self) -> dict[str, pa.DataType]:
        """The Arrow type of each column, by its name in the run."""
        return {
            name: simplify_type(self.store.schema.field(source).type) for name, source in self.columns.items()
        }

    def read(self, keys: Any, times: np.ndarray) -> dict[str, pa.Array]:
        """Read the columns of keys as of times.

        Args:
            keys: Keys [N].
            times: Unix seconds [N] int64; ignored if the newest version is read.

        Returns:
            The values [N] of each column, by its name in the run; null where the store has no value.
        """
        started_s = time.perf_counter()
        values, offsets = self.store.multi_get(
            keys, list(dict.fromkeys(self.columns.values())), times if self.timed else None
        )
        has_row = np.diff(offsets) > 0
        row_or_null = pa.array(np.where(has_row, offsets[:-1], 0), mask=~has_row)
        columns = {name: values.column(source).take(row_or_null) for name, source in self.columns.items()}
        with self._count_lock:  # `read` is called by several threads.
            self.rows += len(has_row)
            self.absent += int(len(has_row) - has_row.sum())
            self.seconds += time.perf_counter() - started_s
        return columns

    def get_counts(self) -> dict[str, float]:
        """Return the numbers of "rows" looked up and of those "found" since the last `pop_counts`, and the "seconds" it took."""
        return {"rows": self.rows, "found": self.rows - self.absent, "seconds": self.seconds}

    def pop_counts(self) -> dict[str, float]:
        """Return the counts since the last call, as `get_counts`, and set them to zero."""
        with self._count_lock:
            counts = self.get_counts()
            self.rows, self.absent, self.seconds = 0, 0, 0.0
        return counts


class StoreJoins:
    """The joins of a run by name; their stores are opened when they are first read, in each process anew."""

    def __init__(self, joins: Mapping[str, Join]):
        self._joins = dict(joins)
        self._opened: dict[str, StoreJoin] = {}
        self._open_lock = Lock()

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
        with self._open_lock:
            if name not in self._opened:
                self._opened[name] = self._joins[name].open(name)
            return self._opened[name]

    def _get_key(self, name: str) -> str:
        """Return which ids are the keys of a join's store: "item" or "user"."""
        return self._joins[name].on or name

    def read_event_columns(self, items: Any, users: Any, times: np.ndarray) -> dict[str, np.ndarray]:
        """Read the columns of all joins for events, as models read them.

        Args:
            items: The items [N], by their ids in the user's tables.
            users: The users [N], by their ids in the user's tables.
            times: Unix seconds of the events [N].

        Returns:
            Each column [N] by name: integers, booleans and text as int64 ids (text hashed, NONE if missing), other numbers as
            float32 (NaN if missing). List columns are omitted because models do not read them.
        """
        columns = {}
        for name in self._joins:
            columns |= self.read_join_columns(name, items, users, times)
        return columns

    def read_join_columns(
        self, name: str, items: Any, users: Any, times: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Read the columns of one join for events; arguments and result are as for `read_event_columns`."""
        keys = items if self._get_key(name) == ITEM else users
        return {
            column: _convert_for_models(values)
            for column, values in self.open_join(name).read(keys, times).items()
            if not pa.types.is_nested(values.type)
        }

    def list_warnings(self) -> list[str]:
        """Return the warnings of all joins (see `StoreJoin.describe_warning`), each with the scenario key of its join."""
        warnings = ((name, self.open_join(name).describe_warning()) for name in self._joins)
        return [f"data.join.{name}: {text}" for name, text in warnings if text]

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
        """Read columns for the items of beams and for their users, as of each prompt's time, as rewards read them.

        Args:
            names: Columns to read.
            item_id: The beams' items [U, W], by their ids in the user's tables.
            valid: Where there is a beam [U, W] bool; elsewhere nothing is read.
            user_id: The prompts' users [U], by their ids in the user's tables.
            times: Unix seconds of the prompts [U].

        Returns:
            Item columns [U, W] and user columns [U] by name: float64 with NaN if missing, or text with "" if missing.
        """
        columns: dict[str, np.ndarray] = {}
        for name, join_options in self._joins.items():
            join_columns = [column for column in names if column in join_options.sources]
            if not join_columns:
                continue
            join = self.open_join(name)
            if self._get_key(name) == USER:
                values_by_column = join.read(user_id, times)
                columns |= {column: _convert_for_rewards(values_by_column[column]) for column in join_columns}
                continue
            prompt, beam = np.nonzero(valid)  # The prompt and the beam of each item that is looked up.
            values_by_column = join.read(item_id[prompt, beam], times[prompt])
            for column in join_columns:
                values = _convert_for_rewards(values_by_column[column])
                values_UW = np.full(valid.shape, "" if values.dtype.kind == "U" else np.nan, values.dtype)
                values_UW[prompt, beam] = values
                columns[column] = values_UW
        return columns

    def check_ids(self, items: np.ndarray, users: np.ndarray) -> None:
        """Raise DataError if ids of items or users have another type than the keys of the stores that are read by them.

        Args:
            items: Ids of items [N].
            users: Ids of users [M].
        """
        for name in self._joins:
            try:
                self.open_join(name).store.check_keys((items if self._get_key(name) == ITEM else users)[:1])
            except DataError as error:
                raise DataError(f"data.join.{name}: {error}") from None

    def close(self) -> None:
        """Close the stores that were opened."""
        for join in self._opened.values():
            join.store.close()
        self._opened.clear()

    def pop_counts(self) -> dict[str, dict[str, float]]:
        """Return the counts since the last call by join, and set them to zero."""
        return {name: join.pop_counts() for name, join in self._opened.items()}


def _map_columns(columns: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Return the name in the store of each column; columns in a list have the same name in the run and in the store."""
    return dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}


def _convert_for_models(column: pa.Array) -> np.ndarray:
    """Convert a column to int64 ids if `_is_id`, and to float32 otherwise."""
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


def _to_numbers(column: pa.Array, dtype: Any) -> np.ndarray:
    try:
        return column.cast(pa.float64()).to_numpy(zero_copy_only=False).astype(dtype)
    except pa.ArrowException:
        raise DataError(f"a joined column is {column.type}; it wants numbers or text") from None


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_id(kind: pa.DataType) -> bool:
    """Return whether models look values of this type up in an embedding table, rather than read them as numbers."""
    return _is_text(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)
