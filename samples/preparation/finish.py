"""Writes the events of sorted partitions that remain after the k-core filter to flat files (`nonet.samples.sequences.flat`).

Each partition has a fixed range in the files, so partitions can be written in any order and more than once. A note beside each
partition records that it was written completely, with the hash of the written bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nonet.atomic import write_whole
from nonet.samples.preparation.changes import get_folded_folder
from nonet.samples.preparation.core import KCoreResult, read_kept_mask
from nonet.samples.preparation.gather import PartitionLayout, SortedPartition
from nonet.samples.sequences import (
    LABEL_END,
    LABEL_TIME,
    NEVER,
    TRAIN,
    USER_IDS,
    FlatFiles,
    FoldedRepeats,
    SplitFacts,
    compute_split_codes,
    find_duplicates,
    find_repeats,
    limit_label_ends,
)
from nonet.samples.tables import as_numbers, compute_keys

# Shapes: N events, I items.
_NOTE_FILE = "done.json"
SPLITS = 4  # number of splits: train, rl, valid, test
_BLOCK_EVENTS = 1 << 22  # number of events that are counted at once, which bounds memory


@dataclass(frozen=True, slots=True)
class PartitionNote:
    """The record that a partition was written completely.

    Attributes:
        facts: Statistics of the partition's split.
        repeats: Number of events that repeat an item of their user, by split.
        sha256: Hash of the written bytes.
    """

    facts: SplitFacts
    repeats: tuple[int, ...]
    sha256: str

    @classmethod
    def load(cls, part: SortedPartition) -> PartitionNote | None:
        """Read the note of a partition; None if the partition was not written completely."""
        path = part.folder / _NOTE_FILE
        if not path.exists():
            return None
        note = json.loads(path.read_text())
        facts = SplitFacts(**{**note["facts"], "events": tuple(note["facts"]["events"])})
        return cls(facts, tuple(note["repeats"]), note["sha256"])

    def save(self, part: SortedPartition) -> None:
        """Write the note beside its partition."""
        facts = {name: getattr(self.facts, name) for name in SplitFacts.__dataclass_fields__}
        text = json.dumps({"facts": facts, "repeats": self.repeats, "sha256": self.sha256})
        write_whole(part.folder / _NOTE_FILE, text.encode())


@dataclass(frozen=True, slots=True)
class PartitionWriter:
    """Writes partitions to their ranges in the flat files.

    Attributes:
        layout: Layout of the partitions.
        core: Result of the k-core filter.
        split: Options of the split.
        folder: Folder of the flat files.
        changed_folder: Folder of the compressed log; None without compression.
    """

    layout: PartitionLayout
    core: KCoreResult
    split: Mapping[str, Any]
    folder: Path
    changed_folder: Path | None = None

    def create_files(self, partitions: Sequence[SortedPartition]) -> FlatFiles:
        """Create the flat files with room for all kept events; times take 32 bits if all of them fit.

        Raises:
            OSError: If the disk is full.
        """
        user_count, event_count = (sum(counts) for counts in zip(*self.core.sizes, strict=True))
        fields = {name: (dtype, event_count) for name, dtype in self._get_fields().items()}
        if all(_can_fit_int32(part.read_column("time", "<i8")) for part in partitions):
            fields["time"] = ("<i4", event_count)
        fields |= {"split": ("|i1", event_count), "offsets": ("<i8", user_count + 1)}
        fields |= {"train_lengths": ("<i8", user_count), "user_key": ("<i8", user_count)}
        if not self.layout.text:
            fields["user_id"] = ("<i8", user_count)
        return FlatFiles(self.folder, fields)

    def write(self, files: FlatFiles, partitions: Sequence[SortedPartition], number: int) -> None:
        """Write one partition to its range in the files and save its note; do nothing if it already has a note."""
        part = partitions[number]
        if PartitionNote.load(part) is not None:
            return
        users_before, events_before = [
            sum(counts) for counts in zip(*self.core.sizes[:number], strict=True)
        ] or [0, 0]
        offsets = part.read_offsets()
        kept = read_kept_mask(part, int(offsets[-1]))
        kept_per_user = (
            np.add.reduceat(kept, offsets[:-1], dtype=np.int64) if len(kept) else np.empty(0, np.int64)
        )
        has_events = kept_per_user > 0
        lengths = kept_per_user[has_events]
        own_offsets = np.concatenate(
            [np.zeros(1, np.int64), np.cumsum(lengths)]
        )  # from 0 within the partition
        digest = hashlib.sha256()

        def write_field(name: str, start: int, values: np.ndarray) -> None:
            digest.update(files.write(name, start, values))

        time = part.read_column("time", "<i8")[kept]
        codes = compute_split_codes(own_offsets, time, self.split)
        item = self._renumber_items(part.read_column("item", "<i4")[kept])
        write_field("item", events_before, item)
        write_field("time", events_before, time)
        write_field("split", events_before, codes)
        fields = {name: dtype for name, dtype in self._get_fields().items() if name not in ("item", "time")}
        files_of_ends, file_of_label_time = self._list_files_of_label_ends(), self._name_label_time_files()
        for name, dtype in fields.items():
            values = part.read_column(name, dtype)[kept]
            if name in files_of_ends:
                values = limit_label_ends(values, codes, self.split)
            elif name in file_of_label_time:
                values &= part.read_column(file_of_label_time[name], "<i8")[kept] < NEVER
            write_field(name, events_before, values)
        if self.changed_folder is not None:
            self._write_folded(part, number, kept, digest)
        write_field("offsets", users_before + 1, own_offsets[1:] + events_before)
        train_lengths = (
            np.add.reduceat(codes == TRAIN, own_offsets[:-1], dtype=np.int64) if len(item) else lengths
        )
        write_field("train_lengths", users_before, train_lengths)
        users = part.read_users(self.layout.text)
        users = users.filter(pa.array(has_events)) if self.layout.text else users[has_events]
        write_field("user_key", users_before, compute_keys("user", as_numbers(users)))
        if not self.layout.text:
            write_field("user_id", users_before, users)
        user = np.repeat(np.arange(len(lengths)), lengths)
        is_repeat = find_repeats(user, item) & ~find_duplicates(user, item, time)
        repeats = tuple(np.bincount(codes[is_repeat], minlength=SPLITS).tolist())
        facts = SplitFacts.from_events(own_offsets, time, codes)
        PartitionNote(facts, repeats, digest.hexdigest()).save(part)

    def _get_fields(self) -> dict[str, str]:
        """Return the dtype of each field of the flat files that a sorted partition has."""
        fields = self.layout.get_fields()
        return {name: dtype for name, dtype in fields.items() if name != self._row_file}

    @property
    def _row_file(self) -> str:
        """The file in a partition of the rows of the compressed log."""
        return f"column-{len(self.layout.sequence_columns)}"

    def _name_label_time_files(self) -> dict[str, str]:
        """Return the file of a target's label times by the file of the target, for targets that have label times."""
        columns = list(self.layout.columns)
        return {
            f"target-{i}": f"column-{columns.index(LABEL_TIME + stage)}"
            for i, stage in enumerate(self.layout.targets)
            if LABEL_TIME + stage in columns
        }

    def _list_files_of_label_ends(self) -> set[str]:
        """Return the files of the columns of ends of windows."""
        return {f"column-{i}" for i, name in enumerate(self.layout.columns) if name.startswith(LABEL_END)}

    def _write_folded(self, part: SortedPartition, number: int, kept: np.ndarray, digest: Any) -> None:
        """Write the rows behind the kept events of a partition beside it, and add their bytes to the digest."""
        assert self.changed_folder is not None
        folded = FoldedRepeats.load(get_folded_folder(self.changed_folder, number))
        assert folded is not None
        folded = folded.take(part.read_column(self._row_file, "<i8")[kept])
        folded.save(part.folder)
        for values in (folded.offsets, folded.time, folded.kinds):
            digest.update(b"" if values is None else np.ascontiguousarray(values).data)

    def join_folded(self, partitions: Sequence[SortedPartition]) -> None:
        """Write the rows behind all kept events to the folder of the flat files."""
        if self.changed_folder is not None:
            FoldedRepeats.join([part.folder for part in partitions], self.folder)

    def write_texts(self, partitions: Sequence[SortedPartition]) -> None:
        """Write the text ids of the users in order; do nothing if ids are integers."""
        if not self.layout.text:
            return
        schema = pa.schema({"user_id": pa.large_string()})
        with pa.ipc.new_file(str(self.folder / USER_IDS), schema) as out:
            for part in partitions:
                offsets = part.read_offsets()
                kept = read_kept_mask(part, int(offsets[-1]))
                has_events = np.add.reduceat(kept, offsets[:-1], dtype=np.int64) > 0 if len(kept) else kept
                ids = part.read_users(text=True).filter(pa.array(has_events)).cast(pa.large_string())
                out.write_batch(pa.record_batch([ids], schema=schema))

    def _renumber_items(self, item: np.ndarray) -> np.ndarray:
        """Convert catalogue rows to dense indices among the items that the k-core filter kept."""
        return (np.cumsum(self.core.items) - 1).astype(np.int32)[item]


def _can_fit_int32(times: np.ndarray) -> bool:
    """Return whether times fit into 32 bits (1901 to 2038)."""
    bounds = np.iinfo(np.int32)
    return bool(len(times) == 0 or (times.min() >= bounds.min and times.max() <= bounds.max))


def count_train_events(
    item: np.ndarray, split: np.ndarray, n_items: int, report_rows: Callable[[int], None]
) -> np.ndarray:
    """Count the TRAIN events of each item, [I] int64, from memory-mapped columns, one block at a time.

    Args:
        item: Item index of each event [N].
        split: Split code of each event [N].
        n_items: Number of items I.
        report_rows: A function that is called with the number of events of each block.
    """
    counts = np.zeros(n_items, np.int64)
    for start in range(0, len(item), _BLOCK_EVENTS):
        block = slice(start, start + _BLOCK_EVENTS)
        counts += np.bincount(item[block][split[block] == TRAIN], minlength=n_items)
        report_rows(len(item[block]))
    return counts
