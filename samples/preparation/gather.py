"""Gathers one partition from all runs and sorts it by user and time; ties keep the order of the log.

User, time and position are packed into one integer if 63 bits hold them, because sorting integers is ten times as fast as
an argsort of two columns.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.samples.preparation.scatter import WORDS, ScatteredRun
from nonet.samples.sequences import ROW

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

# Shapes: N events of a partition, U users of it.


@dataclass(frozen=True, slots=True)
class PartitionLayout:
    """Describes the columns of runs and partitions.

    Attributes:
        text: Whether user ids are text.
        finer: Dtype of the times that are finer than seconds; "" if only seconds are known.
        event_names: Names of the kinds of events, sorted.
        columns: Dtype of each carried column by name, in the order of their files. The last one may be `ROW`: the row of each
            event among the compressed events of its partition's users, which is not a column of the sequences.
        targets: Names of the targets, in the order of their files.
    """

    text: bool
    finer: str
    event_names: tuple[str, ...]
    columns: Mapping[str, str]
    targets: Sequence[str]

    def get_fields(self) -> dict[str, str]:
        """Return the dtype of each column of a sorted partition by name, without the users."""
        event = {"event": "<i4"} if self.event_names else {}
        columns = {f"column-{i}": dtype for i, dtype in enumerate(self.columns.values())}
        targets = {f"target-{i}": "|b1" for i in range(len(self.targets))}
        return {"item": "<i4", "time": "<i8", **event, **columns, **targets}

    @property
    def sequence_columns(self) -> list[str]:
        """The names of the columns of the sequences."""
        return [name for name in self.columns if name != ROW]

    def compute_row_bytes(self) -> int:
        """Return the maximum number of bytes that one event takes in a run."""
        field_bytes = sum(np.dtype(dtype).itemsize for dtype in self.get_fields().values())
        user_bytes, fine_time_bytes = 8, 8 if self.finer else 0
        return field_bytes + user_bytes + fine_time_bytes


@dataclass(frozen=True, slots=True)
class SortedPartition:
    """A sorted partition on disk. Its items are catalogue rows, and it is not filtered yet."""

    folder: Path

    def read_column(self, name: str, dtype: str) -> np.ndarray:
        """Read one column [N] into memory."""
        return np.fromfile(self.folder / f"{name}.bin", dtype)

    def read_offsets(self) -> np.ndarray:
        """Read the offsets [U + 1] at which each user's events begin."""
        return self.read_column("offsets", "<i8")

    def read_users(self, text: bool) -> Any:
        """Return the ids of the partition's users in ascending order: int64 [U], or an Arrow array of strings if `text`."""
        if not text:
            return self.read_column("users", "<i8")
        with pa.memory_map(str(self.folder / WORDS)) as source:
            return pa.ipc.open_file(source).read_all()["id"].combine_chunks()


def gather_partition(
    runs: Sequence[ScatteredRun], number: int, layout: PartitionLayout, folder: Path
) -> SortedPartition:
    """Write the partition with this number unless it exists, and return it.

    The partition is written to a temporary folder that is then renamed.

    Args:
        runs: The runs of all slices, in the order of the log.
        number: Index of the partition.
        layout: Layout of the runs.
        folder: Parent folder of the partitions.
    """
    partition_folder = folder / f"part-{number:06}"
    if partition_folder.exists():
        return SortedPartition(partition_folder)
    staging_folder = folder / f".part-{number:06}"
    shutil.rmtree(staging_folder, ignore_errors=True)
    staging_folder.mkdir(parents=True)
    texts, user = _read_users(runs, number, layout.text)
    fine_time = _read_column(runs, number, "finer", layout.finer) if layout.finer else None
    time = _read_column(runs, number, "time", "<i8")
    order = sort_events(user, time if fine_time is None else fine_time)
    ordered = user[order]
    is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    first = np.flatnonzero(is_first) if len(order) else order
    np.append(first, len(order)).astype("<i8").tofile(staging_folder / "offsets.bin")
    _write_users(texts, ordered[first], staging_folder)
    for name, dtype in layout.get_fields().items():
        values = time if name == "time" else _read_column(runs, number, name, dtype, layout.event_names)
        values[order].tofile(staging_folder / f"{name}.bin")
    os.replace(staging_folder, partition_folder)
    return SortedPartition(partition_folder)


