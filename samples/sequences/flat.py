"""Flat files: the fields of sequences as one memory-mapped .npy file each (format 4).

Ranges of users are written in any order to files whose space is reserved first, so a full disk is an error before the first
byte and not a signal in a mapping. meta.json is written last; a folder without it holds no sequences. Text ids of users are
a mapped Arrow file. An artifact of 100 M events takes 1.4 to 1.8 GB on disk; a process holds only the pages that it has
read.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from nonet.errors import DataError

FLAT_META, FLAT_FORMAT = "meta.json", 4
ITEM_KEYS = "item_keys.npy"
_WIDE_TIMES = 3  # the format whose times always take 64 bits
USER_IDS = "user_id.arrow"


def is_flat(folder: Path) -> bool:
    """Return whether a folder holds sequences in this format."""
    return (folder / FLAT_META).is_file()


class MappedTextIds:
    """Text ids [U] that stay in their file; indexing returns an object array or one text."""

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
        places = np.flatnonzero(rows) if rows.dtype == bool else rows
        return np.array(self._column.take(pa.array(places)).to_pylist(), dtype=object)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._column.to_pylist(), dtype=object).astype(dtype or object)

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
        """Return the numbers [first, last) without reading them."""
        return WideView(self.values[first:last])


class MappedSequences:
    """The files of a folder, mapped on access. Raises DataError if they cannot be read."""

    def __init__(self, folder: Path):
        self._folder = folder
        try:
            self.meta: dict[str, Any] = json.loads((folder / FLAT_META).read_text())
        except (OSError, ValueError) as error:
            raise DataError(
                f"sequences {folder}: {FLAT_META} is not readable ({error}). Run the tokenise stage again."
            ) from None
        if self.meta.get("format") not in (_WIDE_TIMES, FLAT_FORMAT):
            raise DataError(
                f"sequences {folder}: format {self.meta.get('format')}, this Nonet reads {_WIDE_TIMES} and {FLAT_FORMAT}. "
                "Run the tokenise stage again."
            )

    def map_array(self, name: str) -> np.ndarray:
        """Map one field."""
        try:
            return np.load(self._folder / f"{name}.npy", mmap_mode="r")
        except (OSError, ValueError) as error:
            raise DataError(
                f"sequences {self._folder}: {name}.npy is not readable ({error}). Run the tokenise stage again."
            ) from None

    def map_fields(self) -> dict[str, Any]:
        """Return the arguments of `Sequences` that are stored in this folder."""
        meta = self.meta
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
        }

    def _map_user_ids(self) -> Any:
        if not (self._folder / USER_IDS).is_file():
            return self.map_array("user_id")
        with pa.memory_map(str(self._folder / USER_IDS)) as source:
            return MappedTextIds(pa.ipc.open_file(source).read_all()["user_id"])


class FlatFiles:
    """Arrays of a known length, each a .npy file that is written in ranges.

    Args:
        folder: Folder of the files.
        fields: Dtype and length of each field by name.

    Raises:
        OSError: If the disk has no room.
    """

    def __init__(self, folder: Path, fields: Mapping[str, tuple[Any, int]]):
        self._place: dict[str, tuple[int, int, np.dtype[Any]]] = {}
        for name, (kind, length) in fields.items():
            dtype = np.dtype(kind)
            path = folder / f"{name}.npy"
            whole = path.exists()
            with path.open("r+b" if whole else "wb") as out:
                header = {
                    "descr": np.lib.format.dtype_to_descr(dtype),
                    "fortran_order": False,
                    "shape": (length,),
                }
                np.lib.format.write_array_header_1_0(out, header)
                start = out.tell()
                out.flush()
                if length and not whole:
                    os.posix_fallocate(out.fileno(), start, length * dtype.itemsize)
            self._place[name] = (os.open(path, os.O_WRONLY), start, dtype)

    def write(self, name: str, at: int, values: np.ndarray) -> bytes | memoryview:
        """Write values at [at, at + n) of a field and return the bytes that were written."""
        handle, start, dtype = self._place[name]
        content = np.ascontiguousarray(values, dtype).data.cast("B")
        done = 0
        while done < len(content):
            done += os.pwrite(handle, content[done:], start + at * dtype.itemsize + done)
        return content

    def close(self) -> None:
        """Flush all files to disk and close them."""
        for handle, *_ in self._place.values():
            os.fsync(handle)
            os.close(handle)
        self._place = {}


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
        facts = {"descr": self._dtype.str, "fortran_order": False, "shape": (self._length,)}
        np.lib.format.write_array_header_1_0(self._out, facts)


def load_item_keys(folder: Path) -> np.ndarray | None:
    """Map the sparse keys [I] of a sequences folder's items; None if keys are indices."""
    path = folder / ITEM_KEYS
    return np.load(path, mmap_mode="r") if path.is_file() else None


def release_pages(*arrays: np.ndarray) -> None:
    """Drop the resident pages of the memory-mapped arrays (`madvise(DONTNEED)`); a later access reads them again."""
    for array in arrays:
        mapped = getattr(getattr(array, "values", array), "_mmap", None)
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)
