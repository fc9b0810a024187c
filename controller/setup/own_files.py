"""The user's own files of a scenario: every `file.py` that a `use:` names is copied into the run, which uses only the copies.

Such a file may import modules beside it, or open files relative to `__file__`. The modules that it imports, the code of packages
that it imports, and the files and folders that its texts name are therefore copied too, to the same places beside the copy. Of
folders that are named, those of up to 16 MiB and 500 files without a table of the scenario are copied, because a text may be the
name of a folder of data by chance. Nothing else is copied: what lies beside code may be data or secrets, and a run may be shared.

`sources.json` lists the copies, {"use", "copy", "sha256"} for each; "use" is null for a file that is only beside another.
The originals may be edited or deleted during a run and before it is resumed; a copy that changed is an error
(docs/explanation/design.md, section 4).
"""

from __future__ import annotations

import ast
import glob
import hashlib
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from importlib.machinery import all_suffixes
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nonet import yaml
from nonet.atomic import make_folder, write_whole
from nonet.controller.record import RunFolder
from nonet.controller.scenario import Scenario, to_document
from nonet.controller.setup.named_texts import list_imports, list_named_patterns
from nonet.errors import ConfigError, DataError
from nonet.plugins import PluginFiles, parse_file
from nonet.run_code import CodePart, list_references, read_copy_records
from nonet.samples.tables import find_files
from nonet.trust import approve_parts

_MAX_BYTES, _MAX_FILES = 16 << 20, 500  # limits for a folder that is copied because a text names it
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_SKIPPED_NAMES = ("__pycache__", "runs", "node_modules")  # files and folders that are never copied
_KEY_SEARCH_BYTES = 64 << 10  # at the beginning of a file, in which a private key is looked for
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY|PuTTY-User-Key-File")
_KEY_SUFFIXES = (".p12", ".pfx", ".der", ".ppk", ".key", ".jks")  # whose content may be binary


def list_named_files(scenario: Scenario) -> list[str]:
    """Return every `file.py` that a `use:`, the model, a metric or an optimizer names, once each, in their order."""
    uses = [
        *_list_uses(to_document(scenario)),
        scenario.model.get_options().get("path"),
        *scenario.evaluate.metrics,
        *_list_optimizers(scenario),
    ]
    return list(dict.fromkeys(filter(None, map(parse_file, uses))))


def keep_copies(scenario: Scenario, folder: Path, run: RunFolder) -> None:
    """Copy the user's own files into a run, write its `sources.json`, and approve this code, but no other file of the run.

    Args:
        scenario: The scenario that names the files.
        folder: The folder of the scenario, to which these names are relative.
        run: The folder of the run.

    Raises:
        ConfigError: A file is missing.
    """
    part = _copy_files(scenario, folder, run)
    with suppress(OSError):  # a home that cannot be written: --trust is asked for later
        approve_parts([part])


def describe_code(scenario: Scenario, folder: Path) -> CodePart:
    """Return the code that a run of a scenario has when it starts, without approving it.

    Args:
        scenario: The scenario that names the user's own files.
        folder: The folder of the scenario.

    Raises:
        ConfigError: A file is missing.
    """
    with TemporaryDirectory() as run:
        return _copy_files(scenario, folder, RunFolder(Path(run)))


