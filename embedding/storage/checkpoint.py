"""Writes sparse rows to a checkpoint in the background, and reads them with any number of shards.

    <folder>/sparse/<table>/<shard>-0.seg

A save opens a snapshot of every table between two steps and returns. A thread then writes one range of slices after
the other while training continues, so that a step waits for at most one range. `nonet.bench.embedding.checkpoint`
measures the delay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nonet.background import BackgroundWrite, Written, get_writer_thread
from nonet.embedding import SLICES, compute_slices
from nonet.embedding.reading import to_wire_tables
from nonet.embedding.storage.segments import (
    SegmentFooter,
    SegmentWriter,
    check_spec,
    read_footer,
    read_segments,
)
from nonet.embedding.tables import ALL_SLICES, BaseTable, RowColumns, TableSpec, put_rows
from nonet.embedding.training import ShardedTables
from nonet.embedding.versions import ReadBuffers, open_all
from nonet.errors import CheckpointError, ConfigError

_SEGMENT_BYTES = 2 << 20
_MIN_SLICES = 64  # The fewest slices of a segment, so that large tables do not get more than 1,024 segments.
_FILE_NAME = re.compile(r"(\d+)-(\d+)\.seg")


class SparseSave(BackgroundWrite):
    """A save in progress; `wait` returns when the files are durable."""

    def __init__(self, world: ShardedTables, folder: Path):
        get_writer_thread()  # Before the snapshots allocate memory, which would delay the start of the thread.
        self._world, self._ranges = world, world.ranges
        self._snapshots = open_all(world.histories)
        super().__init__(folder, "sparse rows", self._write_all)

    def _write_all(self) -> Written:
        """Write one file per table and close the snapshots; return (SHA-256, size in bytes) by path relative to `folder`."""
        try:
            paths = {
                name: self.folder / "sparse" / name / f"{self._world.shard}-0.seg" for name in self._snapshots
            }
            return {
                str(path.relative_to(self.folder)): self._write(name, path) for name, path in paths.items()
            }
        finally:
            for snapshot in self._snapshots.values():
                snapshot.close()

    def _write(self, name: str, path: Path) -> tuple[str, int]:
        """Write the rows of one table to a segment file; return its SHA-256 and its size in bytes."""
        table, snapshot = self._world.tables[name], self._snapshots[name]
        slices_per_segment = _count_segment_slices(table)
        writer = SegmentWriter(path, name, table.spec, snapshot.step, self._ranges)
        # The buffers have a reserve of an eighth, because they must not be reallocated while a step waits.
        buffers = ReadBuffers(table.spec, len(table) * slices_per_segment // SLICES * 9 // 8)
        try:
            for block in self._ranges:
                for start in range(block.start, block.stop, slices_per_segment):
                    slices = range(start, min(start + slices_per_segment, block.stop))
                    writer.add(slices, snapshot.read_slices(slices, since=None, buffers=buffers))
            return writer.close()
        except BaseException:
            writer.abandon()
            raise


def save(world: ShardedTables, folder: Path) -> SparseSave:
    """Start to write this rank's rows below `folder` in the background; must be called between steps.

    Returns:
        The save, whose `wait` returns when the files are durable.
    """
    return SparseSave(world, folder)


def load(world: ShardedTables, folder: Path) -> None:
    """Read the rows that this rank owns from the files of all shards.

    Raises:
        CheckpointError: If a file is missing or corrupted; the tables are empty afterwards.
        ConfigError: If a save or a published version of a table is open; the tables do not change.
    """
    for name, history in world.histories.items():
        if history.snapshots:
            raise ConfigError(
                f"table {name!r} cannot be loaded while a save or a published version of it is open; wait for the save, "
                "or close the publisher"
            )
    try:
        for table in world.tables.values():
            table.clear()
            load_table(table, folder, world.ranges)
    except BaseException:
        for table in world.tables.values():
            table.clear()
        raise


def load_table(table: BaseTable, folder: Path, slice_ranges: list[range]) -> None:
    """Read the rows of these slices into an empty table."""
    files = _check_files(table.name, table.spec, folder, slice_ranges)
    for path, footer in files:
        for part in read_segments(path, slice_ranges, footer):
            for block in _select_ranges(part.key, slice_ranges):
                put_rows(table, part, block)
    # A row that was created but not trained is stamped with the next step, so the step is taken from the footers.
    table.step = max((footer.step for _, footer in files), default=0)


def load_update(folder: Path, specs: Mapping[str, TableSpec], version: int = 0) -> dict[str, Any]:
    """Read a checkpoint in the format of a full update for a `ReplicaReader`.

    Args:
        folder: Folder of the checkpoint.
        specs: Specs of the tables to read.
        version: Version number of the update.
    """
    return {
        "version": version,
        "base": None,
        "tables": {
            name: [table for part in _read_parts(folder, name, spec) for table in to_wire_tables(part)]
            for name, spec in specs.items()
        },
    }


def _count_segment_slices(table: BaseTable) -> int:
    """Compute the number of slices per segment: a power of two, for segments of about 2 MB, which delay a step by 5 ms."""
    table_bytes = max(1, len(table)) * table.spec.row_bytes
    max_slices = max(_MIN_SLICES, min(SLICES, SLICES * _SEGMENT_BYTES // table_bytes))
    return 1 << (max_slices.bit_length() - 1)


def _check_files(
    table: str, spec: TableSpec, folder: Path, ranges: Iterable[range]
) -> list[tuple[Path, SegmentFooter]]:
    """Check that a table's files match its spec, are from one step and cover the slices; return their paths and footers."""
    table_folder = folder / "sparse" / table
    files = [
        (path, read_footer(path))
        for path in sorted(table_folder.glob("*.seg"))
        if _FILE_NAME.fullmatch(path.name)
    ]
    covered, step = np.zeros(SLICES, dtype=bool), files[0][1].step if files else 0
    for path, footer in files:
        check_spec(path, footer, spec)
        if footer.since is not None or footer.step != step:
            raise CheckpointError(
                f"{path} holds changes from step {footer.since} to {footer.step}, the others all rows of step {step}; "
                "it is not of this checkpoint"
            )
        for start, stop in footer.slices:
            covered[start:stop] = True
    uncovered = [block for block in ranges if not covered[block.start : block.stop].all()]
    if uncovered:
        raise CheckpointError(
            f"{folder}: no file holds slices {uncovered[0].start} to {uncovered[0].stop - 1} of table {table!r} completely; "
            "a shard's file is missing"
        )
    return files


def _read_parts(folder: Path, name: str, spec: TableSpec) -> Iterator[RowColumns]:
    """Yield all rows of one table of a checkpoint, one segment at a time."""
    for path, footer in _check_files(name, spec, folder, [ALL_SLICES]):
        yield from read_segments(path, [ALL_SLICES], footer)


def _select_ranges(keys: np.ndarray, ranges: list[range]) -> list[range]:
    """Select the ranges that contain one of these keys."""
    slices = compute_slices(keys)
    return [block for block in ranges if ((slices >= block.start) & (slices < block.stop)).any()]
