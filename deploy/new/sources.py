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
    is_parquet_table,
    list_data_files,
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
    guess_categories,
    guess_roles,
    list_time_candidates,
    read_first_rows,
    read_parquet_schema,
)
from nonet.suggest import join_names

_SUPPORTED_ENDINGS = ".csv, .tsv, .csv.gz, .tsv.gz, .inter, .item, .jsonl"  # of text files, for messages
_DATA_ENDINGS = (*ENDINGS, ".parquet")
# Names, without ending, of numbered parts of one table: part-00000-abc, data_3, 0001.
_PART_NAME = re.compile(r"(part|data|chunk)?[-_.]?\d+([-_.]\w+)*$|part[-_.].*", re.IGNORECASE)
# The files of interactions and items in each version of MovieLens.
_MOVIELENS_FILES = (("ratings.csv", "movies.csv"), ("ratings.dat", "movies.dat"), ("u.data", "u.item"))
_REQUIRED_ROLES = ("user", "item", "time")


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A table of the data set.

    Attributes:
        path: The table's file or folder.
        form: "parquet" or "csv".
        schema: The table's Arrow schema.
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
        """Return a copy in which missing roles are also guessed from the types of columns."""
        return replace(self, roles=guess_by_type(self.roles, self.schema))

    def describe_form(self) -> str:
        """Return the format for messages: "parquet", "csv", or "JSON lines", which the importer of CSV reads."""
        return "JSON lines" if self.text is not None and self.text.kind == "json" else self.form

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

    def describe_form(self) -> str:
        """Return the format of each table for messages, or the name of the importer that knows the files."""
        if self.interactions is None:
            return self.form
        form = self.interactions.describe_form()
        if self.items is None or (items_form := self.items.describe_form()) == form:
            return form
        return f"{form}, {self.items.path.name} as {items_form}"

    def describe_roles(self) -> str:
        """Return the column of each role as text; "" for data sets whose columns an importer knows."""
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
    missing_texts = TableFormat.from_options(None, missing_texts).missing
    tables = [_read_table(path, columns_by_role, missing_texts) for path in _list_candidates(data_path)]
    for table in tables:
        if table.text is not None and not table.text.has_header:
            columns_by_role = resolve_column_numbers(columns_by_role, table.names)
    given_items = None
    if items_path is not None:
        if not items_path.exists():
            raise ConfigError(f"--items {items_path}: no such file")
        given_items = _read_table(items_path, columns_by_role, missing_texts)
    interactions = _find_interactions(data_path, tables, columns_by_role, given_items)
    items = _find_items(data_path, tables, interactions, given_items)
    if items is not None:
        roles = align_item_column(interactions.roles, items.item_roles, interactions.names, columns_by_role)
        interactions = replace(interactions, roles=roles)
        items = replace(
            items, item_roles=guess_categories(items.item_roles, _read_rows(items, missing_texts))
        )
    interactions = _choose_time_column(interactions, columns_by_role, missing_texts)
    # The importer of CSV reads a Parquet table beside one of text, too.
    form = interactions.form if items is None or items.form == interactions.form else "csv"
    return DataSource(form, interactions.path, interactions, items)


def _choose_time_column(
    table: SourceTable, columns_by_role: Mapping[str, str], missing_texts: tuple[str, ...]
) -> SourceTable:
    """Return a copy with the best of several time columns, by the first rows of the table, unless the user named one."""
    candidates = list_time_candidates(table.names)
    is_named = bool({"time", "timestamp"} & set(columns_by_role))
    if is_named or "time" not in table.roles or len(candidates) < 2:
        return table
    best = choose_time_column(_read_rows(table, missing_texts), candidates, table.roles["time"])
    return replace(table, roles={**table.roles, "time": best})


def _read_rows(table: SourceTable, missing_texts: tuple[str, ...]) -> Any:
    """Read the first rows of a table."""
    if table.form == "parquet":
        return read_first_rows(table.path)
    return read_first_text_rows(table.path, "csv", missing_texts)


def _detect_importer(data_path: Path) -> str:
    """Return the name of the importer that knows the files of a data set, or "" if there is none."""
    if not data_path.is_dir():
        return "sequences" if data_path.name == "sequences.txt" else ""
    if (data_path / "sequences.txt").is_file():
        return "sequences"
    is_movielens = any(all((data_path / name).is_file() for name in names) for names in _MOVIELENS_FILES)
    return "movielens" if is_movielens else ""


def _list_candidates(data_path: Path) -> list[Path]:
    """Return the paths that are tables by their file endings: files, and folders with data files.

    A folder that consists of parts of a table is one table.
    """
    if data_path.is_file() or _is_partitioned(data_path):
        return [data_path]
    paths = [path for path in sorted(data_path.iterdir()) if not path.name.startswith((".", "_"))]
    files = [
        path
        for path in paths
        if path.is_file() and path.name.lower().endswith(_DATA_ENDINGS) and path.stem.lower() != "readme"
    ]
    return files + [path for path in paths if path.is_dir() and list_data_files(path)]


def _is_partitioned(folder: Path) -> bool:
    """Return whether all data files of a folder are parts of one table.

    They are if a writer left a marker file, if the subfolders are named key=value, or if the files are numbered
    parts.
    """
    files = list_data_files(folder)
    relative_parts = [path.relative_to(folder).parts for path in files]
    if not files or any(len(parts) > 1 and "=" not in parts[0] for parts in relative_parts):
        return False
    if all("=" in parts[0] for parts in relative_parts):
        return True
    if any((folder / marker).exists() for marker in ("_SUCCESS", "_metadata", "_common_metadata")):
        return True
    return all(_PART_NAME.fullmatch(path.name.partition(".")[0]) for path in files)


