"""Segment files: the rows of a sparse table on disk, with one segment per range of slices.

A file consists of:

    magic, the columns of each segment, a JSON footer, the footer's length, the footer's checksum, magic

The footer has a checksum for each column of each segment. A reader starts at the end of the file, so that a truncated file is
rejected before a row is used. If a segment does not match its checksums, an error names it. The slice of a key does not depend on
the number of shards, so any number of shards can read the files that any other number wrote.

The checksum is computed in C++ at memory speed or in NumPy, with equal results: a bijection mixes each 64-bit word with its
position, and the results are added, so that one changed word always changes the sum.
"""

# Shapes: R rows of a segment, D width, S elements of optimizer state per row.

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nonet.embedding import splitmix64
from nonet.embedding.tables import NativeUnavailable, RowColumns, TableSpec, get_state_width, load_library
from nonet.embedding.versions import write_out
from nonet.errors import CheckpointError

FORMAT = 1
_MAGIC = b"NONETSEG"
_TAIL_BYTES = 16 + len(_MAGIC)  # The footer's length and checksum, 8 bytes each, and the magic.
# Write-back starts after this many bytes, so that the final fsync does not have to write the whole file.
_WRITE_OUT_BYTES = 8 << 20
_OP = {"upsert": 0, "delete": 1, "wait": 2}  # The values of the column `op`.


@dataclass(frozen=True)
class SliceSegment:
    """The location and contents of one segment.

    Attributes:
        start: The first slice.
        stop: The slice after the last.
        offset: The position of the first byte in the file.
        rows: The number of rows.
        policy: Whether the segment has the columns `seen` and `uses` of the eviction policy.
        sums: The checksum of each column.
    """

    start: int
    stop: int
    offset: int
    rows: int
    policy: bool
    sums: list[int]


@dataclass
class SegmentFooter:
    """The footer of a file, whose fields are those of the JSON object.

    Attributes:
        table: The name of the table.
        dim: The width of a row.
        state: The elements of optimizer state per row.
        step: The training step of the rows.
        since: If not None, the file has only rows that changed after this step.
        slices: The slices whose rows are in the file, as [start, stop] pairs.
        segments: The segments of the file.
        format: The version of the file format.
    """

    table: str
    dim: int
    state: int
    step: int
    since: int | None = None
    slices: list[list[int]] = field(default_factory=list)
    segments: list[SliceSegment] = field(default_factory=list)
    format: int = FORMAT


