"""Flat files: the fields of sequences as one memory-mapped .npy file each.

Ranges of users are written in any order to files whose disk space is reserved first, so a full disk raises an error before the
first write. meta.json is written last; a folder without it holds no sequences. Text ids of users are a memory-mapped Arrow file.
An artifact of 100 M events takes 1.4 to 1.8 GB on disk; in a process, only the pages that it has read are resident.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from nonet.atomic import read_json
from nonet.errors import ConfigError, DataError

FLAT_META = "meta.json"
_FLAT_FORMAT = 4
_COMPRESSED_FORMAT = (
    5  # of a compressed log: with the rows behind each event (`FoldedRepeats`), and strict samples
)
# Is added to the formats of logs with labels that arrive later; formats 6 and 7 are those of earlier versions (`sequences.py`).
_LATE_LABELS = 4
ITEM_KEYS = "item_keys.npy"
USER_IDS = "user_id.arrow"


def choose_flat_format(*, compressed: bool, late_labels: bool) -> int:
    """Return the number of the format of sequences that are prepared on disk."""
    return (_COMPRESSED_FORMAT if compressed else _FLAT_FORMAT) + _LATE_LABELS * late_labels


def is_flat(folder: Path) -> bool:
    """Return whether a folder holds sequences in this format."""
    return (folder / FLAT_META).is_file()


class MappedTextIds:
    """Text ids [U] that are read from their file on access.

    Indexing with a slice returns another MappedTextIds, with one number a text, and with an array an object array.
    """

    dtype = np.dtype(object)

    def __init__(self, column: Any):
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, slice):
            return MappedTextIds(self._column[rows])
        if np.ndim(rows) == 0:
            return self._column[int(rows)].as_py()
        rows = np.asarray(rows)
        index = np.flatnonzero(rows) if rows.dtype == bool else rows
        return np.array(self._column.take(pa.array(index)).to_pylist(), dtype=object)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._column.to_pylist(), dtype=object).astype(dtype or object)

    def tolist(self) -> list[Any]:
        """Read all ids as a list."""
        return self._column.to_pylist()

    def __arrow_array__(self, type: Any = None) -> pa.Array:
        """Return all ids as an Arrow array, without Python objects."""
        ids = self._column.combine_chunks()
        return ids if type is None else ids.cast(type)

    def astype(self, dtype: Any) -> np.ndarray:
        """Read all ids as an array of the given dtype."""
        return np.asarray(self).astype(dtype)


class WideView:
    """A memory-mapped array of 32-bit integers that is read as int64."""

    dtype = np.dtype(np.int64)

    def __init__(self, values: np.ndarray):
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        return self.values[index].astype(np.int64)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.values.astype(dtype or np.int64)

    def slice_values(self, first: int, last: int) -> WideView:
        """Return a view of the values [first, last) without reading them."""
        return WideView(self.values[first:last])


class MappedSequences:
    """The files of a sequences folder, each of which is memory-mapped when it is requested.

    Attributes:
        meta: Content of meta.json.

    Raises:
        DataError: A file cannot be read, or has an unknown format.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        try:
            self.meta: dict[str, Any] = read_json(folder / FLAT_META)
        except (OSError, ConfigError) as error:
            raise DataError(
                f"sequences {folder}: {FLAT_META} is not readable ({error}). Run the tokenise stage again."
            ) from None
        last_format = _COMPRESSED_FORMAT + _LATE_LABELS
        if self.meta.get("format") not in range(_FLAT_FORMAT, last_format + 1):
            raise DataError(
                f"sequences {folder}: format {self.meta.get('format')}, this Nonet reads {_FLAT_FORMAT} to {last_format}. Run "
                "the tokenise stage again."
            )

    def map_array(self, name: str) -> np.ndarray:
        """Memory-map the file of one field."""
        return _map_file(self._folder, f"{name}.npy")

    def map_fields(self) -> dict[str, Any]:
        """Return the arguments of `Sequences` that are stored in this folder."""
        meta = self.meta
        # Without kinds of events there is no file: a broadcast zero takes no memory.
        event = (
            self.map_array("event") if meta["event_names"] else np.broadcast_to(np.int32(0), meta["events"])
        )
        return {
            "user_id": self._map_user_ids(),
            "offsets": np.asarray(self.map_array("offsets")),
            "event": event,
            "time": time if (time := self.map_array("time")).dtype == np.int64 else WideView(time),
            **{name: self.map_array(name) for name in ("item", "split", "user_key")},
            "columns": {name: self.map_array(f"column-{i}") for i, name in enumerate(meta["columns"])},
            "targets": {name: self.map_array(f"target-{i}") for i, name in enumerate(meta["targets"])},
            "event_names": tuple(meta["event_names"]),
            "dropped": tuple(meta["dropped"]),
            "repeats": meta["repeats"],
            "strict": meta["format"] % 2 == 1,  # numbers of formats are odd for compressed logs
            "late_labels": meta["format"] > _COMPRESSED_FORMAT,
        }

    def _map_user_ids(self) -> Any:
        if not (self._folder / USER_IDS).is_file():
            return self.map_array("user_id")
        with pa.memory_map(str(self._folder / USER_IDS)) as source:
            return MappedTextIds(pa.ipc.open_file(source).read_all()["user_id"])


