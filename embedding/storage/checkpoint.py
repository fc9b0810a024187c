"""Sparse rows in a commit: written in the background from one version, read back by any number of shards.

    <folder>/sparse/<table>/<shard>-<n>.seg      n = 0 full, 1, 2, ... what changed since the one before

A save opens a snapshot of every table between two steps and returns; a thread writes range after range of slices while
training goes on, so a step waits at most for one range. An incremental save links the files of the commit it
builds on, so every commit's folder is whole by itself. 2 M rows of width 64: `nonet.bench.embedding.checkpoint`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from nonet.deadlines import way_out
from nonet.embedding import SLICES, slice_of
from nonet.embedding.reading import wire_tables
from nonet.embedding.storage.segments import Footer, SegmentWriter, check_spec, read_footer, read_segments
from nonet.embedding.tables import ALL_SLICES, BaseTable, RowColumns, TableSpec, joined, put
from nonet.embedding.training import SparseWorld
from nonet.embedding.versions import Room, Snapshot, open_all
from nonet.errors import CheckpointError, ConfigError, DeadlineExceeded

_SEGMENT_BYTES = 2 << 20
_LEAST_SLICES = 64
_NAME = re.compile(r"(\d+)-(\d+)\.seg")


class Saving:
    """A save that is being written; `wait` until it is durable."""

    def __init__(self, world: SparseWorld, folder: Path, base: Path | None):
        self.folder, self._world = folder, world
        # Before the snapshots ask for memory: a thread that starts while they do waits for it.
        writer = _writer(os.getpid())
        self._plans = [(name, *_plan(world, name, folder, base)) for name in world.tables]
        self._snapshots = open_all(world.histories)
        self._ranges = world.ranges
        self._written = writer.submit(self._write_all)

    @property
    def done(self) -> bool:
        """Whether the writing has ended, well or not."""
        return self._written.done()

    def wait(self, timeout_s: float = 3600.0) -> dict[str, int]:
        """Bytes of each file by its path under the folder. Raises what stopped the writing, or DeadlineExceeded."""
        wait([self._written], timeout_s)
        if not self.done:
            raise DeadlineExceeded(
                f"sparse rows are still being written to {self.folder} after {timeout_s:g} s{way_out(timeout_s)}"
            )
        error = self._written.exception()
        if error is not None:
            raise CheckpointError(
                f"sparse rows could not be written to {self.folder}: {type(error).__name__}: {error}"
            ) from error
        return self._written.result()

    def _write_all(self) -> dict[str, int]:
        try:
            return {
                str(path.relative_to(self.folder)): self._write(name, path, since)
                for name, path, since in self._plans
            }
        finally:
            for snapshot in self._snapshots.values():
                snapshot.close()

    def _write(self, name: str, path: Path, since: int | None) -> int:
        table, snapshot = self._world.tables[name], self._snapshots[name]
        many = _segment_slices(table)
        writer = SegmentWriter(path, name, table.spec, snapshot.step, self._ranges, since)
        # With an eighth to spare, for it must not grow while a step waits.
        room = Room(table.spec, len(table) * many // SLICES * 9 // 8)
        try:
            for block in self._ranges:
                for start in range(block.start, block.stop, many):
                    slices = range(start, min(start + many, block.stop))
                    writer.add(slices, _changed(snapshot, slices, since, room))
            return writer.close()
        except BaseException:
            writer.abandon()
            raise


@cache
def _writer(process: int) -> ThreadPoolExecutor:
    """The thread that writes the saves of this process, one after the other; a forked child has one of its own.

    It stays, for a step that opens a save would wait until a new one runs.
    """
    executor = ThreadPoolExecutor(1, f"sparse-save-{process}", _step_aside)
    executor.submit(int).result()  # it runs now
    return executor


def _step_aside() -> None:
    """A step that wants the core goes first, but not for ever: it may wait for what this thread holds."""
    if sys.platform == "linux":  # where the priority is this thread's alone
        os.nice(5)


def save(world: SparseWorld, folder: Path, *, base: Path | None = None) -> Saving:
    """Start to write this rank's rows under `folder`; call it between steps. `base`: a commit to write the changes since."""
    return Saving(world, folder, base)


