"""Sequences: the events of all users in time order, as flat arrays, from which all stages read their data.

A row of training data is one user, stored as one row of `part-0.parquet`; users are in the order of their ids. The events of a
user are sorted by time, with ties in file order, so the TRAIN events are a prefix of each user's events. Equal sequences are
written as equal bytes (`user_file.py`), so the artifact can be named after a hash of the file. Sequences that were prepared on
disk have one memory-mapped .npy file per field (`flat.py`), so a process that reads few users has few resident pages.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nonet.errors import DataError
from nonet.samples.sequences.build import build_arrays
from nonet.samples.sequences.compression import FoldedRepeats
from nonet.samples.sequences.flat import (
    ITEM_KEYS,
    MappedSequences,
    WideView,
    is_flat,
    load_item_keys,
    release_pages,
)
from nonet.samples.sequences.labels import LABEL_END, LABEL_TIME, NEVER
from nonet.samples.sequences.repeats import (
    MASK,
    choose_policy,
    compute_repeat_shares,
    find_duplicates,
    find_repeats,
)
from nonet.samples.sequences.split import NAMES, RL, TEST, TRAIN, VALID
from nonet.samples.sequences.user_file import USER_FILE, UserFile, write_user_file

__all__ = ["RL", "TEST", "TRAIN", "VALID", "Sequences", "build_sequences"]

_FORMAT = 2
# The format of sequences with labels that arrive later. In format 3 of earlier versions, the times of labels choose the events
# that are trained on, which favours purchases. Format 2 may have labels, too: of two labels, a target may be taken as known too
# early; a label counts at once, and may belong to an event that `where` removes.
_FORMAT_WITH_LATE_LABELS = 4
_FORMATS_WITH_LATE_LABELS = (3, _FORMAT_WITH_LATE_LABELS)
_PART_EVENTS = 1 << 22  # number of events that are processed at once, so that memory is bounded
_DTYPES = {"item": "<i4", "time": "<i8", "event": "<i4", "split": "|i1"}


# Shapes: U users, N events.
@dataclass(frozen=True, eq=False)
class Sequences:
    """The events of U users, N in total; user u owns events offsets[u]:offsets[u + 1], sorted by time.

    Attributes:
        user_id: Original user ids [U], int64, or object for text.
        offsets: First event of each user [U + 1] int64.
        item: Row of items.parquet of each event [N] int32.
        time: Unix seconds [N] int64.
        event: Kind of each event as an index into event_names [N] int32; 0 if the log has no kinds of events.
        split: Split of each event [N] int8: TRAIN, VALID, TEST or RL.
        user_key: Sparse keys of the users [U] int64.
        item_key: Sparse keys of the items [I] int64.
        columns: Columns of the log by name [N]: ids are int64 (text is hashed; NONE if missing), other numbers float32 (NaN
            if missing).
        targets: Where each stage's `target:` condition holds [N] bool, by stage; false where its label never becomes known. What
            a stage trains on is `find_targets`.
        event_names: Kinds of events.
        dropped: Columns of the log that are left out because of their type, as "name (type)".
        repeats: "allow" or "mask": whether items that a user has seen can be recommended (`repeats.py`).
        joined: A function that maps dense items [n], user ids [n] and times [n] to columns [n] from stores by name, or None
            without such columns; not saved.
        graphs: Graphs of these users and items, whose neighbours are features of click models (`Graphs`); None for none; not
            saved.
        strict: Whether a sample must not see other events of its own second, whatever their order (for compressed logs).
        folded: The rows of the original log that each event of a compressed log stands for; None for other logs.
        late_labels: Whether the log had labels that arrive later, which gives the files a format of their own.
        new_targets: Which TRAIN events a continued run trains on [N] bool; None for all; not saved.
    """

    user_id: np.ndarray
    offsets: np.ndarray
    item: np.ndarray
    time: np.ndarray
    event: np.ndarray
    split: np.ndarray
    user_key: np.ndarray
    item_key: np.ndarray
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    targets: dict[str, np.ndarray] = field(default_factory=dict)
    event_names: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    repeats: str = MASK
    joined: Any = None
    graphs: Any = None
    strict: bool = False
    folded: FoldedRepeats | None = None
    late_labels: bool = False
    new_targets: np.ndarray | None = None

    @cached_property
    def feature_columns(self) -> tuple[str, ...]:
        """The names of the columns that a model may read: all but the times of labels and the ends of their windows."""
        return tuple(name for name in self.columns if not name.startswith((LABEL_TIME, LABEL_END)))

    def get_label_times(self, stage: str | None) -> np.ndarray:
        """Return the unix seconds [N] at which each event's label becomes known; NEVER if it is unknown.

        The labels are those of a stage's target, by default the first one. A label without a time of its own becomes known at
        the time of its event.
        """
        return self.columns.get(LABEL_TIME + (stage or next(iter(self.targets), "")), self.time)

    def find_labelled(self, stage: str, events: slice | np.ndarray = slice(None)) -> np.ndarray:
        """Return for which of some events [n] bool a stage or task may be trained or measured: their windows have ended.

        Of the TRAIN events, they must have ended before the end of training. Without labels that arrive later, these are the
        events that lack no column on which the target of a task depends. In sequences of earlier versions, the events are
        chosen by the times of their labels.
        """
        ends = self.columns.get(LABEL_END + stage)
        return np.asarray((self.get_label_times(stage) if ends is None else ends)[events]) < NEVER

    def find_targets(self, stage: str, events: slice | np.ndarray = slice(None)) -> np.ndarray:
        """Return for which of some events [n] bool the condition of a target holds and `find_labelled` is true."""
        target = self.targets[stage][events]
        return target & self.find_labelled(stage, events) if LABEL_END + stage in self.columns else target

    def gather_columns(
        self, index: np.ndarray, users: np.ndarray, as_of: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Return the columns [n] of events: those of the log and those joined from stores.

        Args:
            index: The indices of the events [n].
            users: The user rows of the events [n].
            as_of: The unix seconds [n] of the samples that read the events. The columns `count`, `span` and `kinds` of a
                compressed log are then computed from the rows before that time; by default, from those before the user's next
                event.
        """
        columns = {name: self.columns[name][index] for name in self.feature_columns}
        if self.folded is not None and as_of is not None:
            columns |= self.folded.compute_columns(index, as_of)
        if self.joined is None:
            return columns
        return columns | self.joined(self.item[index], self.user_id[users], self.time[index])

    def get_history_columns(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Return the columns of events [start, stop), those of a compressed log computed from all of its rows."""
        columns = {name: values[start:stop] for name, values in self.columns.items()}
        if self.folded is None:
            return columns
        index = np.arange(start, stop)
        return columns | self.folded.compute_columns(index, np.full(len(index), NEVER))

    def get_user_keys(self, rows: np.ndarray) -> np.ndarray:
        """Return the sparse keys [B] int64 of user rows [B]."""
        return self.user_key[rows]

    def get_item_keys(self, items: np.ndarray) -> np.ndarray:
        """Return the sparse keys [N] int64 of dense item indices [N]."""
        return np.asarray(self.item_key[items], np.int64)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def summary(self) -> str:
        """The numbers of users and events as text. Equal summaries do not imply equal sequences; equal artifact hashes do."""
        return f"{len(self)} users, {len(self.item)} events"

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of events of each user, [U] int64."""
        return np.diff(self.offsets)

    @cached_property
    def train_lengths(self) -> np.ndarray:
        """The number of TRAIN events of each user, [U] int64; they are a prefix of the user's events."""
        return self.count_by_user(self.split == TRAIN)

    def count_by_user(self, mask: np.ndarray) -> np.ndarray:
        """Return the number of events of a mask [N] of each user, [U] int64."""
        cumulative = np.concatenate([[0], np.cumsum(mask)])
        return cumulative[self.offsets[1:]] - cumulative[self.offsets[:-1]]

    @cached_property
    def user(self) -> np.ndarray:
        """The user row of each event, [N] int64."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @cached_property
    def first_of_second(self) -> np.ndarray:
        """For each event, the index of the user's first event in the same second, [N] int64."""
        is_first = np.ones(len(self.time), bool)
        is_first[1:] = self.time[1:] != self.time[:-1]
        is_first[self.offsets[:-1][self.lengths > 0]] = True
        return np.maximum.accumulate(np.where(is_first, np.arange(len(is_first)), 0))

    @cached_property
    def repeated(self) -> np.ndarray:
        """Whether the user of each event had an earlier event with the same item, [N] bool."""
        return find_repeats(self.user, self.item)

    @cached_property
    def repeat_shares(self) -> dict[str, float]:
        """The share of events that repeat an item of their user, by split; splits without events are left out."""
        return compute_repeat_shares(count_repeats(self))

    def iterate_parts(self, max_events: int = _PART_EVENTS) -> Iterator[Sequences]:
        """Iterate over all users in parts of about `max_events` events, and release the resident pages after each part.

        With this, sums over all events need a constant amount of memory. There is at least one part, which may be empty.
        """
        start = 0
        while start < len(self) or start == 0:
            limit = int(self.offsets[start]) + max_events
            stop = max(start + 1, int(np.searchsorted(self.offsets, limit, "right")) - 1)
            yield self.slice_users(start, min(stop, len(self)))
            start = max(1, stop)
            if start < len(self):
                self.release_pages()

    def release_pages(self) -> None:
        """Drop the resident pages of the memory-mapped files (`madvise(DONTNEED)`); a later access reads them again."""
        fields = self.item, self.time, self.event, self.split
        release_pages(*fields, *self.columns.values(), *self.targets.values())
        if self.graphs is not None:
            self.graphs.release_pages()

    def slice_users(self, start: int, stop: int) -> Sequences:
        """Return the sequences of users [start, stop) without copying events; item indices stay the same."""
        if start == 0 and stop == len(self):
            return self
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        time: Any = self.time
        part = replace(
            self,
            user_id=self.user_id[start:stop],
            offsets=self.offsets[start : stop + 1] - first,
            item=self.item[first:last],
            time=time.slice_values(first, last) if isinstance(time, WideView) else time[first:last],
            event=self.event[first:last],
            split=self.split[first:last],
            columns={name: values[first:last] for name, values in self.columns.items()},
            targets={name: values[first:last] for name, values in self.targets.items()},
            user_key=self.user_key[start:stop],
            graphs=None,  # which have indices of all users
            folded=None if self.folded is None else self.folded.slice_events(first, last),
            new_targets=None if self.new_targets is None else self.new_targets[first:last],
        )
        if "train_lengths" in self.__dict__:
            part.__dict__["train_lengths"] = self.train_lengths[start:stop]  # keeps the cached property
        return part

    def find_split_events(self, split: int) -> np.ndarray:
        """Return the ascending indices of the events of a split, without allocating a mask of all events."""
        starts = range(0, len(self.split), _PART_EVENTS)
        parts = [
            np.flatnonzero(self.split[start : start + _PART_EVENTS] == split) + start for start in starts
        ]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def find_users(self, events: np.ndarray) -> np.ndarray:
        """Return the user rows [n] of events [n] given by index, without computing the array `user` of all events."""
        return np.searchsorted(self.offsets, events, "right") - 1

    def measure_immediate_repeats(self, split: int) -> float:
        """Return the share of the events of a split whose item is that of the user's event right before; 0 without events."""
        events = self.find_split_events(split)
        later = events[events > np.asarray(self.offsets)[self.find_users(events)]]
        return float((self.item[later] == self.item[later - 1]).sum() / len(events)) if len(events) else 0.0

    def count_events(self) -> dict[str, int]:
        """Return the number of users, events, events of each split, train-only users, and TEST events without history."""
        counts_by_split = np.bincount(self.split, minlength=len(NAMES))
        first_events = self.offsets[:-1][self.lengths > 0]
        return {
            "users": len(self),
            "events": len(self.item),
            **{name: int(count) for name, count in zip(NAMES, counts_by_split, strict=True)},
            "train_only_users": int((self.train_lengths == self.lengths).sum()),
            "test_without_history": int((self.split[first_events] == TEST).sum()),
        }

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write folder/part-0.parquet atomically, then item_keys.npy and the files of `folded`; return the path of the first."""
        path = Path(folder) / USER_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        users = {"user_id": self.user_id, "user_key": self.user_key}
        write_user_file(path, users, self.offsets, self._get_fields(), self._make_metadata())
        np.save(path.with_name(ITEM_KEYS), self.item_key)
        if self.folded is not None:
            self.folded.save(path.parent)
        return path

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Sequences:
        """Load the sequences of a folder.

        Raises:
            DataError: If the folder has no sequences in a format that this version reads.
        """
        if is_flat(Path(folder)):
            return cls._load_mapped(Path(folder))
        path = Path(folder) / USER_FILE
        file = UserFile.read(path)
        meta = file.metadata
        if meta.get("format") not in (_FORMAT, *_FORMATS_WITH_LATE_LABELS):
            raise DataError(
                f"{path}: format {meta.get('format')}; this version reads {_FORMAT} to {_FORMAT_WITH_LATE_LABELS}. Run the "
                "tokenise stage again."
            )
        return cls(
            user_id=file.get_users("user_id"),
            offsets=file.compute_offsets("item", 4),  # 4 bytes per item, see _DTYPES
            **{name: file.get_events(name, dtype) for name, dtype in _DTYPES.items()},
            columns={
                name: file.get_events(f"column:{name}", dtype) for name, dtype in meta["columns"].items()
            },
            targets={name: file.get_events(f"target:{name}", "|b1") for name in meta["targets"]},
            event_names=tuple(meta["event_names"]),
            user_key=file.get_users("user_key"),
            item_key=load_item_keys(path.parent),
            dropped=tuple(meta.get("dropped", ())),
            repeats=meta.get("repeats", MASK),
            strict=meta.get("strict", False),
            folded=FoldedRepeats.load(path.parent),
            late_labels=meta["format"] in _FORMATS_WITH_LATE_LABELS,
        )

    @classmethod
    def _load_mapped(cls, folder: Path) -> Sequences:
        """Load memory-mapped sequences, with two cached properties that their preparation computed."""
        mapped = MappedSequences(folder)
        seq = cls(**mapped.map_fields(), item_key=load_item_keys(folder), folded=FoldedRepeats.load(folder))
        seq.__dict__["train_lengths"] = mapped.map_array("train_lengths")
        seq.__dict__["repeat_shares"] = dict(mapped.meta["repeat_shares"])
        return seq

    def _get_fields(self) -> dict[str, np.ndarray]:
        """Return the event fields by the names that they have in the file."""
        fields = {name: np.asarray(getattr(self, name), dtype) for name, dtype in _DTYPES.items()}
        for name, values in self.columns.items():
            fields[f"column:{name}"] = values.astype(_get_dtype(values), copy=False)
        for name, values in self.targets.items():
            fields[f"target:{name}"] = values.astype("|b1", copy=False)
        return fields

    def _make_metadata(self) -> dict[str, Any]:
        """Return the metadata of the file."""
        meta: dict[str, Any] = {
            "format": _FORMAT_WITH_LATE_LABELS if self.late_labels else _FORMAT,
            "columns": {name: _get_dtype(values) for name, values in self.columns.items()},
            "targets": list(self.targets),
            "event_names": list(self.event_names),
        }
        meta |= {"dropped": list(self.dropped)} if self.dropped else {}
        if self.repeats != MASK:  # omitted for "mask", because a hash of the file names the artifact
            meta["repeats"] = self.repeats
        if self.strict:
            meta["strict"] = True
        return meta


def build_sequences(
    interactions: pa.Table,
    items: pa.Table | None,
    *,
    keep: Mapping[str, int] | None = None,
    split: Mapping[str, Any],
    targets: Mapping[str, str] | None = None,
    where: str | None = None,
    columns: Sequence[str] | None = None,
    tie_seed: int | None = None,
    repeats: str | None = None,
    strict: bool = False,
) -> tuple[Sequences, pa.Table]:
    """Build the sequences of a log, and the table of the items that are kept (see `nonet.samples.sequences.build`).

    Args:
        interactions: The checked interactions.
        items: The checked items; None to use the items that occur.
        keep: Minimum numbers of events of an item and of a user, as `item_events` and `user_events`.
        split: Options `use`, `test`, `valid` and `rl` of the split, see `split_events`.
        targets: Condition of the target by stage.
        where: Condition on the interactions; None for all.
        columns: Columns to keep; None for all columns of numbers or text.
        tie_seed: Seed for shuffling the events that a user has in the same second, to measure the effect of their file order.
        repeats: "allow" or "mask"; None to decide by the share of repeated items in the data.
        strict: See `Sequences`.

    Returns:
        The sequences, and the items in the order of their dense indices.
    """
    built = build_arrays(
        interactions,
        items,
        keep=keep,
        split=split,
        targets=targets,
        where=where,
        columns=columns,
        tie_seed=tie_seed,
    )
    seq = Sequences(**built.arrays, strict=strict)
    return replace(seq, repeats=choose_policy(count_repeats(seq), repeats)), built.items


def count_repeats(seq: Sequences) -> np.ndarray:
    """Count the events of each split, [2, 4] int64: in row 0 those that repeat an item of their user, in row 1 all.

    Duplicates (the same user, item and second) are not repeats.
    """
    counts = np.zeros((2, len(NAMES)), np.int64)
    for part in seq.iterate_parts():
        repeated = part.repeated if part is seq else find_repeats(part.user, part.item)
        repeated = repeated & ~find_duplicates(part.user, part.item, np.asarray(part.time))
        counts[0] += np.bincount(part.split[repeated], minlength=len(NAMES))
        counts[1] += np.bincount(part.split, minlength=len(NAMES))
    return counts


def _get_dtype(values: np.ndarray) -> str:
    """Return the dtype in which a column is saved."""
    return "<i8" if values.dtype.kind in "iu" else "<f4"
