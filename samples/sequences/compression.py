"""Fixed-period compression: repeated events of a user with one item (or category) within a period become one event.

The first event is kept, the head of a group; the later ones are its repeats. It stores the number of rows that it stands for
(`count`), the seconds from the first to the last of them (`span`) and their kinds (`kinds`). All three depend on the time of
reading: a sample counts only the repeats that are older than itself, also if they came after other events of the user.
`FoldedRepeats` computes the three values for any time. The columns of the compressed log hold the values as of the user's next
kept event, which is when they are first read. `expand_log` restores the checked log row by row. Periods are those of the clock:
with 1d, days in UTC. Count and span are int32, eight bytes per event. Samples are strict: they see no event of their own second.
"""

# Shapes: I items, R rows of the log, H kept events (heads), F rows of the log in the order of their heads, n requested events.
#
# `compress_log` has three index spaces. A row is a position in the log. A rank is the position of a row among those of all users
# by user and time. A position is that of an event among the kept ones, which are in the order of the log. Names say which they
# hold and of what: `row_of_rank_R` has a row for each rank, and the suffix is the length.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute
from pydantic import Field

from nonet.errors import DataError
from nonet.options import StrictModel
from nonet.ranges import expand_ranges
from nonet.samples.sequences.flat import GrowingFile
from nonet.samples.sequences.labels import REPEAT_EVENTS, merge_labels
from nonet.samples.tables import as_numbers
from nonet.units import Seconds

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

COUNT, SPAN, KINDS = "count", "span", "kinds"  # added columns of the kept events
REPEAT_TIMES, REPEAT_KINDS = "repeat:times", "repeat:kinds"  # added columns: lists with one value per repeat
ROW = "row:"  # column with the row of a repeat in the log
_FILES = {name: f"repeats-{name}.npy" for name in ("offsets", "time", "kinds")}


class Compress(StrictModel):
    """Repeated events of a user with one item within a period as one event (`nonet.samples.sequences.compress_log`)."""

    compress: Annotated[Seconds, Field(ge=1, description="the period, of the clock: 1d is a day of UTC")]
    by: Annotated[
        Literal["item", "category"],
        Field(description="what is put together: events with one item, or with items of the same categories"),
    ] = "item"


