"""Finds the files of a table behind a path, glob, folder, URI or `builtin:` name, by one rule for local and remote places.

Path components that begin with `_` or `.` below the folder or wildcard are ignored, because Spark, Hive and Delta keep
their own
files there. In a glob, `*`, `?` and `[...]` match within one component, and `**` matches any number of components. Folders
named
`key=value` become columns (`FolderColumns`).
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from nonet.errors import DataError
from nonet.samples.tables.retries import get_first_line, read_with_retries
from nonet.suggest import join_names, suggest_sentence

_WILD = "*?["
_NULL = "__HIVE_DEFAULT_PARTITION__"
_DATA = Path(__file__).parents[1] / "data"
_PREFIX = "builtin:"
_NOTICES = {
    "movielens-small": (
        "MovieLens latest-small (October 2016) by GroupLens, University of Minnesota: for research, to be "
        "redistributed "
        "under the same conditions, no commercial use without permission. Terms and citation: {terms}"
    )
}


def get_builtin_path(name: str) -> Path:
    """Return the path of a built-in file such as `builtin:movielens-small/interactions.parquet`.

    Raises:
        DataError: If there is no such file; the message lists the existing ones.
    """
    known = [f"{_PREFIX}{file.relative_to(_DATA).as_posix()}" for file in sorted(_DATA.glob("*/*.parquet"))]
    if name not in known:
        raise DataError(
            f"{name}: no such built-in table; there are {join_names(known)}.{suggest_sentence(name, known)}"
        )
    return _DATA / name.removeprefix(_PREFIX)


def get_licence_notice(path: str | os.PathLike[str]) -> str | None:
    """Return one line with the licence of a built-in data set and the path of its terms; None for other data."""
    text = os.fspath(path)
    if not text.startswith(_PREFIX):
        return None
    folder = get_builtin_path(text).parent
    return _NOTICES[folder.name].format(terms=folder / "README.txt")


@dataclass(frozen=True)
class FoundFiles:
    """The files behind a path, sorted by name.

    Attributes:
        system: the filesystem that reads them.
        files: their paths in it.
    """

    system: pafs.FileSystem
    files: list[str]

    @cached_property
    def partitions(self) -> FolderColumns:
        """The columns that the folders' names hold."""
        return FolderColumns.from_files(self.files)


def find_parquet(
    path: str | os.PathLike[str], label: str, ending: str | Sequence[str] = ".parquet"
) -> tuple[pafs.FileSystem, list[str]]:
    """Return the filesystem and the files behind `path`; see `find_files`."""
    found = find_files(path, label, ending)
    return found.system, found.files


def find_files(
    path: str | os.PathLike[str], label: str, ending: str | Sequence[str] = ".parquet"
) -> FoundFiles:
    """Find the files behind a path, glob, folder, URI or builtin name.

    Args:
        path: The place. A folder means all files below it with `ending`; if there are none and Parquet files are wanted,
            those that begin with the Parquet magic bytes.
        label: Prefix of every error message.
        ending: One ending or several.

    Raises:
        DataError: There is no file, or the place cannot be listed.
    """
    text = os.fspath(path)
    endings = (ending,) if isinstance(ending, str) else tuple(ending)
    if text.startswith(_PREFIX):
        file = get_builtin_path(text)
        return FoundFiles(pafs.LocalFileSystem(), [str(file)])
    remote = "://" in text
    try:
        return read_with_retries(lambda: _find_without_retry(text, label, endings, remote), f"{label} {text}")
    except (pa.ArrowException, ValueError, OSError) as error:
        raise DataError(f"{label} {text}: cannot be listed: {get_first_line(error)}") from None
    except DataError as error:
        said = str(error)
        raise (DataError(said.replace("cannot be read", "cannot be listed")) if remote else error) from None


def _find_without_retry(text: str, what: str, endings: tuple[str, ...], remote: bool) -> FoundFiles:
    """Find the files behind a path once, without retries."""
    query = ""
    if remote and re.match(r"\w+=", text.rpartition("?")[2]):  # options of the file system, not a wildcard
        text, _, options = text.rpartition("?")
        query = f"?{options}"
    cut = min((text.find(mark) for mark in _WILD if mark in text), default=-1)
    base = text if cut < 0 else text[:cut].rpartition("/")[0]
    if remote:
        system, root = pafs.FileSystem.from_uri(base + query)
        pattern = "" if cut < 0 else text[len(base) :].lstrip("/")
    else:
        system, root = pafs.LocalFileSystem(), base
        if cut >= 0 and os.path.exists(text):  # a name with brackets in it
            root, cut = text, -1
        pattern = "" if cut < 0 else text[len(base) :].lstrip("/")
        root = root or ("/" if text.startswith("/") else ".")
    if cut >= 0:
        files = _match_pattern(system, root, pattern.split("/"), endings)
        if not files:
            none = f"no {endings[0]} file is there." if remote else "no file matches this pattern."
            raise DataError(f"{what} {text}: {none}")
        return FoundFiles(system, files)
    info = system.get_file_info(root)
    if info.type == pafs.FileType.File:
        return FoundFiles(system, [root])
    if info.type == pafs.FileType.Directory or remote:
        files = _list_data_files(system, root, endings)
        if not files:
            none = f"no {endings[0]} file is there." if remote else f"the folder holds no {endings[0]} file."
            raise DataError(f"{what} {text}: {none}")
        return FoundFiles(system, files)
    raise DataError(f"{what} {text}: no such file or folder (looked in {os.getcwd()}).")


