"""Detection of the tables of interactions and items in a data set, and of the roles of their columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nonet.errors import ConfigError
from nonet.samples.importers import (
    ENDINGS,
    TextForm,
    describe_missing_header,
    has_column_numbers,
    is_parquet_file,
    read_first_text_rows,
    read_text_schema,
    resolve_column_numbers,
)
from nonet.samples.tables import (
    OF_INTERACTIONS,
    OF_ITEMS,
    TableFormat,
    align_item_column,
    choose_time_column,
    guess_by_type,
    guess_roles,
    list_time_candidates,
    read_first_rows,
    read_parquet_schema,
)
from nonet.suggest import join_names

_SUPPORTED_ENDINGS = ".csv, .tsv, .csv.gz, .tsv.gz, .inter, .item, .jsonl"
_DATA_ENDINGS = (*ENDINGS, ".parquet")
_PART_NAME = re.compile(r"(part|data|chunk)?[-_.]?\d+([-_.]\w+)*$|part[-_.].*", re.IGNORECASE)
_MOVIELENS = (("ratings.csv", "movies.csv"), ("ratings.dat", "movies.dat"), ("u.data", "u.item"))
_REQUIRED_ROLES = ("user", "item", "time")


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A table of the data set.

    Attributes:
        path: The table's file or folder.
        form: "parquet" or "csv".
        schema: Its Arrow schema.
        roles: Columns by role if this is a table of interactions, as guessed from the names of columns.
        item_roles: Columns by role if this is a table of items, guessed likewise.
        text: The format of a text file; None for Parquet.
    """

    path: Path
    form: str
    schema: Any
    roles: Mapping[str, str]
    item_roles: Mapping[str, str]
    text: TextForm | None = None

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return list(self.schema.names)

    def add_roles_by_type(self) -> SourceTable:
        """Return a copy in which columns get roles by their types if their names give no role."""
        return replace(self, roles=guess_by_type(self.roles, self.schema))

    @property
    def is_interactions(self) -> bool:
        """Whether the table has columns of users, items and times."""
        return all(role in self.roles for role in _REQUIRED_ROLES)

    @property
    def is_items(self) -> bool:
        """Whether the table has a column of items and none of users."""
        return "item" in self.item_roles and "user" not in self.roles


@dataclass(frozen=True, slots=True)
class DataSource:
    """The location of the interactions and items.

    Attributes:
        form: "parquet", or the importer that reads the data: "csv", "movielens" or "sequences".
        place: The path that the importer reads.
        interactions: The table of interactions, for parquet and csv.
        items: The table of items, for parquet and csv, if there is one.
    """

    form: str
    place: Path
    interactions: SourceTable | None = None
    items: SourceTable | None = None

    def describe_roles(self) -> str:
        """Describe which column has which role; "" for data sets whose columns an importer knows."""
        if self.interactions is None:
            return ""
        descriptions = [f"{role} = {name}" for role, name in self.interactions.roles.items()]
        if self.items is not None:
            descriptions += [
                f"{'item (items)' if role == 'item' else role} = {name}"
                for role, name in self.items.item_roles.items()
            ]
        return ", ".join(descriptions)


def find_source(
    data_path: Path,
    items_path: Path | None,
    columns_by_role: Mapping[str, str],
    missing_texts: Sequence[str] | None = None,
) -> DataSource:
    """Find the tables in a folder, or beside a file of interactions.

    Args:
        data_path: A file or a folder.
        items_path: The file of items, if one is named.
        columns_by_role: Columns by role, which override guesses.
        missing_texts: Texts that stand for a missing value; None for the default ones.

    Raises:
        ConfigError: A table or a role is missing or ambiguous, or an option does not apply.
    """
    if not data_path.exists():
        raise ConfigError(f"--data {data_path}: no such file or folder")
    form = _detect_importer(data_path)
    if form and (items_path or columns_by_role or missing_texts is not None):
        raise ConfigError(
            f"--data {data_path}: its files are read as by `nonet import {form}`, which has no --items, --column and "
            "--missing; omit these options, or name the file of interactions itself"
        )
    if form:
        return DataSource(form, data_path)
    texts = TableFormat.from_options(None, missing_texts).missing
    tables = [_read_table(path, columns_by_role, texts) for path in _list_candidates(data_path)]
    for table in tables:
        if table.text is not None and not table.text.has_header:
            columns_by_role = resolve_column_numbers(columns_by_role, table.names)
    interactions = _find_interactions(data_path, tables, columns_by_role)
    chosen = _find_items(data_path, items_path, tables, interactions, columns_by_role, texts)
    if chosen is not None:
        roles = align_item_column(interactions.roles, chosen.item_roles, interactions.names, columns_by_role)
        interactions = replace(interactions, roles=roles)
    interactions = _choose_time_column(interactions, columns_by_role, texts)
    if chosen and chosen.form != interactions.form:
        raise ConfigError(
            f"--data {data_path}: {interactions.path.name} is {interactions.form} and {chosen.path.name} is {chosen.form}; "
            "write both as Parquet, or both as CSV"
        )
    return DataSource(interactions.form, interactions.path, interactions, chosen)


