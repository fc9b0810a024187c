"""prepare: from interactions of any number to sequences on disk, the same as `build_sequences` makes of the same tables.

    scatter  slices of the log -> runs, cut by ranges of users
    gather   a range of all runs -> its users, sorted
    core     passes over counts: which items and users are left
    write    what is left -> flat files, memory-mapped by who reads them

Each step leaves whole files in a working folder, and what is there is not made again, so a preparation that was killed goes on.
A slice and a partition hold about two million rows: that, times the threads, is what is in memory, beside the items.
Disk: about twice the events in rows of 20 to 40 bytes while it works, asked for before it begins.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nonet.atomic import write_whole
from nonet.errors import DataError
from nonet.samples.preparation.catalogue import ItemIndex, distinct_items
from nonet.samples.preparation.core import Core, k_core
from nonet.samples.preparation.finish import Finish, Note, trained_events
from nonet.samples.preparation.gather import Layout, Partition, gather, layout_of
from nonet.samples.preparation.log import EventLog
from nonet.samples.preparation.progress import Progress, Tell
from nonet.samples.preparation.scatter import Run, Scatter, user_bounds
from nonet.samples.sequences import (
    FLAT_FORMAT,
    FLAT_META,
    ITEM_KEYS,
    Mapped,
    Sequences,
    carried_columns,
    check_split,
    item_table,
    least_events,
    policy,
    repeat_shares,
)
from nonet.samples.tables import (
    MISSING,
    TableFormat,
    as_numbers,
    check_columns,
    keys_in,
    parquet_schema,
    read_items,
)

_PARTITION_ROWS = 1 << 21
_THREADS = 4
_SPARE = 1.05
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What `build_sequences` is told, but for tie_seed; paths instead of tables."""

    interactions: str
    items: str | None
    columns: Mapping[str, str]
    keep: Mapping[str, int]
    split: Mapping[str, Any]
    targets: Mapping[str, str]
    where: str | None = None
    repeats: str | None = None
    missing: tuple[str, ...] = MISSING

    @property
    def table_format(self) -> TableFormat:
        """Column names and missing texts that both tables are read with."""
        return TableFormat(self.columns, self.missing)

    def to_fingerprint(self) -> dict[str, Any]:
        """Return what a working folder is named after; default missing texts are left out, as before they could be chosen."""
        facts = asdict(self)
        del facts["missing"]
        missing = self.table_format.own_missing
        return facts if missing is None else {**facts, "missing": missing}


@dataclass(frozen=True, slots=True)
class Prepared:
    """folder: of the sequences, with items.parquet; seconds: of each step; cpu_s: seconds of cores in each, reading apart."""

    folder: Path
    sha256: str
    seconds: dict[str, float]
    cpu_s: dict[str, float]

    def open(self) -> tuple[Sequences, pa.Table]:
        """Memory-mapped sequences, and their items."""
        return Sequences.load(self.folder), pq.read_table(self.folder / "items.parquet")


def prepare(
    ask: BuildOptions,
    root: Path,
    *,
    tell: Tell | None = None,
    slice_rows: int | None = None,
    partition_rows: int = _PARTITION_ROWS,
    threads: int | None = None,
) -> Prepared:
    """Write root/sequences-<sha8>, or go on where a call for the same question and files was killed.

    Raises DataError and ConfigError as `build_sequences` does, and DataError, with nothing left behind, where the disk is full.
    """
    log = EventLog(ask.interactions, ask.table_format, *([slice_rows] if slice_rows else []))
    work = (
        root
        / f"preparing-{_hash([FLAT_FORMAT, log.state(), _state(ask.items), ask.to_fingerprint(), partition_rows])[:8]}"
    )
    for other in root.glob("preparing-*"):
        if other != work:
            shutil.rmtree(other, ignore_errors=True)
    job = _Job(ask, log, work, Progress(tell), partition_rows, threads or min(_THREADS, os.cpu_count() or 1))
    try:
        return job.run(root)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free = _free(root)
        shutil.rmtree(work, ignore_errors=True)
        raise DataError(
            f"the disk of {root} is full: preparing {log.rows:,} events takes about {_gb(job.needed_bytes)}, and {_gb(free)} "
            "were left when it failed. Nothing is left behind; free some room, or name a --run-dir elsewhere"
        ) from None


