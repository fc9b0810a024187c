"""Reads and checks the two tables of a scenario, and converts them to the names and types that the other modules expect.

interactions: user_id, item_id (int64 or text), timestamp (int64 unix seconds), optionally event and rating, any other column.
items: item_id (unique), optionally title and categories (list of text), any other column.

Invalid files are reported here, before a worker starts, as one line that says what the table has, what is expected and what to
do. A source is the name that a column has in the files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.errors import ConfigError, DataError
from nonet.samples.tables.ids import describe_rewritten_ids
from nonet.samples.tables.paths import read_parquet
from nonet.samples.tables.table_format import FRACTION, INTERNAL, ROLES, Columns, to_table_format
from nonet.samples.tables.times import compute_fractions, convert_times, convert_to_seconds, get_unit_by_name
from nonet.samples.tables.word_lists import parse_word_lists
from nonet.suggest import join_names, suggest_sentence

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them


def read_tables(
    interactions: str | os.PathLike[str],
    items: str | os.PathLike[str] | None,
    columns: Columns = None,
) -> tuple[pa.Table, pa.Table | None]:
    """Read and check both tables.

    Args:
        interactions: Path of the interactions.
        items: Path of the items; None if there are none.
        columns: Sources of columns by Nonet's names, or the whole table format.

    Returns:
        The interactions and the items; None if there are none.

    Raises:
        DataError: If a table is not valid, or `columns` names a column that neither table has.
    """
    raw_interactions = read_parquet(interactions, "interactions")
    raw_items = None if items is None else read_parquet(items, "items")
    available = [*raw_interactions.column_names, *(raw_items.column_names if raw_items is not None else [])]
    check_columns(columns, available)
    return (
        check_interactions(raw_interactions, columns, f"interactions {interactions}"),
        None if raw_items is None else check_items(raw_items, columns, f"items {items}"),
    )


def check_columns(columns: Columns, available: Collection[str]) -> None:
    """Raise DataError if `columns` names a column that is not in `available`, the columns of both tables."""
    for name, source in to_table_format(columns).columns.items():
        if source not in available:
            near = suggest_sentence(source, available)
            raise DataError(
                f"columns: {name}: {source!r} is in neither table.{near} There are: {join_names(available)}."
            )


def read_interactions(
    path: str | os.PathLike[str],
    columns: Columns = None,
    only: Collection[str] | None = None,
    table: str = "interactions",
) -> pa.Table:
    """Read and check the interactions behind a path, glob, folder, URI or `builtin:` name.

    Args:
        path: Path of the files.
        columns: Sources of columns by Nonet's names, or the whole table format.
        only: Columns to read, by Nonet's names; None reads all.
        table: The name of the table in error messages.
    """
    rows = read_parquet(path, table, _get_source_names(only, columns))
    return check_interactions(rows, columns, f"{table} {path}")


def read_items(
    path: str | os.PathLike[str],
    columns: Columns = None,
    only: Collection[str] | None = None,
) -> pa.Table:
    """Read and check the items behind a path, glob, folder, URI or `builtin:` name; arguments as `read_interactions`."""
    return check_items(
        read_parquet(path, "items", _get_source_names(only, columns)), columns, f"items {path}"
    )


def _get_source_names(only: Collection[str] | None, columns: Columns) -> set[str] | None:
    """Return the columns to read from the files for the columns `only` of Nonet: these names and their sources.

    None stands for all columns.
    """
    sources = _get_sources(columns)
    if only is None:
        return None
    return {*only, *(sources[name] for name in only if name in sources)}


def check_interactions(table: pa.Table, columns: Columns, label: str) -> pa.Table:
    """Rename the columns of interactions, check the values and normalise them.

    If times are finer than seconds, the rows are sorted by them, because seconds alone do not keep the order.

    Args:
        table: The interactions as they were read.
        columns: Sources of columns by Nonet's names, or the whole table format.
        label: Prefix of every error message.
    """
    refuse_internal_columns(table.column_names, label)
    table = _rename_roles(table, columns, label)
    _check_not_empty(table, label)
    table, raw_times = _check_event_values(table, columns, label, unit=None)
    return table if raw_times is None else table.take(pa.array(np.argsort(raw_times, kind="stable")))


def refuse_internal_columns(names: Iterable[str], label: str) -> None:
    """Raise DataError if a table of the user has a column with a name that Nonet gives to columns which it adds."""
    for name in names:
        if name.startswith(INTERNAL):
            raise DataError(f"{label}: column {name!r} has a name that Nonet uses for its own; rename it")


def check_events(
    table: pa.Table, columns: Columns, label: str, unit: str | None = None
) -> tuple[pa.Table, np.ndarray | None]:
    """Check some of the rows of interactions as `check_interactions` does, without sorting them; the table may be empty.

    Args:
        table: The rows as they were read.
        columns: Sources of columns by Nonet's names, or the whole table format.
        label: Prefix of every error message.
        unit: Unit of numeric times if it is known from more rows; None to determine it.

    Returns:
        The table, and the raw times [N] to sort its rows by if they are finer than seconds (None otherwise).
    """
    return _check_event_values(_rename_roles(table, columns, label), columns, label, unit)


def _rename_roles(table: pa.Table, columns: Columns, label: str) -> pa.Table:
    """Rename the columns of interactions to Nonet's names. Raises DataError if the user, item or time is missing."""
    sources = _get_sources(columns)
    table = _simplify_types(_rename_columns(table, sources))
    for role in ("user", "item", "time"):
        _require_column(table, ROLES[role], role, sources, label)
    return table


