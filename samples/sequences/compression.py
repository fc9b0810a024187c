"""Fixed-period compression: repeated events of a user with one item (or category) within a period become one event.

The first event is kept. It stores the number of rows that it stands for (`count`), the seconds from the first to the last
of them (`span`) and their kinds (`kinds`). All three depend on the time of reading: a sample counts the repeats that are
older than itself, including those after other events of the user, and never a later one. `FoldedRepeats` computes them for
any time. The columns of the compressed log hold the values as of the user's next event, because every target after a window
of training events reads it. `expand_log` restores the checked log row by row. Periods are those of the clock: with 1d, days
in UTC. Count and span are int32, eight bytes per event. Samples are strict: they see no event of their own second.
"""

# Shapes: R rows of the log, H events that stay, F rows of the log in the order of their events, U users, n events looked at.

from __future__ import annotations

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
from nonet.samples.tables import as_numbers
from nonet.units import Seconds

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

COUNT, SPAN, KINDS = "count", "span", "kinds"
REPEAT_TIMES, REPEAT_KINDS = "repeat:times", "repeat:kinds"
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
        offsets: [H + 1] int64; event h stands for the rows offsets[h]:offsets[h + 1], itself the first.
        time: [F] int64 unix seconds, ascending within an event.
        kinds: [F] the kinds of an event's rows up to and including this one; None where the log has no kinds.
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
        folded = np.diff(times.offsets.to_numpy().astype(np.int64))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(folded + 1)])
        repeats = np.ones(offsets[-1], bool)
        repeats[offsets[:-1]] = False
        time = np.empty(offsets[-1], np.int64)
        time[~repeats], time[repeats] = events["timestamp"].to_numpy(), times.flatten().to_numpy()
        if REPEAT_KINDS not in events.column_names:
            return cls(offsets, time, None)
        kinds = np.empty(offsets[-1], np.int64)
        kinds[~repeats] = as_numbers(events["event"].cast(pa.string()))
        kinds[repeats] = as_numbers(events[REPEAT_KINDS].combine_chunks().flatten())
        return cls(offsets, time, kinds)

    @classmethod
    def load(cls, folder: Path) -> FoldedRepeats | None:
        """Map the files that `save` wrote; None where there are none."""
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

    def take(self, index: np.ndarray) -> FoldedRepeats:
        """Return the repeats of events [n], in their order."""
        rows, offsets = expand_ranges(self.offsets[index], self.offsets[index + 1])
        return FoldedRepeats(offsets, self.time[rows], None if self.kinds is None else self.kinds[rows])

    def slice_events(self, start: int, stop: int) -> FoldedRepeats:
        """Return the repeats of events [start, stop) without copying them."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        kinds = None if self.kinds is None else self.kinds[first:last]
        return replace(
            self, offsets=self.offsets[start : stop + 1] - first, time=self.time[first:last], kinds=kinds
        )

    def compute_columns(self, index: np.ndarray, as_of: np.ndarray) -> dict[str, np.ndarray]:
        """Return count, span and kinds [n] of events by index [n] from their rows that are older than `as_of` [n].

        An event counts itself, also where it is not older.
        """
        some = self.take(index)
        older = some.time < np.repeat(as_of, np.diff(some.offsets))
        older[some.offsets[:-1]] = True
        count = np.add.reduceat(older, some.offsets[:-1], dtype=np.int64) if len(index) else older.astype(int)
        last = some.offsets[:-1] + count - 1
        columns = {COUNT: count, SPAN: some.time[last] - some.time[some.offsets[:-1]]}
        return columns if some.kinds is None else columns | {KINDS: some.kinds[last]}


@dataclass(frozen=True)
class CompressedLog:
    """A compressed log.

    Attributes:
        events: [H] the log's columns, count, span and kinds, and lists of the times (and kinds so far) of the repeats.
        repeats: [R - H] the log's columns and each repeat's row in the log.
    """

    events: pa.Table
    repeats: pa.Table

    def measure_savings(self) -> dict[str, float]:
        """Return the rows, events and repeats of the log, and its Arrow bytes before and after compression."""
        log, added = (
            self.events.drop_columns(list_added_columns(self.events)),
            list_added_columns(self.events),
        )
        return {
            "rows": len(self.events) + len(self.repeats),
            "events": len(self.events),
            "repeats": len(self.repeats),
            "bytes_before": log.nbytes + self.repeats.drop_columns([ROW]).nbytes,
            "bytes_after": log.nbytes + self.events.select(added).nbytes,
        }


def list_added_columns(events: pa.Table) -> list[str]:
    """Return the columns that a compressed log has beside those of the log."""
    names = (COUNT, SPAN, KINDS, REPEAT_TIMES, REPEAT_KINDS)
    return [name for name in names if name in events.column_names]


def compress_log(log: pa.Table, period_s: float, by: str, items: pa.Table | None = None) -> CompressedLog:
    """Compress a checked log of interactions [R].

    Args:
        log: The interactions.
        period_s: Length of a period in seconds.
        by: "item", or "category" for the categories of the items.
        items: The items; needed for categories.

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
    user, what = (
        _encode_values(log["user_id"]),
        _encode_values(log["item_id"]) if by == "item" else _encode_categories(log, items),
    )
    order = np.lexsort((time, user))
    head = _find_heads(user[order], np.floor_divide(time[order], period), what[order])
    heads = head == np.arange(len(head))
    repeat = ~heads
    until = _find_next_times(user[order], time[order], heads)
    stays = np.sort(order[heads])
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    at = place[stays]  # rank by user and time of each kept event, in the order of the log
    folded = np.flatnonzero(repeat)
    folded = folded[np.lexsort((time[order][folded], _invert_index(at, len(order))[head[folded]]))]
    lengths = np.bincount(head[folded], minlength=len(order))[at]
    cuts = pa.array(np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]).astype(np.int32))
    times = pa.array(time[order][folded])
    events = log.take(pa.array(stays))
    events = events.append_column(REPEAT_TIMES, pa.ListArray.from_arrays(cuts, times))
    if "event" in log.column_names:
        kinds = _collect_kinds(log["event"], order, head, folded)
        events = events.append_column(REPEAT_KINDS, pa.ListArray.from_arrays(cuts, kinds))
    events = _add_columns(events, until[at])
    rows = np.sort(order[repeat])
    return CompressedLog(events, log.take(pa.array(rows)).append_column(ROW, pa.array(rows)))


