"""Parquet files by path, glob, folder, URI or `builtin:` name, read as one Arrow table.

Several files become one table in the order of their names; columns are united by name. URIs (s3://, gs://,
hdfs://, file://) go through Arrow's own filesystems, with the credentials those find by themselves.
"""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from nonet.atomic import replacing
from nonet.errors import DataError
from nonet.samples.tables.builtin import builtin_path

_WILD = "*?["


def read_parquet(path: str | os.PathLike[str], what: str, only: Collection[str] | None = None) -> pa.Table:
    """All rows of the Parquet files behind `path`; `what` (interactions, items) opens every error.

    `only`: the columns to read, as the files name them; those that are not there are left out.
    """
    system, files = find_parquet(path, what)
    tables = [_read(system, file, what, only) for file in files]
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise _unlike(path, files, what, error) from None


def parquet_schema(path: str | os.PathLike[str], what: str) -> pa.Schema:
    """Names and types of the columns behind `path`, without its rows."""
    system, files = find_parquet(path, what)
    schemas = [_schema(system, file, what) for file in files]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException as error:
        raise _unlike(path, files, what, error) from None


def count_rows(path: str | os.PathLike[str], what: str) -> int:
    """Rows of the files behind `path`, from their footers."""
    system, files = find_parquet(path, what)
    return sum(parquet_footer(system, file, what).num_rows for file in files)


def parquet_footer(system: pafs.FileSystem, file: str, what: str) -> pq.FileMetaData:
    """Row groups and columns of one file, without its rows."""
    with _opened(system, file, what) as parquet:
        return parquet.metadata


def read_groups(
    system: pafs.FileSystem, file: str, groups: Collection[int], what: str, only: Collection[str]
) -> pa.Table:
    """Some row groups of one file, those of the columns `only` that it has. Raises DataError that names file and row group."""
    with _opened(system, file, what) as parquet:
        names = [name for name in parquet.schema_arrow.names if name in only]
        tables = []
        for group in groups:
            try:
                tables.append(parquet.read_row_group(group, columns=names, use_threads=False))
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{what} {file}: row group {group} cannot be read: {_first(error)}") from None
        return pa.concat_tables(tables)


def find_parquet(
    path: str | os.PathLike[str], what: str, ending: str = ".parquet"
) -> tuple[pafs.FileSystem, list[str]]:
    """The filesystem and the Parquet files (of a folder, those of `ending`) behind `path`, sorted by name; none is an error."""
    text = os.fspath(path)
    if text.startswith("builtin:"):
        return pafs.LocalFileSystem(), [str(builtin_path(text))]
    if "://" in text:
        return _find_remote(text, what, ending)
    if any(mark in text for mark in _WILD) and not os.path.exists(text):
        files = sorted(file for file in glob.glob(text, recursive=True) if os.path.isfile(file))
        if not files:
            raise DataError(f"{what} {text}: no file matches this pattern.")
    elif os.path.isdir(text):
        files = sorted(
            str(file) for file in Path(text).rglob(f"*{ending}") if not file.name.startswith((".", "_"))
        )
        if not files:
            raise DataError(f"{what} {text}: the folder holds no {ending} file.")
    elif os.path.isfile(text):
        files = [text]
    else:
        raise DataError(f"{what} {text}: no such file or folder (looked in {os.getcwd()}).")
    return pafs.LocalFileSystem(), files


def _find_remote(uri: str, what: str, ending: str) -> tuple[pafs.FileSystem, list[str]]:
    cut = min((uri.find(mark) for mark in _WILD if mark in uri), default=-1)
    base = uri if cut < 0 else uri[:cut].rsplit("/", 1)[0]
    try:
        system, root = pafs.FileSystem.from_uri(base)
        pattern = None if cut < 0 else root.rstrip("/") + uri[len(base) :]
        info = system.get_file_info(root)
        if info.type == pafs.FileType.File:
            return system, [root]
        entries = system.get_file_info(pafs.FileSelector(root, recursive=True, allow_not_found=True))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{what} {uri}: cannot be listed: {_first(error)}") from None
    files = sorted(file.path for file in entries if file.type == pafs.FileType.File)
    if pattern is not None:
        files = [file for file in files if fnmatch.fnmatchcase(file, pattern)]
    else:
        files = [file for file in files if file.endswith(ending)]
    if not files:
        raise DataError(f"{what} {uri}: no {ending} file is there.")
    return system, files


def write_parquet(table: pa.Table, path: str | os.PathLike[str]) -> Path:
    """Writes the file, whole or not at all; its path."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as draft:
        pq.write_table(table, draft, compression="zstd")
    return target


def _read(system: pafs.FileSystem, file: str, what: str, only: Collection[str] | None = None) -> pa.Table:
    with _opened(system, file, what) as parquet:
        if only is None:
            return parquet.read()
        return parquet.read(columns=[name for name in parquet.schema_arrow.names if name in only])


def _schema(system: pafs.FileSystem, file: str, what: str) -> pa.Schema:
    with _opened(system, file, what) as parquet:
        return parquet.schema_arrow


@contextmanager
def _opened(system: pafs.FileSystem, file: str, what: str) -> Iterator[pq.ParquetFile]:
    try:
        with system.open_input_file(file) as source:
            yield pq.ParquetFile(source)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"{what} {file}: not a Parquet file ({_first(error)}) `nonet import csv SRC DST` makes "
            "Parquet of a CSV."
        ) from None
    except OSError as error:
        raise DataError(f"{what} {file}: cannot be read: {_first(error)}") from None


def _unlike(path: str | os.PathLike[str], files: list[str], what: str, error: BaseException) -> DataError:
    return DataError(f"{what} {path}: its {len(files)} files have unlike columns: {_first(error)}")


def _first(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
