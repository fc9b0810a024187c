"""Tables that are read for a finished run: more events, new items, users. They have the column names of the run's own files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nonet.deploy.opened.vocabulary import Vocabulary
from nonet.errors import DataError
from nonet.samples.importers import is_parquet_file, read_text
from nonet.samples.tables import (
    ROLES,
    TableFormat,
    check_events,
    check_interactions,
    check_items,
    read_parquet,
)
from nonet.suggest import join_names, suggest_sentence

_ID_COLUMNS = ("user_id", "item_id")


def read_run_interactions(path: str, vocabulary: Vocabulary, *, keep_order: bool = False) -> pa.Table:
    """Read interactions, Parquet or delimited text, with Nonet's column names.

    Args:
        path: A file, folder, pattern or URI.
        vocabulary: The run's names.
        keep_order: Whether rows stay in their order, also if their times are finer than seconds, by which they are sorted else.

    Raises:
        DataError: The table cannot be read, or lacks a column; the message has the name that the run gives it.
    """
    label = f"interactions {path}"
    raw = _read_table(path, "interactions", vocabulary)
    table_format = _choose_format(raw.column_names, vocabulary, label, ("user", "item", "time"))
    if keep_order:
        return check_events(raw, table_format, label)[0]
    return check_interactions(raw, table_format, label)


def read_run_items(path: str, vocabulary: Vocabulary) -> pa.Table:
    """Read items; arguments and errors are those of `read_run_interactions`."""
    label = f"items {path}"
    raw = _read_table(path, "items", vocabulary)
    return check_items(raw, _choose_format(raw.column_names, vocabulary, label, ("item",)), label)


def iterate_user_ids(path: Path, vocabulary: Vocabulary, chunk_size: int) -> Iterator[list[Any]]:
    """Yield the ids of users in a table in chunks, in order.

    Args:
        path: A Parquet file, or one of delimited text.
        vocabulary: The run's names.
        chunk_size: Number of users of a chunk.

    Raises:
        DataError: The file cannot be read, or lacks the column of users.
    """
    try:
        if not is_parquet_file(path):
            table = _read_table(str(path), "users", vocabulary)
            column = _find_column(table.column_names, vocabulary, "user", f"users {path}")
            ids = table[column].to_pylist()
            return (ids[start : start + chunk_size] for start in range(0, len(ids), chunk_size))
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as a table: {str(error).splitlines()[0]}") from None
    column = _find_column(file.schema_arrow.names, vocabulary, "user", f"users {path}")
    return (batch[column].to_pylist() for batch in file.iter_batches(chunk_size, columns=[column]))


def _read_table(path: str, label: str, vocabulary: Vocabulary) -> pa.Table:
    """Read a table as it is, Parquet or delimited text; ids of text files are read as text if the run's ids are text."""
    file = Path(path)
    if not file.is_file() or is_parquet_file(file):
        return read_parquet(path, label)
    kinds = dict(zip(_ID_COLUMNS, (vocabulary.users, vocabulary.items), strict=True))
    texts = [name for name, kind in kinds.items() if kind.text]
    texts += [source for name, source in vocabulary.sources.items() if name in texts]
    return read_text(path, label, texts, missing=vocabulary.missing)


def _choose_format(
    names: Sequence[str], vocabulary: Vocabulary, label: str, roles: Sequence[str]
) -> TableFormat:
    """Return the run's format for a table: only the sources that the table has, each required one checked."""
    for role in roles:
        _find_column(names, vocabulary, role, label)
    columns = {name: source for name, source in vocabulary.columns.items() if source in names}
    return vocabulary.table_format.replace_columns(columns)


def _find_column(names: Sequence[str], vocabulary: Vocabulary, role: str, label: str) -> str:
    """Return the name of a role's column in a table: that in the run's files, or else Nonet's.

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
        f"{suggest_sentence(source, names)} Rename the column to {source}."
    )
