"""`nonet new FILE --data DIR`: create a scenario that runs on the user's tables, and describe the data.

Existing files are never overwritten, and an error leaves nothing behind. CSV files, MovieLens and sequences
folders are imported into `FILE-data/` beside the scenario.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nonet import yaml
from nonet.atomic import write_whole
from nonet.controller.scenario import make_scenario
from nonet.deploy.new.click_page import render_click_scenario, select_item_features
from nonet.deploy.new.scenario_page import choose_compression, render_reward, render_scenario
from nonet.deploy.new.sources import DataSource, find_source
from nonet.errors import ConfigError
from nonet.plugins import PluginFiles
from nonet.samples.importers import get_importer, read_csv_tables, write_tables
from nonet.samples.preparation import EventLog
from nonet.samples.profiles import ItemColumn, format_profile, read_profile
from nonet.samples.tables import (
    ROLES,
    TableFormat,
    describe_split,
    read_first_rows,
    read_interactions,
    read_items,
    write_parquet,
)
from nonet.suggest import join_names

_TABLE_FILES = ("interactions.parquet", "items.parquet")
_RAY_BYTES = 1e9  # memory of Ray's processes and the driver in runs on one node
_MIN_DISTINCT_SHARE = 0.9  # of the texts in a column that may be the title
_COPIED_FILES = ("README", "README.txt", "README.html")  # files that importers copy beside the tables


def create_from_data(
    target: Path,
    data_path: Path,
    items_path: Path | None,
    columns_by_role: Mapping[str, str],
    missing_texts: Sequence[str] | None = None,
    clicks: str | None = None,
) -> Iterator[str]:
    """Write a scenario and, for formats other than Parquet, the two tables; for a recommender also a file with a first reward.

    Args:
        target: The scenario's file.
        data_path: The tables: a folder, or a file of interactions.
        items_path: The file of items, if it is not found beside the interactions.
        columns_by_role: Columns by role, which override guesses.
        missing_texts: Texts that stand for a missing value; None for the default ones.
        clicks: The condition that says which events are clicks, for the scenario of a click model; None for a recommender.

    Yields:
        Lines of text that describe what was found and written.

    Raises:
        ConfigError: An argument is wrong, or the scenario fails the checks of `nonet plan`.
        DataError: The tables are wrong. Nothing is left behind then.
    """
    if target.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{target} must be a .yaml file")
    name = re.sub(r"\W", "_", target.stem)
    name = name if name[:1].isalpha() else f"s_{name}"
    reward_path = Path("rewards") / f"{name}.py"  # relative to the scenario
    folder = target.parent / f"{target.stem}-data"
    own_paths = (target,) if clicks is not None else (target, target.parent / reward_path)
    for path in own_paths:
        if path.exists():
            raise ConfigError(f"{path} already exists; choose another path")
    source = find_source(data_path, items_path, columns_by_role, missing_texts)
    distinct_texts = None if missing_texts is None else list(dict.fromkeys(missing_texts))
    notes: list[str] = []
    with _remove_folder_on_error(folder):
        table_format = TableFormat.from_options(columns_by_role, distinct_texts)
        data = make_data_section(source, table_format, folder, target.parent, notes)
        if distinct_texts is not None:
            data["missing"] = distinct_texts
        text, data_lines = _build_scenario(name, data_path, data, reward_path, target.parent, clicks, notes)
        reward = {} if clicks is not None else {target.parent / reward_path: render_reward(name)}
        _write_files({**reward, target: text})
    yield f"{source.place} is read as {source.describe_form()}" + (
        f": {roles}" if (roles := source.describe_roles()) else ""
    )
    yield from (f"note: {note}" for note in notes)
    yield from data_lines
    written_paths = [*own_paths, *([folder] if folder.exists() else [])]
    yield "wrote " + ", ".join(map(str, written_paths))
    yield f"next: nonet plan {target}  (shows the derived settings and their reasons);  nonet run {target}"


def _write_files(texts: Mapping[Path, str]) -> None:
    """Write texts by path to files that do not exist yet; if one of them cannot be written, none is left behind."""
    new_folders = [
        folder for path in texts for folder in (path.parent, *path.parent.parents) if not folder.exists()
    ]
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text.encode())
    except BaseException:
        for path in texts:
            path.unlink(missing_ok=True)
        for folder in sorted(set(new_folders), reverse=True):  # subfolders first
            with suppress(OSError):  # it was not created, or it has other files
                folder.rmdir()
        raise


@contextmanager
def _remove_folder_on_error(folder: Path) -> Iterator[None]:
    """Delete the folder on an error in the `with` block, if the block created it.

    Raises:
        ConfigError: The folder exists and has other files than imported tables.
    """
    folder_existed = folder.exists()
    known_names = (*_TABLE_FILES, *_COPIED_FILES)
    if folder_existed and (
        not folder.is_dir() or any(path.name not in known_names for path in folder.iterdir())
    ):
        raise ConfigError(f"{folder} has other files; choose another name for the scenario")
    try:
        yield
    except BaseException:
        if not folder_existed:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def make_data_section(
    source: DataSource, table_format: TableFormat, folder: Path, base_dir: Path, notes: list[str]
) -> dict[str, Any]:
    """Return the scenario's `data` section, after importing tables that are not Parquet files.

    Args:
        source: The location of the tables.
        table_format: The columns by role that the user named, and the texts of missing values.
        folder: The folder to import tables into.
        base_dir: The scenario's folder, which paths are relative to.
        notes: A list to which the importer's notes are appended.
    """
    if source.form == "parquet":
        return _make_parquet_section(source, table_format, folder, base_dir, notes)
    if source.form == "csv":
        return _make_csv_section(source, table_format, folder, base_dir, notes)
    get_importer(source.form)(source.place, folder)
    return _make_table_paths(folder, base_dir)


def _make_csv_section(
    source: DataSource, table_format: TableFormat, folder: Path, base_dir: Path, notes: list[str]
) -> dict[str, Any]:
    """Return the `data` section of tables of which one is text, after writing both to `folder` as Parquet.

    Columns keep their names and times their unit, which files for the finished run will have too, unless a name has a role in
    only one of the tables that have it. The arguments are those of `make_data_section`.
    """
    interactions, items = source.interactions, source.items
    assert interactions is not None  # a source of CSV has a table of interactions
    columns = {**interactions.roles, **table_format.columns}
    if items and (name := items.item_roles.get("categories")) not in (None, *interactions.names):
        columns["categories"] = name
    missing = table_format.missing
    tables = read_csv_tables(source.place, columns, items and items.path, notes, missing)
    own_roles = tables.merge_roles()
    label, roles = f"csv {source.place}", (tables.roles, tables.item_roles)
    write_tables(
        tables.interactions, tables.items, folder, label, *roles, missing, keep_names=own_roles is not None
    )
    columns = {role: name for role, name in (own_roles or {}).items() if ROLES.get(role, role) != name}
    return _make_table_paths(folder, base_dir) | ({"columns": columns} if columns else {})


def _make_parquet_section(
    source: DataSource, table_format: TableFormat, folder: Path, base_dir: Path, notes: list[str]
) -> dict[str, Any]:
    """Return the `data` section of Parquet tables, with the names of columns that are not the default ones.

    If the name of the item column differs between the two tables, copies with the default names are written to `folder`.
    The arguments are those of `make_data_section`.
    """
    interactions, items = source.interactions, source.items
    assert interactions is not None  # a Parquet source has a table of interactions
    columns = {role: name for role, name in interactions.roles.items() if ROLES.get(role, role) != name}
    paths = {"interactions": _format_path(interactions.path, base_dir)}
    if items is None:
        return paths | ({"columns": columns} if columns else {})
    if (name := items.item_roles.get("categories")) is not None:
        note = describe_split(read_first_rows(items.path)[name], name)
        notes += [] if note is None else [note]
    if items.item_roles["item"] != interactions.roles["item"]:
        interactions_format = table_format.replace_columns(interactions.roles)
        items_format = table_format.replace_columns(items.item_roles)
        write_parquet(
            read_interactions(str(interactions.path), interactions_format), folder / _TABLE_FILES[0]
        )
        write_parquet(read_items(str(items.path), items_format), folder / _TABLE_FILES[1])
        return _make_table_paths(folder, base_dir)
    columns |= {role: name for role, name in items.item_roles.items() if role != "item" and role != name}
    paths["items"] = _format_path(items.path, base_dir)
    return paths | ({"columns": columns} if columns else {})


def _make_table_paths(folder: Path, base_dir: Path) -> dict[str, Any]:
    """Return the paths of two imported tables for the `data` section."""
    return {
        "interactions": _format_path(folder / _TABLE_FILES[0], base_dir),
        "items": _format_path(folder / _TABLE_FILES[1], base_dir),
    }


def _format_path(path: Path, base_dir: Path) -> str:
    """Format a path for the scenario: relative if it is below the scenario's folder, else absolute."""
    path, base_dir = path.resolve(), base_dir.resolve()
    return os.path.relpath(path, base_dir) if path.is_relative_to(base_dir) else str(path)