class SegmentWriter:
    """Writes one segment file, which readers reject until `close` has written the footer and synced the file to disk.

    Args:
        path: The file to create.
        table: The name of the table.
        spec: The spec of the table.
        step: The training step of the rows.
        ranges: The ranges of slices that the file will cover.
    """

    def __init__(
        self,
        path: Path,
        table: str,
        spec: TableSpec,
        step: int,
        ranges: Iterable[range],
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        slices = [[block.start, block.stop] for block in ranges]
        self.path = path
        self.footer = SegmentFooter(table, spec.dim, get_state_width(spec), step, since=None, slices=slices)
        self._file: BinaryIO = open(path, "wb", buffering=0)  # noqa: SIM115
        self._offset, self._written_out, self._hash = 0, 0, hashlib.sha256()
        self._write(memoryview(_MAGIC))

    def add(self, slices: range, part: RowColumns) -> None:
        """Append the rows `part` of a range of slices as one segment; without rows, write nothing."""
        if not len(part.key):
            return
        arrays = [np.ascontiguousarray(array) for array in _to_arrays(part)]
        sums = [compute_checksum(array) for array in arrays]
        policy = part.seen is not None
        self.footer.segments.append(
            SliceSegment(slices.start, slices.stop, self._offset, len(part.key), policy, sums)
        )
        for array in arrays:
            self._write(_view_bytes(array))
        if self._offset - self._written_out >= _WRITE_OUT_BYTES:
            write_out(self._file.fileno(), self._written_out, self._offset - self._written_out)
            self._written_out = self._offset

    def close(self) -> tuple[str, int]:
        """Write the footer, sync the file to disk, and return the file's SHA-256 in hexadecimal and its size in bytes."""
        text = np.frombuffer(_to_json(self.footer), dtype=np.uint8)
        tail = np.array([len(text), compute_checksum(text)], dtype=np.uint64)
        for piece in (_view_bytes(text), _view_bytes(tail), memoryview(_MAGIC)):
            self._write(piece)
        os.fsync(self._file.fileno())
        self._file.close()
        return self._hash.hexdigest(), self._offset

    def abandon(self) -> None:
        """Close the file without a footer, so that readers reject it."""
        self._file.close()

    def _write(self, view: memoryview) -> None:
        """Append bytes to the file and its hash; an unbuffered write may write only a part of them."""
        self._hash.update(view)
        while len(view):
            written = self._file.write(view)
            self._offset, view = self._offset + written, view[written:]


def _view_bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def read_footer(path: Path) -> SegmentFooter:
    """Read the footer of a file.

    Raises:
        CheckpointError: If the file is truncated, corrupted or of another format.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size < len(_MAGIC) + _TAIL_BYTES:
                raise _make_corruption_error(path, f"it has {size} bytes")
            file.seek(size - _TAIL_BYTES)
            tail = file.read(_TAIL_BYTES)
            length, checksum = (int(word) for word in np.frombuffer(tail[:16], dtype=np.uint64))
            if tail[16:] != _MAGIC or length > size - _TAIL_BYTES:
                raise _make_corruption_error(path, "its last bytes are not those of a segment file")
            file.seek(size - _TAIL_BYTES - length)
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if compute_checksum(np.frombuffer(text, dtype=np.uint8)) != checksum:
        raise _make_corruption_error(path, "its footer does not match its checksum")
    fields: dict[str, Any] = json.loads(text)
    if fields.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has segment format {fields.get('format')}; this version reads only format {FORMAT}"
        )
    fields["segments"] = [SliceSegment(**segment) for segment in fields["segments"]]
    return SegmentFooter(**fields)


def read_segments(
    path: Path, ranges: Iterable[range], footer: SegmentFooter | None = None
) -> Iterator[RowColumns]:
    """Read the segments that overlap one of the ranges of slices.

    A segment is read completely, so rows outside the ranges can be included. `footer` saves reading it from the file.

    Yields:
        The rows of one segment, after its checksums were checked.

    Raises:
        CheckpointError: If a segment is corrupted.
    """
    footer = footer or read_footer(path)
    blocks = [block for block in ranges if len(block)]
    for segment in footer.segments:
        if any(segment.start < block.stop and block.start < segment.stop for block in blocks):
            yield _read_segment(path, footer, segment)


def check_spec(path: Path, footer: SegmentFooter, spec: TableSpec) -> None:
    """Check that a file's rows fit a table.

    Raises:
        CheckpointError: If they do not.
    """
    expected = (spec.dim, get_state_width(spec))
    if (footer.dim, footer.state) != expected:
        raise CheckpointError(
            f"{path} has rows of width {footer.dim} with {footer.state} elements of optimizer state, but table "
            f"{footer.table!r} needs {expected[0]} and {expected[1]}; was it saved with another dim or optimizer?"
        )


def _to_json(footer: SegmentFooter) -> bytes:
    """Convert a footer to JSON; `dataclasses.asdict` takes six times as long and would delay a step by 5 ms."""
    return json.dumps(vars(footer), default=vars).encode()


def _to_arrays(part: RowColumns) -> list[np.ndarray]:
    """Return the columns of a segment in the order of the file, which `_read_segment` reads."""
    is_waiting = part.waiting if part.waiting is not None else np.zeros(len(part.key), dtype=bool)
    op = part.deleted * np.uint8(_OP["delete"]) + is_waiting * np.uint8(_OP["wait"])
    policy = [] if part.seen is None or part.uses is None else [part.seen, part.uses]
    return [part.key, part.row, part.state, part.step, op.astype(np.uint8), *policy]


def _read_segment(path: Path, footer: SegmentFooter, segment: SliceSegment) -> RowColumns:
    """Read one segment of a file and check the checksum of each column."""
    count = segment.rows
    shapes: list[tuple[tuple[int, ...], type]] = [
        ((count,), np.int64),
        ((count, footer.dim), np.float32),
        ((count, footer.state), np.float32),
        ((count,), np.int64),
        ((count,), np.uint8),
        *([((count,), np.int64)] * (2 if segment.policy else 0)),
    ]
    arrays = []
    with path.open("rb") as file:
        file.seek(segment.offset)
        for (shape, dtype), expected in zip(shapes, segment.sums, strict=True):
            array = np.empty(shape, dtype=dtype)
            got = file.readinto(array.reshape(-1).view(np.uint8).data) if array.size else 0
            if got != array.nbytes or compute_checksum(array) != expected:
                raise CheckpointError(
                    f"{path}: the segment of slices {segment.start} to {segment.stop - 1} is corrupted at byte "
                    f"{segment.offset}; load an older checkpoint"
                )
            arrays.append(array)
    key, row, state, step, op, *policy = arrays
    seen, uses = policy or (None, None)
    return RowColumns(key, row, state, step, op == _OP["delete"], seen, uses, op == _OP["wait"])


def _make_corruption_error(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is truncated or corrupted: {why}; load an older checkpoint")


_POSITION_FACTOR = np.uint64(
    0xD1342543DE82EF95
)  # An odd constant, so that words of different positions mix differently.


def compute_checksum(data: np.ndarray) -> int:
    """Compute the 64-bit checksum of a contiguous array's bytes."""
    native = _load_native_checksum()
    if native is not None:
        return native(data.ctypes.data, data.nbytes)
    return compute_checksum_numpy(data)


def compute_checksum_numpy(data: np.ndarray) -> int:
    """Compute the same checksum as the native function, in NumPy.

    The bytes are padded with at least one zero to 64-bit words, and their number is added to the sum.
    """
    raw = data.reshape(-1).view(np.uint8)
    padded = np.zeros(8 * (len(raw) // 8 + 1), dtype=np.uint8)
    padded[: len(raw)] = raw
    words = padded.view(np.uint64)
    mixed = splitmix64(words ^ (np.arange(len(words), dtype=np.uint64) * _POSITION_FACTOR))
    return (int(mixed.sum(dtype=np.uint64)) + len(raw)) % (1 << 64)


@cache
def _load_native_checksum() -> Callable[[int, int], int] | None:
    """Return the native checksum function; None if the native library is unavailable."""
    try:
        call = load_library().nonet_checksum
    except NativeUnavailable:
        return None
    call.restype, call.argtypes = ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_int64]
    return call