@dataclass(frozen=True, eq=False)
class FoldedRepeats:
    """The rows of the log behind each event of a compressed log.

    Attributes:
        offsets: Offsets [H + 1] int64; event h stands for the rows offsets[h]:offsets[h + 1], of which it is the first.
        time: Unix seconds [F] int64, ascending among the rows of an event.
        kinds: Code [F] int64 of the set of kinds of an event's rows up to and including this row; None if the log has no kinds.
    """

    offsets: np.ndarray
    time: np.ndarray
    kinds: np.ndarray | None

    @classmethod
    def from_events(cls, events: pa.Table) -> FoldedRepeats | None:
        """Return the repeats of a compressed log [H]; None for a log that is not compressed."""
        if REPEAT_TIMES not in events.column_names:
            return None
        times = events[REPEAT_TIMES].combine_chunks()
        repeat_counts = np.diff(times.offsets.to_numpy().astype(np.int64))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(repeat_counts + 1)])
        is_repeat = np.ones(offsets[-1], bool)
        is_repeat[offsets[:-1]] = False
        time = np.empty(offsets[-1], np.int64)
        time[~is_repeat], time[is_repeat] = events["timestamp"].to_numpy(), times.flatten().to_numpy()
        if REPEAT_KINDS not in events.column_names:
            return cls(offsets, time, None)
        kinds = np.empty(offsets[-1], np.int64)
        kinds[~is_repeat] = as_numbers(events["event"].cast(pa.string()))
        kinds[is_repeat] = as_numbers(events[REPEAT_KINDS].combine_chunks().flatten())
        return cls(offsets, time, kinds)

    @classmethod
    def load(cls, folder: Path) -> FoldedRepeats | None:
        """Memory-map the files that `save` wrote; return None if there are none."""
        if not (folder / _FILES["offsets"]).is_file():
            return None
        paths = {name: folder / file for name, file in _FILES.items()}
        arrays = {
            name: np.load(path, mmap_mode="r") if path.is_file() else None for name, path in paths.items()
        }
        return cls(**arrays)  # pyright: ignore[reportArgumentType]  offsets and time are always written

    def save(self, folder: Path) -> None:
        """Write one .npy file per field."""
        for name, file in _FILES.items():
            if (values := getattr(self, name)) is not None:
                np.save(folder / file, values)

    @classmethod
    def join(cls, folders: Sequence[Path], folder: Path) -> None:
        """Write the concatenation of the repeats that were saved in `folders` to `folder`, with one part in memory at a time."""
        parts = [part for part in map(cls.load, folders) if part is not None]
        has_kinds = bool(parts) and parts[0].kinds is not None  # the parts of one log have the same columns
        with GrowingFile(folder / _FILES["offsets"], np.int64) as out:
            out.append_values(np.zeros(1, np.int64))
            start = 0
            for part in parts:
                out.append_values(part.offsets[1:] + start)
                start += int(part.offsets[-1])
        for name in ("time", "kinds") if has_kinds else ("time",):
            with GrowingFile(folder / _FILES[name], np.int64) as out:
                for part in parts:
                    out.append_values(getattr(part, name))

    def take(self, index: np.ndarray) -> FoldedRepeats:
        """Return the rows of the events with these indices [n], in this order."""
        rows, offsets = expand_ranges(self.offsets[index], self.offsets[index + 1])
        return FoldedRepeats(offsets, self.time[rows], None if self.kinds is None else self.kinds[rows])

    def slice_events(self, start: int, stop: int) -> FoldedRepeats:
        """Return the rows of events [start, stop) without copying them."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        kinds = None if self.kinds is None else self.kinds[first:last]
        return replace(
            self, offsets=self.offsets[start : stop + 1] - first, time=self.time[first:last], kinds=kinds
        )

    def compute_columns(self, index: np.ndarray, as_of: np.ndarray) -> dict[str, np.ndarray]:
        """Return count, span and kinds [n] of events, computed from those of their rows that are older than a time.

        The first row of an event, the event itself, always counts.

        Args:
            index: Indices of the events [n].
            as_of: Unix seconds [n].
        """
        taken = self.take(index)
        first = taken.offsets[:-1]
        older = taken.time < np.repeat(as_of, np.diff(taken.offsets))
        older[first] = True
        count = np.add.reduceat(older, first, dtype=np.int64) if len(index) else older.astype(int)
        last = first + count - 1
        columns = {COUNT: count, SPAN: taken.time[last] - taken.time[first]}
        return columns if taken.kinds is None else columns | {KINDS: taken.kinds[last]}


@dataclass(frozen=True)
class CompressedLog:
    """A compressed log, and the rows that the compression removed.

    Attributes:
        events: The kept rows [H] with the log's columns, count, span and kinds, and lists with the time of each repeat and the
            kinds up to it.
        repeats: The other rows [R - H] with the log's columns and their row in the log.
    """

    events: pa.Table
    repeats: pa.Table

    def measure_savings(self) -> dict[str, float]:
        """Return the rows, events and repeats of the log, and its Arrow bytes before and after compression."""
        added = list_added_columns(self.events)
        kept = self.events.drop_columns(added)
        added = [name for name in added if name != REPEAT_EVENTS]  # which sequences do not keep
        return {
            "rows": len(self.events) + len(self.repeats),
            "events": len(self.events),
            "repeats": len(self.repeats),
            "bytes_before": kept.nbytes + self.repeats.drop_columns([ROW]).nbytes,
            "bytes_after": kept.nbytes + self.events.select(added).nbytes,
        }


def list_added_columns(events: pa.Table) -> list[str]:
    """Return the names of the columns that compression added to a log."""
    names = (COUNT, SPAN, KINDS, REPEAT_TIMES, REPEAT_KINDS, REPEAT_EVENTS)
    return [name for name in names if name in events.column_names]


def drop_repeat_lists(events: pa.Table) -> pa.Table:
    """Return a compressed log without the lists of its repeats that `FoldedRepeats` holds."""
    return events.drop_columns([name for name in (REPEAT_TIMES, REPEAT_KINDS) if name in events.column_names])


def compress_log(
    log: pa.Table,
    period_s: float,
    by: str,
    items: pa.Table | None = None,
    *,
    has_repeat_events: bool = True,
    part_starts: Sequence[int] = (),
) -> CompressedLog:
    """Compress a checked log of interactions [R].

    A condition of a target over `event` holds for a kept event if it holds for one of the kinds of its rows (`match_target`).

    Args:
        log: The interactions.
        period_s: Length of a period in seconds.
        by: What repeats have in common: "item" for their item, or "category" for the categories of their items.
        items: The items; needed for "category".
        has_repeat_events: Whether the events get the column `REPEAT_EVENTS`, if the log has kinds.
        part_starts: Unix seconds at which parts of the split begin, ascending (`get_part_starts`). In this column, a row counts
            only for an event of its own part.

    Raises:
        DataError: If the log already has one of the added columns, or there are no categories.
    """
    for name in (COUNT, SPAN, KINDS, ROW):
        if name in log.column_names:
            raise DataError(
                f"data.events: the interactions have a column {name!r} already; rename it with data.columns"
            )
    period = int(period_s)
    if period < 1:
        raise DataError(f"data.events.compress: {period_s:g} s; a period is at least a second")
    time = log["timestamp"].to_numpy()
    user = _encode_values(log["user_id"])
    group = _encode_values(log["item_id"]) if by == "item" else _encode_groups(log, items)
    row_of_rank_R = np.lexsort((time, user))
    rank_of_row_R = _invert_index(row_of_rank_R, len(log))
    user_of_rank_R, time_of_rank_R = user[row_of_rank_R], time[row_of_rank_R]
    period_of_rank_R = np.floor_divide(time_of_rank_R, period)
    head_rank_of_rank_R = _find_heads(user_of_rank_R, period_of_rank_R, group[row_of_rank_R])
    is_head_of_rank_R = head_rank_of_rank_R == np.arange(len(log))
    next_time_of_rank_R = _find_next_times(user_of_rank_R, time_of_rank_R, is_head_of_rank_R)
    kept_rows = np.sort(row_of_rank_R[is_head_of_rank_R])
    kept_ranks = rank_of_row_R[kept_rows]
    position_of_rank_R = _invert_index(kept_ranks, len(log))
    repeat_ranks = _sort_repeats(is_head_of_rank_R, position_of_rank_R[head_rank_of_rank_R], time_of_rank_R)
    repeat_counts = np.bincount(head_rank_of_rank_R[repeat_ranks], minlength=len(log))[kept_ranks]
    offsets = pa.array(np.concatenate([np.zeros(1, np.int64), np.cumsum(repeat_counts)]).astype(np.int32))
    repeat_times = pa.array(time_of_rank_R[repeat_ranks])
    head_row_of_row_R = row_of_rank_R[head_rank_of_rank_R][rank_of_row_R]
    events = merge_labels(log, head_row_of_row_R).take(pa.array(kept_rows))
    events = events.append_column(REPEAT_TIMES, pa.ListArray.from_arrays(offsets, repeat_times))
    if "event" in log.column_names:
        kinds = _collect_kinds(log["event"], row_of_rank_R, head_rank_of_rank_R, repeat_ranks)
        events = events.append_column(REPEAT_KINDS, pa.ListArray.from_arrays(offsets, kinds))
    if "event" in log.column_names and has_repeat_events:
        part_of_rank_R = np.searchsorted(part_starts, time_of_rank_R, side="right")
        is_known = part_of_rank_R[repeat_ranks] == part_of_rank_R[head_rank_of_rank_R[repeat_ranks]]
        known_before = np.concatenate([[0], np.cumsum(is_known)]).astype(np.int32)
        known_rows = pa.array(row_of_rank_R[repeat_ranks[is_known]])
        own_kinds = log["event"].combine_chunks().take(known_rows)
        known_offsets = pa.array(known_before[offsets.to_numpy()])
        events = events.append_column(REPEAT_EVENTS, pa.ListArray.from_arrays(known_offsets, own_kinds))
    events = _add_columns(events, next_time_of_rank_R[kept_ranks])
    repeat_rows = np.sort(row_of_rank_R[~is_head_of_rank_R])
    return CompressedLog(events, log.take(pa.array(repeat_rows)).append_column(ROW, pa.array(repeat_rows)))


def expand_log(compressed: CompressedLog) -> pa.Table:
    """Restore the original log row by row; labels of kept events stay those of their groups (`merge_labels`)."""
    events = compressed.events.drop_columns(list_added_columns(compressed.events))
    repeat_rows = compressed.repeats[ROW].to_numpy()
    is_kept = np.ones(len(events) + len(repeat_rows), bool)
    is_kept[repeat_rows] = False
    order = np.empty(len(is_kept), np.int64)  # the row of each log row in `events` followed by the repeats
    order[is_kept] = np.arange(len(events))
    order[repeat_rows] = len(events) + np.arange(len(repeat_rows))
    return (
        pa.concat_tables([events, compressed.repeats.drop_columns([ROW])])
        .take(pa.array(order))
        .combine_chunks()
    )


def _encode_values(column: pa.ChunkedArray) -> np.ndarray:
    """Return an integer code for each value [R] int64, in the order of first occurrence."""
    return column.combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)


def encode_categories(items: pa.Table | None) -> np.ndarray:
    """Return a code for the categories of each item [I] int64; an item without categories has a code of its own.

    Codes below I are items without categories; those from I on are sets of categories.

    Raises:
        DataError: There are no items, or no categories.
    """
    if items is None or "categories" not in items.column_names:
        raise DataError("data.events: by: category wants data.items with a column categories; say by: item")
    text = pa.array(["|".join(row or ()) for row in items["categories"].to_pylist()])
    code = _encode_values(pa.chunked_array([text])) + len(items)
    return np.where(pc.equal(text, "").to_numpy(zero_copy_only=False), np.arange(len(items)), code)


def _encode_groups(log: pa.Table, items: pa.Table | None) -> np.ndarray:
    """Return the code of `encode_categories` for each row's item [R] int64; items that it lacks have codes from 2 I on."""
    code = encode_categories(items)
    assert items is not None
    index = pc.index_in(
        log["item_id"].cast(items["item_id"].type), value_set=items["item_id"].combine_chunks()
    )
    row = index.fill_null(-1).to_numpy()
    return np.where(row >= 0, code[np.maximum(row, 0)], 2 * len(items) + _encode_values(log["item_id"]))