def _check_event_values(
    table: pa.Table, columns: Columns, label: str, unit: str | None
) -> tuple[pa.Table, np.ndarray | None]:
    """Check the values of interactions whose columns have been renamed, and normalise them; returns as `check_events`."""
    for name in ("user_id", "item_id", "timestamp"):
        _check_no_nulls(table, name, label)
    for name in ("user_id", "item_id"):
        _check_no_missing_texts(
            table, name, _get_sources(columns).get(name, name), to_table_format(columns).missing, label
        )
    table = _normalise_ids(table, "user_id", label)
    table = _normalise_ids(table, "item_id", label)
    if "event" in table.column_names:
        _check_event_type(table, label)
    if "rating" in table.column_names:
        table = _normalise_rating(table, label)
    source = _get_sources(columns).get("timestamp", "timestamp")
    if run_unit := to_table_format(columns).time_unit:
        unit = get_unit_by_name(source) or run_unit
        convert_times(
            table["timestamp"], unit, f"{label}: column {source!r}"
        )  # raises an error that names the unit
    normalised, raw_times = _normalise_times(table, source, label, unit)
    if raw_times is not None and to_table_format(columns).keeps_fractions:
        fractions = compute_fractions(table["timestamp"], source, unit)
        normalised = normalised.append_column(FRACTION, pa.array(fractions))
    return normalised, raw_times


def check_items(table: pa.Table, columns: Columns, label: str) -> pa.Table:
    """Rename the columns of items, check the values and normalise them.

    Args:
        table: The items as they were read.
        columns: Sources of columns by Nonet's names, or the whole table format.
        label: Prefix of every error message.
    """
    sources = {name: source for name, source in _get_sources(columns).items() if source in table.column_names}
    table = _simplify_types(_rename_columns(table, sources))
    _require_column(table, "item_id", "item", sources, label)
    _check_not_empty(table, label)
    _check_no_nulls(table, "item_id", label)
    missing_texts = to_table_format(columns).missing
    _check_no_missing_texts(table, "item_id", sources.get("item_id", "item_id"), missing_texts, label)
    table = _normalise_ids(table, "item_id", label)
    _check_no_duplicates(table, label)
    if "title" in table.column_names:
        table = _normalise_title(table, label)
    if "categories" in table.column_names:
        table = _normalise_categories(table, missing_texts, label)
    return table


def list_id_names(columns: Columns) -> list[str]:
    """Return the names that the column of item ids may have in a file beside the tables: that of the tables, and item_id."""
    return list(dict.fromkeys([_get_sources(columns).get("item_id", "item_id"), "item_id"]))