def _choose_time_column(
    table: SourceTable, columns: Mapping[str, str], missing: tuple[str, ...]
) -> SourceTable:
    """Choose the best of several time columns from the first rows of the table."""
    candidates = list_time_candidates(table.names)
    if {"time", "timestamp"} & set(columns) or "time" not in table.roles or len(candidates) < 2:
        return table
    rows = (
        read_first_rows(table.path)
        if table.form == "parquet"
        else read_first_text_rows(table.path, "csv", missing)
    )
    best = choose_time_column(rows, candidates, table.roles["time"])
    return replace(table, roles={**table.roles, "time": best})


def _detect_importer(place: Path) -> str:
    """Return the importer for the file names of a data set, or "" if there is none."""
    if not place.is_dir():
        return "sequences" if place.name == "sequences.txt" else ""
    if (place / "sequences.txt").is_file():
        return "sequences"
    return "movielens" if any(all((place / name).is_file() for name in names) for names in _MOVIELENS) else ""


def _list_candidates(place: Path) -> list[Path]:
    """List tables by their file endings.

    A folder that consists of parts of a table is one table.
    """
    if place.is_file() or _is_partitioned(place):
        return [place]
    paths = [path for path in sorted(place.iterdir()) if not path.name.startswith((".", "_"))]
    files = [
        path
        for path in paths
        if path.is_file() and path.name.lower().endswith(_DATA_ENDINGS) and path.stem.lower() != "readme"
    ]
    return files + [path for path in paths if path.is_dir() and _list_data_files(path)]


def _list_data_files(folder: Path) -> list[Path]:
    """List the data files in a folder at any depth, without hidden files."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
        and (path.name.lower().endswith(_DATA_ENDINGS) or ("." not in path.name and is_parquet_file(path)))
    ]


def _is_partitioned(folder: Path) -> bool:
    """Return whether a folder is one table.

    It is if it has a marker file of a writer, if its folders are named key=value, or if its files are
    numbered parts.
    """
    data = _list_data_files(folder)
    if not data or any(
        len(path.relative_to(folder).parts) > 1 and "=" not in path.relative_to(folder).parts[0]
        for path in data
    ):
        return False
    if all("=" in path.relative_to(folder).parts[0] for path in data):
        return True
    if any((folder / mark).exists() for mark in ("_SUCCESS", "_metadata", "_common_metadata")):
        return True
    return len(data) > 0 and all(_PART_NAME.fullmatch(path.name.partition(".")[0]) for path in data)


def _detect_form(path: Path) -> str:
    """Return "parquet" or "csv" by the content of the file, or of a folder's first file."""
    files = _list_data_files(path) if path.is_dir() else [path]
    return "parquet" if not files or is_parquet_file(files[0]) or files[0].suffix == ".parquet" else "csv"


def _read_table(path: Path, columns: Mapping[str, str], missing: tuple[str, ...]) -> SourceTable:
    """Read a table's schema and guess the roles of its columns."""
    form, text = _detect_form(path), None
    schema: Any
    if form == "parquet":
        schema = read_parquet_schema(path, "table")
    else:
        schema, text = read_text_schema(path, "csv", missing=missing)
        if not text.has_header:
            columns = resolve_column_numbers(columns, schema.names)
    roles = guess_roles(OF_INTERACTIONS, schema.names, columns)
    return SourceTable(path, form, schema, roles, guess_roles(OF_ITEMS, schema.names, columns), text)


