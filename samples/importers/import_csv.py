"""Imports a CSV of interactions, and optionally one of items, with any usual column names; one of the two may be Parquet.

The role of a column (user, item, time, ...) is guessed from its name (`nonet.samples.tables.guesses`). Ids that are whole numbers
become int64, but a column with an id such as `007` stays text. Other columns are kept under their own names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute

from nonet.errors import DataError
from nonet.samples.importers.importers import (
    Counts,
    PathLike,
    check_names,
    parse_ids,
    write_tables,
)
from nonet.samples.importers.text_form import TextForm
from nonet.samples.importers.text_tables import is_parquet_table, read_text, read_text_schema
from nonet.samples.tables import (
    MISSING,
    NAMES,
    OF_INTERACTIONS,
    OF_ITEMS,
    align_item_column,
    choose_time_column,
    describe_rewritten_ids,
    describe_split,
    guess_categories,
    guess_roles,
    list_time_candidates,
    normalise_name,
    read_parquet,
    read_parquet_schema,
    replace_column,
    strip_type_suffix,
)
from nonet.suggest import join_names, suggest_sentence

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

_MAX_MISSING_SHARE = 0.01
"""The share of rows without an id up to which these rows are left out; with a larger share, the table is refused."""

_MIN_TIED_SHARE = 0.1
"""The share of rows with a timestamp of another row of their user from which an error mentions it."""


@dataclass(frozen=True)
class CsvTables:
    """The two tables as they were read, with the names of their columns.

    Attributes:
        interactions: The interactions.
        items: The items; those that occur if there is no table of items.
        roles: Column of the interactions by role.
        item_roles: Column of the items by role.
    """

    interactions: pa.Table
    items: pa.Table
    roles: dict[str, str]
    item_roles: dict[str, str]

    def merge_roles(self) -> dict[str, str] | None:
        """Return the column of each role in both tables; None if one table has a column that has a role only in the other."""
        roles = {**self.roles, **self.item_roles}
        for own_roles, table in ((self.roles, self.interactions), (self.item_roles, self.items)):
            if any(
                own_roles.get(role) != name and name in table.column_names for role, name in roles.items()
            ):
                return None
        return roles if {**roles, **self.roles} == roles else None


def import_csv(
    src: PathLike,
    dst: PathLike,
    columns: Mapping[str, str] | None = None,
    items: PathLike | None = None,
    notes: list[str] | None = None,
    missing: tuple[str, ...] = MISSING,
) -> Counts:
    """Import a table of interactions and optionally one of items into Parquet tables in the folder `dst`.

    The other arguments, and errors, are those of `read_csv_tables`.

    Returns:
        The number of users, items and events.
    """
    tables = read_csv_tables(src, columns, items, notes, missing)
    label = f"csv {src}"
    for role in ("user", "item"):
        note = (
            describe_rewritten_ids(tables.interactions[tables.roles[role]], role)
            if role in tables.roles
            else None
        )
        if note is not None and notes is not None:
            notes.append(note)
    return write_tables(
        tables.interactions, tables.items, dst, label, tables.roles, tables.item_roles, missing
    )


def read_csv_tables(
    src: PathLike,
    columns: Mapping[str, str] | None = None,
    items: PathLike | None = None,
    notes: list[str] | None = None,
    missing: tuple[str, ...] = MISSING,
) -> CsvTables:
    """Read a table of interactions and optionally one of items, each delimited, JSON lines or Parquet.

    Args:
        src: A file, a folder with interactions.csv and perhaps items.csv, or a folder of the parts of one table.
        columns: Column name by role; takes precedence over guesses. Columns of a file without a header have numbers:
            {"user": "1"}.
        items: The table of items; None to make the catalogue from the items that occur.
        notes: Receives a sentence about each decision that the user should check.
        missing: Texts that stand for a missing value. Rows without an id are left out if they are few, else refused.

    Raises:
        DataError: The files cannot be read, or lack a required column or ids.
    """
    path, items_path = _find_files(Path(src), items)
    schemas = {path: _read_schema(path, missing)}
    candidate_roles: dict[Path, tuple[str, ...]] = {path: OF_INTERACTIONS}
    if items_path is not None:
        schemas[items_path] = _read_schema(items_path, missing)
        candidate_roles[items_path] = OF_ITEMS
    names_by_file: dict[Path, list[str]] = {}
    for file, (schema, form) in schemas.items():
        names_by_file[file] = list(schema.names)
        check_names(names_by_file[file], f"csv {file}")
        if form is not None and not form.has_header and not has_column_numbers(columns, names_by_file[file]):
            raise DataError(describe_missing_header(f"csv {file}", len(names_by_file[file])))
    text_schemas = [(schema, form) for schema, form in schemas.values() if form is not None]
    columns = resolve_column_numbers(
        columns, [name for schema, form in text_schemas if not form.has_header for name in schema.names]
    )
    headers_are_sure = all(form.sure for _, form in text_schemas)
    all_names = [name for names in names_by_file.values() for name in names]
    _check_columns(columns, all_names, f"csv {src}", headers_are_sure)
    # The column of each role, by file.
    chosen = {
        file: guess_roles(candidate_roles[file], names, columns) for file, names in names_by_file.items()
    }
    if not headers_are_sure and not {"user", "item", "time"} <= set(chosen[path]):
        raise DataError(
            f"csv {src}: the first line does not look like names of columns; write one, or name columns that it has"
        )
    if items_path is not None:
        chosen[path] = align_item_column(chosen[path], chosen[items_path], names_by_file[path], columns)
    table = _read_table(path, chosen[path], missing, notes)
    chosen[path] = _choose_time_column(table, chosen[path], columns, notes)
    # `_read_table` removes type suffixes from the names of the columns.
    roles = {
        file: {role: strip_type_suffix(name) for role, name in columns_by_role.items()}
        for file, columns_by_role in chosen.items()
    }
    if items_path is None:
        catalogue = _make_catalogue(table, roles[path])
        item_roles = {"item": catalogue.column_names[0]}
    else:
        catalogue = _read_table(items_path, chosen[items_path], missing, notes)
        item_roles = guess_categories(roles[items_path], catalogue)
        categories = item_roles.get("categories", "")
        if notes is not None and categories in catalogue.column_names:
            split_note = describe_split(catalogue[categories], categories)
            notes += [] if split_note is None else [split_note]
    table, catalogue = _align_id_types(
        table, roles[path].get("item"), catalogue, item_roles.get("item", "item_id")
    )
    return CsvTables(table, catalogue, roles[path], item_roles)


def _read_schema(path: Path, missing: tuple[str, ...]) -> tuple[pa.Schema, TextForm | None]:
    """Read the schema of a table, and the format of its text; None for Parquet."""
    if is_parquet_table(path):
        return read_parquet_schema(path, "table"), None
    return read_text_schema(path, "csv", missing=missing)


def describe_missing_header(where: str, columns: int) -> str:
    """Return the error message for a file whose first line is data; `where` opens it, `columns` is the number of columns."""
    return (
        f"{where}: the file has no header: its first line is data, of {columns} columns. Say which column is "
        "what by its number, such "
        "as --column user=1 --column time=2 --column item=3, or write a first line of names"
    )


def resolve_column_numbers(columns: Mapping[str, str] | None, names: Sequence[str]) -> dict[str, str]:
    """Replace the numbers of columns without a header by names: "1" becomes "column_1", if `names` contains that.

    Args:
        columns: Column name or number by role.
        names: Names of the columns of files without a header.
    """
    return {
        role: f"column_{column}" if f"column_{column}" in names else column
        for role, column in (columns or {}).items()
    }


def has_column_numbers(columns: Mapping[str, str] | None, names: Sequence[str]) -> bool:
    """Return whether `columns` names a column of a file without a header, by its number or as "column_1"."""
    return any(column in names for column in resolve_column_numbers(columns, names).values())


def _find_files(src: Path, items: PathLike | None) -> tuple[Path, Path | None]:
    """Return the path of the interactions, and the path of the items or None; `items` takes precedence over src/items.csv."""
    given_items = None if items is None else Path(items)
    items_file, interactions_file = src / "items.csv", src / "interactions.csv"
    is_pair = src.is_dir() and (interactions_file.is_file() or items_file.is_file())
    if not is_pair:  # one file, or the parts of one table
        return src, given_items
    return interactions_file, given_items or (items_file if items_file.is_file() else None)


def _check_columns(columns: Mapping[str, str], names: list[str], where: str, headers_are_sure: bool) -> None:
    """Raise DataError if a column that the user has assigned to a role is not in `names`."""
    for role, column in columns.items():
        if column not in names:
            suggestion = suggest_sentence(column, names)
            if not headers_are_sure:
                raise DataError(
                    f"{where}: columns says {role}: {column}, which is not there; the first line does not look "
                    f"like names of columns"
                )
            raise DataError(
                f"{where}: columns says {role}: {column}, which is not there; it has {join_names(names)}.{suggestion}"
            )


def _read_table(
    path: Path, chosen: dict[str, str], missing: tuple[str, ...], notes: list[str] | None
) -> pa.Table:
    """Read a table without the rows that lack an id, and without type suffixes in its column names.

    Args:
        path: The file or folder.
        chosen: Column name by role.
        missing: Texts that stand for a missing value.
        notes: Receives how many rows were left out.

    Raises:
        DataError: More than `_MAX_MISSING_SHARE` of the rows lack an id.
    """
    id_columns = [chosen[role] for role in ("user", "user_id", "item", "item_id") if role in chosen]
    numbers = [chosen["rating"]] if "rating" in chosen else []
    is_parquet = is_parquet_table(path)
    table = (
        _read_parquet(path, id_columns)
        if is_parquet
        else read_text(path, "csv", id_columns, notes, missing, numbers)
    )
    for name in id_columns:
        if not pa.types.is_string(table.schema.field(name).type):
            continue  # JSON lines have types of their own
        column = table[name]
        marked_count = pc.sum(pc.is_in(column, value_set=pa.array(missing, pa.string()))).as_py() or 0
        missing_count = marked_count + column.null_count
        if missing_count > _MAX_MISSING_SHARE * len(table):
            first_missing = next(text for text in column.to_pylist() if text is None or text in missing)
            raise DataError(
                f"csv {path}: {missing_count:,} of {len(table):,} rows have no {name}: it is "
                f"{first_missing or 'empty'!r} there, "
                "which would become one id. Drop or fill those rows, name another column: --column ROLE=NAME, or, "
                "if it is a real id, list the texts that do count as missing: --missing TEXT"
                + _describe_shared_times(table, name, chosen, missing)
            )
        if missing_count:
            table = table.filter(
                pc.invert(pc.is_in(column, value_set=pa.array([*missing, None], pa.string())))
            )
            if notes is not None:
                notes.append(f"{missing_count:,} rows of {path} have no {name} and are left out")
        table = replace_column(table, name, parse_ids(table[name]))
    table = table if is_parquet else _split_declared_lists(table, missing)
    return table.rename_columns([strip_type_suffix(name) for name in table.column_names])


def _read_parquet(path: Path, id_columns: Sequence[str]) -> pa.Table:
    """Read a Parquet table, with integers and texts of its columns of ids as text, as those of a text table are."""
    table = read_parquet(path, "table")
    for name in id_columns:
        kind = table.schema.field(name).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if pa.types.is_integer(kind) or pa.types.is_large_string(kind) or pa.types.is_string(kind):
            table = replace_column(table, name, table[name].cast(pa.string()))
    return table


def _describe_shared_times(
    table: pa.Table, id_column: str, chosen: Mapping[str, str], missing: tuple[str, ...]
) -> str:
    """Return a sentence for an error if many rows with a user share a timestamp with another row of that user; else "".

    Args:
        table: The table.
        id_column: The column with missing ids; "" is returned unless this is the column of the users.
        chosen: Column name by role.
        missing: Texts that stand for a missing value.
    """
    time = chosen.get("time", "")
    if id_column not in (chosen.get("user"), chosen.get("user_id")) or time not in table.column_names:
        return ""
    is_missing = pc.is_in(table[id_column], value_set=pa.array([*missing, None], pa.string()))
    known = table.filter(pc.invert(is_missing))
    distinct_count = known.group_by([id_column, time]).aggregate([]).num_rows
    if not len(known) or (share := 1 - distinct_count / len(known)) < _MIN_TIED_SHARE:
        return ""
    return f". {share:.0%} of its other rows share a timestamp with another row of their user: only the file orders them"


def _choose_time_column(
    table: pa.Table, chosen: Mapping[str, str], columns: Mapping[str, str] | None, notes: list[str] | None
) -> dict[str, str]:
    """Return `chosen` with the best of several time columns, unless the user named one; `notes` receives the candidates."""
    candidates = list_time_candidates(table.column_names)
    if {"time", "timestamp"} & set(columns or {}) or "time" not in chosen or len(candidates) < 2:
        return dict(chosen)
    best = choose_time_column(table, candidates, strip_type_suffix(chosen["time"]))
    if notes is not None:
        notes.append(f"time = {best}, the finest complete one of {join_names(candidates)}")
    return {**chosen, "time": best}


def _split_declared_lists(table: pa.Table, missing: tuple[str, ...]) -> pa.Table:
    """Convert RecBole's `:token_seq` and `:float_seq` columns to lists split at blanks; title columns stay whole."""
    for name in table.column_names:
        if not re.search(r":(token|float)_seq$", name) or normalise_name(name) in NAMES["title"].split():
            continue
        words = pc.split_pattern_regex(pc.utf8_trim_whitespace(table[name].cast(pa.string())), r"\s+")
        lists = [[word for word in row or () if word and word not in missing] for row in words.to_pylist()]
        value_type = pa.float64() if name.endswith(":float_seq") else pa.string()
        try:
            column = pa.chunked_array([pa.array(lists, pa.list_(pa.string())).cast(pa.list_(value_type))])
        except pa.ArrowException as error:
            raise DataError(f"csv: column {name!r}: {str(error).splitlines()[0]}") from None
        table = replace_column(table, name, column)
    return table


def _make_catalogue(table: pa.Table, roles: dict[str, str]) -> pa.Table:
    """Return a table with the column of distinct item ids of the interactions, sorted; `roles` has the column name by role."""
    item_column = roles.get("item", roles.get("item_id", ""))
    if item_column not in table.column_names:
        return pa.table({"item_id": pa.array([], pa.int64())})
    return pa.table({item_column: table[item_column].combine_chunks().unique().sort()})


def _align_id_types(
    table: pa.Table, name: str | None, items: pa.Table, item_name: str
) -> tuple[pa.Table, pa.Table]:
    """Convert the item ids of both tables to text if their types differ: only one of them has integer ids."""
    if name is None or item_name not in items.column_names or table[name].type == items[item_name].type:
        return table, items
    text = pa.string()
    return replace_column(table, name, table[name].cast(text)), replace_column(
        items, item_name, items[item_name].cast(text)
    )
