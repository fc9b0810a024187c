"""Prepares sequences on disk from any number of interactions, with the same result as `build_sequences`.

    change   Attach labels and compress events, if there are any (`changes.py`), which makes another log.
    scatter  Split each slice of the log into one run per slice, with a part for each range of users.
    gather   Collect the parts of one range from all runs into a partition of sorted users.
    core     Count events repeatedly to find the items and users that the k-core filter keeps.
    write    Write the kept events to memory-mapped flat files.

Each step writes complete files to a working folder and skips files that exist, so a preparation that was killed continues
where it stopped. A slice and a partition have about two million rows each; memory is needed for one of them per thread, and for
the items. While the preparation runs, it needs disk space for about twice the events, at 20 to 40 bytes per event; this is
checked at the start.
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
from dataclasses import asdict, dataclass, field
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
from nonet.samples.preparation.changes import LogChanger, LogChanges
from nonet.samples.preparation.core import KCoreResult, compute_k_core, drop_cold_events
from nonet.samples.preparation.finish import PartitionNote, PartitionWriter, count_train_events
from nonet.samples.preparation.gather import PartitionLayout, SortedPartition, gather_partition, make_layout
from nonet.samples.preparation.log import EventLog
from nonet.samples.preparation.progress import PreparationProgress, ReportProgress
from nonet.samples.preparation.scatter import RunWriter, ScatteredRun, compute_user_bounds
from nonet.samples.sequences import (
    FLAT_META,
    ITEM_KEYS,
    ROW,
    LabelCounts,
    MappedSequences,
    check_split,
    choose_policy,
    compute_repeat_shares,
    draw_cold_items,
    list_label_time_columns,
    make_item_table,
    parse_min_events,
    select_carried_columns,
)
from nonet.samples.tables import (
    as_numbers,
    check_columns,
    compute_keys,
    read_items,
    read_parquet_schema,
    refuse_internal_columns,
)

_PARTITION_ROWS = 1 << 21  # number of rows per partition; each thread holds one partition in memory
_MAX_THREADS = 4
_DISK_MARGIN = 1.05  # times the bytes of the events, for what is not per event: users, items and file headers
_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class PreparedSequences:
    """The result of a preparation.

    Attributes:
        folder: Folder of the sequences and of items.parquet.
        sha256: Hash of the artifact.
        seconds: Elapsed seconds by step.
        cpu_s: CPU seconds by step; those for reading the log are under "read" and not under "scatter".
        savings: What compression saved (`CompressedLog.measure_savings`); None without compression.
        unknown: What was left out because the items table lacks its item (`UnknownItems.to_facts`); None if that is an error.
        labels: How many rows of each label file found an event, by the name of the label.
        repeats: The name of the folder, beside that of the sequences, with the events that compression removed, if there is one.
    """

    folder: Path
    sha256: str
    seconds: dict[str, float]
    cpu_s: dict[str, float]
    savings: dict[str, float] | None = None
    unknown: dict[str, int] | None = None
    labels: dict[str, LabelCounts] = field(default_factory=dict)
    repeats: tuple[str, ...] = ()


def prepare_sequences(
    options: BuildOptions,
    root: Path,
    *,
    changes: LogChanges | None = None,
    report_progress: ReportProgress | None = None,
    slice_rows: int | None = None,
    partition_rows: int = _PARTITION_ROWS,
    threads: int | None = None,
) -> PreparedSequences:
    """Prepare sequences in root/sequences-<first 8 digits of the hash>.

    If an earlier call with the same options and files was killed, this call continues its work.

    Args:
        options: Paths and options of the build.
        root: Parent folder of the artifact and of the working folder.
        changes: Labels and compression of the log; None for none.
        report_progress: A function that is called with a `PreparationReport` at most once per second.
        slice_rows: Number of rows per slice; None for the default.
        partition_rows: Number of rows per partition.
        threads: Number of threads; None for four, or for the number of CPUs if it is lower.

    Raises:
        DataError: For the same reasons as in `build_sequences`, or if the disk is full; the working folder is then removed.
        ConfigError: For the same reasons as in `build_sequences`.
    """
    changes = changes or LogChanges()
    table_format = changes.extend_format(options.table_format)
    log = EventLog(options.interactions, table_format, *([slice_rows] if slice_rows else []))
    refuse_internal_columns(log.names, f"interactions {options.interactions}")
    item_files = options.list_item_files()
    inputs = [changes.flat_format, log.compute_hash(), item_files, options.to_fingerprint(), partition_rows]
    labels = changes.open_labels(options.table_format)
    inputs += [changes.to_fingerprint(labels)] if changes else []
    working_folder = root / f"preparing-{_hash_json(inputs)[:8]}"
    for other_folder in root.glob("preparing-*"):  # left by killed preparations of other data
        if other_folder != working_folder:
            shutil.rmtree(other_folder, ignore_errors=True)
    job = _PreparationJob(
        options,
        log,
        changes,
        labels,
        working_folder,
        PreparationProgress(report_progress),
        partition_rows,
        threads or min(_MAX_THREADS, os.cpu_count() or 1),
    )
    try:
        return job.run(root)
    except OSError as error:
        if error.errno not in _DISK_FULL_ERRORS:
            raise
        free_bytes = _get_free_bytes(root)
        shutil.rmtree(working_folder, ignore_errors=True)
        raise DataError(
            f"the disk of {root} is full: preparing {log.rows:,} events takes about "
            f"{_format_gb(job.needed_bytes)}, and {_format_gb(free_bytes)} were free when it failed. "
            "The files of the preparation were removed. Free disk space, or set --run-dir to another disk."
        ) from None


@dataclass(slots=True)
class _PreparationJob:
    """A preparation: its options, log and working folder, and the steps that it runs.

    `needed_bytes`, the disk space that the preparation needs, is 0 until `run` computes it.
    """

    options: BuildOptions
    log: EventLog
    changes: LogChanges
    labels: Sequence[EventLog]
    working_folder: Path
    progress: PreparationProgress
    partition_rows: int
    threads: int
    needed_bytes: int = 0

    def run(self, root: Path) -> PreparedSequences:
        """Run all steps and move the artifact to its final name in the folder `root`."""
        parse_min_events(self.options.keep)  # raises ConfigError before the work begins
        items, item_columns = None, []
        if self.options.items is not None:
            items = read_items(self.options.items, self.options.table_format)
            items = self.options.attach_vectors(items)
            item_columns = read_parquet_schema(self.options.items, "items").names
        check_columns(self.options.columns, [*self.log.names, *item_columns])
        self._check_free_space()
        self.working_folder.mkdir(parents=True, exist_ok=True)
        bounds = compute_user_bounds(self.log, -(-self.log.rows // self.partition_rows))
        changer = self._change_log(items, bounds) if self.changes else None
        catalogue = collect_items(self.log, self.options.where) if items is None else items
        cpu_s: dict[str, float] = {}
        sorted_record = self.working_folder / "sorted.json"
        if not sorted_record.exists():
            self._sort_partitions(catalogue, bounds, cpu_s)
        layout, partitions = self._read_sorted(sorted_record)
        self.progress.start_phase("core", sum(int(part.read_offsets()[-1]) for part in partitions))
        core = compute_k_core(partitions, len(catalogue), self.options.keep, self.progress.add_rows)
        is_cold = draw_cold_items(self.options.split, catalogue["item_id"])
        if is_cold is not None:
            core = drop_cold_events(partitions, core, is_cold, self.options.split)
        staging_folder = self.working_folder / "sequences"
        staging_folder.mkdir(exist_ok=True)
        changed_folder = changer.folder if changer is not None and self.changes.compress is not None else None
        writer = PartitionWriter(layout, core, self.options.split, staging_folder, changed_folder)
        sha256 = self._write_artifact(staging_folder, writer, partitions, catalogue)
        self.progress.end_phase()
        artifact_folder = root / f"sequences-{sha256[:8]}"
        if not artifact_folder.exists():
            os.replace(staging_folder, artifact_folder)
        savings = None if changer is None else changer.sum_savings()
        labels = {} if changer is None else changer.sum_labels()
        unknown: dict[str, int] | None = None
        if self.options.leaves_out_unknown:
            left_out = None if changer is None else changer.sum_unknown()
            unknown = left_out.to_facts() if left_out else json.loads(sorted_record.read_text())["unknown"]
        repeats = () if changer is None else changer.store_repeats(root)
        shutil.rmtree(self.working_folder)
        cpu_s |= self.progress.cpu_s
        cpu_s["scatter"] = cpu_s.get("scatter", 0.0) - cpu_s.get("read", 0.0)
        return PreparedSequences(
            artifact_folder, sha256, self.progress.seconds, cpu_s, savings, unknown, labels, repeats
        )

    def _change_log(self, items: pa.Table | None, bounds: Sequence[Any]) -> LogChanger:
        """Attach the labels and compress the events, and continue with the changed log."""
        changer = LogChanger(
            self.changes,
            self.log,
            self.labels,
            items,
            self.options.where,
            self.options.leaves_out_unknown,
            bounds,
            self.working_folder / "changed",
        )
        slices, ranges = changer.list_slices(), range(len(bounds) + 1)
        self.progress.start_phase("change", 2 * self.log.rows)
        if not changer.has_changed_all():
            self._run_jobs(
                slices,
                lambda numbered: changer.divide_slice(*numbered),
                count_rows=lambda numbered: numbered[2].rows,
            )
            share = self.log.rows // len(ranges)
            self._run_jobs(ranges, changer.change_range, count_rows=lambda number: share)
        self.log = changer.open_changed(self.options.missing)
        changer.remove_slices()
        return changer

    def _list_columns(self) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return the dtype of each column that partitions have of the log, and descriptions of the columns that are left out."""
        carried, dropped = select_carried_columns(self.log.schema, None)
        dtypes = {
            name: _get_column_dtype(self.log.schema.field(name).type) for name in carried if name != ROW
        }
        dtypes |= dict.fromkeys(list_label_time_columns(self.log.schema, self.options.targets), "<i8")
        return dtypes | ({ROW: "<i8"} if ROW in carried else {}), dropped

    def _sort_partitions(self, catalogue: pa.Table, bounds: Sequence[Any], cpu_s: dict[str, float]) -> None:
        """Run scatter and gather, and record in sorted.json that all partitions are complete; sets cpu_s["read"]."""
        dtypes, dropped = self._list_columns()
        ids = catalogue["item_id"].combine_chunks()
        runs_folder = self.working_folder / "runs"
        scatter = RunWriter(
            self.log,
            ItemIndex(ids),
            self.options.where,
            self.options.targets,
            list(dtypes),
            bounds,
            runs_folder,
            self.options.leaves_out_unknown,
        )
        self.progress.start_phase("scatter", self.log.rows)
        self._run_jobs(
            enumerate(self.log.slices),
            lambda numbered: scatter.write(*numbered),
            count_rows=lambda numbered: numbered[1].rows,
        )
        cpu_s["read"] = scatter.cpu_s["read"]
        runs = [ScatteredRun.load(scatter.get_run_folder(number)) for number in range(len(self.log.slices))]
        unknown = reduce(add, [run.unknown for run in runs])
        unknown.check()
        if not sum(int(run.bounds[-1]) for run in runs):
            raise DataError(f"data.where: {self.options.where!r} matches no interaction.")
        users_are_text = not pa.types.is_integer(self.log.schema.field("user_id").type)
        layout = make_layout(runs, users_are_text, dtypes, list(self.options.targets))
        partitions_folder = self.working_folder / "parts"
        partitions_folder.mkdir(exist_ok=True)
        self.progress.start_phase("gather", sum(int(run.bounds[-1]) for run in runs))
        rows_by_partition = np.sum([np.diff(run.bounds) for run in runs], 0)
        self._run_jobs(
            range(len(bounds) + 1),
            lambda number: gather_partition(runs, number, layout, partitions_folder),
            count_rows=lambda number: int(rows_by_partition[number]),
        )
        record = {
            "layout": asdict(layout),
            "partitions": len(bounds) + 1,
            "dropped": list(dropped),
            "unknown": unknown.to_facts(),
        }
        write_whole(self.working_folder / "sorted.json", json.dumps(record).encode())
        shutil.rmtree(runs_folder)

    def _read_sorted(self, path: Path) -> tuple[PartitionLayout, list[SortedPartition]]:
        """Read the layout and the partitions that `_sort_partitions` recorded in the file `path`."""
        record = json.loads(path.read_text())
        layout = PartitionLayout(
            **{**record["layout"], "event_names": tuple(record["layout"]["event_names"])}
        )
        folder, numbers = self.working_folder / "parts", range(record["partitions"])
        return layout, [SortedPartition(folder / f"part-{number:06}") for number in numbers]

    def _write_artifact(
        self,
        folder: Path,
        writer: PartitionWriter,
        partitions: Sequence[SortedPartition],
        catalogue: pa.Table,
    ) -> str:
        """Write the artifact to `folder`, and return its hash."""
        core, layout = writer.core, writer.layout
        user_count, event_count = (sum(counts) for counts in zip(*core.sizes, strict=True))
        self.progress.start_phase("write", event_count)
        files = writer.create_files(partitions)
        # This is the start of the first user; partitions write the ends.
        files.write("offsets", 0, np.zeros(1, np.int64))
        self._run_jobs(
            range(len(partitions)),
            lambda number: writer.write(files, partitions, number),
            count_rows=lambda number: core.sizes[number][1],
        )
        files.close()
        writer.write_texts(partitions)
        writer.join_folded(partitions)
        notes = [note for part in partitions if (note := PartitionNote.load(part)) is not None]
        facts = reduce(add, [note.facts for note in notes])
        check_split(self.options.split, facts)
        counts = np.array([np.sum([note.repeats for note in notes], 0), facts.events])
        meta = {
            "format": self.changes.flat_format,
            "users": user_count,
            "events": event_count,
            "columns": layout.sequence_columns,
            "targets": list(layout.targets),
            "event_names": list(layout.event_names),
            "dropped": json.loads((self.working_folder / "sorted.json").read_text())["dropped"],
            "repeats": choose_policy(counts, self.options.repeats),
            "repeat_shares": compute_repeat_shares(counts),
            "partitions": [
                {"users": size[0], "events": size[1], "sha256": note.sha256}
                for size, note in zip(core.sizes, notes, strict=True)
            ],
        }
        self._write_items(folder, core, catalogue, meta)
        return _hash_json([meta, hashlib.sha256((folder / "items.parquet").read_bytes()).hexdigest()])

    def _write_items(
        self, folder: Path, core: KCoreResult, catalogue: pa.Table, meta: dict[str, Any]
    ) -> None:
        """Write the item keys, the metadata and the items table of the artifact."""
        kept_ids = catalogue["item_id"].filter(pa.array(core.items))
        np.save(folder / ITEM_KEYS, compute_keys("item", as_numbers(kept_ids)))
        write_whole(folder / FLAT_META, f"{json.dumps(meta, indent=1)}\n".encode())
        self.progress.start_phase("items", meta["events"])
        mapped = MappedSequences(folder)
        train_counts = count_train_events(
            mapped.map_array("item"), mapped.map_array("split"), int(core.items.sum()), self.progress.add_rows
        )
        pq.write_table(make_item_table(catalogue, core.items, train_counts), folder / "items.parquet")

    def _run_jobs(
        self, jobs: Iterable[Any], process: Callable[[Any], Any], count_rows: Callable[[Any], int]
    ) -> None:
        """Call `process` on each job in a thread pool, and report `count_rows(job)` as progress.

        The first error cancels the jobs that have not started.
        """
        with ThreadPoolExecutor(self.threads) as pool:

            def run_job(job: Any) -> None:
                began = time.thread_time()
                process(job)
                self.progress.add_rows(count_rows(job), time.thread_time() - began)

            futures = [pool.submit(run_job, job) for job in jobs]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _check_free_space(self) -> None:
        """Raise DataError if the disk has less free space than the preparation needs."""
        dtypes, _ = self._list_columns()
        # Counts the bytes of integer user ids. Whether there are kinds of events matters, but not their names.
        layout = PartitionLayout(
            False,
            "<i8",
            ("",) if "event" in self.log.schema.names else (),
            dtypes,
            list(self.options.targets),
        )
        # Two of runs, partitions and the artifact exist at a time, and a changed log besides.
        copies = 3 if self.changes else 2
        self.needed_bytes = int(copies * self.log.rows * layout.compute_row_bytes() * _DISK_MARGIN)
        existing_bytes = sum(path.stat().st_size for path in self.working_folder.rglob("*") if path.is_file())
        candidates = (self.working_folder, *self.working_folder.parents)
        existing_folder = next(path for path in candidates if path.exists())
        if (free := _get_free_bytes(existing_folder)) + existing_bytes < self.needed_bytes:
            raise DataError(
                f"preparing {self.log.rows:,} events takes about {_format_gb(self.needed_bytes)} of disk in "
                f"{self.working_folder.parent}, and {_format_gb(free)} are free. Free disk space, or set --run-dir to another "
                "disk."
            )


def _get_column_dtype(arrow_type: pa.DataType) -> str:
    """Return the dtype that `convert_column` produces for a carried column."""
    is_integer = pa.types.is_integer(arrow_type) or pa.types.is_boolean(arrow_type)
    is_text = pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type)
    return "<i8" if is_integer or is_text else "<f4"


def _hash_json(value: Any) -> str:
    """Return the SHA-256 of a value's JSON with sorted keys, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _get_free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _format_gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