def _find_interactions(place: Path, tables: Sequence[SourceTable], columns: Mapping[str, str]) -> SourceTable:
    """Return the table of interactions. Raises ConfigError if there is none or more than one."""
    tables_without_header = [
        table for table in tables if table.text is not None and not table.text.has_header
    ]
    for table in tables_without_header:
        if not has_column_numbers(columns, table.names):
            raise ConfigError(describe_missing_header(f"--data {table.path}", len(table.names)))
    doubtful_tables = [table for table in tables if table.text is not None and not table.text.sure]
    certain_names = {name for table in tables if table not in doubtful_tables for name in table.names}
    all_names = {name for table in tables for name in table.names}
    for role, name in columns.items():
        if name not in all_names:
            raise ConfigError(
                f"--column {role}={name}: no table of {place} has this column; columns: {join_names(sorted(certain_names))}"
            )
    candidates = [table for table in tables if table.is_interactions]
    candidates = candidates or [
        typed for typed in (table.add_roles_by_type() for table in tables) if typed.is_interactions
    ]
    if chosen := _select_by_name(candidates, "interactions"):
        return chosen
    if len(candidates) > 1:
        names = join_names(table.path.name for table in candidates)
        problem = f"--data {place}: {len(candidates)} tables have users, items and times ({names})"
        if candidates[0].names == candidates[1].names:
            raise ConfigError(
                f"{problem} and the same columns; if they are parts of one table, move them into a subfolder; otherwise move all "
                "but one to another folder"
            )
        raise ConfigError(f"{problem}; name one: --data {candidates[0].path}")
    if not tables:
        raise ConfigError(
            f"--data {place} has no table; supported are .parquet, {_SUPPORTED_ENDINGS}, and MovieLens and sequences folders"
        )
    best = max(tables, key=lambda table: sum(role in table.roles for role in _REQUIRED_ROLES))
    missing = [role for role in _REQUIRED_ROLES if role not in best.roles]
    if best in doubtful_tables:
        raise ConfigError(
            f"--data {best.path}: its first line does not look like column names; add a first line with "
            f"names, or name existing columns: --column user=NAME"
        )
    raise ConfigError(
        f"--data {best.path}{_describe_form(best)}: no column looks like the {' or the '.join(missing)}; it has "
        f"{join_names(best.names)}. Name it: "
        f"--column {missing[0]}=NAME"
    )


def _find_items(
    place: Path,
    given: Path | None,
    tables: Sequence[SourceTable],
    interactions: SourceTable,
    columns: Mapping[str, str],
    missing: tuple[str, ...],
) -> SourceTable | None:
    """Return the table of items, None if there is none. Raises ConfigError if there is more than one."""
    if given is not None:
        if not given.exists():
            raise ConfigError(f"--items {given}: no such file")
        table = _read_table(given, columns, missing)
        if "item" not in table.item_roles:
            named = interactions.roles.get("item", "item_id")
            raise ConfigError(
                f"--items {given}{_describe_form(table)}: no column looks like the item; it has {join_names(table.names)}. "
                f"Call the column of its ids {named} there, as {interactions.path.name} does, or item_id"
            )
        return table
    item_tables = [table for table in tables if table.path != interactions.path and table.is_items]
    if len(item_tables) > 1 and _select_by_name(item_tables, "items") is None:
        names = join_names(table.path.name for table in item_tables)
        raise ConfigError(
            f"--data {place}: {len(item_tables)} tables look like items ({names}); name one with --items"
        )
    return _select_by_name(item_tables, "items")


def _describe_form(table: SourceTable) -> str:
    """Return a text for error messages if the content of the table was detected as JSON lines, else ""."""
    return ", read as JSON lines" if table.text is not None and table.text.kind == "json" else ""


def _select_by_name(tables: Sequence[SourceTable], name: str) -> SourceTable | None:
    """Return the only table, or the only one of several with that name."""
    matching = [table for table in tables if table.path.name.partition(".")[0] == name]
    return tables[0] if len(tables) == 1 else matching[0] if len(matching) == 1 else None
