"""Scatters slices of events to runs on disk, each divided by ranges of users.

A run is the output of one slice: one file per column, with rows in the order of partitions, and within a partition in the
order of the log. A partition is a range of user ids whose bounds are computed from a sample of the log, so consecutive
partitions hold the users in the order of their ids. A run is written to a temporary folder that is then renamed, so an existing
run is complete and is not written again.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.samples.preparation.catalogue import ItemIndex
from nonet.samples.preparation.log import EventLog, LogSlice
from nonet.samples.sequences import UnknownItems, compute_label_times, convert_column, match_target
from nonet.samples.tables import match_rows

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

# Shapes: N rows of a run, P partitions.
_SAMPLED_SLICES = 32  # number of slices from which bounds are computed
_SAMPLE_ROWS = 1 << 17  # number of sampled rows of each of these slices
WORDS = "words.arrow"  # file with distinct text ids


def compute_user_bounds(log: EventLog, partitions: int) -> list[Any]:
    """Return up to `partitions` - 1 user ids, ascending, that divide a sample of the events evenly.

    The result depends only on the log.

    Args:
        log: The event log.
        partitions: Requested number of partitions.
    """
    if partitions < 2:
        return []
    sampled_slices = np.unique(np.linspace(0, len(log.slices) - 1, _SAMPLED_SLICES).round().astype(int))
    samples: list[Any] = []
    for number in sampled_slices:
        ids = log.read_column(log.slices[number], "user_id", groups=1).combine_chunks().drop_null()
        samples.append(ids.take(pa.array(np.arange(0, len(ids), max(1, len(ids) // _SAMPLE_ROWS)))))
    samples = [ids.cast(ids.type.value_type) if pa.types.is_dictionary(ids.type) else ids for ids in samples]
    ordered = pc.sort(pa.concat_arrays(samples)) if hasattr(pc, "sort") else pa.concat_arrays(samples).sort()
    bound_index = np.linspace(0, len(ordered), partitions + 1)[1:-1].astype(int)
    return sorted(set(ordered.take(pa.array(bound_index)).to_pylist()))


def locate_in_bounds(user_ids: np.ndarray, bounds: Sequence[Any]) -> np.ndarray:
    """Return the partition [N] uint8 or uint16 of each user id [N] int64 or object, from the bounds between partitions."""
    dtype = np.uint8 if len(bounds) < 256 else np.uint16
    return np.searchsorted(np.array(bounds, user_ids.dtype), user_ids, "right").astype(dtype)


@dataclass(frozen=True, slots=True)
class ScatteredRun:
    """The output of one slice.

    Attributes:
        folder: Folder of the run.
        bounds: First row of each partition [P + 1].
        kinds: Names of the kinds of events, in the order of the run's own codes.
        words: Index of each partition's first text id among the distinct ones of the run [P + 1]; empty if ids are integers.
        unknown: What was left out because the items table lacks its item.
    """

    folder: Path
    bounds: np.ndarray
    kinds: tuple[str, ...]
    words: np.ndarray
    unknown: UnknownItems

    @classmethod
    def load(cls, folder: Path) -> ScatteredRun:
        """Load the run from a folder that `RunWriter` wrote."""
        meta = json.loads((folder / "meta.json").read_text())
        words, unknown = np.array(meta["words"], np.int64), UnknownItems.load(meta["unknown"])
        return cls(folder, np.array(meta["bounds"]), tuple(meta["kinds"]), words, unknown)

    def read_column(self, name: str, partition: int, dtype: str) -> np.ndarray:
        """Read one column of a partition into memory."""
        start, stop = (int(row) for row in self.bounds[partition : partition + 2])
        size_bytes = np.dtype(dtype).itemsize
        return np.fromfile(self.folder / f"{name}.bin", dtype, stop - start, offset=start * size_bytes)

    def read_texts(self, partition: int) -> Any:
        """Return the distinct text ids of a partition, ascending."""
        start, stop = (int(row) for row in self.words[partition : partition + 2])
        with pa.memory_map(str(self.folder / WORDS)) as source:
            return pa.ipc.open_file(source).read_all()["id"].slice(start, stop - start).combine_chunks()


@dataclass(frozen=True, slots=True)
class RunWriter:
    """Writes the run of each slice.

    Attributes:
        log: The event log.
        index: Index over the catalogue.
        where: Condition on the events, or None.
        targets: Condition of the target by stage.
        columns: Names of the carried columns, and of those that `compute_label_times` computes.
        bounds: User ids at which the second and later partitions begin.
        folder: Parent folder of the runs.
        drops_unknown: Whether events are left out whose item is not in the catalogue.
        cpu_s: CPU seconds of reading ("read") and of the rest ("scatter"), added up by `write`.
    """

    log: EventLog
    index: ItemIndex
    where: str | None
    targets: Mapping[str, str]
    columns: Sequence[str]
    bounds: Sequence[Any]
    folder: Path
    drops_unknown: bool = False
    cpu_s: dict[str, float] = field(default_factory=lambda: {"read": 0.0, "scatter": 0.0})

    def get_run_folder(self, number: int) -> Path:
        """Return the folder of a slice's run."""
        return self.folder / f"run-{number:06}"

    def write(self, number: int, log_slice: LogSlice) -> None:
        """Write the run of the slice with this number unless the run exists."""
        run_folder = self.get_run_folder(number)
        if run_folder.exists():
            return
        staging_folder = self.folder / f".run-{number:06}"
        shutil.rmtree(staging_folder, ignore_errors=True)
        staging_folder.mkdir(parents=True)
        began = time.thread_time()
        columns = self.log.select_columns(self.where, *self.targets.values())
        table, fine_time = self.log.read(log_slice, columns)
        read_end = time.thread_time()
        if self.where:
            mask = match_rows(self.where, table, name="data.where")
            table = table.filter(pa.array(mask))
            fine_time = None if fine_time is None else fine_time[mask]
        self._write_columns(staging_folder, table, fine_time, log_slice)
        os.replace(staging_folder, run_folder)
        self.cpu_s["read"] += read_end - began
        self.cpu_s["scatter"] += time.thread_time() - read_end

    def _write_columns(
        self, folder: Path, table: pa.Table, fine_time: np.ndarray | None, log_slice: LogSlice
    ) -> None:
        """Write the columns of a run, ordered by partition, and its metadata.

        `fine_time` are the times finer than seconds that `EventLog.read` returned.
        """
        unknown = UnknownItems(0, len(table), frozenset())
        if self.drops_unknown:
            is_known = self.index.find(table["item_id"].combine_chunks()) >= 0
            unknown_ids = pc.unique(table["item_id"].filter(pa.array(~is_known))).to_pylist()
            unknown = UnknownItems(int((~is_known).sum()), len(table), frozenset(unknown_ids))
            table = table.filter(pa.array(is_known))
            fine_time = None if fine_time is None else fine_time[is_known]
        words, user, partition = self._encode_users(table["user_id"], folder)
        order = np.argsort(partition, kind="stable")
        user[order].tofile(folder / "user.bin")
        label = f"interactions {log_slice.file}, rows from {log_slice.first_row:,}"
        self.index.locate(table["item_id"], label)[order].tofile(folder / "item.bin")
        table["timestamp"].to_numpy()[order].tofile(folder / "time.bin")
        if fine_time is not None:
            fine_time.astype(_get_fine_dtype(fine_time))[order].tofile(folder / "finer.bin")
        kinds: list[str] = []
        if "event" in table.column_names:
            encoded = table["event"].cast(pa.string()).combine_chunks().dictionary_encode()
            kinds = encoded.dictionary.to_pylist()
            encoded.indices.to_numpy().astype(np.int32)[order].tofile(folder / "event.bin")
        label_times = compute_label_times(table, self.targets)
        for i, name in enumerate(self.columns):
            values = label_times[name] if name in label_times else convert_column(table[name])
            values[order].tofile(folder / f"column-{i}.bin")
        for i, (stage, condition) in enumerate(self.targets.items()):
            target = match_target(condition, table, name=f"stages.{stage}.target")
            target[order].tofile(folder / f"target-{i}.bin")
        counts = np.bincount(partition, minlength=len(self.bounds) + 1)
        bounds = np.concatenate([[0], np.cumsum(counts)])
        meta = {
            "bounds": bounds.tolist(),
            "kinds": kinds,
            "words": words,
            "finer": _get_fine_dtype(fine_time),
            "unknown": unknown.dump(),
        }
        (folder / "meta.json").write_text(json.dumps(meta))

    def _encode_users(self, ids: Any, folder: Path) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Assign the rows' users to partitions, and write the file of the distinct ids if ids are text.

        Returns:
            `ScatteredRun.words`, the users [N] (ids, or indices into the sorted distinct texts), and the partition of each
            row [N].
        """
        if pa.types.is_integer(ids.type):
            user = ids.to_numpy()
            return [], user, locate_in_bounds(user, self.bounds)
        encoded = ids.combine_chunks().dictionary_encode()
        order = pc.sort_indices(encoded.dictionary).to_numpy()
        words = encoded.dictionary.take(pa.array(order))
        rank = np.empty(len(order), np.int32)
        rank[order] = np.arange(len(order), dtype=np.int32)
        user = rank[encoded.indices.to_numpy()] if len(order) else np.empty(0, np.int32)
        partition_of_word = locate_in_bounds(np.array(words.to_pylist(), dtype=object), self.bounds)
        with pa.ipc.new_file(str(folder / WORDS), pa.schema({"id": pa.string()})) as out:
            out.write_table(pa.table({"id": words}))
        first_words = np.searchsorted(partition_of_word, np.arange(len(self.bounds) + 2)).tolist()
        return first_words, user, partition_of_word[user]


def _get_fine_dtype(fine_time: np.ndarray | None) -> str:
    """Return the dtype in which times finer than seconds are stored; "" if there are none."""
    if fine_time is None:
        return ""
    return "<f8" if fine_time.dtype.kind == "f" else "<i8"
