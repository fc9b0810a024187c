"""How the users of a run name things: the kinds of its ids, the unit of its times, and the columns of its tables.

Every command and the server convert what they are given here, so a value means the same everywhere. Tables that are read for a
finished run, such as more events, new items or users, have the column names of the run's own files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nonet.deploy.opened.items import Refused
from nonet.errors import DataError
from nonet.samples.importers import is_parquet_file, read_text
from nonet.samples.tables import (
    ROLES,
    IdKind,
    TableFormat,
    check_events,
    check_interactions,
    check_items,
    convert_ids,
    convert_times,
    find_files,
    read_parquet,
)
from nonet.suggest import join_names, suggest_sentence

# Shapes: N values.

_ID_COLUMNS = ("user_id", "item_id")


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

    def replace_sources(self, columns: Mapping[str, str] | None) -> Vocabulary:
        """Return the names of a table in which some columns, by Nonet's name or by role, have names of their own."""
        own_names = {ROLES.get(role, role): name for role, name in (columns or {}).items()}
        return replace(self, columns={**self.sources, **own_names}) if own_names else self

    def convert_user(self, user: int | str) -> str:
        """Return a user's id as text. Raises Refused for a value that can be no id of the run."""
        try:
            return str(convert_ids([user], self.users, "user")[0])
        except DataError as error:
            raise Refused("bad_user", str(error)) from None

    def get_own_user_id(self, user: str) -> int | str | None:
        """Return a user's id in the type of the run's ids; None for "", which stands for no user.

        Args:
            user: An id that `convert_user` returned.
        """
        return None if not user else user if self.users.text else int(user)

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

    def get_own_columns(self, names: Sequence[str]) -> list[str]:
        """Return the names in the run's files of the columns of a table; a name that another column has stays as it is."""
        own_names = [self.sources.get(name, name) for name in names]
        return [name if own in names else own for name, own in zip(names, own_names, strict=True)]

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


def read_run_interactions(
    path: str,
    vocabulary: Vocabulary,
    *,
    keep_order: bool = False,
    columns: Mapping[str, str] | None = None,
    keep_fractions: bool = False,
) -> pa.Table:
    """Read interactions, Parquet or delimited text, with Nonet's column names.

    Args:
        path: A file, folder, pattern or URI.
        vocabulary: The run's names.
        keep_order: Whether rows stay in their order, also if their times are finer than seconds, by which they are sorted else.
        columns: The name of columns in this table, by Nonet's name or by role, where it differs from the run's (`--column`);
            None if the command does not take it.
        keep_fractions: See `TableFormat.keeps_fractions`.

    Raises:
        DataError: The table cannot be read, or lacks a column; the message has the name that the run gives it.
    """
    label = f"interactions {path}"
    vocabulary = vocabulary.replace_sources(columns)
    raw = _read_table(path, "interactions", vocabulary)
    _check_named_columns(raw.column_names, columns, label)
    table_format = _choose_format(raw.column_names, vocabulary, label, ("user", "item", "time"), columns)
    if keep_order:
        return check_events(raw, table_format, label)[0]
    return check_interactions(raw, replace(table_format, keeps_fractions=keep_fractions), label)


def read_run_items(path: str, vocabulary: Vocabulary) -> pa.Table:
    """Read items; arguments and errors are those of `read_run_interactions`."""
    label = f"items {path}"
    raw = _read_table(path, "items", vocabulary)
    return check_items(raw, _choose_format(raw.column_names, vocabulary, label, ("item",)), label)


