"""The user's own files of a scenario: every `file.py` that a `use:` names is copied into the run, which uses only the copies.

Files beside such a file are copied to the same place beside the copy: modules that it imports, and tables that it opens
relative to `__file__`. A folder of up to 16 MiB and 500 files is copied as a whole, without hidden files, caches, runs and
the scenario's own tables. From a larger folder, only modules that the file imports and files that its text names are
copied.

`sources.json` states which copy stands for which `use`, with its SHA-256; copies of files beside it have no `use`. The
originals may be edited or deleted during a run and before it is resumed; a copy that changed is an error
(docs/explanation/design.md, section 4).
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from nonet.atomic import make_folder, write_whole
from nonet.controller.record import RunFolder
from nonet.controller.scenario import Scenario, to_document
from nonet.errors import ConfigError
from nonet.plugins import PluginFiles, parse_file

_MOST_BYTES, _MOST_FILES = 16 << 20, 500  # limits for a folder that is copied as a whole
_LEFT_OUT = ("__pycache__", "runs", "node_modules")


def list_named_files(scenario: Scenario) -> list[str]:
    """Return every `file.py` that a `use:`, a metric or an optimizer of the scenario names, once each."""
    uses = [*_list_uses(to_document(scenario)), *scenario.evaluate.metrics, *_list_optimizers(scenario)]
    return list(dict.fromkeys(filter(None, map(parse_file, uses))))


def keep_copies(scenario: Scenario, folder: Path, run: RunFolder) -> None:
    """Copy the user's own files into a run.

    Args:
        scenario: The scenario that names them.
        folder: The folder of the scenario, to which names are relative.
        run: The folder of the run.

    Raises:
        ConfigError: A file is missing.
    """
    records, copied = [], {}
    for use in list_named_files(scenario):
        origin = (folder / use).resolve()
        if not origin.is_file():
            raise ConfigError(f"use: {use}: there is no file {origin}; it is looked for beside the scenario")
        digest = hashlib.sha256(origin.read_bytes()).hexdigest()
        place = run.sources / _choose_copy_path(use, digest)
        copied[_copy_file(origin, place)] = None
        records.append({"use": use, "copy": str(place.relative_to(run.sources)), "sha256": digest})
        for other in find_files_beside(origin, {*_list_tables(scenario, folder), run.path.resolve()}):
            beside = place.parent / other.relative_to(origin.parent)
            if beside not in copied and str(beside.relative_to(run.sources)) not in list_named_files(
                scenario
            ):
                copied[_copy_file(other, beside)] = None
                sha256 = hashlib.sha256(beside.read_bytes()).hexdigest()
                records.append({"use": None, "copy": str(beside.relative_to(run.sources)), "sha256": sha256})
    run.write_json(run.sources_list.name, records)


def copy_with_siblings(file: Path, place: Path) -> None:
    """Copy a user's file together with the files that it needs beside it.

    Args:
        file: The original.
        place: The path of the copy.
    """
    _copy_file(file, place)
    for other in find_files_beside(file):
        _copy_file(other, place.parent / other.relative_to(file.parent))


def find_files_beside(file: Path, excluded: Collection[Path] = ()) -> list[Path]:
    """Return the files that must be copied with a user's file: its whole folder or, if that is large, the files that it names.

    Args:
        file: The file that a `use:` names.
        excluded: Files and folders that are not copied.
    """
    there: list[Path] = []
    size = 0
    for path in _walk(file.parent, excluded):
        size += path.stat().st_size
        there.append(path)
        if size > _MOST_BYTES or len(there) > _MOST_FILES:
            return sorted(_find_named_files(file, {file}) - {file})
    return sorted(path for path in there if path != file)


def _walk(folder: Path, without: Collection[Path]) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders, except hidden ones, caches, runs and `without`."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in _LEFT_OUT or path.resolve() in without:
            continue
        if path.is_file():
            yield path
        elif path.is_dir() and not (path / "scenario.yaml").exists() and not (path / "pyvenv.cfg").exists():
            yield from _walk(path, without)


def _find_named_files(file: Path, known: set[Path]) -> set[Path]:
    """Return the modules beside a file that it imports, recursively, and the files beside it that its text names."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # the import of the file reports it
        return known
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [f"{alias.name.partition('.')[0]}.py" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module.partition('.')[0]}.py"]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and 0 < len(node.value) < 256:
            names = [node.value]
        for name in names:
            path = (file.parent / name).resolve() if "\0" not in name else file
            if path in known or not path.is_file() or not path.is_relative_to(file.parent):
                continue
            known.add(path)
            if path.suffix == ".py":
                known |= _find_named_files(path, known)
    return known


def _copy_file(origin: Path, place: Path) -> Path:
    """Copy a file and return the path of the copy."""
    make_folder(place.parent)
    write_whole(place, origin.read_bytes())
    return place


def _list_tables(scenario: Scenario, folder: Path) -> set[Path]:
    """Return the scenario's tables on this machine, which are read where they are."""
    named = (scenario.data.interactions, scenario.data.items)
    return {(folder / path).resolve() for path in named if isinstance(path, str) and "://" not in path}


def read_copies(run: RunFolder) -> PluginFiles:
    """Return the copies of the user's own files that a run keeps.

    Raises:
        ConfigError: A copy is missing, or differs from the one at the start of the run.
    """
    records = run.read_json(run.sources_list.name) or []
    for record in records:
        place = run.sources / record["copy"]
        if not place.is_file():
            raise ConfigError(
                f"{place}, the run's copy of {record['use'] or place.name}, is gone; put it back, or start a new run"
            )
        digest = hashlib.sha256(place.read_bytes()).hexdigest()
        if digest != record["sha256"]:
            raise ConfigError(
                f"{place} was changed since the run began (sha256 {digest[:12]}, the run's is {record['sha256'][:12]}): a run "
                f"continues with the files from its start; put it back, or start a new run with the "
                f"changed {record['use'] or place.name}"
            )
    return PluginFiles(
        str(run.sources), {record["use"]: record["copy"] for record in records if record["use"]}
    )


def _choose_copy_path(use: str, digest: str) -> str:
    """Return the relative path of a copy: that below the scenario, or a unique one for files outside its folder."""
    path = Path(use)
    outside = path.is_absolute() or ".." in path.parts
    return f"outside-{digest[:12]}/{path.name}" if outside else str(path)


def _list_optimizers(scenario: Scenario) -> list[str | None]:
    """Return the optimizers that sparse tables name."""
    sparse = scenario.sparse
    return [sparse.defaults.optimizer, *(table.optimizer for table in sparse.tables.values())]


def _list_uses(value: Any) -> Iterator[Any]:
    """Yield all values of keys `use` at any depth."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, dict) and "use" in value:
        yield value["use"]
    for part in parts:
        yield from _list_uses(part)
