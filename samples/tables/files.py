"""Finds the files of a table behind a path, glob, folder, URI or `builtin:` name, by one rule for all filesystems.

Path components that begin with `_` or `.` below the folder or wildcard are ignored, because Spark, Hive and Delta keep their
own files there. In a glob, `*`, `?` and `[...]` match within one component, and `**` matches any number of components. Folders
named `key=value` become columns (`FolderColumns`). Files of a table format with a log (Delta, Iceberg, Hudi) are refused, because
only the log says which of them count.
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

from nonet.addresses import open_filesystem
from nonet.errors import DataError
from nonet.samples.tables.retries import get_first_line, identify_file, read_with_retries
from nonet.suggest import join_names, suggest_sentence

_WILDCARDS = "*?["
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"  # Hive's folder value for null.
_LOG_FORMATS = {
    "_delta_log": "Delta",
    ".hoodie": "Hudi",
    ".hoodie_partition_metadata": "Hudi",
    "metadata": "Iceberg",
}
"""The table format of an entry of a folder. `metadata` counts only if it has files of Iceberg."""
_ICEBERG_METADATA = re.compile(r"\.metadata\.json(\.gz)?$")
_COPY_ADVICE = {
    "Delta": "pyarrow.dataset.write_dataset(deltalake.DeltaTable(PATH).to_pyarrow_dataset(), COPY, format='parquet')",
    "Hudi": "spark.read.format('hudi').load(PATH).write.parquet(COPY)",
    "Iceberg": "pyarrow.parquet.write_table(catalog.load_table(NAME).scan().to_arrow(), COPY), with a catalog of pyiceberg",
}
"""How to write a plain Parquet copy of a table, by its format."""
_BUILTIN_FOLDER = Path(__file__).parents[1] / "data"
_BUILTIN_PREFIX = "builtin:"
_LICENCE_NOTICES = {
    "movielens-small": (
        "MovieLens latest-small (October 2016) by GroupLens, University of Minnesota: for research, to be redistributed "
        "under the same conditions, no commercial use without permission. Terms and citation: {terms}"
    )
}


def get_builtin_path(name: str) -> Path:
    """Return the path of a built-in file such as `builtin:movielens-small/interactions.parquet`.

    Raises:
        DataError: If there is no such file; the message lists the existing ones.
    """
    names = [
        f"{_BUILTIN_PREFIX}{file.relative_to(_BUILTIN_FOLDER).as_posix()}"
        for file in sorted(_BUILTIN_FOLDER.glob("*/*.parquet"))
    ]
    if name not in names:
        raise DataError(
            f"{name}: no such built-in table; there are {join_names(names)}.{suggest_sentence(name, names)}"
        )
    return _BUILTIN_FOLDER / name.removeprefix(_BUILTIN_PREFIX)


def get_licence_notice(path: str | os.PathLike[str]) -> str | None:
    """Return one line with the licence of a built-in data set and the path of its terms; None for other data."""
    text = os.fspath(path)
    if not text.startswith(_BUILTIN_PREFIX):
        return None
    folder = get_builtin_path(text).parent
    return _LICENCE_NOTICES[folder.name].format(terms=folder / "README.txt")


@dataclass(frozen=True)
class FoundFiles:
    """The files behind a path, sorted by name.

    Attributes:
        system: The filesystem of the files.
        files: Their paths in this filesystem.
    """

    system: pafs.FileSystem
    files: list[str]

    @cached_property
    def partitions(self) -> FolderColumns:
        """The columns that the names of `key=value` folders define."""
        return FolderColumns.from_files(self.files)

    def identify(self, label: str) -> list[list[str]]:
        """Return the path of each file, and the identity of its content (`identify_file`)."""
        return [[file, identify_file(self.system, file, f"{label} {file}")] for file in self.files]


def find_parquet(
    path: str | os.PathLike[str], label: str, ending: str | Sequence[str] = ".parquet"
) -> tuple[pafs.FileSystem, list[str]]:
    """Return the filesystem and the paths of the files behind `path`; arguments and errors as for `find_files`."""
    source = find_files(path, label, ending)
    return source.system, source.files


def find_files(
    path: str | os.PathLike[str], label: str, ending: str | Sequence[str] = ".parquet"
) -> FoundFiles:
    """Find the files behind a path, glob, folder, URI or builtin name.

    Args:
        path: Path, glob, folder, URI or `builtin:` name. A folder stands for all files below it with `ending`; if there are none
            and Parquet files are wanted, for the files without an ending that begin with the Parquet magic bytes.
        label: Prefix of every error message.
        ending: One ending or several, such as ".parquet".

    Raises:
        DataError: If there is no file, or the files cannot be listed.
    """
    text = os.fspath(path)
    endings = (ending,) if isinstance(ending, str) else tuple(ending)
    if text.startswith(_BUILTIN_PREFIX):
        file = get_builtin_path(text)
        return FoundFiles(pafs.LocalFileSystem(), [str(file)])
    is_remote = "://" in text
    try:
        return read_with_retries(
            lambda: _find_without_retry(text, label, endings, is_remote), f"{label} {text}"
        )
    except (pa.ArrowException, ValueError, OSError) as error:
        raise DataError(f"{label} {text}: cannot be listed: {get_first_line(error)}") from None
    except DataError as error:
        message = str(error)
        raise (
            DataError(message.replace("cannot be read", "cannot be listed")) if is_remote else error
        ) from None


def _find_without_retry(path: str, label: str, endings: tuple[str, ...], is_remote: bool) -> FoundFiles:
    """Find the files behind a path or glob once, without retries.

    Args:
        path: Path, glob or URI.
        label: Prefix of error messages.
        endings: Endings of the files in folders.
        is_remote: Whether the path is a URI.

    Raises:
        DataError: If there is no file.
    """
    uri_options = ""
    # What follows a `?` in a URI may be options of the filesystem (name=...) and not a wildcard.
    if is_remote and re.match(r"\w+=", path.rpartition("?")[2]):
        path, _, option_text = path.rpartition("?")
        uri_options = f"?{option_text}"
    wildcard_at = min((path.find(mark) for mark in _WILDCARDS if mark in path), default=-1)
    fixed_part = path if wildcard_at < 0 else path[:wildcard_at].rpartition("/")[0]
    if is_remote:
        system, root = open_filesystem(fixed_part + uri_options)
        pattern = "" if wildcard_at < 0 else _decode_pattern(path[len(fixed_part) :].lstrip("/"))
    else:
        system, root = pafs.LocalFileSystem(), fixed_part
        if wildcard_at >= 0 and os.path.exists(path):  # The name of a file or folder has brackets in it.
            root, wildcard_at = path, -1
        pattern = "" if wildcard_at < 0 else path[len(fixed_part) :].lstrip("/")
        root = root or ("/" if path.startswith("/") else ".")
    if wildcard_at >= 0:
        files = _match_pattern(system, root, pattern.split("/"), endings)
        if not files:
            problem = f"no {endings[0]} file is there." if is_remote else "no file matches this pattern."
            raise DataError(f"{label} {path}: {problem}")
        _check_no_table_log(system, root, files, f"{label} {path}")
        return FoundFiles(system, files)
    info = system.get_file_info(root)
    if info.type == pafs.FileType.File:
        _check_no_table_log(system, root, [root], f"{label} {path}")
        return FoundFiles(system, [root])
    if info.type == pafs.FileType.Directory or is_remote:
        files = _list_data_files(system, root, endings)
        if not files:
            problem = (
                f"no {endings[0]} file is there." if is_remote else f"the folder holds no {endings[0]} file."
            )
            raise DataError(f"{label} {path}: {problem}")
        _check_no_table_log(system, root, files, f"{label} {path}")
        return FoundFiles(system, files)
    raise DataError(f"{label} {path}: no such file or folder (looked in {os.getcwd()}).")


def _decode_pattern(pattern: str) -> str:
    """Decode the percent-encoded characters of a pattern; encoded wildcards stand for themselves."""
    return unquote(re.sub("%(2A|3F|5B)", r"[%\1]", pattern, flags=re.IGNORECASE))


def _check_no_table_log(system: pafs.FileSystem, root: str, files: Sequence[str], label: str) -> None:
    """Refuse files that belong to a table with a log, because some of them may hold rows that were deleted or replaced.

    Args:
        system: Filesystem of the files.
        root: The file or folder in which the files were found.
        files: Paths of the files.
        label: Prefix of the error message.

    Raises:
        DataError: If the folder of a file, or one around it, has the log of a table. The message names the format.
    """
    if isinstance(system, pafs.LocalFileSystem):
        root, files = os.path.abspath(root), [os.path.abspath(file) for file in files]
    for folder in _list_table_folders(root, files):
        try:
            infos = system.get_file_info([f"{folder}/{name}" for name in _LOG_FORMATS])
            for info in infos:
                name = info.base_name
                if info.type == pafs.FileType.NotFound or (
                    name == "metadata" and not _has_iceberg_metadata(system, info)
                ):
                    continue
                table_format = _LOG_FORMATS[name]
                raise DataError(
                    f"{label}: {folder} belongs to a {table_format} table (it has {name}), whose log says which rows count; "
                    f"Nonet does not use that log. Write a plain Parquet copy and give its path: {_COPY_ADVICE[table_format]}"
                )
        except OSError:
            if folder == root or folder.startswith(f"{root.rstrip('/')}/"):
                raise
            # A folder around the one that the user gave may be closed to them.


def _list_table_folders(root: str, files: Sequence[str]) -> list[str]:
    """Return the folders whose log may be about the files: all up to `root`, and those of which `root` may be a partition."""
    folders: dict[str, None] = {}
    for folder in dict.fromkeys(file.rpartition("/")[0] for file in files):
        while folder and folder not in folders:
            name = folder.rpartition("/")[2]
            if "=" not in name:  # Tables have no log in their partitions.
                folders[folder] = None
            is_below_root = folder.startswith(f"{root.rstrip('/')}/")
            if not is_below_root and "=" not in name and name != "data":  # Iceberg keeps files in `data`.
                break
            folder = folder.rpartition("/")[0]
    return list(folders)


def _has_iceberg_metadata(system: pafs.FileSystem, info: pafs.FileInfo) -> bool:
    """Return whether an entry is a folder with metadata files of Iceberg."""
    if info.type != pafs.FileType.Directory:
        return False
    return any(_ICEBERG_METADATA.search(path) for path, _ in _list_entries(system, info.path))


def _list_data_files(system: pafs.FileSystem, root: str, endings: tuple[str, ...]) -> list[str]:
    """Return the files with an ending in a folder at any depth, sorted, without hidden ones."""
    infos = system.get_file_info(pafs.FileSelector(root, recursive=True, allow_not_found=True))
    prefix_length = len(root.rstrip("/")) + 1 if root != "/" else 1
    paths = sorted(info.path for info in infos if info.type == pafs.FileType.File)
    paths = [path for path in paths if not any(map(_is_hidden, path[prefix_length:].split("/")))]
    files = [path for path in paths if path.lower().endswith(endings)]
    if not files and ".parquet" in endings:  # Hive writes files without an ending.
        files = [path for path in paths if "." not in path.rpartition("/")[2] and _is_parquet(system, path)]
    return files


def _is_parquet(system: pafs.FileSystem, path: str) -> bool:
    """Return whether a file begins with the magic bytes of Parquet."""
    with system.open_input_file(path) as source:
        return source.size() > 8 and source.read_at(4, 0) == b"PAR1"


def _match_pattern(
    system: pafs.FileSystem, root: str, components: Sequence[str], endings: tuple[str, ...]
) -> list[str]:
    """Return the files below `root` that a pattern matches; if it matches only folders, return the data files in them.

    Args:
        system: Filesystem.
        root: The folder in which the pattern begins.
        components: The pattern, split at `/`.
        endings: Endings of the files in folders that the pattern matches.
    """
    type_by_path = dict(_expand_pattern(system, root, components))
    files = sorted(path for path, file_type in type_by_path.items() if file_type == pafs.FileType.File)
    if files:
        return files
    folders = sorted(path for path, file_type in type_by_path.items() if file_type == pafs.FileType.Directory)
    return [file for folder in folders for file in _list_data_files(system, folder, endings)]


def _expand_pattern(
    system: pafs.FileSystem, root: str, components: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """Yield path and type of each file and folder below `root` that the components of a pattern match."""
    component, later_components = components[0], components[1:]
    if component == "**":
        if later_components:  # `**` matches no component here.
            yield from _expand_pattern(system, root, later_components)
        for path, file_type in _list_entries(system, root):
            if _is_hidden(path.rpartition("/")[2]):
                continue
            if file_type == pafs.FileType.Directory:  # `**` matches this folder and maybe more below it.
                yield from _expand_pattern(system, path, components)
            elif not later_components:
                yield path, file_type
        return
    if not any(mark in component for mark in _WILDCARDS):
        path = f"{root.rstrip('/')}/{component}"
        info = system.get_file_info(path)
        if info.type == pafs.FileType.NotFound:
            return
        matches = [(path, info.type)]
    else:
        matches = [
            (path, file_type)
            for path, file_type in _list_entries(system, root)
            if fnmatch.fnmatchcase(name := path.rpartition("/")[2], component)
            and (not _is_hidden(name) or component[0] == name[0])
        ]
    for path, file_type in matches:
        if not later_components:
            yield path, file_type
        elif file_type == pafs.FileType.Directory:
            yield from _expand_pattern(system, path, later_components)


def _list_entries(system: pafs.FileSystem, folder: str) -> list[tuple[str, Any]]:
    """Return path and type of each entry directly in a folder, sorted by path."""
    infos = system.get_file_info(pafs.FileSelector(folder, recursive=False, allow_not_found=True))
    return sorted((info.path, info.type) for info in infos)


def _is_hidden(component: str) -> bool:
    """Return whether a path component is one that is ignored; see the module."""
    return component.startswith(("_", "."))


@dataclass(frozen=True)
class FolderColumns:
    """The columns that folders named `key=value` define.

    Attributes:
        schema: Names and types of the columns: int64 if all values of a column are integers, otherwise string.
        values: For each file, the value of each column by name; None for Hive's null partition.
    """

    schema: pa.Schema
    values: Mapping[str, Mapping[str, Any]]

    @classmethod
    def from_files(cls, files: Sequence[str]) -> FolderColumns:
        """Parse the `key=value` folders in the paths of files.

        A key that a path lacks is null in the rows of that file. Keys that differ only in upper and lower case are one column.
        """
        texts_by_file = _unify_case({file: _parse_pairs(file) for file in files})
        names = list(dict.fromkeys(name for pairs in texts_by_file.values() for name in pairs))
        fields: list[pa.Field] = []
        values: dict[str, dict[str, Any]] = {file: {} for file in files}
        for name in names:
            is_integer = all(
                map(_is_int64_or_null, (pairs.get(name, _HIVE_NULL) for pairs in texts_by_file.values()))
            )
            fields.append(pa.field(name, pa.int64() if is_integer else pa.string()))
            for file, pairs in texts_by_file.items():
                text = pairs.get(name, _HIVE_NULL)
                values[file][name] = None if text == _HIVE_NULL else int(text) if is_integer else text
        return cls(pa.schema(fields), values)

    def add_to_table(self, table: pa.Table, file: str, only: Sequence[str] | None = None) -> pa.Table:
        """Append the columns of a file's folders to its rows; a column that the file has itself stays as it is.

        Args:
            table: Rows of the file.
            file: Path of the file.
            only: Names of the columns that may be appended; None for all.
        """
        for field in self.schema:
            if field.name not in table.column_names and (only is None or field.name in only):
                value = pa.scalar(self.values[file][field.name], field.type)
                table = table.append_column(field, pa.repeat(value, len(table)))
        return table

    def extend_schema(self, schema: pa.Schema) -> pa.Schema:
        """Return a file's schema with the columns of the folders appended."""
        return pa.schema([*schema, *(field for field in self.schema if field.name not in schema.names)])


