"""Resharding: moves rows to other shards between steps while training and reading continue.

All ranks take part, one block of slices at a time, so that a step waits for at most one block. A moved row keeps
its optimizer state, step and policy counters, so its bits equal those of a table that never moved. Readers use the
shard that had the row when their version was published until the next version is published.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from nonet.embedding import SLICES, SliceMap, SliceMove, is_within
from nonet.embedding.exchange import KeyRoute
from nonet.errors import ConfigError, NonetError

if TYPE_CHECKING:
    from nonet.embedding.tables import BaseTable
    from nonet.embedding.versions import TableHistory

_MOVE_WORDS = 4  # A move is encoded as start, stop, source and target.
_BEFORE_FIRST_STEP = -1  # An export since this step has all rows and all deletes.


def spread_over(slices: SliceMap, shards: Sequence[int]) -> SliceMap:
    """Return a map that divides all slices evenly between these of the map's shards, in this order."""
    invalid_shards = [shard for shard in shards if not 0 <= shard < slices.shards]
    if invalid_shards or not shards or len(set(shards)) < len(shards):
        raise ConfigError(
            f"rows can be spread over distinct shards 0 to {slices.shards - 1}, got {list(shards)}; start more shards first"
        )
    owners = np.asarray(shards, dtype=np.uint16)[SliceMap(len(shards)).owners]
    return SliceMap(slices.shards, owners, slices.version)


class MovableShards(Protocol):
    """Tables whose slices move between shards, such as `ShardedTables`."""

    slices: SliceMap

    def move(self, moves: Sequence[SliceMove]) -> None:
        """Move slices between shards."""
        ...


def reshard(world: MovableShards, shards: Sequence[int], max_slices: int = 2048) -> Iterator[int]:
    """Move slices until the given shards have all rows evenly; every trainer calls it and iterates over it.

    Each iteration is a round of moves between two steps; the caller can train and read between the rounds.

    Args:
        world: The sparse world.
        shards: The shards that have rows afterwards.
        max_slices: The maximum number of slices that move in a round.

    Yields:
        The number of slices that are left to move.
    """
    target = spread_over(world.slices, shards)
    while moves := world.slices.plan_moves(target, max_slices):
        round_moves, slice_count = [], 0
        for move in moves:
            if slice_count + move.stop - move.start > max_slices and round_moves:
                break
            round_moves.append(move)
            slice_count += move.stop - move.start
        world.move(round_moves)
        yield int((world.slices.owners != target.owners).sum())


def make_move_route(moves: Sequence[SliceMove], shards: range, world: int) -> KeyRoute:
    """Encode moves as a route that sends four words per move as keys to every shard: start, stop, source and target."""
    words = np.array(
        [(move.start, move.stop, move.source, move.target) for move in moves], dtype=np.int64
    ).reshape(-1)
    counts = [len(words) if rank in shards else 0 for rank in range(world)]
    return KeyRoute(words, np.tile(words, len(shards)), counts, np.empty(0, dtype=np.int64))


def parse_moves(keys: np.ndarray, trainers: int) -> list[SliceMove]:
    """Decode the moves from the keys that a shard received; every one of `trainers` trainers has sent the same moves.

    Raises:
        NonetError: If the trainers sent different moves.
    """
    words_by_trainer = keys.reshape(trainers, -1)
    if (words_by_trainer != words_by_trainer[0]).any():
        raise NonetError("trainers of the sparse world ask for different moves; all must reshard alike")
    return [SliceMove(*words) for words in words_by_trainer[0].reshape(-1, _MOVE_WORDS).tolist()]


def check_moves(moves: Sequence[SliceMove], slices: SliceMap) -> None:
    """Check that moves fit a slice map.

    Raises:
        ConfigError: If a move does not.
    """
    for move in moves:
        inside = 0 <= move.start < move.stop <= SLICES and 0 <= move.target < slices.shards
        if not inside or (slices.owners[move.start : move.stop] != move.source).any():
            raise ConfigError(f"{move} does not fit slice map {slices.version} of {slices.shards} shards")


def pack_moved_rows(table: BaseTable, moves: Sequence[SliceMove]) -> np.ndarray:
    """Serialise the rows of these moves with the table's step.

    Returns:
        Bytes, uint8: the table's step (int64), then each Arrow table as its size (int64) and an Arrow IPC stream.
    """
    tables = [
        part
        for move in moves
        for part in table.export(range(move.start, move.stop), _BEFORE_FIRST_STEP)
        if part.num_rows
    ]
    step = np.array([table.step], dtype=np.int64).view(np.uint8)
    return np.concatenate([step, *(_serialise_table(part) for part in tables)])


def remove_moved_rows(history: TableHistory, moves: Sequence[SliceMove]) -> int:
    """Remove the rows of these moves from the table, with their waiting and deleted keys; open snapshots keep the rows.

    Returns:
        The number of removed rows.
    """
    table, removed_count = history.table, 0
    slices = [range(move.start, move.stop) for move in moves]
    with history.lock:
        for move in moves:
            keys = np.concatenate(
                [part.key for part in table._iterate_rows(range(move.start, move.stop), None)]
                + [np.empty(0, dtype=np.int64)]
            )
            for snapshot in history.snapshots if len(keys) else ():
                snapshot.keep_rows(keys)
            if len(keys):
                table._delete(keys)
            removed_count += len(keys)
        waiting_keys, _ = table._list_waiting()
        table._delete(waiting_keys[is_within(waiting_keys, slices)])
        table.deleted.drop_slices(slices)
    return removed_count


def load_moved_rows(history: TableHistory, data: np.ndarray) -> None:
    """Load rows that `pack_moved_rows` serialised."""
    table = history.table
    with history.lock:
        # Loading a row that was created and not yet trained would advance the table's step.
        step = max(table.step, int(data[:8].copy().view(np.int64)[0]))
        for part in _read_tables(data[8:]):
            table.load([part])
            for snapshot in history.snapshots:
                snapshot.add_moved_keys(part["key"].to_numpy())
        table.step = step


def _serialise_table(table: pa.Table) -> np.ndarray:
    """Return the size of an Arrow IPC stream (int64) and the stream, as uint8."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    stream = np.frombuffer(sink.getvalue(), dtype=np.uint8)
    return np.concatenate([np.array([len(stream)], dtype=np.int64).view(np.uint8), stream])


def _read_tables(data: np.ndarray) -> Iterator[pa.Table]:
    """Yield the tables that `_serialise_table` serialised."""
    size_start = 0
    while size_start < len(data):
        start = size_start + 8
        stop = start + int(data[size_start:start].copy().view(np.int64)[0])
        yield pa.ipc.open_stream(pa.py_buffer(data[start:stop].tobytes())).read_all()
        size_start = stop