def load(world: SparseWorld, folder: Path) -> None:
    """Read the rows that this rank owns out of all shards' files. Raises CheckpointError; the tables are then empty.

    Raises ConfigError, and changes nothing, while a save or a published version of a table is open: it is made of these rows.
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


def load_table(table: BaseTable, folder: Path, ranges: list[range]) -> None:
    """Read the rows of these slices into an empty table."""
    files = _chain(table.name, table.spec, folder, ranges)
    newest = max((footer.step for _, footer in files), default=0)
    for path, footer in files:
        for part in read_segments(path, ranges, footer):
            # Every file has all keys that waited when it was written.
            if footer.step < newest and part.waiting is not None:
                part = part.where(~part.waiting)
            for block in _touched(part.key, ranges):
                put(table, part, block)
    table.step = newest  # a row that was made and not trained yet is of the step after


def update_of(folder: Path, specs: Mapping[str, TableSpec], version: int = 0) -> dict[str, Any]:
    """A commit as a full update for a ReplicaReader."""
    return {
        "version": version,
        "base": None,
        "tables": {
            name: [table for part in _parts(folder, name, spec) for table in wire_tables(part)]
            for name, spec in specs.items()
        },
    }


def _segment_slices(table: BaseTable) -> int:
    """Slices of a segment, a power of two: about 2 MB, which holds a training step up for about 5 ms."""
    whole = max(1, len(table)) * table.spec.row_bytes
    most = max(_LEAST_SLICES, min(SLICES, SLICES * _SEGMENT_BYTES // whole))
    return 1 << (most.bit_length() - 1)


def _changed(snapshot: Snapshot, slices: range, since: int | None, room: Room) -> RowColumns:
    """What goes into a segment: rows trained after `since`; of a table that evicts all, for looks and scores have no step."""
    part = snapshot.part(slices, None if snapshot.spec.evicts else since, room)
    gone = [] if since is None else snapshot.gone(slices, since)
    return joined([*gone, part], snapshot.spec) if gone else part


def _plan(world: SparseWorld, name: str, folder: Path, base: Path | None) -> tuple[Path, int | None]:
    """The file to write and the step since which, having linked the files it builds on."""
    own = folder / "sparse" / name
    before = _files(base, name) if base else []
    if not before:
        return own / f"{world.shard}-0.seg", None
    own.mkdir(parents=True, exist_ok=True)
    shards = world.slices.shards
    for path, shard, _ in before:
        # Files of shards that there no longer are go with the last one.
        if min(shard, shards - 1) == world.shard:
            _link(path, own / path.name)
    newest = max(number for _, _, number in before)
    steps = {read_footer(path).step for path, _, number in before if number == newest}
    if len(steps) != 1:
        raise CheckpointError(
            f"{base}: the shards of table {name!r} were saved at different steps {sorted(steps)}"
        )
    return own / f"{world.shard}-{newest + 1}.seg", steps.pop()


def _link(source: Path, target: Path) -> None:
    if target.exists():
        return
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def _files(folder: Path, name: str) -> list[tuple[Path, int, int]]:
    """(path, shard, number) of a table's files, full ones first."""
    root = folder / "sparse" / name
    found = [(path, _NAME.fullmatch(path.name)) for path in sorted(root.glob("*.seg"))]
    known = [(path, int(match[1]), int(match[2])) for path, match in found if match]
    return sorted(known, key=lambda entry: (entry[2], entry[1]))


def _chain(table: str, spec: TableSpec, folder: Path, ranges: Iterable[range]) -> list[tuple[Path, Footer]]:
    """A table's files in the order to read them, checked: of this table, nothing missing, each on top of the one before."""
    files = [(path, number, read_footer(path)) for path, _, number in _files(folder, table)]
    covered: dict[int, np.ndarray] = {0: np.zeros(SLICES, dtype=bool)}
    steps: dict[int, int] = {}
    for path, number, footer in files:
        check_spec(path, footer, spec)
        expected = steps.get(number - 1)
        if footer.since != expected or steps.setdefault(number, footer.step) != footer.step:
            raise CheckpointError(
                f"{path} holds changes from step {footer.since} to {footer.step}, the files before it end at step {expected}; "
                "a file of this commit is missing"
            )
        for start, stop in footer.slices:
            covered.setdefault(number, np.zeros(SLICES, dtype=bool))[start:stop] = True
    for number, there in covered.items():
        missing = [block for block in ranges if not there[block.start : block.stop].all()]
        if missing:
            what = f"increment {number}" if number else "file"
            raise CheckpointError(
                f"{folder}: no {what} holds slices {missing[0].start} to {missing[0].stop - 1} of table {table!r} completely; "
                "a shard's file is missing"
            )
    return [(path, footer) for path, _, footer in files]


def _parts(folder: Path, name: str, spec: TableSpec) -> Iterator[RowColumns]:
    for path, footer in _chain(name, spec, folder, [ALL_SLICES]):
        yield from read_segments(path, [ALL_SLICES], footer)


def _touched(keys: np.ndarray, ranges: list[range]) -> list[range]:
    """The ranges that one of these keys lies in."""
    place = slice_of(keys)
    return [block for block in ranges if ((place >= block.start) & (place < block.stop)).any()]
