"""Read a scenario that extends another one: `extends: NAME` or `extends: FILE` at its top.

Maps are merged key by key, lists and scalars are replaced, and `null` removes a key of the extended scenario. An extended
scenario may extend another one. Its relative paths start from its own folder: those that name a file there are rewritten, so
that the merged document needs one folder only, the one of the scenario that was named.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from nonet import yaml
from nonet.controller.scenario.document.changes import apply_change
from nonet.controller.scenario.document.library import LIBRARY, find_scenario, is_of_run
from nonet.errors import ConfigError
from nonet.plugins import parse_file

KEY = "extends"
CHANGED = "--set"  # the origin of a value that a change of the command line sets
# Keys whose values are paths, even where there is no such file.
_PATHS = (("data", "interactions"), ("data", "items"), ("data", "sequences", "use"))


@dataclass(frozen=True, slots=True)
class ScenarioDocument:
    """The merged document of a scenario and of those that it extends.

    Attributes:
        document: Plain dicts, lists and scalars.
        path: The file of the scenario.
        parents: The files of the scenarios that it extends, nearest first.
        origins: By the keys that lead to a value, where the value is written: `FILE:LINE`, `NAME:LINE` for a shipped
            scenario, or `--set`. A list counts as one value.
    """

    document: Any
    path: Path
    parents: tuple[Path, ...]
    origins: Mapping[tuple[str, ...], str]

    def find_origin(self, keys: Sequence[str]) -> str | None:
        """Return where the value at a path is written, or the first value below it; None if nothing there is written."""
        path = tuple(keys)
        below = (origin for place, origin in self.origins.items() if place[: len(path)] == path)
        above = (self.origins[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.origins)
        return next(below, next(above, None))


def read_chain(path: Path, changes: Sequence[str] = ()) -> ScenarioDocument:
    """Read a scenario and those that it extends, merge them, and apply changes.

    Args:
        path: The file of the scenario.
        changes: Changes such as `a.b=c`, which are applied to the merged document.

    Raises:
        ConfigError: A file does not exist or is no map, the scenarios extend each other, or a change is wrong.
    """
    chain = list(_follow(path))
    merged: Any = {}
    origins: dict[tuple[str, ...], str] = {}
    for file, document in reversed(chain):
        if not yaml.is_map(document):  # only the first one can be, and the validation refuses it
            return ScenarioDocument(document, path, (), {})
        lines = yaml.locate_values(file.read_text(encoding="utf-8"))
        label = _name_file(file, path.parent)
        relocated = document if file == path else _Relocation(file.parent, path.parent).relocate(document)
        _merge(merged, relocated, (), origins, {place: f"{label}:{line}" for place, line in lines.items()})
    for change in changes:
        keys = tuple(change.partition("=")[0].strip().split("."))
        if keys[0] == KEY:
            raise ConfigError(f"--set {change}: write `{KEY}` into a scenario's file")
        apply_change(merged, change)
        _remove_below(origins, keys)
        origins[keys] = CHANGED
    return ScenarioDocument(merged, path, tuple(file for file, _ in chain[1:]), origins)


def _follow(path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the file and the document, without `extends`, of a scenario and of those that it extends, nearest first."""
    files = [path]
    while True:
        file = files[-1]
        document = yaml.read(file)
        if len(files) > 1 and not yaml.is_map(document):
            raise ConfigError(
                f"{file}: wanted a map, as {files[-2].name} extends it, got {type(document).__name__}"
            )
        source = document.pop(KEY) if yaml.is_map(document) and KEY in document else None
        has_parent = source is not None
        yield file, document
        if not has_parent:
            return
        if not isinstance(source, str) or not source:
            raise ConfigError(
                f"{file}: {KEY}: wanted the name of a shipped scenario or the path of a file, got {source!r}"
            )
        try:
            parent = find_scenario(source, file.parent)
        except ConfigError as error:
            raise ConfigError(f"{file}: {KEY}: {error}") from None
        if parent in files:
            names = " -> ".join(item.name for item in [*files[files.index(parent) :], parent])
            raise ConfigError(f"{file}: {KEY}: {names} extend each other; remove one of these keys")
        if is_of_run(parent):
            raise ConfigError(
                f"{file}: {KEY}: {parent} is the stored scenario of a run; extend the file that the run was started with"
            )
        files.append(parent)


