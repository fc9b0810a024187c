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
from nonet.deploy.new.scenario_page import render_reward, render_scenario
from nonet.deploy.new.sources import DataSource, find_source
from nonet.errors import ConfigError
from nonet.plugins import PluginFiles
from nonet.samples.importers import get_importer
from nonet.samples.profiles import format_profile, read_profile
from nonet.samples.tables import ROLES, TableFormat, read_interactions, read_items, write_parquet

_TABLES = ("interactions.parquet", "items.parquet")
_RAY_BYTES = 1e9  # memory of Ray's processes and the driver in runs on one node
_BESIDE = ("README", "README.txt", "README.html")  # files that an importer may copy


def create_from_data(
    target: Path,
    data_path: Path,
    items_path: Path | None,
    columns_by_role: Mapping[str, str],
    missing_texts: Sequence[str] | None = None,
) -> Iterator[str]:
    """Write a scenario, a reward and, for other formats than Parquet, the two tables.

    Args:
        target: The scenario's file.
        data_path: The tables: a folder, or a file of interactions.
        items_path: The file of items, if it is not found beside the interactions.
        columns_by_role: Columns by role, which override guesses.
        missing_texts: Texts that stand for a missing value; None for the default ones.

    Yields:
        What was found and written, line by line.

    Raises:
        ConfigError: An argument is wrong, or the scenario fails the checks of `nonet plan`.
        DataError: The tables are wrong. Nothing is left behind then.
    """
    if target.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{target} must be a .yaml file")
    name = re.sub(r"\W", "_", target.stem)
    name = name if name[:1].isalpha() else f"s_{name}"
    reward = Path("rewards") / f"{name}.py"
    folder = target.parent / f"{target.stem}-data"
    for path in (target, target.parent / reward):
        if path.exists():
            raise ConfigError(f"{path} already exists; choose another path")
    source = find_source(data_path, items_path, columns_by_role, missing_texts)
    texts = None if missing_texts is None else list(dict.fromkeys(missing_texts))
    notes: list[str] = []
    with _remove_folder_on_error(folder):
        data = _make_data_section(
            source, TableFormat.from_options(columns_by_role, texts), folder, target.parent, notes
        )
        if texts is not None:
            data["missing"] = texts
        text, said = _build_scenario(name, data_path, data, reward, target.parent)
        _write_files({target.parent / reward: render_reward(name), target: text})
    yield f"{source.place} is read as {source.form}" + (
        f": {roles}" if (roles := source.describe_roles()) else ""
    )
    yield from (f"note: {note}" for note in notes)
    yield from said
    wrote = [target, target.parent / reward, *([folder] if folder.exists() else [])]
    yield "wrote " + ", ".join(map(str, wrote))
    yield f"next: nonet plan {target}  (shows the derived settings and their reasons);  nonet run {target}"


def _write_files(texts: Mapping[Path, str]) -> None:
    """Write files that do not exist yet; if one of them cannot be written, none is left behind."""
    folders = [
        folder for path in texts for folder in (path.parent, *path.parent.parents) if not folder.exists()
    ]
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text.encode())
    except BaseException:
        for path in texts:
            path.unlink(missing_ok=True)
        for folder in sorted(set(folders), reverse=True):
            with suppress(OSError):  # it was not created, or it has other files
                folder.rmdir()
        raise


@contextmanager
def _remove_folder_on_error(folder: Path) -> Iterator[None]:
    """Remove a new folder if the block fails; refuse a folder that has other files than tables."""
    was_there = folder.exists()
    if was_there and (
        not folder.is_dir() or any(path.name not in (*_TABLES, *_BESIDE) for path in folder.iterdir())
    ):
        raise ConfigError(f"{folder} has other files; choose another name for the scenario")
    try:
        yield
    except BaseException:
        if not was_there:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _make_data_section(
    source: DataSource, form: TableFormat, folder: Path, beside: Path, notes: list[str]
) -> dict[str, Any]:
    """Make the scenario's `data` section: tables at their place, or imported into `folder`."""
    if source.form == "parquet":
        return _make_parquet_section(source, form, folder, beside)
    extra: dict[str, Any] = {}
    if source.interactions is not None:
        extra["columns"] = {**source.interactions.roles, **form.columns}
        extra["items"] = source.items and source.items.path
        extra |= {"notes": notes, "missing": form.missing}
    get_importer(source.form)(source.place, folder, **extra)
    return _make_table_paths(folder, beside)


def _make_parquet_section(
    source: DataSource, form: TableFormat, folder: Path, beside: Path
) -> dict[str, Any]:
    """Make the `data` section of Parquet tables, including the names of their columns.

    If both tables name the item column differently, copies with the default names are written.
    """
    table, items = source.interactions, source.items
    assert table is not None  # a Parquet source has a table of interactions
    names = {role: name for role, name in table.roles.items() if ROLES.get(role, role) != name}
    if items is None:
        return {"interactions": _format_path(table.path, beside)} | ({"columns": names} if names else {})
    if items.item_roles["item"] != table.roles["item"]:
        write_parquet(
            read_interactions(str(table.path), form.replace_columns(table.roles)), folder / _TABLES[0]
        )
        write_parquet(
            read_items(str(items.path), form.replace_columns(items.item_roles)), folder / _TABLES[1]
        )
        return _make_table_paths(folder, beside)
    names |= {role: name for role, name in items.item_roles.items() if role != "item" and role != name}
    paths = {"interactions": _format_path(table.path, beside), "items": _format_path(items.path, beside)}
    return paths | ({"columns": names} if names else {})


def _make_table_paths(folder: Path, beside: Path) -> dict[str, Any]:
    """Return the paths of both imported tables as the scenario names them."""
    return {
        "interactions": _format_path(folder / _TABLES[0], beside),
        "items": _format_path(folder / _TABLES[1], beside),
    }


def _format_path(path: Path, beside: Path) -> str:
    """Format a path for the scenario: relative if it is below the scenario's folder, else absolute."""
    path, beside = path.resolve(), beside.resolve()
    return os.path.relpath(path, beside) if path.is_relative_to(beside) else str(path)


def _build_scenario(
    name: str, place: Path, data: Mapping[str, Any], reward: Path, beside: Path
) -> tuple[str, list[str]]:
    """Build the scenario's text, and lines that describe its data: a table, warnings and memory."""
    from nonet.controller.cluster import read_local_view
    from nonet.controller.plan import format_bytes
    from nonet.deploy.run import ScenarioFile, planning

    items = str(beside / data["items"]) if "items" in data else None
    form = TableFormat.from_options(data.get("columns"), data.get("missing"))
    profile = read_profile(str(beside / data["interactions"]), items, form)
    text = render_scenario(name, place.name or str(place), data, profile, str(reward))
    scenario = make_scenario(yaml.parse(text), name, PluginFiles(str(beside)))
    source = ScenarioFile(scenario, beside)
    said = format_profile(profile).splitlines()
    said += [f"warning: {warning}" for warning in planning.check_scenario(source)]
    made = source.plan(read_local_view())
    memory = max((line.needed for line in made.ledger.lines), default=0)
    said.append(
        f"the workers need about {format_bytes(memory)}, and Ray's own processes {format_bytes(_RAY_BYTES)} more; the run prints "
        "the remaining time after its first steps"
    )
    return text, said
