"""`nonet import FORMAT SRC DST`: converts files of other formats to the two Parquet tables that every scenario reads.

An importer checks its output by the same rules as a run, so imported data can be read. Both tables are written under
temporary names and renamed together at the end, so an error leaves no partial output.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nonet.atomic import replace_file
from nonet.errors import DataError
from nonet.samples.importers.text_form import detect_text_form, read_whole_text, split_lines
from nonet.samples.importers.text_tables import may_have_decimal_commas, parse_decimal_commas, read_delimited
from nonet.samples.sequences import index_items
from nonet.samples.tables import (
    MISSING,
    ROLES,
    TableFormat,
    check_interactions,
    check_items,
    convert_to_seconds,
    find_unit,
)
from nonet.suggest import join_names

Counts = dict[str, int]
PathLike = str | os.PathLike[str]


def write_tables(
    interactions: pa.Table,
    items: pa.Table,
    dst: PathLike,
    label: str,
    columns: dict[str, str] | None = None,
    item_columns: dict[str, str] | None = None,
    missing: tuple[str, ...] = MISSING,
    keep_names: bool = False,
) -> Counts:
    """Check both tables and write dst/interactions.parquet and dst/items.parquet together.

    Args:
        interactions: The interactions.
        items: The items.
        dst: Target folder.
        label: Prefix of error messages.
        columns: Column name in the interactions by role; None if the columns already have the names of the roles.
        item_columns: The same for the items.
        missing: Texts that stand for a missing value.
        keep_names: Whether columns keep their names; otherwise they get Nonet's. Numeric times keep their unit.

    Returns:
        The number of users, items and events.
    """
    log = check_interactions(interactions, TableFormat(columns or {}, missing), f"{label} interactions")
    catalogue = check_items(items, TableFormat(item_columns or {}, missing), f"{label} items")
    index_items(log["item_id"], catalogue["item_id"])  # raises DataError if an item is not in the items table
    time_column = (columns or {}).get("time", (columns or {}).get("timestamp", "timestamp"))
    tables = {
        "interactions.parquet": _restore_time_unit(log, interactions[time_column], time_column),
        "items.parquet": catalogue,
    }
    if keep_names:
        sources = {ROLES.get(role, role): name for role, name in (item_columns or {}).items()}
        own_names = [sources.get(name, name) for name in catalogue.column_names]
        tables = {
            "interactions.parquet": interactions,
            "items.parquet": catalogue.rename_columns(own_names),
        }
    folder = Path(dst)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as replaced_files:  # both tables are written before either file is renamed
        for name, table in tables.items():
            temporary_path = replaced_files.enter_context(replace_file(folder / name))
            pq.write_table(table, temporary_path, compression="zstd", compression_level=9)
    user_count = len(log["user_id"].unique())
    return {"users": user_count, "items": len(items), "events": len(interactions)}


def _restore_time_unit(log: pa.Table, times: pa.ChunkedArray, name: str) -> pa.Table:
    """Return a checked log with numeric times that are finer than seconds in their own unit, as later files have them.

    Args:
        log: The log with times in seconds, sorted by the finer times.
        times: The times as they were read.
        name: Name of their column, which may end in a unit.

    Returns:
        The log; unchanged if times in a column called `timestamp` would be read as other seconds.
    """
    if pa.types.is_dictionary(times.type) or find_unit(times, name) == "s":
        return log
    fine_times: Any = convert_to_seconds(times, name)[1]  # numbers that have a unit finer than seconds
    column = pa.chunked_array([np.sort(fine_times // 1).astype(np.int64)])
    try:
        seconds, _ = convert_to_seconds(column, "timestamp")
    except ValueError:  # the numbers do not show the unit that the name had
        return log
    index = log.column_names.index("timestamp")
    is_same = np.array_equal(seconds, log["timestamp"].to_numpy())
    return log.set_column(index, "timestamp", column) if is_same else log


def read_csv(path: PathLike, label: str, *, types: dict[str, pa.DataType] | None = None) -> pa.Table:
    """Read a delimited file with a header, in the delimiter and encoding that it has; `types` gives types by column."""
    form = detect_text_form(path, label)
    form = replace(form, delimiter=form.delimiter or ",", has_header=True)
    file, types = os.fspath(path), types or {}
    table = read_delimited(file, form, label, types)
    if may_have_decimal_commas(form):
        [table] = parse_decimal_commas([table], form, types, file, notes=[])
    check_names(table.column_names, f"{label} {path}")
    return table


def check_names(names: list[str], label: str) -> None:
    """Raise DataError if a name occurs more than once."""
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DataError(f"{label}: columns {join_names(repeated)} occur more than once; rename or drop them.")


def parse_ids(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert text ids to int64 if all of them are plain integers without leading zeros; otherwise return them unchanged."""
    try:
        numbers = column.cast(pa.int64())
    except pa.ArrowException:
        return column
    return numbers if numbers.cast(pa.string()).equals(column.cast(pa.string())) else column


def parse_years(titles: pa.ChunkedArray) -> pa.Array:
    """Return the year in brackets at the end of each title, int32, null if there is none."""
    matches = (
        re.search(r"\((\d{4})(?:\s*[-–]\s*\d{0,4})?\)\s*$", title or "") for title in titles.to_pylist()
    )
    return pa.array([int(match[1]) if match else None for match in matches], pa.int32())


def split_genres(column: pa.ChunkedArray) -> pa.Array:
    """Split texts such as `Comedy|Drama` to lists; `(no genres listed)` becomes an empty list."""
    genres = [[part for part in (text or "").split("|") if part] for text in column.to_pylist()]
    return pa.array(
        [[] if names == ["(no genres listed)"] else names for names in genres], pa.list_(pa.string())
    )


def read_jagged_lines(path: Path, label: str) -> tuple[list[str], list[list[str]]]:
    """Read lines of `user token token ...`, and return the users and the tokens of each; empty lines are skipped."""
    lines = [line.split() for line in split_lines(read_whole_text(path, label))]
    lines = [line for line in lines if line]
    return [line[0] for line in lines], [line[1:] for line in lines]


def parse_integers(tokens: list[str], label: str) -> np.ndarray:
    """Convert tokens to int64. Raises DataError that names the first invalid one."""
    try:
        return np.array(tokens, dtype=np.int64) if tokens else np.empty(0, np.int64)
    except (ValueError, OverflowError):
        invalid = next(token for token in tokens if not re.fullmatch(r"[+-]?\d{1,18}", token))
        raise DataError(f"{label}: {invalid!r} is not a whole number.") from None
