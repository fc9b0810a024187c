"""What a folder or file holds: which table is of interactions, which of items, and which column plays which role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nonet.errors import ConfigError
from nonet.samples.importers import csv_schema
from nonet.samples.tables import (
    OF_INTERACTIONS,
    OF_ITEMS,
    guess_by_type,
    guess_roles,
    parquet_schema,
)
from nonet.suggest import listed

_CSV = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".inter", ".item")
_MOVIELENS = (("ratings.csv", "movies.csv"), ("ratings.dat", "movies.dat"), ("u.data", "u.item"))
_NEEDED = ("user", "item", "time")


@dataclass(frozen=True, slots=True)
class Table:
    """A table, what it is written in (parquet or csv), its Arrow schema, and role -> column as far as names tell."""

    path: Path
    form: str
    schema: Any
    roles: Mapping[str, str]
    item_roles: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        return list(self.schema.names)

    def by_type(self) -> Table:
        """The same with the roles that types tell, where names do not."""
        return replace(self, roles=guess_by_type(self.roles, self.schema))

    @property
    def is_interactions(self) -> bool:
        return all(role in self.roles for role in _NEEDED)

    @property
    def is_items(self) -> bool:
        return "item" in self.item_roles and "user" not in self.roles


@dataclass(frozen=True, slots=True)
class Source:
    """Where interactions and items are. form: parquet, or the importer that reads them: csv, movielens or sequences.

    place: what an importer is given; interactions, items: of parquet and csv.
    """

    form: str
    place: Path
    interactions: Table | None = None
    items: Table | None = None

    def roles(self) -> str:
        """Which column is what, in words."""
        if self.interactions is None:
            return ""
        said = [f"{role} = {name}" for role, name in self.interactions.roles.items()]
        if self.items is not None:
            said += [
                f"{'item (items)' if role == 'item' else role} = {name}"
                for role, name in self.items.item_roles.items()
            ]
        return ", ".join(said)


def find_source(place: Path, items: Path | None, columns: Mapping[str, str]) -> Source:
    """The tables in a folder, or a file of interactions with `items` beside it; `columns`: role -> column, over guesses.

    Raises ConfigError that says what is missing or what there is too much of.
    """
    if not place.exists():
        raise ConfigError(f"--data {place}: there is no such file or folder")
    form = _known_form(place)
    if form and (items or columns):
        raise ConfigError(
            f"--data {place}: its files are read as `nonet import {form}` does, which knows no --items and --column; leave them "
            "out, or name the file of interactions itself"
        )
    if form:
        return Source(form, place)
    tables = [_table(path, columns) for path in _candidates(place)]
    interactions = _interactions(place, tables, columns)
    chosen = _items(place, items, tables, interactions, columns)
    if chosen and chosen.form != interactions.form:
        raise ConfigError(
            f"--data {place}: {interactions.path.name} is {interactions.form} and {chosen.path.name} is {chosen.form}; "
            "write both as Parquet, or both as CSV"
        )
    return Source(interactions.form, interactions.path, interactions, chosen)


def _known_form(place: Path) -> str:
    """The importer whose files these are by their names, "" for none."""
    if not place.is_dir():
        return "sequences" if place.name == "sequences.txt" else ""
    if (place / "sequences.txt").is_file():
        return "sequences"
    return "movielens" if any(all((place / name).is_file() for name in names) for names in _MOVIELENS) else ""


def _candidates(place: Path) -> list[Path]:
    """Tables by their endings; a folder with Parquet files in it is one table."""
    if place.is_file():
        return [place]
    paths = [path for path in sorted(place.iterdir()) if not path.name.startswith((".", "_"))]
    files = [path for path in paths if path.is_file() and _form(path)]
    return files + [path for path in paths if path.is_dir() and any(path.rglob("*.parquet"))]


def _form(path: Path) -> str:
    if path.is_dir() or path.suffix == ".parquet":
        return "parquet"
    return "csv" if path.name.lower().endswith(_CSV) else ""


def _table(path: Path, columns: Mapping[str, str]) -> Table:
    form = _form(path) or "csv"
    schema: Any = parquet_schema(path, "table") if form == "parquet" else csv_schema(path, "csv")
    roles = guess_roles(OF_INTERACTIONS, schema.names, columns)
    return Table(path, form, schema, roles, guess_roles(OF_ITEMS, schema.names, columns))


def _interactions(place: Path, tables: Sequence[Table], columns: Mapping[str, str]) -> Table:
    there = {name for table in tables for name in table.names}
    for role, name in columns.items():
        if name not in there:
            raise ConfigError(
                f"--column {role}={name}: no table of {place} has it; columns: {listed(sorted(there))}"
            )
    whole = [table for table in tables if table.is_interactions]
    whole = whole or [table for table in (each.by_type() for each in tables) if table.is_interactions]
    if chosen := _by_name(whole, "interactions"):
        return chosen
    if len(whole) > 1:
        names = listed(table.path.name for table in whole)
        raise ConfigError(
            f"--data {place}: {len(whole)} tables have users, items and times ({names}); name one: --data {whole[0].path}"
        )
    if not tables:
        raise ConfigError(
            f"--data {place}: no table there; wanted .parquet, {', '.join(_CSV)}, or a MovieLens or sequences folder"
        )
    best = max(tables, key=lambda table: sum(role in table.roles for role in _NEEDED))
    missing = [role for role in _NEEDED if role not in best.roles]
    raise ConfigError(
        f"--data {best.path}: no column looks like the {' or the '.join(missing)}; it has {listed(best.names)}. Name it: "
        f"--column {missing[0]}=NAME"
    )


def _items(
    place: Path,
    given: Path | None,
    tables: Sequence[Table],
    interactions: Table,
    columns: Mapping[str, str],
) -> Table | None:
    if given is not None:
        if not given.exists():
            raise ConfigError(f"--items {given}: there is no such file")
        table = _table(given, columns)
        if "item" not in table.item_roles:
            raise ConfigError(
                f"--items {given}: no column looks like the item; it has {listed(table.names)}. Name it: --column item=NAME"
            )
        return table
    of_items = [table for table in tables if table.path != interactions.path and table.is_items]
    if len(of_items) > 1 and _by_name(of_items, "items") is None:
        names = listed(table.path.name for table in of_items)
        raise ConfigError(
            f"--data {place}: {len(of_items)} tables look like items ({names}); name one with --items"
        )
    return _by_name(of_items, "items")


def _by_name(tables: Sequence[Table], name: str) -> Table | None:
    """The only table, or that of several which is called so."""
    called = [table for table in tables if table.path.name.partition(".")[0] == name]
    return tables[0] if len(tables) == 1 else called[0] if len(called) == 1 else None