def _read_table(
    path: Path, columns_by_role: Mapping[str, str], missing_texts: tuple[str, ...]
) -> SourceTable:
    """Read a table's schema and guess the roles of its columns."""
    form, text = "parquet" if is_parquet_table(path) else "csv", None
    schema: Any
    if form == "parquet":
        schema = read_parquet_schema(path, "table")
    else:
        schema, text = read_text_schema(path, "csv", missing=missing_texts)
        if not text.has_header:
            columns_by_role = resolve_column_numbers(columns_by_role, schema.names)
    roles = guess_roles(OF_INTERACTIONS, schema.names, columns_by_role)
    item_roles = guess_roles(OF_ITEMS, schema.names, columns_by_role)
    return SourceTable(path, form, schema, roles, item_roles, text)


def _find_interactions(
    data_path: Path,
    tables: Sequence[SourceTable],
    columns_by_role: Mapping[str, str],
    given_items: SourceTable | None,
) -> SourceTable:
    """Return the table of interactions. Raises ConfigError if there is none or more than one, or a named column is missing."""
    tables_without_header = [
        table for table in tables if table.text is not None and not table.text.has_header
    ]
    for table in tables_without_header:
        if not has_column_numbers(columns_by_role, table.names):
            raise ConfigError(describe_missing_header(f"--data {table.path}", len(table.names)))
    # Tables whose first line may be data instead of column names.
    doubtful_tables = [table for table in tables if table.text is not None and not table.text.sure]
    named_tables = [*tables, *([] if given_items is None else [given_items])]
    certain_names = {name for table in named_tables if table not in doubtful_tables for name in table.names}
    all_names = {name for table in named_tables for name in table.names}
    for role, name in columns_by_role.items():
        if name not in all_names:
            places = f"{data_path}" if given_items is None else f"{data_path} and {given_items.path}"
            raise ConfigError(
                f"--column {role}={name}: no table of {places} has this column; columns: {join_names(sorted(certain_names))}"
            )
    candidates = [table for table in tables if table.is_interactions]
    if not candidates:
        tables_by_type = [table.add_roles_by_type() for table in tables]
        candidates = [table for table in tables_by_type if table.is_interactions]
    if interactions := _select_by_name(candidates, "interactions"):
        return interactions
    if len(candidates) > 1:
        names = join_names(table.path.name for table in candidates)
        problem = f"--data {data_path}: {len(candidates)} tables have users, items and times ({names})"
        if candidates[0].names == candidates[1].names:
            raise ConfigError(
                f"{problem} and the same columns; name one: --data {candidates[0].path} (and --items FILE). If they are parts of "
                "one table, move them into a subfolder"
            )
        raise ConfigError(f"{problem}; name one: --data {candidates[0].path}")
    if not tables:
        raise ConfigError(
            f"--data {data_path} has no table; supported are .parquet, {_SUPPORTED_ENDINGS}, and MovieLens and sequences folders"
        )
    closest = max(tables, key=lambda table: sum(role in table.roles for role in _REQUIRED_ROLES))
    missing_roles = [role for role in _REQUIRED_ROLES if role not in closest.roles]
    if closest in doubtful_tables:
        raise ConfigError(
            f"--data {closest.path}: its first line does not look like column names; add a first line with "
            f"names, or name existing columns: --column user=NAME"
        )
    raise ConfigError(
        f"--data {closest.path}{_describe_form(closest)}: no column looks like the {' or the '.join(missing_roles)}; it has "
        f"{join_names(closest.names)}. Name {'it' if len(missing_roles) == 1 else 'them'}: "
        + " ".join(f"--column {role}=NAME" for role in missing_roles)
    )


def _find_items(
    data_path: Path,
    tables: Sequence[SourceTable],
    interactions: SourceTable,
    given_items: SourceTable | None,
) -> SourceTable | None:
    """Return the table of `--items` or, without it, the one of `tables` that has items; None if there is none.

    Raises:
        ConfigError: Several tables look like items, or the table of `--items` has no column of items.
    """
    if given_items is not None:
        if "item" not in given_items.item_roles:
            item_column = interactions.roles.get("item", "item_id")
            raise ConfigError(
                f"--items {given_items.path}{_describe_form(given_items)}: no column looks like the item; it has "
                f"{join_names(given_items.names)}. Call the column of its ids {item_column} there, as "
                f"{interactions.path.name} does, or item_id"
            )
        return given_items
    item_tables = [table for table in tables if table.path != interactions.path and table.is_items]
    if len(item_tables) > 1 and _select_by_name(item_tables, "items") is None:
        names = join_names(table.path.name for table in item_tables)
        raise ConfigError(
            f"--data {data_path}: {len(item_tables)} tables look like items ({names}); name one with --items"
        )
    return _select_by_name(item_tables, "items")


def _describe_form(table: SourceTable) -> str:
    """Return a text for error messages if the content of the table was detected as JSON lines, else ""."""
    return ", read as JSON lines" if table.text is not None and table.text.kind == "json" else ""


def _select_by_name(tables: Sequence[SourceTable], name: str) -> SourceTable | None:
    """Return the only table, or the only one of several whose file has this name; None if that is not unique."""
    matching = [table for table in tables if table.path.name.partition(".")[0] == name]
    return tables[0] if len(tables) == 1 else matching[0] if len(matching) == 1 else None