def sort_events(user: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Return the indices [N] that sort events by user, then time, then index."""
    if not len(user):
        return np.empty(0, np.int64)
    largest_code, code = _encode_users(user)
    if time.dtype.kind != "f":
        first_time, last_time = int(time.min()), int(time.max())
        time_bits, index_bits = (last_time - first_time).bit_length(), len(user).bit_length()
        if largest_code.bit_length() + time_bits + index_bits <= 63:
            index = np.arange(len(user), dtype=np.int64)
            packed = np.sort((code << time_bits | (time - first_time)) << index_bits | index)
            return packed & (1 << index_bits) - 1
    return np.lexsort((time, code))


def _encode_users(user: np.ndarray) -> tuple[int, np.ndarray]:
    """Map users to small integers from 0 in the same order; return the largest integer, and the integers [N] int64."""
    lowest, highest = int(user.min()), int(user.max())
    if highest - lowest < 1 << 32:
        return highest - lowest, user.astype(np.int64) - lowest
    ids, code = np.unique(user, return_inverse=True)
    return len(ids) - 1, code.astype(np.int64)


def _read_users(runs: Sequence[ScatteredRun], number: int, text: bool) -> tuple[Any, np.ndarray]:
    """Read the users of a partition's rows from all runs.

    Returns:
        The distinct texts in ascending order (None for integer ids), and the user of each row [N]: its id, or the index of its
        text.
    """
    if not text:
        return None, _read_column(runs, number, "user", "<i8")
    texts_by_run = [run.read_texts(number) for run in runs]
    encoded = pa.concat_arrays(texts_by_run).dictionary_encode()
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    rank_of_text = rank[encoded.indices.to_numpy()] if len(order) else np.empty(0, np.int32)
    run_starts = np.cumsum([0, *(len(texts) for texts in texts_by_run)])
    users = [
        rank_of_text[run.read_column("user", number, "<i4") - run.words[number] + run_start]
        for run, run_start in zip(runs, run_starts[:-1], strict=True)
    ]
    return encoded.dictionary.take(pa.array(order)), np.concatenate(users)


def _write_users(texts: Any, users: np.ndarray, folder: Path) -> None:
    """Write the distinct users of a partition: int64 ids if `texts` is None, else Arrow strings, the texts with these indices."""
    if texts is None:
        users.astype("<i8").tofile(folder / "users.bin")
        return
    with pa.ipc.new_file(str(folder / WORDS), pa.schema({"id": pa.string()})) as out:
        out.write_table(pa.table({"id": texts.take(pa.array(users))}))


def _read_column(
    runs: Sequence[ScatteredRun], number: int, name: str, dtype: str, event_names: Sequence[str] = ()
) -> np.ndarray:
    """Concatenate one column of a partition over all runs; a run's codes of kinds become indices into `event_names`."""
    parts = [run.read_column(name, number, dtype) for run in runs]
    if name == "event":
        index_of_kind = {kind: index for index, kind in enumerate(event_names)}
        index_of_code = [np.array([index_of_kind[kind] for kind in run.kinds], np.int32) for run in runs]
        parts = [
            index[codes] if len(codes) else codes for index, codes in zip(index_of_code, parts, strict=True)
        ]
    return np.concatenate([np.empty(0, dtype), *parts])


def make_layout(
    runs: Sequence[ScatteredRun], text: bool, columns: Mapping[str, str], targets: Sequence[str]
) -> PartitionLayout:
    """Build the layout of the given runs; `text`, `columns` and `targets` are as in PartitionLayout."""
    fine_dtype = json.loads((runs[0].folder / "meta.json").read_text())["finer"]
    event_names = sorted({kind for run in runs for kind in run.kinds})
    return PartitionLayout(text, fine_dtype, tuple(event_names), columns, targets)