def iterate_user_ids(
    path: Path, vocabulary: Vocabulary, chunk_size: int, columns: Mapping[str, str] | None = None
) -> Iterator[list[Any]]:
    """Yield the ids of users in a table in chunks, in the order of their first rows.

    Args:
        path: A Parquet file, or one of delimited text.
        vocabulary: The run's names.
        chunk_size: Number of users of a chunk.
        columns: As in `read_run_interactions`.

    Raises:
        DataError: The file cannot be read, or lacks the column of users.
    """
    label = f"users {path}"
    vocabulary = vocabulary.replace_sources(columns)
    try:
        if not is_parquet_file(path):
            table = _read_table(str(path), "users", vocabulary)
            _check_named_columns(table.column_names, columns, label)
            column = _find_column(table.column_names, vocabulary, "user", label, columns)
            return _split_distinct_ids([table[column]], chunk_size)
        file = pq.ParquetFile(find_files(path, "users").files[0])
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as a table: {str(error).splitlines()[0]}") from None
    _check_named_columns(file.schema_arrow.names, columns, label)
    column = _find_column(file.schema_arrow.names, vocabulary, "user", label, columns)
    return _split_distinct_ids((batch[column] for batch in file.iter_batches(columns=[column])), chunk_size)


def _split_distinct_ids(columns: Iterable[Any], chunk_size: int) -> Iterator[list[Any]]:
    """Yield the distinct ids of columns that follow one another, in the order of their first rows, in chunks."""
    known_ids: set[Any] = set()
    chunk: list[Any] = []
    for column in columns:
        for user_id in column.unique().to_pylist():
            if user_id in known_ids:
                continue
            known_ids.add(user_id)
            chunk.append(user_id)
            if len(chunk) == chunk_size:
                yield chunk
                chunk = []
    if chunk:
        yield chunk


def _read_table(path: str, label: str, vocabulary: Vocabulary) -> pa.Table:
    """Read a table as it is, Parquet or delimited text; ids of text files are read as text if the run's ids are text."""
    file = Path(path)
    if not file.is_file() or is_parquet_file(file):
        return read_parquet(path, label)
    kinds = dict(zip(_ID_COLUMNS, (vocabulary.users, vocabulary.items), strict=True))
    texts = [name for name, kind in kinds.items() if kind.text]
    texts += [source for name, source in vocabulary.sources.items() if name in texts]
    numbers = [vocabulary.sources.get("rating", "rating")]
    return read_text(path, label, texts, missing=vocabulary.missing, numbers=numbers)


def _choose_format(
    names: Sequence[str],
    vocabulary: Vocabulary,
    label: str,
    roles: Sequence[str],
    named_columns: Mapping[str, str] | None = None,
) -> TableFormat:
    """Return the run's format for a table: only the sources that the table has, each required one checked."""
    for role in roles:
        _find_column(names, vocabulary, role, label, named_columns)
    columns = {name: source for name, source in vocabulary.columns.items() if source in names}
    return vocabulary.table_format.replace_columns(columns)


def _check_named_columns(names: Sequence[str], columns: Mapping[str, str] | None, label: str) -> None:
    """Raise DataError if a table does not have a column that the user named with `--column`."""
    for role, name in (columns or {}).items():
        if name not in names:
            raise DataError(
                f"--column {role}={name}: {label} has no column {name!r}; it has {join_names(names)}."
                f"{suggest_sentence(name, names)}"
            )


def _find_column(
    names: Sequence[str],
    vocabulary: Vocabulary,
    role: str,
    label: str,
    named_columns: Mapping[str, str] | None = None,
) -> str:
    """Return the name of a role's column in a table: that in the run's files, or else Nonet's.

    Args:
        names: Names of the table's columns.
        vocabulary: The run's names.
        role: The role.
        label: Prefix of the message.
        named_columns: The columns that the user named; None if the command has no `--column`.

    Raises:
        DataError: The table has neither.
    """
    own_name = ROLES[role]
    source = vocabulary.sources.get(own_name, own_name)
    for name in (source, own_name):
        if name in names:
            return name
    raise DataError(
        f"{label}: no column {source!r}, in which the run has the {role} (data.columns); it has {join_names(names)}."
        f"{suggest_sentence(source, names)} Rename the column to {source}"
        + ("." if named_columns is None else f", or name it: --column {role}=NAME.")
    )