class FlatFiles:
    """Arrays of a known length, each a .npy file that is written in ranges; the content of existing files is kept.

    Args:
        folder: Folder of the files.
        fields: Dtype and length of each field by name.

    Raises:
        OSError: The disk is full.
    """

    def __init__(self, folder: Path, fields: Mapping[str, tuple[Any, int]]):
        # File descriptor, position of the first value in bytes, and dtype of each field.
        self._files: dict[str, tuple[int, int, np.dtype[Any]]] = {}
        for name, (dtype_like, length) in fields.items():
            dtype = np.dtype(dtype_like)
            path = folder / f"{name}.npy"
            existed = path.exists()
            with path.open("r+b" if existed else "wb") as out:
                header = {
                    "descr": np.lib.format.dtype_to_descr(dtype),
                    "fortran_order": False,
                    "shape": (length,),
                }
                np.lib.format.write_array_header_1_0(out, header)
                data_start = out.tell()
                out.flush()
                if length and not existed:
                    os.posix_fallocate(out.fileno(), data_start, length * dtype.itemsize)
            self._files[name] = (os.open(path, os.O_WRONLY), data_start, dtype)

    def write(self, name: str, start: int, values: np.ndarray) -> bytes | memoryview:
        """Write n values to the indices [start, start + n) of a field, and return the bytes that were written."""
        descriptor, data_start, dtype = self._files[name]
        content = np.ascontiguousarray(values, dtype).data.cast("B")
        written = 0
        while written < len(content):  # a call may write less than all bytes
            written += os.pwrite(descriptor, content[written:], data_start + start * dtype.itemsize + written)
        return content

    def close(self) -> None:
        """Flush all files to disk and close them."""
        for descriptor, *_ in self._files.values():
            os.fsync(descriptor)
            os.close(descriptor)
        self._files = {}


class GrowingFile:
    """A one-dimensional .npy file that is written sequentially; its length is set when it is closed."""

    def __init__(self, path: Path, dtype: Any):
        self._dtype, self._length = np.dtype(dtype), 0
        self._out = path.open("wb")
        self._write_header()
        self._start = self._out.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.seek(0)
        self._write_header()
        assert self._out.tell() == self._start  # headers are padded, for lengths of up to 20 digits
        self._out.close()

    def append_values(self, values: np.ndarray) -> None:
        """Append values."""
        values.astype(self._dtype, copy=False).tofile(self._out)
        self._length += len(values)

    def _write_header(self) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self._length,)}
        np.lib.format.write_array_header_1_0(self._out, header)


def load_item_keys(folder: Path) -> np.ndarray:
    """Memory-map the sparse keys [I] int64 of a sequences folder's items. Raises DataError if they cannot be read."""
    return _map_file(folder, ITEM_KEYS)


def _map_file(folder: Path, name: str) -> np.ndarray:
    """Memory-map a .npy file of a sequences folder."""
    try:
        return np.load(folder / name, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise DataError(
            f"sequences {folder}: {name} is not readable ({error}). Run the tokenise stage again."
        ) from None


def release_pages(*arrays: np.ndarray) -> None:
    """Drop the resident pages of the memory-mapped arrays (`madvise(DONTNEED)`); a later access reads them again."""
    for array in arrays:
        mapped = getattr(getattr(array, "values", array), "_mmap", None)
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)
