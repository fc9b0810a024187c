"""Prepares sequences on disk from any number of interactions, with the same result as `build_sequences`.

    scatter  slices of the log -> runs, cut by ranges of users
    gather   one range of all runs -> its users, sorted
    core     passes over counts: which items and users are kept
    write    the kept events -> memory-mapped flat files

Each step writes complete files to a working folder and skips files that exist, so a preparation that was killed continues
where it stopped. A slice and a partition have about two million rows each; memory holds one of them per thread, and the
items. The disk needs about twice the events at 20 to 40 bytes per row while the preparation runs; this is checked before it
begins.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
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
from nonet.samples.preparation.build_options import BuildOptions
from nonet.samples.preparation.catalogue import ItemIndex, collect_items
from nonet.samples.preparation.core import KCoreResult, compute_k_core
from nonet.samples.preparation.finish import PartitionNote, PartitionWriter, count_train_events
from nonet.samples.preparation.gather import PartitionLayout, SortedPartition, gather_partition, make_layout
from nonet.samples.preparation.log import EventLog
from nonet.samples.preparation.progress import PreparationProgress, ReportProgress
from nonet.samples.preparation.scatter import RunWriter, ScatteredRun, compute_user_bounds
from nonet.samples.sequences import (
    FLAT_FORMAT,
    FLAT_META,
    ITEM_KEYS,
    MappedSequences,
    Sequences,
    check_split,
    choose_policy,
    compute_repeat_shares,
    make_item_table,
    parse_min_events,
    select_carried_columns,
)
from nonet.samples.tables import as_numbers, check_columns, compute_keys, read_items, read_parquet_schema

_PARTITION_ROWS = 1 << 21
_THREADS = 4
_SPARE = 1.05
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class PreparedSequences:
    """The result of a preparation.

    Attributes:
        folder: Folder of the sequences and of items.parquet.
        sha256: Hash of the artifact.
        seconds: Elapsed seconds of each step.
        cpu_s: CPU seconds of each step; reading is listed separately.
    """

    folder: Path
    sha256: str
    seconds: dict[str, float]
    cpu_s: dict[str, float]

    def open(self) -> tuple[Sequences, pa.Table]:
        """Open the memory-mapped sequences and read their items."""
        return Sequences.load(self.folder), pq.read_table(self.folder / "items.parquet")


def prepare_sequences(
    options: BuildOptions,
    root: Path,
    *,
    report_progress: ReportProgress | None = None,
    slice_rows: int | None = None,
    partition_rows: int = _PARTITION_ROWS,
    threads: int | None = None,
) -> PreparedSequences:
    """Write root/sequences-<sha8>, continuing an earlier call with the same options and files that was killed.

    Args:
        options: Paths and options of the build.
        root: Parent folder of the artifact and of the working folder.
        report_progress: Called with a `PreparationReport` at most once a second.
        slice_rows: Rows per slice; None for the default.
        partition_rows: Rows per partition.
        threads: Number of threads; None for at most four.

    Raises:
        DataError: As `build_sequences`, or if the disk is full; then the working folder is removed.
        ConfigError: As `build_sequences`.
    """
    log = EventLog(options.interactions, options.table_format, *([slice_rows] if slice_rows else []))
    items = _list_item_files(options.items)
    facts = [FLAT_FORMAT, log.compute_hash(), items, options.to_fingerprint(), partition_rows]
    work = root / f"preparing-{_hash_facts(facts)[:8]}"
    for other in root.glob("preparing-*"):
        if other != work:
            shutil.rmtree(other, ignore_errors=True)
    job = _PreparationJob(
        options,
        log,
        work,
        PreparationProgress(report_progress),
        partition_rows,
        threads or min(_THREADS, os.cpu_count() or 1),
    )
    try:
        return job.run(root)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free = _get_free_bytes(root)
        shutil.rmtree(work, ignore_errors=True)
        raise DataError(
            f"the disk of {root} is full: preparing {log.rows:,} events takes about "
            f"{_format_gb(job.needed_bytes)}, and {_format_gb(free)} were left when it failed. "
            "Nothing is left behind; free some room, or name a --run-dir elsewhere"
        ) from None


@dataclass(slots=True)
class _PreparationJob:
    """One preparation with its options and its working folder."""

    ask: BuildOptions
    log: EventLog
    work: Path
    progress: PreparationProgress
    partition_rows: int
    threads: int
    needed_bytes: int = 0

    def run(self, root: Path) -> PreparedSequences:
        """Run all steps and move the artifact to its final name."""
        parse_min_events(self.ask.keep)
        items = None if self.ask.items is None else read_items(self.ask.items, self.ask.table_format)
        given = [] if self.ask.items is None else read_parquet_schema(self.ask.items, "items").names
        check_columns(self.ask.columns, [*self.log.names, *given])
        self._check_room()
        self.work.mkdir(parents=True, exist_ok=True)
        catalogue = collect_items(self.log, self.ask.where) if items is None else items
        cpu_s: dict[str, float] = {}
        sorted_ = self.work / "sorted.json"
        if not sorted_.exists():
            self._sort_partitions(catalogue, cpu_s)
        layout, partitions = self._read_sorted(sorted_)
        self.progress.start_phase("core", sum(int(part.read_offsets()[-1]) for part in partitions))
        core = compute_k_core(partitions, len(catalogue), self.ask.keep, self.progress.add_rows)
        aside = self.work / "sequences"
        aside.mkdir(exist_ok=True)
        sha256 = self._write(
            aside, PartitionWriter(layout, core, self.ask.split, aside), partitions, catalogue
        )
        self.progress.end_phase()
        final = root / f"sequences-{sha256[:8]}"
        if not final.exists():
            os.replace(aside, final)
        shutil.rmtree(self.work)
        cpu_s |= self.progress.cpu_s
        cpu_s["scatter"] = cpu_s.get("scatter", 0.0) - cpu_s.get("read", 0.0)
        return PreparedSequences(final, sha256, self.progress.seconds, cpu_s)

    def _sort_partitions(self, catalogue: pa.Table, cpu_s: dict[str, float]) -> None:
        """Run scatter and gather, and record that all partitions are complete."""
        columns, dropped = select_carried_columns(self.log.schema, None)
        bounds = compute_user_bounds(self.log, -(-self.log.rows // self.partition_rows))
        ids = catalogue["item_id"].combine_chunks()
        runs_folder = self.work / "runs"
        scatter = RunWriter(
            self.log, ItemIndex(ids), self.ask.where, self.ask.targets, columns, bounds, runs_folder
        )
        self.progress.start_phase("scatter", self.log.rows)
        self._run_jobs(enumerate(self.log.slices), lambda job: scatter.write(*job), lambda job: job[1].rows)
        cpu_s["read"] = scatter.cpu_s["read"]
        runs = [ScatteredRun.load(scatter.get_run_folder(number)) for number in range(len(self.log.slices))]
        if not sum(int(run.bounds[-1]) for run in runs):
            raise DataError(f"data.where: {self.ask.where!r} matches no interaction.")
        text = not pa.types.is_integer(self.log.schema.field("user_id").type)
        kinds = {name: _get_column_dtype(self.log.schema.field(name).type) for name in columns}
        layout = make_layout(runs, text, kinds, list(self.ask.targets))
        parts = self.work / "parts"
        parts.mkdir(exist_ok=True)
        self.progress.start_phase("gather", sum(int(run.bounds[-1]) for run in runs))
        sizes = np.sum([np.diff(run.bounds) for run in runs], 0)
        self._run_jobs(
            range(len(bounds) + 1),
            lambda number: gather_partition(runs, number, layout, parts),
            lambda number: int(sizes[number]),
        )
        note = {"layout": asdict(layout), "partitions": len(bounds) + 1, "dropped": list(dropped)}
        write_whole(self.work / "sorted.json", json.dumps(note).encode())
        shutil.rmtree(runs_folder)

    def _read_sorted(self, note: Path) -> tuple[PartitionLayout, list[SortedPartition]]:
        """Read the layout and the partitions that `_sort_partitions` recorded."""
        there = json.loads(note.read_text())
        layout = PartitionLayout(**{**there["layout"], "event_names": tuple(there["layout"]["event_names"])})
        numbers = range(there["partitions"])
        return layout, [SortedPartition(self.work / "parts" / f"part-{number:06}") for number in numbers]

    def _write(
        self,
        folder: Path,
        finish: PartitionWriter,
        partitions: Sequence[SortedPartition],
        catalogue: pa.Table,
    ) -> str:
        """Write the artifact without its final name and return its hash."""
        core, layout = finish.core, finish.layout
        users, events = (sum(column) for column in zip(*core.sizes, strict=True))
        self.progress.start_phase("write", events)
        files = finish.create_files(partitions)
        files.write("offsets", 0, np.zeros(1, np.int64))
        self._run_jobs(
            range(len(partitions)),
            lambda number: finish.write(files, partitions, number),
            lambda number: core.sizes[number][1],
        )
        files.close()
        finish.write_texts(partitions)
        notes = [note for part in partitions if (note := PartitionNote.load(part)) is not None]
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
            "repeats": choose_policy(counts, self.ask.repeats),
            "repeat_shares": compute_repeat_shares(counts),
            "partitions": [
                {"users": size[0], "events": size[1], "sha256": note.sha256}
                for size, note in zip(core.sizes, notes, strict=True)
            ],
        }
        self._write_items(folder, core, catalogue, meta)
        return _hash_facts([meta, hashlib.sha256((folder / "items.parquet").read_bytes()).hexdigest()])

    def _write_items(
        self, folder: Path, core: KCoreResult, catalogue: pa.Table, meta: dict[str, Any]
    ) -> None:
        """Write the item keys, the metadata and the items table of the artifact."""
        kept_ids = catalogue["item_id"].filter(pa.array(core.items))
        np.save(folder / ITEM_KEYS, compute_keys("item", as_numbers(kept_ids)))
        write_whole(folder / FLAT_META, f"{json.dumps(meta, indent=1)}\n".encode())
        self.progress.start_phase("items", meta["events"])
        mapped = MappedSequences(folder)
        trained = count_train_events(
            mapped.map_array("item"), mapped.map_array("split"), int(core.items.sum()), self.progress.add_rows
        )
        pq.write_table(make_item_table(catalogue, core.items, trained), folder / "items.parquet")

    def _run_jobs(self, jobs: Iterable[Any], work: Callable[[Any], Any], rows: Callable[[Any], int]) -> None:
        """Run all jobs in a thread pool; the first error cancels the others."""
        with ThreadPoolExecutor(self.threads) as pool:

            def run_job(job: Any) -> None:
                began = time.thread_time()
                work(job)
                self.progress.add_rows(rows(job), time.thread_time() - began)

            waiting = [pool.submit(run_job, job) for job in jobs]
            try:
                for each in waiting:
                    each.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _check_room(self) -> None:
        """Raise DataError if the disk has less free space than the preparation needs."""
        columns, _ = select_carried_columns(self.log.schema, None)
        layout = PartitionLayout(
            False,
            "<i8",
            ("",) if "event" in self.log.schema.names else (),
            {name: _get_column_dtype(self.log.schema.field(name).type) for name in columns},
            list(self.ask.targets),
        )
        self.needed_bytes = int(2 * self.log.rows * layout.compute_row_bytes() * _SPARE)
        there = sum(path.stat().st_size for path in self.work.rglob("*") if path.is_file())
        place = next(path for path in (self.work, *self.work.parents) if path.exists())
        if (free := _get_free_bytes(place)) + there < self.needed_bytes:
            raise DataError(
                f"preparing {self.log.rows:,} events takes about {_format_gb(self.needed_bytes)} of disk in {self.work.parent}, "
                f"and {_format_gb(free)} are free. Free some room, or name a --run-dir elsewhere"
            )


def _get_column_dtype(kind: pa.DataType) -> str:
    """Return the dtype that `convert_column` produces for a carried column."""
    whole = pa.types.is_integer(kind) or pa.types.is_boolean(kind)
    return "<i8" if whole or pa.types.is_string(kind) or pa.types.is_large_string(kind) else "<f4"


def _list_item_files(items: str | None) -> Any:
    """Return path, size and modification time of each items file; None without items."""
    if items is None:
        return None
    from nonet.samples.tables import find_parquet

    system, files = find_parquet(items, "items")
    return [[info.path, info.size, info.mtime_ns] for info in system.get_file_info(files)]


def _hash_facts(facts: Any) -> str:
    """Return the SHA-256 of facts as JSON with sorted keys, in hexadecimal."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _get_free_bytes(place: Path) -> int:
    return shutil.disk_usage(place).free


def _format_gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