def _parse_pairs(path: str) -> dict[str, str]:
    """Return the keys and values of the consecutive `key=value` folders directly above a file, the outermost first."""
    pairs: list[tuple[str, str]] = []
    for folder in reversed(path.split("/")[:-1]):
        key, equals, value = folder.partition("=")
        if not (equals and key):
            break
        pairs.append((unquote(key), unquote(value)))
    return dict(reversed(pairs))


def _unify_case(pairs_by_file: Mapping[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Write keys that differ only in case in lower case; keys that occur in one path in two spellings stay as they are."""
    spellings: dict[str, set[str]] = {}
    apart: set[str] = set()
    for pairs in pairs_by_file.values():
        lower_names = [name.lower() for name in pairs]
        apart.update(name for name in lower_names if lower_names.count(name) > 1)
        for name in pairs:
            spellings.setdefault(name.lower(), set()).add(name)
    unified = {lower for lower, names in spellings.items() if len(names) > 1} - apart
    return {
        file: {name.lower() if name.lower() in unified else name: text for name, text in pairs.items()}
        for file, pairs in pairs_by_file.items()
    }


def _is_int64_or_null(text: str) -> bool:
    """Return whether a folder's value is an integer of at most 18 digits in its usual form, or Hive's null."""
    digits = text.removeprefix("-")
    return text == _HIVE_NULL or (
        digits.isascii() and digits.isdigit() and str(int(text)) == text and len(digits) < 19
    )