def _list_data_files(system: pafs.FileSystem, root: str, endings: tuple[str, ...]) -> list[str]:
    """Return the data files of a folder at any depth."""
    infos = system.get_file_info(pafs.FileSelector(root, recursive=True, allow_not_found=True))
    cut = len(root.rstrip("/")) + 1 if root != "/" else 1
    paths = sorted(info.path for info in infos if info.type == pafs.FileType.File)
    paths = [path for path in paths if not any(map(_is_hidden, path[cut:].split("/")))]
    files = [path for path in paths if path.lower().endswith(endings)]
    if not files and ".parquet" in endings:  # Hive writes parts without an ending
        files = [path for path in paths if "." not in path.rpartition("/")[2] and _is_parquet(system, path)]
    return files


def _is_parquet(system: pafs.FileSystem, path: str) -> bool:
    with system.open_input_file(path) as source:
        return source.size() > 8 and source.read_at(4, 0) == b"PAR1"


def _match_pattern(
    system: pafs.FileSystem, root: str, parts: Sequence[str], endings: tuple[str, ...]
) -> list[str]:
    """Return the files that a pattern matches; if it matches only folders, return the data files in them."""
    matched = dict(_expand_pattern(system, root, parts))
    files = sorted(path for path, kind in matched.items() if kind == pafs.FileType.File)
    if files:
        return files
    folders = sorted(path for path, kind in matched.items() if kind == pafs.FileType.Directory)
    return [file for folder in folders for file in _list_data_files(system, folder, endings)]


def _expand_pattern(system: pafs.FileSystem, root: str, parts: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield path and type of everything below a folder that the components of a pattern match."""
    part, rest = parts[0], parts[1:]
    if part == "**":
        if rest:
            yield from _expand_pattern(system, root, rest)
        for path, kind in _list_entries(system, root):
            if _is_hidden(path.rpartition("/")[2]):
                continue
            if kind == pafs.FileType.Directory:
                yield from _expand_pattern(system, path, parts)
            elif not rest:
                yield path, kind
        return
    if not any(mark in part for mark in _WILD):
        path = f"{root.rstrip('/')}/{part}"
        info = system.get_file_info(path)
        if info.type == pafs.FileType.NotFound:
            return
        found = [(path, info.type)]
    else:
        found = [
            (path, kind)
            for path, kind in _list_entries(system, root)
            if fnmatch.fnmatchcase(name := path.rpartition("/")[2], part)
            and (not _is_hidden(name) or part[0] == name[0])
        ]
    for path, kind in found:
        if not rest:
            yield path, kind
        elif kind == pafs.FileType.Directory:
            yield from _expand_pattern(system, path, rest)


def _list_entries(system: pafs.FileSystem, folder: str) -> list[tuple[str, Any]]:
    infos = system.get_file_info(pafs.FileSelector(folder, recursive=False, allow_not_found=True))
    return sorted((info.path, info.type) for info in infos)


def _is_hidden(part: str) -> bool:
    return part.startswith(("_", "."))


@dataclass(frozen=True)
class FolderColumns:
    """The columns that folders named `key=value` stand for.

    Attributes:
        schema: Names and types: int64 if all values of a column are integers, otherwise string.
        values: Value of each column by file; None for Hive's null partition.
    """

    schema: pa.Schema
    values: Mapping[str, Mapping[str, Any]]

    @classmethod
    def from_files(cls, files: Sequence[str]) -> FolderColumns:
        """Read the names of the `key=value` folders of each file; a key that is not in every path is no column."""
        texts = {file: _parse_pairs(file) for file in files}
        names = [
            name for name in next(iter(texts.values()), {}) if all(name in pairs for pairs in texts.values())
        ]
        fields: list[pa.Field] = []
        values: dict[str, dict[str, Any]] = {file: {} for file in files}
        for name in names:
            whole = all(map(_is_whole, (pairs[name] for pairs in texts.values())))
            fields.append(pa.field(name, pa.int64() if whole else pa.string()))
            for file, pairs in texts.items():
                text = pairs[name]
                values[file][name] = None if text == _NULL else int(text) if whole else text
        return cls(pa.schema(fields), values)

    def add_to_table(self, table: pa.Table, file: str, only: Sequence[str] | None = None) -> pa.Table:
        """Return a file's rows with its folders' columns; a column that the file has itself stays as it is."""
        for field in self.schema:
            if field.name not in table.column_names and (only is None or field.name in only):
                value = pa.scalar(self.values[file][field.name], field.type)
                table = table.append_column(field, pa.repeat(value, len(table)))
        return table

    def extend_schema(self, schema: pa.Schema) -> pa.Schema:
        """Return a file's schema with the columns of the folders appended."""
        return pa.schema([*schema, *(field for field in self.schema if field.name not in schema.names)])


def _parse_pairs(path: str) -> dict[str, str]:
    """Return key and value of the `key=value` folders directly above a file, the outermost first."""
    pairs: list[tuple[str, str]] = []
    for part in reversed(path.split("/")[:-1]):
        key, sign, value = part.partition("=")
        if not (sign and key):
            break
        pairs.append((unquote(key), unquote(value)))
    return dict(reversed(pairs))


def _is_whole(text: str) -> bool:
    digits = text.removeprefix("-")
    return text == _NULL or (
        digits.isascii() and digits.isdigit() and str(int(text)) == text and len(digits) < 19
    )
