"""A CSV of interactions, and optionally one of items, with any usual column names.

Columns are found by their names (`nonet.samples.tables.guesses`). Ids stay what they are in the file: whole numbers
become int64, but `007` stays text. Other columns are kept under their own names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
from nonet.samples.importers.text_tables import read_text, read_text_schema
from nonet.samples.tables import (
    MISSING,
    NAMES,
    OF_INTERACTIONS,
    OF_ITEMS,
    align_item_column,
    choose_time_column,
    guess_roles,
    list_time_candidates,
    normalise_name,
    strip_type_suffix,
)
from nonet.suggest import join_names, suggest_sentence

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

_FEW_MISSING = 0.01
"""The share of rows without an id up to which they are left out, and beyond which the table is refused."""

_MANY_SHARED = 0.1


def import_csv(
    src: PathLike,
    dst: PathLike,
    columns: Mapping[str, str] | None = None,
    items: PathLike | None = None,
    notes: list[str] | None = None,
    missing: tuple[str, ...] = MISSING,
) -> Counts:
    """Import a table of interactions and perhaps one of items, delimited or JSON lines.

    Args:
        src: a file, a folder with interactions.csv and perhaps items.csv, or a folder of the parts of one table.
        dst: the folder for both Parquet tables.
        columns: role -> column; wins over guesses. Columns of a file without a header have numbers: {"user": "1"}.
        items: the table of items; without one the catalogue is the items that occur.
        notes: gets a sentence about each decision that is worth a look.
        missing: texts that stand for a missing value: rows without an id are refused, or left out where they are few.
    """
    path, items_path = _find_files(Path(src), items)
    forms = {path: read_text_schema(path, "csv", missing=missing)}
    roles_of: dict[Path, tuple[str, ...]] = {path: OF_INTERACTIONS}
    if items_path is not None:
        forms[items_path], roles_of[items_path] = (
            read_text_schema(items_path, "csv", missing=missing),
            OF_ITEMS,
        )
    there: dict[Path, list[str]] = {}
    for file, (schema, form) in forms.items():
        there[file] = list(schema.names)
        check_names(there[file], f"csv {file}")
        if not form.has_header and not has_column_numbers(columns, there[file]):
            raise DataError(describe_missing_header(f"csv {file}", len(there[file])))
    columns = resolve_column_numbers(
        columns, [name for (schema, form) in forms.values() if not form.has_header for name in schema.names]
    )
    sure = all(form.sure for _, form in forms.values())
    _check_columns(columns, [name for names in there.values() for name in names], f"csv {src}", sure)
    chosen = {file: guess_roles(roles_of[file], names, columns) for file, names in there.items()}
    if not sure and not {"user", "item", "time"} <= set(chosen[path]):
        raise DataError(
            f"csv {src}: the first line does not look like names of columns; write one, or name columns that it has"
        )
    if items_path is not None:
        chosen[path] = align_item_column(chosen[path], chosen[items_path], there[path], columns)
    table = _read_table(path, chosen[path], missing, notes)
    chosen[path] = _choose_time_column(table, chosen[path], columns, notes)
    named = {
        file: {role: strip_type_suffix(source) for role, source in picks.items()}
        for file, picks in chosen.items()
    }
    if items_path is None:
        catalogue, item_columns = _make_catalogue(table, named[path]), {}
    else:
        catalogue, item_columns = (
            _read_table(items_path, chosen[items_path], missing, notes),
            named[items_path],
        )
    table, catalogue = _align_id_types(
        table, named[path].get("item"), catalogue, item_columns.get("item", "item_id")
    )
    return write_tables(table, catalogue, dst, f"csv {src}", named[path], item_columns, missing)


def describe_missing_header(where: str, columns: int) -> str:
    """Return what to say of a file whose first line is data."""
    return (
        f"{where}: the file has no header: its first line is data, of {columns} columns. Say which column is "
        f"what by its number, such "
        "as --column user=1 --column time=2 --column item=3, or write a first line of names"
    )


def resolve_column_numbers(columns: Mapping[str, str] | None, names: Sequence[str]) -> dict[str, str]:
    """Return `columns` with the numbers of columns that have no names as `names` calls them."""
    return {
        role: f"column_{source}" if f"column_{source}" in names else source
        for role, source in (columns or {}).items()
    }


def has_column_numbers(columns: Mapping[str, str] | None, names: Sequence[str]) -> bool:
    """Return whether some of the columns of a file without a header are named by their numbers."""
    return any(source in names for source in resolve_column_numbers(columns, names).values())


def _find_files(src: Path, items: PathLike | None) -> tuple[Path, Path | None]:
    """Return the interactions file and the items file, if there is one."""
    if not src.is_dir():
        return src, None if items is None else Path(items)
    beside, log = src / "items.csv", src / "interactions.csv"
    if not log.is_file() and not beside.is_file():
        return src, None if items is None else Path(items)
    return log, Path(items) if items is not None else (beside if beside.is_file() else None)


def _check_columns(columns: Mapping[str, str] | None, there: list[str], what: str, sure: bool) -> None:
    """Raise DataError if a column that the user has assigned does not exist."""
    for role, source in (columns or {}).items():
        if source not in there:
            near = suggest_sentence(source, there)
            if not sure:
                raise DataError(
                    f"{what}: columns says {role}: {source}, which is not there; the first line does not look "
                    f"like names of columns"
                )
            raise DataError(
                f"{what}: columns says {role}: {source}, which is not there; it has {join_names(there)}.{near}"
            )


def _read_table(
    path: Path, chosen: dict[str, str], missing: tuple[str, ...], notes: list[str] | None
) -> pa.Table:
    """Read a text table without the rows that lack an id.

    Args:
        path: the file or folder.
        chosen: role -> column.
        missing: texts that stand for a missing value.
        notes: gets how many rows were left out.

    Raises:
        DataError: more than a small share of the rows lacks an id.
    """
    ids = [chosen[role] for role in ("user", "user_id", "item", "item_id") if role in chosen]
    table = read_text(path, "csv", ids, notes, missing)
    for name in ids:
        if not pa.types.is_string(table.schema.field(name).type):
            continue  # JSON lines have types of their own
        column = table[name]
        blank = pc.sum(pc.is_in(column, value_set=pa.array(missing, pa.string()))).as_py() or 0
        if blank + column.null_count > _FEW_MISSING * len(table):
            first = next(text for text in column.to_pylist() if text is None or text in missing)
            raise DataError(
                f"csv {path}: {blank + column.null_count:,} of {len(table):,} rows have no {name}: it is "
                f"{first or 'empty'!r} there, "
                "which would become one id. Drop or fill those rows, name another column: --column ROLE=NAME, or, "
                "if it is a real id, list the texts that do count as missing: --missing TEXT"
                + _describe_shared_times(table, name, chosen, missing)
            )
        if blank + column.null_count:
            table = table.filter(
                pc.invert(pc.is_in(column, value_set=pa.array([*missing, None], pa.string())))
            )
            if notes is not None:
                notes.append(f"{blank + column.null_count:,} rows of {path} have no {name} and are left out")
        table = _replace_column(table, name, parse_ids(table[name]))
    table = _split_declared_lists(table, missing)
    return table.rename_columns([strip_type_suffix(name) for name in table.column_names])


def _describe_shared_times(
    table: pa.Table, user: str, chosen: Mapping[str, str], missing: tuple[str, ...]
) -> str:
    """Return what to add to the refusal of a column of users whose other rows have no order in time; "" where they have."""
    time = chosen.get("time", "")
    if user not in (chosen.get("user"), chosen.get("user_id")) or time not in table.column_names:
        return ""
    known = table.filter(pc.invert(pc.is_in(table[user], value_set=pa.array([*missing, None], pa.string()))))
    moments = known.group_by([user, time]).aggregate([]).num_rows
    if not len(known) or (share := 1 - moments / len(known)) < _MANY_SHARED:
        return ""
    return f". {share:.0%} of its other rows share a timestamp with another row of their user: only the file orders them"


def _choose_time_column(
    table: pa.Table, chosen: Mapping[str, str], columns: Mapping[str, str] | None, notes: list[str] | None
) -> dict[str, str]:
    """Return the roles with the best of several time columns; `notes` gets the candidates."""
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
        kind = pa.float64() if name.endswith(":float_seq") else pa.string()
        try:
            column = pa.chunked_array([pa.array(lists, pa.list_(pa.string())).cast(pa.list_(kind))])
        except pa.ArrowException as error:
            raise DataError(f"csv: column {name!r}: {str(error).splitlines()[0]}") from None
        table = _replace_column(table, name, column)
    return table


def _make_catalogue(table: pa.Table, chosen: dict[str, str]) -> pa.Table:
    source = chosen.get("item", chosen.get("item_id", ""))
    if source not in table.column_names:
        return pa.table({"item_id": pa.array([], pa.int64())})
    return pa.table({"item_id": table[source].combine_chunks().unique().sort()})


def _align_id_types(
    table: pa.Table, name: str | None, items: pa.Table, item_name: str
) -> tuple[pa.Table, pa.Table]:
    """Convert the item ids of both tables to text if only one of them is all integers."""
    if name is None or item_name not in items.column_names or table[name].type == items[item_name].type:
        return table, items
    text = pa.string()
    return _replace_column(table, name, table[name].cast(text)), _replace_column(
        items, item_name, items[item_name].cast(text)
    )


def _replace_column(table: pa.Table, name: str, column: pa.ChunkedArray) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, column)
