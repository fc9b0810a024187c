"""Changes a log before sequences are built from it: attaches labels that arrive later, and compresses repeated events.

Both concern events of one user only. On disk, the log is therefore divided by ranges of users, and each range is changed on its
own, so memory does not grow with the log. The changed log is a folder of Parquet files, one per range, which is prepared like any
other log. Every file is complete when it has its name, and a file that exists is not written again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nonet.atomic import write_whole
from nonet.errors import DataError
from nonet.samples.preparation.log import EventLog, LogSlice
from nonet.samples.preparation.scatter import locate_in_bounds
from nonet.samples.sequences import (
    ROW,
    Compress,
    CompressedLog,
    FoldedRepeats,
    LabelCounts,
    Labels,
    UnknownItems,
    add_labels,
    attach_label,
    check_label_ids,
    choose_flat_format,
    compress_log,
    drop_repeat_lists,
    drop_unknown_events,
    drop_unlabelled_events,
    find_newest_time,
)
from nonet.samples.tables import (
    FRACTION,
    ROLES,
    TableFormat,
    compile_condition,
    list_names,
    read_interactions,
)

_FINE_TIME = "fine time:"  # column of the times that are finer than seconds
_TIME = "unix time_s"  # name of the times in the changed log, which gives their unit
_LABELS = "data.labels:"  # how error messages name a label file
_FACTS = b"facts"  # metadata of a divided slice: the first row of each range ("bounds") and the newest time ("newest")


@dataclass(frozen=True, slots=True)
class LogChanges:
    """The changes of a log.

    Attributes:
        labels: Labels that arrive after their events.
        drop_unlabelled: Whether events of which no label is known yet are removed.
        compress: How repeated events become one; None for no compression.
        part_starts: Unix seconds at which parts of the split begin (`get_part_starts`); none if the split is not by time.
    """

    labels: tuple[Labels, ...] = ()
    drop_unlabelled: bool = False
    compress: Compress | None = None
    part_starts: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.labels) or self.compress is not None

    @property
    def period_s(self) -> int:
        """The seconds of a period within which repeated events become one."""
        return 1 if self.compress is None else max(1, int(self.compress.compress))

    @property
    def flat_format(self) -> int:
        """The format of sequences that are prepared on disk from the changed log."""
        return choose_flat_format(compressed=self.compress is not None, late_labels=bool(self.labels))

    def extend_format(self, table_format: TableFormat) -> TableFormat:
        """Return the format in which a log is read so that `attach_labels` knows times that are finer than seconds."""
        return replace(table_format, keeps_fractions=bool(self.labels))

    def open_labels(self, table_format: TableFormat) -> list[EventLog]:
        """Open the label files, whose columns of users, items and times are named as in the log unless they say otherwise."""
        return [
            EventLog(options.path, _select_roles(table_format, options), table=_LABELS)
            for options in self.labels
        ]

    def attach_labels(
        self, events: pa.Table, table_format: TableFormat, where: str | None
    ) -> tuple[pa.Table, dict[str, LabelCounts]]:
        """Add the columns of the labels to the checked events of a log that `where` keeps, as `extend_format` reads them.

        Returns:
            The events, and how many rows of each label file found an event, by the name of the label.
        """
        counts: dict[str, LabelCounts] = {}
        if self.labels:
            events = self.select_labelled_events(events, where)
            if not len(events):
                raise DataError(f"data.where: {where!r} matches no interaction.")
        for options in self.labels:
            labels = read_interactions(options.path, _select_roles(table_format, options), table=_LABELS)
            events, counts[options.name] = attach_label(events, labels, options, period_s=self.period_s)
        if self.labels and self.drop_unlabelled:
            events = drop_unlabelled_events(events, self.labels, required=True)
        return _drop_column(events, FRACTION), counts

    def select_labelled_events(self, events: pa.Table, where: str | None) -> pa.Table:
        """Return the events to which labels may belong: those that `where` keeps, or all if it reads a label itself."""
        reads_label = where and not list_names(where).isdisjoint(options.name for options in self.labels)
        return events if reads_label else filter_events(events, where)

    def compress_events(
        self, events: pa.Table, items: pa.Table | None, where: str | None
    ) -> CompressedLog | None:
        """Compress the checked events that `where` keeps; None without compression."""
        if self.compress is None:
            return None
        return self._compress(self.compress, filter_events(events, where), items)

    def _compress(self, compress: Compress, events: pa.Table, items: pa.Table | None) -> CompressedLog:
        """Compress checked events by the options of this run's data.

        The kinds of further rows count in targets, but for click models, which read the labels of earlier events: an event's
        label would be known before those rows.
        """
        return compress_log(
            events,
            compress.compress,
            compress.by,
            items,
            has_repeat_events=not self.drop_unlabelled,
            part_starts=self.part_starts,
        )

    def apply_to_sample(
        self, events: pa.Table, items: pa.Table | None, table_format: TableFormat
    ) -> pa.Table:
        """Return some checked events with the columns of the changed log; labels are from one row group of each label file."""
        for options, label_log in zip(self.labels, self.open_labels(table_format), strict=True):
            labels, _ = label_log.read(label_log.slices[0], label_log.names)
            events = add_labels(events, labels, options, period_s=self.period_s)
        if self.compress is None:
            return events
        return self._compress(self.compress, events, items).events

    def to_fingerprint(self, labels: Sequence[EventLog]) -> dict[str, Any]:
        """Return the values that, with the log and its options, determine the changed log."""
        label_values = [
            value
            for options, log in zip(self.labels, labels, strict=True)
            for value in (options.to_fingerprint(), log.compute_hash())
        ]
        return {
            "labels": label_values or None,
            "drop_unlabelled": self.drop_unlabelled,
            "compress": self.compress and self.compress.model_dump(),
            # Earlier versions wrote no kinds of further rows.
            **(
                {"repeat events": self.part_starts or 0} if self.compress and not self.drop_unlabelled else {}
            ),
        }


def filter_events(events: pa.Table, where: str | None) -> pa.Table:
    """Return the events for which the condition `data.where` holds; all events without a condition."""
    return events.filter(compile_condition(where, events.schema, name="data.where")) if where else events


def _select_roles(table_format: TableFormat, options: Labels) -> TableFormat:
    """Return a table format with the columns of users, items and times alone, as a label file has them."""
    columns: dict[str, str] = {}
    for role in ("user", "item", "time"):
        # The log names a column by its role or by Nonet's name.
        names = [table_format.columns[key] for key in (role, ROLES[role]) if key in table_format.columns]
        if source := options.columns.get(role) or next(iter(names), None):
            columns[role] = source
    return replace(table_format, columns=columns, keeps_fractions=True)


def _drop_column(table: pa.Table, name: str) -> pa.Table:
    """Return a table without a column that it may have."""
    return table.drop_columns([name]) if name in table.column_names else table


@dataclass(frozen=True, slots=True)
class LogChanger:
    """Changes a log on disk, one range of users at a time.

    Attributes:
        changes: The changes.
        log: The log.
        labels: The label files.
        items: The items table; None without one.
        where: Condition on the events, or None; labels and compression apply to the events that it keeps.
        drops_unknown: Whether events whose item is not in the items table are left out before events are compressed.
        bounds: User ids at which the second and later ranges begin.
        folder: Folder of all files.
    """

    changes: LogChanges
    log: EventLog
    labels: Sequence[EventLog]
    items: pa.Table | None
    where: str | None
    drops_unknown: bool
    bounds: Sequence[Any]
    folder: Path

    def list_slices(self) -> list[tuple[Path, EventLog, LogSlice]]:
        """Return the slices of the log and of the label files, each with its log and the path of the divided slice.

        Raises:
            DataError: The ids of a label file have other types than those of the log.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for labels in self.labels:
            check_label_ids(self.log.schema, labels.schema)
        logs = {"log": self.log} | {_name_label_slices(index): log for index, log in enumerate(self.labels)}
        return [
            (self.folder / f"{name}-{number:06}.arrow", log, log_slice)
            for name, log in logs.items()
            for number, log_slice in enumerate(log.slices)
        ]

    def divide_slice(self, path: Path, log: EventLog, log_slice: LogSlice) -> None:
        """Write the checked rows of a slice, ordered by range of users, unless the file exists."""
        if path.exists():
            return
        table, fine_time = log.read(log_slice, log.names)
        if log is not self.log:
            names = ("user_id", "item_id", "timestamp", FRACTION)
            table = table.select([name for name in names if name in table.column_names])
        if fine_time is not None:
            table = table.append_column(_FINE_TIME, pa.array(fine_time))
        ids = table["user_id"].combine_chunks()
        if pa.types.is_integer(ids.type):
            range_index = locate_in_bounds(ids.to_numpy(), self.bounds)
        else:
            encoded = ids.dictionary_encode()
            texts = np.array(encoded.dictionary.to_pylist(), dtype=object)
            range_index = locate_in_bounds(texts, self.bounds)[encoded.indices.to_numpy()]
        counts = np.bincount(range_index, minlength=len(self.bounds) + 1)
        newest = find_newest_time(table["timestamp"].to_numpy())
        facts = json.dumps({"bounds": [0, *np.cumsum(counts).tolist()], "newest": newest})
        table = table.take(pa.array(np.argsort(range_index, kind="stable")))
        table = table.replace_schema_metadata({_FACTS: facts.encode()})
        draft = path.with_name(f".{path.name}")
        with pa.OSFile(str(draft), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        os.replace(draft, path)

    def change_range(self, number: int) -> None:
        """Write the changed events of a range of users, what compression removed, and the facts, unless they exist."""
        facts_path = self.folder / f"range-{number:06}.json"
        if facts_path.exists():
            return
        events = self._read_range("log", number)
        if _FINE_TIME in events.column_names:
            order = np.argsort(events[_FINE_TIME].to_numpy(), kind="stable")
            events = events.take(pa.array(order)).drop_columns([_FINE_TIME])
        facts: dict[str, Any] = {}
        if self.changes.labels:
            events = self.changes.select_labelled_events(events, self.where)
            facts = {"events": len(events), "labels": {}}
        for index, options in enumerate(self.changes.labels):
            name = _name_label_slices(index)
            newest = max(facts["newest"] for _, facts in self._open_slices(name))
            labels = self._read_range(name, number)
            events, counts = attach_label(
                events, labels, options, observed_until=newest, period_s=self.changes.period_s
            )
            facts["labels"][options.name] = asdict(counts)
        events = _drop_column(events, FRACTION)
        if self.changes.labels and self.changes.drop_unlabelled:
            events = drop_unlabelled_events(events, self.changes.labels)
        if self.drops_unknown and self.items is not None and self.changes.compress is not None:
            events, unknown = drop_unknown_events(filter_events(events, self.where), self.items["item_id"])
            facts["unknown"] = unknown.dump()
        compressed = self.changes.compress_events(events, self.items, self.where)
        if compressed is not None:
            facts["savings"] = compressed.measure_savings()
            folded = FoldedRepeats.from_events(compressed.events)
            assert folded is not None
            folded_folder = get_folded_folder(self.folder, number)
            folded_folder.mkdir(exist_ok=True)
            folded.save(folded_folder)
            repeats_folder = self.folder / "repeats"
            repeats_folder.mkdir(exist_ok=True)
            pq.write_table(
                compressed.repeats, repeats_folder / f"repeats-{number:06}.parquet", compression="zstd"
            )
            events = drop_repeat_lists(compressed.events)
            events = events.append_column(ROW, pa.array(np.arange(len(events))))
        events = events.rename_columns(
            [_TIME if name == "timestamp" else name for name in events.column_names]
        )
        events_folder = self.folder / "events"
        events_folder.mkdir(exist_ok=True)
        pq.write_table(events, events_folder / f"range-{number:06}.parquet", compression="lz4")
        write_whole(facts_path, json.dumps({**facts, "changed": len(events)}).encode())

    def has_changed_all(self) -> bool:
        """Return whether all ranges are changed."""
        names = [f"range-{number:06}.json" for number in range(len(self.bounds) + 1)]
        return all((self.folder / name).exists() for name in names)

    def open_changed(self, missing: tuple[str, ...]) -> EventLog:
        """Open the changed log.

        Args:
            missing: Texts that stand for a missing value.

        Raises:
            DataError: No event is left.
        """
        if not sum(facts["changed"] for facts in self._read_facts()):
            if (unknown := self.sum_unknown()) is not None:
                unknown.check()
            if sum(facts.get("events", 0) for facts in self._read_facts()) and self.changes.drop_unlabelled:
                drop_unlabelled_events(pa.table({}), self.changes.labels, required=True)
            raise DataError(f"data.where: {self.where!r} matches no interaction.")
        return EventLog(str(self.folder / "events"), TableFormat({"timestamp": _TIME}, missing))

    def sum_savings(self) -> dict[str, float] | None:
        """Return what compression saved (`CompressedLog.measure_savings`), summed over all ranges; None without compression."""
        savings = [facts["savings"] for facts in self._read_facts() if "savings" in facts]
        return {name: sum(one[name] for one in savings) for name in savings[0]} if savings else None

    def sum_unknown(self) -> UnknownItems | None:
        """Return what was left out of all ranges because the items table lacks its item; None if nothing can be left out here."""
        parts = [UnknownItems.load(facts["unknown"]) for facts in self._read_facts() if "unknown" in facts]
        return reduce(add, parts) if parts else None

    def sum_labels(self) -> dict[str, LabelCounts]:
        """Return how many rows of each label file found an event, summed over all ranges, by the name of the label."""
        parts = [facts.get("labels", {}) for facts in self._read_facts()]
        return {
            options.name: reduce(add, [LabelCounts(**part[options.name]) for part in parts])
            for options in self.changes.labels
        }

    def store_repeats(self, root: Path) -> tuple[str, ...]:
        """Move the events that compression removed to root/repeats-<first 8 digits of the hash>, one file per range of users.

        Returns:
            The name of that folder; nothing without compression.
        """
        folder = self.folder / "repeats"
        if not folder.exists():
            return ()
        hashes = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())
        }
        final = (
            root / f"repeats-{hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()[:8]}"
        )
        if not final.exists():
            os.replace(folder, final)
        return (final.name,)

    def remove_slices(self) -> None:
        """Remove the divided slices, which are not needed once all ranges are changed."""
        for path in self.folder.glob("*.arrow"):
            path.unlink()

    def _read_facts(self) -> list[Mapping[str, Any]]:
        """Read the facts of all ranges."""
        return [
            json.loads((self.folder / f"range-{number:06}.json").read_text())
            for number in range(len(self.bounds) + 1)
        ]

    def _read_range(self, name: str, number: int) -> pa.Table:
        """Read the rows of a range of users, in the order of the files, of the log ("log") or of a label file."""
        parts = []
        for table, facts in self._open_slices(name):
            start, stop = facts["bounds"][number : number + 2]
            parts.append(table.slice(start, stop - start).replace_schema_metadata())
        return pa.concat_tables(parts)

    def _open_slices(self, name: str) -> Iterator[tuple[pa.Table, dict[str, Any]]]:
        """Yield the memory-mapped rows and the facts of each divided slice of the log ("log") or of a label file."""
        for path in sorted(self.folder.glob(f"{name}-*.arrow")):
            with pa.memory_map(str(path)) as source:
                table: Any = pa.ipc.open_file(source).read_all()
                yield table, json.loads(table.schema.metadata[_FACTS])


def _name_label_slices(index: int) -> str:
    """Return the name of the divided slices of a label file, of which none is the prefix of another."""
    return f"labels_{index}"


def get_folded_folder(folder: Path, number: int) -> Path:
    """Return the folder of the `FoldedRepeats` of a range's changed events, in the folder of a `LogChanger`."""
    return folder / f"folded-{number:06}"
