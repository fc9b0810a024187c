"""Scatters slices of events to runs on disk, each cut by ranges of users.

A run is the output of one slice: one file per column, with rows in the order of partitions, and within a partition in the
order of the log. A partition is a range of user ids whose bounds are drawn from a sample of the log, so consecutive
partitions hold the users in the order of their ids. A run is written to a temporary folder that is renamed, so an existing
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
from nonet.samples.sequences import convert_column
from nonet.samples.tables import match_rows

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

# Shapes: N rows of a run, P partitions.
_SAMPLED = 32  # number of slices that bounds are sampled from
_SAMPLE_ROWS = 1 << 17  # sampled rows of each slice
WORDS = "words.arrow"


def compute_user_bounds(log: EventLog, partitions: int) -> list[Any]:
    """Return up to `partitions` - 1 user ids, ascending, that divide a sample of the events evenly.

    The result depends only on the log.

    Args:
        log: The event log.
        partitions: Wanted number of partitions.
    """
    if partitions < 2:
        return []
    chosen = np.unique(np.linspace(0, len(log.slices) - 1, _SAMPLED).round().astype(int))
    ids: list[Any] = []
    for place in chosen:
        column = log.read_column(log.slices[place], "user_id", groups=1).combine_chunks().drop_null()
        ids.append(column.take(pa.array(np.arange(0, len(column), max(1, len(column) // _SAMPLE_ROWS)))))
    ids = [each.cast(each.type.value_type) if pa.types.is_dictionary(each.type) else each for each in ids]
    ordered = pc.sort(pa.concat_arrays(ids)) if hasattr(pc, "sort") else pa.concat_arrays(ids).sort()
    cuts = np.linspace(0, len(ordered), partitions + 1)[1:-1].astype(int)
    return sorted(set(ordered.take(pa.array(cuts)).to_pylist()))


@dataclass(frozen=True, slots=True)
class ScatteredRun:
    """The output of one slice.

    Attributes:
        folder: Folder of the run.
        bounds: First row of each partition [P + 1].
        kinds: Kinds of events, in the order of the run's own codes.
        words: First distinct text id of each partition among those of the run; empty if ids are integers.
    """

    folder: Path
    bounds: np.ndarray
    kinds: tuple[str, ...]
    words: np.ndarray

    @classmethod
    def load(cls, folder: Path) -> ScatteredRun:
        """Load the run from a folder that `RunWriter` wrote."""
        meta = json.loads((folder / "meta.json").read_text())
        return cls(folder, np.array(meta["bounds"]), tuple(meta["kinds"]), np.array(meta["words"], np.int64))

    def read_column(self, name: str, partition: int, kind: str) -> np.ndarray:
        """Read one column of a partition into memory."""
        start, stop = (int(row) for row in self.bounds[partition : partition + 2])
        size = np.dtype(kind).itemsize
        return np.fromfile(self.folder / f"{name}.bin", kind, stop - start, offset=start * size)

    def read_texts(self, partition: int) -> Any:
        """Return the distinct text ids of a partition, ascending."""
        start, stop = (int(row) for row in self.words[partition : partition + 2])
        with pa.memory_map(str(self.folder / WORDS)) as source:
            return pa.ipc.open_file(source).read_all()["id"].slice(start, stop - start).combine_chunks()


@dataclass(frozen=True, slots=True)
class RunWriter:
    """Writes runs.

    Attributes:
        log: The event log.
        index: Index over the catalogue.
        where: Condition on the events, or None.
        targets: Condition of each stage's target.
        columns: Names of the carried columns.
        bounds: User ids at which partitions begin.
        folder: Parent folder of the runs.
        cpu_s: CPU seconds of reading and of the rest.
    """

    log: EventLog
    index: ItemIndex
    where: str | None
    targets: Mapping[str, str]
    columns: Sequence[str]
    bounds: Sequence[Any]
    folder: Path
    cpu_s: dict[str, float] = field(default_factory=lambda: {"read": 0.0, "scatter": 0.0})

    def get_run_folder(self, number: int) -> Path:
        """Return the folder of a slice's run."""
        return self.folder / f"run-{number:06}"

    def write(self, number: int, part: LogSlice) -> None:
        """Write the run of a slice unless it exists."""
        final = self.get_run_folder(number)
        if final.exists():
            return
        aside = self.folder / f".run-{number:06}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        began = time.thread_time()
        table, finer = self.log.read(part, self.log.select_columns(self.where, *self.targets.values()))
        read = time.thread_time()
        if self.where:
            there = match_rows(self.where, table, name="data.where")
            table = table.filter(pa.array(there))
            finer = None if finer is None else finer[there]
        self._write_columns(aside, table, finer, part)
        os.replace(aside, final)
        self.cpu_s["read"] += read - began
        self.cpu_s["scatter"] += time.thread_time() - read

    def _write_columns(self, folder: Path, table: pa.Table, finer: np.ndarray | None, part: LogSlice) -> None:
        """Write the columns of a run, ordered by partition, and its metadata."""
        words, user, partition = self._encode_users(table["user_id"], folder)
        order = np.argsort(partition, kind="stable")
        user[order].tofile(folder / "user.bin")
        where = f"interactions {part.file}, rows from {part.first_row:,}"
        self.index.locate(table["item_id"], where)[order].tofile(folder / "item.bin")
        table["timestamp"].to_numpy()[order].tofile(folder / "time.bin")
        if finer is not None:
            finer.astype(np.float64 if finer.dtype.kind == "f" else np.int64)[order].tofile(
                folder / "finer.bin"
            )
        kinds: list[str] = []
        if "event" in table.column_names:
            coded = table["event"].cast(pa.string()).combine_chunks().dictionary_encode()
            kinds = coded.dictionary.to_pylist()
            coded.indices.to_numpy().astype(np.int32)[order].tofile(folder / "event.bin")
        for i, name in enumerate(self.columns):
            convert_column(table[name])[order].tofile(folder / f"column-{i}.bin")
        for i, (stage, text) in enumerate(self.targets.items()):
            match_rows(text, table, name=f"stages.{stage}.target")[order].tofile(folder / f"target-{i}.bin")
        counts = np.bincount(partition, minlength=len(self.bounds) + 1)
        bounds = np.concatenate([[0], np.cumsum(counts)])
        meta = {"bounds": bounds.tolist(), "kinds": kinds, "words": words, "finer": _get_finer_dtype(finer)}
        (folder / "meta.json").write_text(json.dumps(meta))

    def _encode_users(self, ids: Any, folder: Path) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Assign users to partitions, and write the distinct text ids.

        Returns:
            The first distinct text of each partition, the users [N] (ids, or indices into the texts), and the partition
            of each [N].
        """
        small = np.uint8 if len(self.bounds) < 256 else np.uint16
        if pa.types.is_integer(ids.type):
            user = ids.to_numpy()
            bounds = np.array(self.bounds, np.int64)
            return [], user, np.searchsorted(bounds, user, "right").astype(small)
        coded = ids.combine_chunks().dictionary_encode()
        order = pc.sort_indices(coded.dictionary).to_numpy()
        words = coded.dictionary.take(pa.array(order))
        place = np.empty(len(order), np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        user = place[coded.indices.to_numpy()] if len(order) else np.empty(0, np.int32)
        texts = np.array(words.to_pylist(), dtype=object)
        of_word = np.searchsorted(np.array(self.bounds, dtype=object), texts, "right").astype(small)
        with pa.ipc.new_file(str(folder / WORDS), pa.schema({"id": pa.string()})) as out:
            out.write_table(pa.table({"id": words}))
        begins = np.searchsorted(of_word, np.arange(len(self.bounds) + 2)).tolist()
        return begins, user, of_word[user] if len(order) else np.empty(0, small)


def _get_finer_dtype(finer: np.ndarray | None) -> str:
    if finer is None:
        return ""
    return "<f8" if finer.dtype.kind == "f" else "<i8"