@dataclass(slots=True)
class _Job:
    ask: BuildOptions
    log: EventLog
    work: Path
    progress: Progress
    partition_rows: int
    threads: int
    needed_bytes: int = 0

    def run(self, root: Path) -> Prepared:
        least_events(self.ask.keep)
        items = None if self.ask.items is None else read_items(self.ask.items, self.ask.table_format)
        given = [] if self.ask.items is None else parquet_schema(self.ask.items, "items").names
        check_columns(self.ask.columns, [*self.log.names, *given])
        self._check_room()
        self.work.mkdir(parents=True, exist_ok=True)
        catalogue = distinct_items(self.log, self.ask.where) if items is None else items
        cpu_s: dict[str, float] = {}
        sorted_ = self.work / "sorted.json"
        if not sorted_.exists():
            self._sort(catalogue, cpu_s)
        layout, partitions = self._sorted(sorted_)
        self.progress.phase("core", sum(int(part.offsets()[-1]) for part in partitions))
        core = k_core(partitions, len(catalogue), self.ask.keep, self.progress.add)
        aside = self.work / "sequences"
        aside.mkdir(exist_ok=True)
        sha256 = self._write(aside, Finish(layout, core, self.ask.split, aside), partitions, catalogue)
        self.progress.end()
        final = root / f"sequences-{sha256[:8]}"
        if not final.exists():
            os.replace(aside, final)
        shutil.rmtree(self.work)
        cpu_s |= self.progress.cpu_s
        cpu_s["scatter"] = cpu_s.get("scatter", 0.0) - cpu_s.get("read", 0.0)
        return Prepared(final, sha256, self.progress.seconds, cpu_s)

    def _sort(self, catalogue: pa.Table, cpu_s: dict[str, float]) -> None:
        """Scatter and gather: whole partitions, and the note that all of them are there."""
        columns, dropped = carried_columns(self.log.schema, None)
        bounds = user_bounds(self.log, -(-self.log.rows // self.partition_rows))
        ids = catalogue["item_id"].combine_chunks()
        runs_folder = self.work / "runs"
        scatter = Scatter(
            self.log, ItemIndex(ids), self.ask.where, self.ask.targets, columns, bounds, runs_folder
        )
        self.progress.phase("scatter", self.log.rows)
        self._each(enumerate(self.log.slices), lambda job: scatter.write(*job), lambda job: job[1].rows)
        cpu_s["read"] = scatter.cpu_s["read"]
        runs = [Run.load(scatter.place(number)) for number in range(len(self.log.slices))]
        if not sum(int(run.bounds[-1]) for run in runs):
            raise DataError(f"data.where: {self.ask.where!r} matches no interaction.")
        text = not pa.types.is_integer(self.log.schema.field("user_id").type)
        kinds = {name: _kind(self.log.schema.field(name).type) for name in columns}
        layout = layout_of(runs, text, kinds, list(self.ask.targets))
        parts = self.work / "parts"
        parts.mkdir(exist_ok=True)
        self.progress.phase("gather", sum(int(run.bounds[-1]) for run in runs))
        sizes = np.sum([np.diff(run.bounds) for run in runs], 0)
        self._each(
            range(len(bounds) + 1),
            lambda number: gather(runs, number, layout, parts),
            lambda number: int(sizes[number]),
        )
        note = {"layout": asdict(layout), "partitions": len(bounds) + 1, "dropped": list(dropped)}
        write_whole(self.work / "sorted.json", json.dumps(note).encode())
        shutil.rmtree(runs_folder)

    def _sorted(self, note: Path) -> tuple[Layout, list[Partition]]:
        there = json.loads(note.read_text())
        layout = Layout(**{**there["layout"], "event_names": tuple(there["layout"]["event_names"])})
        numbers = range(there["partitions"])
        return layout, [Partition(self.work / "parts" / f"part-{number:06}") for number in numbers]

    def _write(
        self, folder: Path, finish: Finish, partitions: Sequence[Partition], catalogue: pa.Table
    ) -> str:
        """The artifact, but for its name: its hash."""
        core, layout = finish.core, finish.layout
        users, events = (sum(column) for column in zip(*core.sizes, strict=True))
        self.progress.phase("write", events)
        files = finish.files(partitions)
        files.write("offsets", 0, np.zeros(1, np.int64))
        self._each(
            range(len(partitions)),
            lambda number: finish.write(files, partitions, number),
            lambda number: core.sizes[number][1],
        )
        files.close()
        finish.write_texts(partitions)
        notes = [note for part in partitions if (note := Note.load(part)) is not None]
        facts = reduce(add, [note.facts for note in notes])
        check_split(self.ask.split, facts)
        counts = np.array([np.sum([note.repeats for note in notes], 0), facts.events])
        meta = {
            "format": FLAT_FORMAT,
            "users": users,
            "events": events,
            "columns": list(layout.columns),
            "targets": list(layout.targets),
            "event_names": list(layout.event_names),
            "dropped": json.loads((self.work / "sorted.json").read_text())["dropped"],
            "repeats": policy(counts, self.ask.repeats),
            "repeat_shares": repeat_shares(counts),
            "partitions": [
                {"users": size[0], "events": size[1], "sha256": note.sha256}
                for size, note in zip(core.sizes, notes, strict=True)
            ],
        }
        self._write_items(folder, core, catalogue, meta)
        return _hash([meta, hashlib.sha256((folder / "items.parquet").read_bytes()).hexdigest()])

    def _write_items(self, folder: Path, core: Core, catalogue: pa.Table, meta: dict[str, Any]) -> None:
        kept_ids = catalogue["item_id"].filter(pa.array(core.items))
        np.save(folder / ITEM_KEYS, keys_in("item", as_numbers(kept_ids)))
        write_whole(folder / FLAT_META, f"{json.dumps(meta, indent=1)}\n".encode())
        self.progress.phase("items", meta["events"])
        mapped = Mapped(folder)
        trained = trained_events(
            mapped.array("item"), mapped.array("split"), int(core.items.sum()), self.progress.add
        )
        pq.write_table(item_table(catalogue, core.items, trained), folder / "items.parquet")

    def _each(self, jobs: Iterable[Any], work: Callable[[Any], Any], rows: Callable[[Any], int]) -> None:
        """All jobs, some at a time; the first error ends them."""
        with ThreadPoolExecutor(self.threads) as pool:

            def one(job: Any) -> None:
                began = time.thread_time()
                work(job)
                self.progress.add(rows(job), time.thread_time() - began)

            waiting = [pool.submit(one, job) for job in jobs]
            try:
                for each in waiting:
                    each.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _check_room(self) -> None:
        """Raise DataError where the disk has less room than all this takes."""
        columns, _ = carried_columns(self.log.schema, None)
        layout = Layout(
            False,
            "<i8",
            ("",) if "event" in self.log.schema.names else (),
            {name: _kind(self.log.schema.field(name).type) for name in columns},
            list(self.ask.targets),
        )
        self.needed_bytes = int(2 * self.log.rows * layout.row_bytes() * _SPARE)
        there = sum(path.stat().st_size for path in self.work.rglob("*") if path.is_file())
        place = next(path for path in (self.work, *self.work.parents) if path.exists())
        if (free := _free(place)) + there < self.needed_bytes:
            raise DataError(
                f"preparing {self.log.rows:,} events takes about {_gb(self.needed_bytes)} of disk in {self.work.parent}, and "
                f"{_gb(free)} are free. Free some room, or name a --run-dir elsewhere"
            )


def _kind(kind: pa.DataType) -> str:
    """The dtype that `column_values` gives for a carried column."""
    whole = pa.types.is_integer(kind) or pa.types.is_boolean(kind)
    return "<i8" if whole or pa.types.is_string(kind) or pa.types.is_large_string(kind) else "<f4"


def _state(items: str | None) -> Any:
    if items is None:
        return None
    from nonet.samples.tables import find_parquet

    system, files = find_parquet(items, "items")
    return [[info.path, info.size, info.mtime_ns] for info in system.get_file_info(files)]


def _hash(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _free(place: Path) -> int:
    return shutil.disk_usage(place).free


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