def _suggest_title(columns: Sequence[ItemColumn]) -> str:
    """Return a sentence about how to name the title of the items; "" if it is known, or no column is a text."""
    texts = [column for column in columns if column.kind == "text"]
    if not texts or any(column.name == "title" for column in columns):
        return ""
    candidates = [
        column.name for column in texts if column.distinct > _MIN_DISTINCT_SHARE * column.filled > 0
    ]
    return (
        f"no column of the items looks like a title: --column title={candidates[0] if candidates else 'NAME'}"
    )


def _build_scenario(
    name: str,
    data_path: Path,
    data: Mapping[str, Any],
    reward_path: Path,
    base_dir: Path,
    clicks: str | None,
    notes: list[str],
) -> tuple[str, list[str]]:
    """Build and check the scenario.

    Args:
        name: The scenario's name.
        data_path: The path that the user gave, for the first comment.
        data: The scenario's `data` section.
        reward_path: The file of the first reward, relative to the scenario.
        base_dir: The scenario's folder.
        clicks: The condition that says which events are clicks; None for a recommender.
        notes: A list to which a sentence about the columns of the items that are not used is appended.

    Returns:
        The scenario's text, and lines of text about its data, warnings and memory.
    """
    from nonet.controller.cluster import read_local_view
    from nonet.controller.plan import format_bytes
    from nonet.deploy.run import ScenarioFile, planning

    items = str(base_dir / data["items"]) if "items" in data else None
    table_format = TableFormat.from_options(data.get("columns"), data.get("missing"))
    profile = read_profile(str(base_dir / data["interactions"]), items, table_format)
    log_columns = EventLog(str(base_dir / data["interactions"]), table_format).schema.names
    title = data_path.name or str(data_path)
    if clicks is None:
        if (compression := choose_compression(profile, log_columns)) is not None:
            data = {**data, "events": compression}
            notes.append(
                f"{profile.immediate:.0%} of the events are of the item of the user's event right before, such as an order after "
                "a view: data.events makes one event of a user's events with an item on one day, so that the next other item "
                "is predicted; a target over the kind of event holds if one of them has it"
            )
        text = render_scenario(name, title, data, profile, str(reward_path))
        lists = [column.name for column in profile.columns if column.kind == "list"]
        if unused := [column for column in lists if column != "categories"]:
            notes.append(
                f"the lists {join_names(unused)} of the items are not used; name one, --column categories={unused[0]}, or "
                "more in tokenizer.vectors of the scenario"
            )
        if note := _suggest_title(profile.columns):
            notes.append(note)
    else:
        item_table = None if items is None else read_items(items, table_format)
        features = select_item_features(item_table, log_columns)
        text = render_click_scenario(name, title, data, profile, features, clicks)
        notes += [f"no features of the items: {line}" for line in features.describe_omitted()]
    scenario = make_scenario(yaml.parse(text), name, PluginFiles(str(base_dir)))
    source = ScenarioFile(scenario, base_dir)
    lines = format_profile(profile).splitlines()
    plan = source.plan(read_local_view())
    lines += [f"warning: {warning}" for warning in planning.check_files(source)]
    worker_bytes = max((line.needed for line in plan.ledger.lines), default=0)  # of one device or host
    lines.append(
        f"the workers need about {format_bytes(worker_bytes)}, and Ray's own processes {format_bytes(_RAY_BYTES)} more; "
        "the run prints an estimate of the remaining time after its first steps"
    )
    return text, lines