def _copy_files(scenario: Scenario, folder: Path, run: RunFolder) -> CodePart:
    """Copy the user's own files into a run, write its `sources.json`, and return its code.

    Raises:
        ConfigError: A file is missing.
    """
    records, copies = [], set[Path]()
    named_files = list_named_files(scenario)
    for use in named_files:
        origin = (folder / use).resolve()
        if not origin.is_file():
            raise ConfigError(f"use: {use}: there is no file {origin}; it is looked for beside the scenario")
        digest = hashlib.sha256(origin.read_bytes()).hexdigest()
        copy = run.sources / _choose_copy_path(use, digest)
        digest = _copy_file(origin, copy)
        copies.add(copy)
        records.append({"use": use, "copy": str(copy.relative_to(run.sources)), "sha256": digest})
        for file_beside in find_files_beside(origin, {*_list_tables(scenario, folder), run.path.resolve()}):
            copy_beside = copy.parent / file_beside.relative_to(origin.parent)
            name_beside = str(copy_beside.relative_to(run.sources))
            if copy_beside not in copies and name_beside not in named_files:
                copies.add(copy_beside)
                sha256 = _copy_file(file_beside, copy_beside)
                records.append({"use": None, "copy": name_beside, "sha256": sha256})
    run.write_json(run.sources_list.name, records)
    files = {f"{run.sources.name}/{record['copy']}": record["sha256"] for record in records}
    files[run.sources_list.name] = hashlib.sha256(run.sources_list.read_bytes()).hexdigest()
    return CodePart(files, list_references(yaml.parse(yaml.dump(to_document(scenario)))))


def copy_with_siblings(file: Path, copy: Path) -> dict[Path, str]:
    """Copy a user's file together with the files that it needs beside it.

    Args:
        file: The original.
        copy: The path of the copy.

    Returns:
        The SHA-256 of each copy by its path.
    """
    copies = {copy: _copy_file(file, copy)}
    for file_beside in find_files_beside(file):
        copy_beside = copy.parent / file_beside.relative_to(file.parent)
        copies[copy_beside] = _copy_file(file_beside, copy_beside)
    return copies


def find_files_beside(file: Path, excluded: Collection[Path] = ()) -> list[Path]:
    """Return the other files that must be copied with a user's file, sorted: what it imports and names, and what those do.

    Args:
        file: The file that a `use:` names.
        excluded: Absolute paths of files and folders that are not copied, and neither are folders around them.
    """
    origin = file.resolve()
    found = {origin}
    _collect_files(origin, origin.parent, frozenset(excluded), found)
    return sorted(file.parent / path.relative_to(origin.parent) for path in found - {origin})


def walk_files(folder: Path, is_left_out: Callable[[Path], bool] = lambda path: False) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders that may leave this machine, in the order of their names.

    Hidden files, private keys, caches, runs and environments are left out, and so are links that lead out of the folder, links to
    a folder that the walk is in, which would have no end, and links to a folder behind another such link, because folders with
    links to each other have exponentially many paths.

    Args:
        folder: The folder.
        is_left_out: Returns whether a file or folder is left out as well.
    """
    root = folder.resolve()

    def walk(current: Path, parents: tuple[Path, ...], is_linked: bool) -> Iterator[Path]:
        for path in sorted(current.iterdir()):
            if path.name.startswith(".") or path.name in _SKIPPED_NAMES or is_left_out(path):
                continue
            resolved = path.resolve()
            is_link = path.is_symlink()
            if is_link and (not resolved.is_relative_to(root) or (is_linked and path.is_dir())):
                continue
            if path.is_file():
                if not is_private_key(path):
                    yield path
            elif path.is_dir() and resolved not in parents and not _is_run_or_environment(path):
                yield from walk(path, (*parents, resolved), is_link or is_linked)

    yield from walk(folder, (root,), False)


def _is_run_or_environment(folder: Path) -> bool:
    """Return whether a folder is that of a run, or a Python environment."""
    return (folder / "scenario.yaml").exists() or (folder / "pyvenv.cfg").exists()


def is_private_key(file: Path) -> bool:
    """Return whether a file may hold a private key: by its suffix, or by a key in text form in its first 64 KiB."""
    if file.suffix.lower() in _KEY_SUFFIXES:
        return True
    with file.open("rb") as source:
        head = source.read(_KEY_SEARCH_BYTES)
    return bool(
        _PRIVATE_KEY.search(head.replace(b"\0", b""))
    )  # a text in UTF-16 has a zero in each character


def _collect_files(file: Path, root: Path, excluded: frozenset[Path], found: set[Path]) -> None:
    """Add to `found` the files below `root` that a file imports or names, and those that copied modules do in turn.

    Args:
        file: A Python file.
        root: The folder of the first file.
        excluded: Absolute paths of files and folders that are not copied.
        found: The files found so far, by their places; a place may be a link.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):  # the import of the file reports it
        return
    # A module is looked for beside the file that imports it, and beside the first one, whose folder is on the path.
    folders = tuple(dict.fromkeys((file.parent, root)))
    places = [
        place
        for name in list_imports(tree)
        for folder in folders
        for place in _iterate_module_files(folder, name)
    ]
    for pattern in list_named_patterns(tree):
        for folder in folders:
            if _is_module_path(folder, pattern):
                places += _iterate_module_files(folder, pattern.partition(".")[0])
        for folder in (each for each in file.parents if each.is_relative_to(root)):
            places += _find_files(folder, file, pattern, excluded)
    for place in places:
        target = place.resolve()
        is_excluded = not excluded.isdisjoint((target, *target.parents))
        is_found_or_outside = place in found or not place.is_relative_to(root)
        if is_found_or_outside or is_excluded or not _can_be_copied(target, root):
            continue
        found.add(place)
        if place.suffix == ".py":
            _collect_files(place, root, excluded, found)