def expand_log(compressed: CompressedLog) -> pa.Table:
    """Restore the original log row by row."""
    events = compressed.events.drop_columns(list_added_columns(compressed.events))
    rows = compressed.repeats[ROW].to_numpy()
    place = np.ones(len(events) + len(rows), bool)
    place[rows] = False
    order = np.empty(len(place), np.int64)
    order[place] = np.arange(len(events))
    order[rows] = len(events) + np.arange(len(rows))
    return (
        pa.concat_tables([events, compressed.repeats.drop_columns([ROW])])
        .take(pa.array(order))
        .combine_chunks()
    )


def _encode_values(column: pa.ChunkedArray) -> np.ndarray:
    """Return an integer code for each value [R]."""
    return column.combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)


def _encode_categories(log: pa.Table, items: pa.Table | None) -> np.ndarray:
    """Return a code for the categories of each row's item [R]; an item without categories has a code of its own."""
    if items is None or "categories" not in items.column_names:
        raise DataError("data.events: by: category wants data.items with a column categories; say by: item")
    text = pa.array(["|".join(row or ()) for row in items["categories"].to_pylist()])
    code = _encode_values(pa.chunked_array([text])) + len(items)
    code = np.where(pc.equal(text, "").to_numpy(zero_copy_only=False), np.arange(len(items)), code)
    index = pc.index_in(
        log["item_id"].cast(items["item_id"].type), value_set=items["item_id"].combine_chunks()
    )
    row = index.fill_null(-1).to_numpy()
    return np.where(row >= 0, code[np.maximum(row, 0)], 2 * len(items) + _encode_values(log["item_id"]))


def _find_heads(user: np.ndarray, period: np.ndarray, what: np.ndarray) -> np.ndarray:
    """Return the first row of each row's user, period and item [R]; rows are sorted by user and time."""
    order = np.lexsort((np.arange(len(user)), what, period, user))
    same = np.ones(len(user), bool)
    for column in (user, period, what):
        part = column[order]
        same[1:] &= part[1:] == part[:-1]
    same[:1] = False
    first = np.maximum.accumulate(np.where(same, 0, np.arange(len(user))))
    head = np.empty(len(user), np.int64)
    head[order] = order[first]
    return head


def _find_next_times(user: np.ndarray, time: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """Return for each kept event the time of its user's next kept event [R]; the int64 maximum for the last one."""
    until = np.full(len(user), np.iinfo(np.int64).max)
    at = np.flatnonzero(heads)
    same = user[at[1:]] == user[at[:-1]]
    until[at[:-1][same]] = time[at[1:][same]]
    return until


def _invert_index(at: np.ndarray, size: int) -> np.ndarray:
    """Return where each number below `size` is among `at`; -1 for those that are not."""
    places = np.full(size, -1, np.int64)
    places[at] = np.arange(len(at))
    return places


def _collect_kinds(
    event: pa.ChunkedArray, order: np.ndarray, head: np.ndarray, folded: np.ndarray
) -> pa.Array:
    """Return per repeat the kinds of its event's rows up to and including it, "buy|click", in alphabetical order."""
    texts_in_order = event.cast(pa.string()).take(pa.array(order))
    kind: list[str] = texts_in_order.to_pylist()
    texts, before, known = [], -1, set[str]()
    for row in folded.tolist():
        if head[row] != before:
            before = int(head[row])
            known = {kind[before]}
        known = known | {kind[row]}
        texts.append("|".join(sorted(known)))
    return pa.array(texts, pa.string())


def _add_columns(events: pa.Table, until: np.ndarray) -> pa.Table:
    """Add count, span and kinds [H] as of the times `until` [H]."""
    folded = FoldedRepeats.from_events(events)
    assert folded is not None
    columns = folded.compute_columns(np.arange(len(events)), until)
    for name in (COUNT, SPAN):
        events = events.append_column(name, pa.array(columns[name].astype(np.int32)))
    if REPEAT_KINDS not in events.column_names:
        return events
    so_far, first = events[REPEAT_KINDS].combine_chunks(), events["event"].cast(pa.string()).combine_chunks()
    last = so_far.offsets.to_numpy()[:-1] + columns[COUNT] - 2
    seen = columns[COUNT] > 1
    repeats = so_far.values.take(pa.array(np.where(seen, last, 0), mask=~seen))
    return events.append_column(KINDS, pc.if_else(pa.array(seen), repeats, first))
