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
_COPIED_FILES = ("README", "README.txt", "README.html")  # files that importers copy beside the tables


def create_from_data(
    target: Path,
    data_path: Path,
    items_path: Path | None,
    columns_by_role: Mapping[str, str],
    missing_texts: Sequence[str] | None = None,
) -> Iterator[str]:
    """Write a scenario, a reward and, for formats other than Parquet, the two tables.

    Args:
        target: The scenario's file.
        data_path: The tables: a folder, or a file of interactions.
        items_path: The file of items, if it is not found beside the interactions.
        columns_by_role: Columns by role, which override guesses.
        missing_texts: Texts that stand for a missing value; None for the default ones.

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
        text, data_lines = _build_scenario(name, data_path, data, reward, target.parent)
        _write_files({target.parent / reward: render_reward(name), target: text})
    yield f"{source.place} is read as {source.form}" + (
        f": {roles}" if (roles := source.describe_roles()) else ""
    )
    yield from (f"note: {note}" for note in notes)
    yield from data_lines
    written = [target, target.parent / reward, *([folder] if folder.exists() else [])]
    yield "wrote " + ", ".join(map(str, written))
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
    """Delete the folder on an error in the `with` block, if the block created it.

    Raises:
        ConfigError: The folder exists and has other files than imported tables.
    """
    is_existing = folder.exists()
    if is_existing and (
        not folder.is_dir() or any(path.name not in (*_TABLES, *_COPIED_FILES) for path in folder.iterdir())
    ):
        raise ConfigError(f"{folder} has other files; choose another name for the scenario")
    try:
        yield
    except BaseException:
        if not is_existing:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _make_data_section(
    source: DataSource, form: TableFormat, folder: Path, base_dir: Path, notes: list[str]
) -> dict[str, Any]:
    """Make the scenario's `data` section, and import tables that are not Parquet files into `folder`.

    Notes of the importer are appended to `notes`.
    """
    if source.form == "parquet":
        return _make_parquet_section(source, form, folder, base_dir)
    extra: dict[str, Any] = {}
    if source.interactions is not None:
        extra["columns"] = {**source.interactions.roles, **form.columns}
        extra["items"] = source.items and source.items.path
        extra |= {"notes": notes, "missing": form.missing}
    get_importer(source.form)(source.place, folder, **extra)
    return _make_table_paths(folder, base_dir)


def _make_parquet_section(
    source: DataSource, form: TableFormat, folder: Path, base_dir: Path
) -> dict[str, Any]:
    """Make the `data` section of Parquet tables, including the names of their columns.

    If the name of the item column differs between the two tables, copies with the default names are written to `folder`.
    """
    table, items = source.interactions, source.items
    assert table is not None  # a Parquet source has a table of interactions
    columns = {role: name for role, name in table.roles.items() if ROLES.get(role, role) != name}
    if items is None:
        return {"interactions": _format_path(table.path, base_dir)} | (
            {"columns": columns} if columns else {}
        )
    if items.item_roles["item"] != table.roles["item"]:
        write_parquet(
            read_interactions(str(table.path), form.replace_columns(table.roles)), folder / _TABLES[0]
        )
        write_parquet(
            read_items(str(items.path), form.replace_columns(items.item_roles)), folder / _TABLES[1]
        )
        return _make_table_paths(folder, base_dir)
    columns |= {role: name for role, name in items.item_roles.items() if role != "item" and role != name}
    paths = {"interactions": _format_path(table.path, base_dir), "items": _format_path(items.path, base_dir)}
    return paths | ({"columns": columns} if columns else {})


def _make_table_paths(folder: Path, base_dir: Path) -> dict[str, Any]:
    """Return the paths of both imported tables as the scenario names them."""
    return {
        "interactions": _format_path(folder / _TABLES[0], base_dir),
        "items": _format_path(folder / _TABLES[1], base_dir),
    }


def _format_path(path: Path, base_dir: Path) -> str:
    """Format a path for the scenario: relative if it is below the scenario's folder, else absolute."""
    path, base_dir = path.resolve(), base_dir.resolve()
    return os.path.relpath(path, base_dir) if path.is_relative_to(base_dir) else str(path)


def _build_scenario(
    name: str, data_path: Path, data: Mapping[str, Any], reward: Path, base_dir: Path
) -> tuple[str, list[str]]:
    """Build the scenario's text, and lines of text about its data, warnings and memory."""
    from nonet.controller.cluster import read_local_view
    from nonet.controller.plan import format_bytes
    from nonet.deploy.run import ScenarioFile, planning

    items = str(base_dir / data["items"]) if "items" in data else None
    form = TableFormat.from_options(data.get("columns"), data.get("missing"))
    profile = read_profile(str(base_dir / data["interactions"]), items, form)
    text = render_scenario(name, data_path.name or str(data_path), data, profile, str(reward))
    scenario = make_scenario(yaml.parse(text), name, PluginFiles(str(base_dir)))
    source = ScenarioFile(scenario, base_dir)
    lines = format_profile(profile).splitlines()
    lines += [f"warning: {warning}" for warning in planning.check_scenario(source)]
    plan = source.plan(read_local_view())
    memory = max((line.needed for line in plan.ledger.lines), default=0)
    lines.append(
        f"the workers need about {format_bytes(memory)}, and Ray's own processes {format_bytes(_RAY_BYTES)} more; the run prints "
        "an estimate of the remaining time after its first steps"
    )
    return text, lines