def _can_be_copied(file: Path, root: Path) -> bool:
    """Return whether a file may be copied: it is below a folder, not hidden there, and no private key."""
    if not file.is_relative_to(root) or is_private_key(file):
        return False
    return not any(part.startswith(".") or part in _SKIPPED_NAMES for part in file.relative_to(root).parts)


def _is_module_path(folder: Path, text: str) -> bool:
    """Return whether a text such as "lib.extra" is the dotted path of a module, as `importlib.import_module` takes it."""
    if not _DOTTED.fullmatch(text):
        return False
    path = folder.joinpath(*text.split("."))
    return path.with_name(f"{path.name}.py").is_file() or (path / "__init__.py").is_file()


def _iterate_module_files(folder: Path, name: str) -> Iterator[Path]:
    """Yield the files of a module or package that is imported in a folder: Python and compiled ones."""
    yield from filter(Path.is_file, (folder / f"{name}.py", folder / f"{name}.so", folder / f"{name}.pyd"))
    yield from sorted(folder.glob(f"{glob.escape(name)}.*.so"))
    package = folder / name
    if package.is_dir() and package.resolve() != folder and _is_package(package):
        yield from (file for file in walk_files(package) if file.suffix in all_suffixes())


def _is_package(folder: Path) -> bool:
    """Return whether a folder is a package to Python: it has `__init__.py`, or no module of its name is installed."""
    if (folder / "__init__.py").is_file():
        return True
    specs = (finder.find_spec(folder.name, None) for finder in sys.meta_path)
    installed = next((spec for spec in specs if spec is not None), None)
    return installed is None or installed.origin is None  # a folder without `__init__.py` has no origin


