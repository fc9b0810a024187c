"""A CSV of interactions, and optionally one of items, with any usual column names.

Columns are found by their names (`nonet.samples.tables.guesses`). Ids stay what they are in the file: whole numbers
become int64, but `007` stays text. Other columns are kept under their own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from nonet.errors import DataError
from nonet.samples.importers.importers import (
    Counts,
    PathLike,
    check_names,
    header,
    natural_ids,
    read_csv,
    write_tables,
)
from nonet.samples.tables import OF_INTERACTIONS, OF_ITEMS, bare_name, guess_roles
from nonet.suggest import did_you_mean, listed


def import_csv(
    src: PathLike, dst: PathLike, columns: Mapping[str, str] | None = None, items: PathLike | None = None
) -> Counts:
    """src: a CSV, or a folder with interactions.csv and perhaps items.csv; `columns` wins over guesses.

    Without an items CSV the catalogue is the items that occur.
    """
    path, items_path = _files(Path(src), items)
    tables: dict[Path, tuple[tuple[str, ...], list[str]]] = {path: (OF_INTERACTIONS, header(path, "csv"))}
    if items_path is not None:
        tables[items_path] = (OF_ITEMS, header(items_path, "csv"))
    for file, (_, names) in tables.items():
        check_names(names, f"csv {file}")
    _check_given(columns, [name for _, names in tables.values() for name in names], f"csv {src}")
    chosen = {file: guess_roles(roles, names, columns) for file, (roles, names) in tables.items()}
    table = _read(path, chosen[path])
    named = {
        file: {role: bare_name(source) for role, source in picks.items()} for file, picks in chosen.items()
    }
    if items_path is None:
        catalogue, item_columns = _occurring(table, named[path]), {}
    else:
        catalogue, item_columns = _read(items_path, chosen[items_path]), named[items_path]
    table, catalogue = _alike(table, named[path].get("item"), catalogue, item_columns.get("item", "item_id"))
    return write_tables(table, catalogue, dst, f"csv {src}", named[path], item_columns)


def _files(src: Path, items: PathLike | None) -> tuple[Path, Path | None]:
    if not src.is_dir():
        return src, None if items is None else Path(items)
    beside = src / "items.csv"
    return src / "interactions.csv", Path(items) if items is not None else (
        beside if beside.is_file() else None
    )


def _check_given(columns: Mapping[str, str] | None, there: list[str], what: str) -> None:
    for role, source in (columns or {}).items():
        if source not in there:
            near = did_you_mean(source, there)
            raise DataError(
                f"{what}: columns says {role}: {source}, which is not there; it has {listed(there)}.{near}"
            )


def _read(path: Path, chosen: dict[str, str]) -> pa.Table:
    ids = [chosen[role] for role in ("user", "user_id", "item", "item_id") if role in chosen]
    table = read_csv(path, "csv", types=dict.fromkeys(ids, pa.string()))
    for name in ids:
        blank = int((table[name].to_numpy() == "").sum())
        if blank:
            raise DataError(f"csv {path}: {blank} of {len(table)} rows have no {name}; every row needs one.")
        table = _with(table, name, natural_ids(table[name]))
    return table.rename_columns([bare_name(name) for name in table.column_names])


def _occurring(table: pa.Table, chosen: dict[str, str]) -> pa.Table:
    source = chosen.get("item", chosen.get("item_id", ""))
    if source not in table.column_names:
        return pa.table({"item_id": pa.array([], pa.int64())})
    return pa.table({"item_id": table[source].combine_chunks().unique().sort()})


def _alike(table: pa.Table, name: str | None, items: pa.Table, item_name: str) -> tuple[pa.Table, pa.Table]:
    """Item ids of both tables as text, when only one of them is all whole numbers."""
    if name is None or item_name not in items.column_names or table[name].type == items[item_name].type:
        return table, items
    text = pa.string()
    return _with(table, name, table[name].cast(text)), _with(items, item_name, items[item_name].cast(text))


def _with(table: pa.Table, name: str, column: pa.ChunkedArray) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, column)