def _get_sources(columns: Columns) -> dict[str, str]:
    """Return the sources of columns by Nonet's names; a role (`user`, `item`, `time`) is replaced by its column's name."""
    sources: dict[str, str] = {}
    for name, source in to_table_format(columns).columns.items():
        if not isinstance(source, str):
            raise ConfigError(
                f"columns: {name}: {source!r} is not a column name; write {name}: <column of your table>."
            )
        sources[ROLES.get(name, name)] = source
    return sources


def _rename_columns(table: pa.Table, sources: Mapping[str, str]) -> pa.Table:
    """Rename columns from their sources to Nonet's names; drop a column that has such a name but is not its source."""
    name_by_source = {source: name for name, source in sources.items() if source in table.column_names}
    names = name_by_source.values()
    columns = [column for column in table.column_names if column in name_by_source or column not in names]
    return table.select(columns).rename_columns([name_by_source.get(column, column) for column in columns])


def _simplify_types(table: pa.Table) -> pa.Table:
    """Decode dictionary columns, convert large_string and string_view to string, and remove schema metadata."""
    for i, field in enumerate(table.schema):
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        kind = pa.string() if pa.types.is_large_string(kind) or pa.types.is_string_view(kind) else kind
        if kind != field.type:
            table = table.set_column(i, field.name, table.column(i).cast(kind))
    return table.replace_schema_metadata(None)


def _require_column(table: pa.Table, name: str, role: str, sources: Mapping[str, str], label: str) -> None:
    """Raise DataError if a required column, by Nonet's name and its role, is missing or occurs more than once."""
    if table.column_names.count(name) > 1:
        raise DataError(f"{label}: column {name!r} occurs more than once.")
    if name in table.column_names:
        return
    source = sources.get(name, name)
    near = suggest_sentence(source, table.column_names)
    origin = f" (columns says {role}: {source})" if source != name else ""
    raise DataError(
        f"{label}: no column {source!r}{origin}; it has {join_names(table.column_names)}.{near} "
        f"Name the column that holds the {role}: columns: {{{role}: <column>}}."
    )


def _check_not_empty(table: pa.Table, label: str) -> None:
    if not len(table):
        raise DataError(
            f"{label}: the table is empty (columns {join_names(table.column_names)}, no rows). Give a table with rows."
        )


def _check_no_nulls(table: pa.Table, name: str, label: str) -> None:
    """Raise DataError if a column has null or non-finite values."""
    column = table[name]
    if pa.types.is_floating(column.type):
        is_missing = ~np.isfinite(column.to_numpy())
    elif column.null_count:
        is_missing = column.is_null().to_numpy()
    else:
        return
    if is_missing.any():
        raise DataError(
            f"{label}: {int(is_missing.sum())} of {len(column)} rows have no {name}; every row needs one; the first is row "
            f"{int(is_missing.argmax())}. Drop or fill those rows."
        )


def _check_no_missing_texts(
    table: pa.Table, name: str, source: str, missing_texts: Collection[str], label: str
) -> None:
    """Raise DataError if the id of a user or an item is a text that stands for a missing value.

    Args:
        table: The rows.
        name: The column of ids.
        source: The name of this column in the files, for messages.
        missing_texts: The texts that stand for a missing value.
        label: Prefix of the message.
    """
    column = table[name]
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return
    is_missing = pc.is_in(column, value_set=pa.array(list(missing_texts), column.type))
    count = pc.sum(is_missing).as_py() or 0
    if count:
        text = column.filter(is_missing)[0].as_py()
        raise DataError(
            f"{label}: {count:,} of {len(column):,} rows have no {name}: {source} is {text!r} in the first of "
            "them, which stands for a missing value and would become one id. Drop or fill those rows, name another column, "
            f"or, if {text!r} is a real id, list the texts that do count as missing: data.missing (nonet new --missing)"
        )


def _normalise_ids(table: pa.Table, name: str, label: str) -> pa.Table:
    """Convert integer ids to int64; text stays as it is. Raises DataError for other types and larger integers."""
    kind = table.schema.field(name).type
    if pa.types.is_string(kind):
        return table
    if not pa.types.is_integer(kind):
        raise DataError(
            f"{label}: column {name!r} is {kind}; expected whole numbers or text. Cast it before writing."
        )
    try:
        return replace_column(table, name, table[name].cast(pa.int64()))
    except pa.ArrowException:
        raise DataError(f"{label}: column {name!r} ({kind}) has ids over 2^63; write them as text.") from None