def _find_files(folder: Path, file: Path, pattern: str, excluded: frozenset[Path]) -> Iterator[Path]:
    """Yield the files beside a file that a text may name: a file, a module, a small folder's files, or those of a pattern.

    A pattern has an ending of its own, such as .txt. An ending alone names the file with this ending (`Path.with_suffix`).
    A folder with a file that is excluded has data of the scenario, and its other files too may be data.
    """
    names_nothing = not pattern.strip("*./") or "\0" in pattern or len(pattern) > 255 or "\n" in pattern
    if names_nothing or Path(pattern).is_absolute() or ".." in Path(pattern).parts:
        return
    candidates = [folder / f"{pattern}.py", folder / pattern]
    if re.fullmatch(r"\.\w+", pattern):
        candidates = [file.with_suffix(pattern)]
    ending = Path(pattern).suffix
    if ending and not {"*", "?"} & set(ending) and {"*", "?"} & set(pattern):
        with suppress(ValueError, OSError):  # no pattern of files
            candidates += sorted(folder.glob(pattern))
    for path in candidates:
        parts = path.relative_to(folder).parts if path.is_relative_to(folder) else ()
        if any(part.startswith(".") or part in _SKIPPED_NAMES for part in parts):
            continue
        if any(_is_run_or_environment(folder.joinpath(*parts[:n])) for n in range(1, len(parts))):
            continue
        if path.is_file():
            yield path
        elif path.is_dir() and path.resolve() != folder and not _is_run_or_environment(path):
            if any(each.is_relative_to(path.resolve()) for each in excluded):
                continue
            files = list(islice(walk_files(path), _MAX_FILES + 1))
            if len(files) <= _MAX_FILES and sum(file.stat().st_size for file in files) <= _MAX_BYTES:
                yield from files


def _copy_file(origin: Path, copy: Path) -> str:
    """Copy a file to the path `copy`, and return the SHA-256 of what was written."""
    make_folder(copy.parent)
    content = origin.read_bytes()
    write_whole(copy, content)
    return hashlib.sha256(content).hexdigest()


def _list_tables(scenario: Scenario, folder: Path) -> set[Path]:
    """Return the absolute paths of the scenario's tables on this machine, which are not copied but read where they are."""
    tables = (graph.table for graph in scenario.data.graph.values())
    labels = (options.path for options in scenario.data.labels)
    vectors = scenario.data.vectors.values()
    places = set[Path]()
    for path in (scenario.data.interactions, scenario.data.items, *tables, *labels, *vectors):
        if isinstance(path, str) and ("://" not in path or path.startswith("file://")):
            place = path if "://" in path else str(folder / path)
            places.add(Path(place).resolve())  # a folder, also of files that come later
            with suppress(DataError):
                places |= {Path(file).resolve() for file in find_files(place, "table", "").files}
    return places


def read_copies(run: RunFolder) -> PluginFiles:
    """Return the location of the copies of the user's own files that a run keeps, after checking every copy.

    Raises:
        ConfigError: A copy is missing, or differs from the one at the start of the run.
    """
    records = read_copy_records(run.path)
    for record in records:
        copy = run.sources / record["copy"]
        if not copy.is_file():
            raise ConfigError(
                f"{copy}, the run's copy of {record['use'] or copy.name}, is gone; put it back, or start a new run"
            )
        digest = hashlib.sha256(copy.read_bytes()).hexdigest()
        if digest != record["sha256"]:
            raise ConfigError(
                f"{copy} was changed since the run began (sha256 {digest[:12]}, the run's is {record['sha256'][:12]}): a run "
                f"continues with the files from its start; put it back, or start a new run with the "
                f"changed {record['use'] or copy.name}"
            )
    return PluginFiles.of_run(run.path, records)


def _choose_copy_path(use: str, digest: str) -> str:
    """Return the path of a copy, relative to the folder of the copies.

    It is the path relative to the scenario, or a unique one for a file outside the folder of the scenario.

    Args:
        use: The path of the file as the scenario names it.
        digest: The SHA-256 of the file.
    """
    path = Path(use)
    is_outside = path.is_absolute() or ".." in path.parts
    return f"outside-{digest[:12]}/{path.name}" if is_outside else str(path)


def _list_optimizers(scenario: Scenario) -> list[str | None]:
    """Return the optimizers that sparse tables name; None for a table that names none."""
    sparse = scenario.sparse
    return [sparse.defaults.optimizer, *(table.optimizer for table in sparse.tables.values())]


def _list_uses(value: Any) -> Iterator[Any]:
    """Yield the values of all keys `use` in plain data, at any depth."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, dict) and "use" in value:
        yield value["use"]
    for child in children:
        yield from _list_uses(child)