def _name_file(file: Path, folder: Path) -> str:
    """Return the short name of a scenario's file: of a shipped one, relative to a folder if below it, or absolute."""
    if file.parent == LIBRARY:
        return file.stem
    return str(file.relative_to(folder) if file.is_relative_to(folder) else file)


def _merge(
    base: dict[str, Any],
    change: Mapping[str, Any],
    path: tuple[str, ...],
    origins: dict[tuple[str, ...], str],
    places: Mapping[tuple[str, ...], str],
) -> None:
    """Merge a map into another one, in place, with the origins of its values.

    Args:
        base: The map that is changed.
        change: The map whose values take precedence.
        path: The keys that lead to both.
        origins: The origins of the values of `base`, changed in place.
        places: Where the values of `change` are written.
    """
    for key, value in change.items():
        keys = (*path, str(key))
        if value is None and key in base:
            del base[key]
            _remove_below(origins, keys)
        elif yaml.is_map(value) and value and yaml.is_map(base.get(key)):
            _merge(base[key], value, keys, origins, places)
        elif yaml.is_map(value) and value:
            _remove_below(origins, keys)
            base[key] = {}
            _merge(base[key], value, keys, origins, places)
        elif not (yaml.is_map(value) and yaml.is_map(base.get(key))):  # an empty map changes no map
            _remove_below(origins, keys)
            base[key] = value
            origins[keys] = places.get(keys, "")


def _remove_below(origins: dict[tuple[str, ...], str], path: tuple[str, ...]) -> None:
    """Remove the origins of a value and of all values below it, and of a scalar above it that the value replaces."""
    for place in [place for place in origins if place[: len(path)] == path or path[: len(place)] == place]:
        del origins[place]


@dataclass(frozen=True, slots=True)
class _Relocation:
    """Rewrites relative paths of an extended scenario for the folder of another one.

    Attributes:
        start: The folder of the extended scenario.
        folder: The folder of the scenario that extends it.
    """

    start: Path
    folder: Path

    def relocate(self, value: Any, path: tuple[str, ...] = ()) -> Any:
        """Return a copy of a value at a path of keys, with its relative paths rewritten."""
        if self.start == self.folder:
            return value
        if yaml.is_map(value):
            return {key: self.relocate(child, (*path, str(key))) for key, child in value.items()}
        if isinstance(value, list):
            return [self.relocate(child, path) for child in cast("list[Any]", value)]
        return self._relocate_text(value, path) if isinstance(value, str) else value

    def _relocate_text(self, text: str, path: tuple[str, ...]) -> str:
        """Return a text with its relative path rewritten, if it is one; any other text is returned unchanged."""
        prefix, location = ("lmdb:", text.removeprefix("lmdb:")) if text.startswith("lmdb:") else ("", text)
        cited = parse_file(location) or location  # without the name after `file.py:`
        if not cited or "://" in cited or "\n" in cited or os.path.isabs(cited):
            return text
        if cited == location and not self._is_file(cited, path):
            return text
        target = os.path.normpath(self.start / cited)
        inside = Path(target).is_relative_to(self.folder)
        moved = os.path.relpath(target, self.folder) if inside else target
        return f"{prefix}{moved}{location[len(cited) :]}"

    def _is_file(self, text: str, path: tuple[str, ...]) -> bool:
        """Return whether a text is the relative path of a file or folder: tables, and stores and other paths that exist."""
        if path in _PATHS and ":" not in text:
            return self.start != LIBRARY  # tables of a shipped scenario that are relative are the user's
        is_store = path[:2] == ("data", "join") and path[-1] == "use"
        is_path_like = "/" in text or "." in text or is_store or path[-1:] in (("path",), ("table",))
        return is_path_like and bool(glob.glob(str(Path(glob.escape(str(self.start))) / text)))