def _check_event_type(table: pa.Table, label: str) -> None:
    kind = table.schema.field("event").type
    if not (pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise DataError(f"{label}: column 'event' is {kind}; wanted text or whole numbers, such as 'click'.")
    if table["event"].null_count:
        _check_no_nulls(table, "event", label)


def _normalise_rating(table: pa.Table, label: str) -> pa.Table:
    """Convert ratings to float32. Raises DataError with the first value if they are no numbers."""
    kind = table.schema.field("rating").type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise DataError(
            f"{label}: column 'rating' is {kind}; wanted numbers{_describe_first_text(table['rating'])}."
        )
    return replace_column(table, "rating", table["rating"].cast(pa.float32(), safe=False))


def _describe_first_text(column: pa.ChunkedArray) -> str:
    """Return a clause with the first text of a column that is no number; "" if its type is no text or all are numbers."""
    if not pa.types.is_string(column.type):
        return ""
    is_wrong = pc.invert(pc.match_substring_regex(column, r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"))
    row = pc.index(is_wrong, True).as_py()
    if row < 0:
        return ""
    text = column[row].as_py()
    advice = ", so write a point for the decimal comma" if re.fullmatch(r"[+-]?\d+,\d+", text) else ""
    return f"; row {row} has {text!r}{advice}"


def _normalise_times(
    table: pa.Table, source: str, label: str, unit: str | None
) -> tuple[pa.Table, np.ndarray | None]:
    """Convert timestamps to unix seconds.

    Returns:
        The table, and the raw times [N] if they are finer than seconds (None otherwise).
    """
    try:
        seconds, raw_times = convert_to_seconds(table["timestamp"], source, unit)
    except TypeError as error:
        raise DataError(
            f"{label}: column {source!r} is {error}; wanted a timestamp, or a number of seconds or "
            "milliseconds."
        ) from None
    except ValueError as error:
        raise DataError(
            f"{label}: column {source!r}: {error}. Write one unit; a name that ends in _s, _ms, _us or _ns says which."
        ) from None
    return replace_column(table, "timestamp", pa.chunked_array([pa.array(seconds)])), raw_times


def _check_no_duplicates(table: pa.Table, label: str) -> None:
    """Raise DataError if an item id occurs more than once."""
    counts = table["item_id"].value_counts()
    values, occurrences = counts.field(0), counts.field(1)
    repeated_ids = values.filter(pa.array(occurrences.to_numpy() > 1))
    if len(repeated_ids):
        raise DataError(
            f"{label}: {len(repeated_ids)} item ids occur more than once, the first: "
            f"{join_names(repeated_ids.to_pylist()[:5])}. "
            "An item has one row."
            + ("" if (note := describe_rewritten_ids(values, "item")) is None else f" {note}")
        )


def _normalise_title(table: pa.Table, label: str) -> pa.Table:
    """Convert integer titles to text."""
    kind = table.schema.field("title").type
    if pa.types.is_integer(kind):
        return replace_column(table, "title", table["title"].cast(pa.string()))
    if not pa.types.is_string(kind):
        raise DataError(f"{label}: column 'title' is {kind}; wanted text.")
    return table


def split_categories(column: pa.Array | pa.ChunkedArray) -> list[list[str]]:
    """Split each text at `|`; null becomes an empty list."""
    return [[part for part in (text or "").split("|") if part] for text in column.to_pylist()]


def _normalise_categories(table: pa.Table, missing_texts: tuple[str, ...], label: str) -> pa.Table:
    """Convert categories to a list of words per item, without missing texts; see `word_lists`."""
    column = table["categories"].combine_chunks()
    if column.type == pa.list_(pa.string()) and not column.null_count and not column.flatten().null_count:
        return replace_column(table, "categories", column)
    try:
        return replace_column(table, "categories", parse_word_lists(column, missing_texts))
    except TypeError as error:
        raise DataError(
            f"{label}: column 'categories' is {error}; wanted a list of text, or text cut by |. Write the names "
            "of the categories, or leave the column out"
        ) from None


def replace_column(table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Return a table in which a column has other values."""
    return table.set_column(table.column_names.index(name), name, column)