def _find_heads(user: np.ndarray, period: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return for each rank the first rank with the same user, period and group, [R] int64; so are the arguments by rank."""
    order = np.lexsort((np.arange(len(user)), group, period, user))
    continues = np.ones(
        len(user), bool
    )  # whether a row, in this order, has the same three values as the one before
    for column in (user, period, group):
        ordered = column[order]
        continues[1:] &= ordered[1:] == ordered[:-1]
    continues[:1] = False
    first = np.maximum.accumulate(np.where(continues, 0, np.arange(len(user))))
    head = np.empty(len(user), np.int64)
    head[order] = order[first]
    return head


def _find_next_times(user: np.ndarray, time: np.ndarray, is_head: np.ndarray) -> np.ndarray:
    """Return for the rank of each kept event the time of its user's next kept event, [R] int64; the maximum if there is none.

    The arguments are by rank. Ranks that are no heads also have the int64 maximum.
    """
    next_times = np.full(len(user), np.iinfo(np.int64).max)
    heads = np.flatnonzero(is_head)
    same_user = user[heads[1:]] == user[heads[:-1]]
    next_times[heads[:-1][same_user]] = time[heads[1:][same_user]]
    return next_times


def _sort_repeats(
    is_head_of_rank_R: np.ndarray, head_position_of_rank_R: np.ndarray, time_of_rank_R: np.ndarray
) -> np.ndarray:
    """Return the ranks [R - H] of the repeats by the position of their head among the kept events, then by time."""
    ranks = np.flatnonzero(~is_head_of_rank_R)
    return ranks[np.lexsort((time_of_rank_R[ranks], head_position_of_rank_R[ranks]))]


def _invert_index(index: np.ndarray, size: int) -> np.ndarray:
    """Return the position in `index` of each number below `size`, [size] int64; -1 for numbers that are not in it."""
    positions = np.full(size, -1, np.int64)
    positions[index] = np.arange(len(index))
    return positions


def _collect_kinds(
    event: pa.ChunkedArray,
    row_of_rank_R: np.ndarray,
    head_rank_of_rank_R: np.ndarray,
    repeat_ranks: np.ndarray,
) -> pa.Array:
    """Return for each repeat the kinds of its event's rows up to and including it, such as "buy|click", sorted alphabetically.

    Args:
        event: Kind of each row of the log [R].
        row_of_rank_R: The row of the log of each rank.
        head_rank_of_rank_R: The rank of the head of each rank.
        repeat_ranks: The ranks of the repeats [R - H], those of one head next to each other and in order of time.
    """
    kind_of_rank: list[str] = event.cast(pa.string()).take(pa.array(row_of_rank_R)).to_pylist()
    texts, current_head_rank, kinds_so_far = [], -1, set[str]()
    for rank in repeat_ranks.tolist():
        if head_rank_of_rank_R[rank] != current_head_rank:
            current_head_rank = int(head_rank_of_rank_R[rank])
            kinds_so_far = {kind_of_rank[current_head_rank]}
        kinds_so_far = kinds_so_far | {kind_of_rank[rank]}
        texts.append("|".join(sorted(kinds_so_far)))
    return pa.array(texts, pa.string())


def _add_columns(events: pa.Table, as_of: np.ndarray) -> pa.Table:
    """Return the events with the columns count, span and kinds, computed as of the unix seconds `as_of` [H]."""
    folded = FoldedRepeats.from_events(events)
    assert folded is not None
    columns = folded.compute_columns(np.arange(len(events)), as_of)
    for name in (COUNT, SPAN):
        events = events.append_column(name, pa.array(columns[name].astype(np.int32)))
    if REPEAT_KINDS not in events.column_names:
        return events
    repeat_kinds = events[REPEAT_KINDS].combine_chunks()
    own_kind = events["event"].cast(pa.string()).combine_chunks()
    # A count of c includes the event itself, so the last counted repeat is at position c - 2 of the event's list.
    last = repeat_kinds.offsets.to_numpy()[:-1] + columns[COUNT] - 2
    has_repeats = columns[COUNT] > 1
    last_kinds = repeat_kinds.values.take(pa.array(np.where(has_repeats, last, 0), mask=~has_repeats))
    return events.append_column(KINDS, pc.if_else(pa.array(has_repeats), last_kinds, own_kind))
