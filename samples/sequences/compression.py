"""Fixed-period compression: repeated events of a user with one item (or category) within a period become one event.

The event that stays is the first. It says how many it stands for (`count`), the seconds from the first to the last of them
(`span`) and their kinds (`kinds`), all as of the user's next event: what came at or after that is not in it, so that no sample
sees what is not older than itself. `expand` gives back every row as it was: the repeats are kept beside, with their places.
Periods are those of the clock: with 1d, days of UTC. Count and span are int32: eight bytes an event. Samples are strict: they
see no event of their own second.
"""

# Shapes: R rows of the log, H events that stay, U users.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from nonet.errors import DataError

pc: Any = pyarrow.compute  # its functions are made at import time, unknown to type checkers

COUNT, SPAN, KINDS = "count", "span", "kinds"
ROW = "row:"  # a repeat's place in the log


@dataclass(frozen=True)
class Compressed:
    """`events` [H]: the log's columns and count, span, kinds. `repeats` [R - H]: the log's columns and its row."""

    events: pa.Table
    repeats: pa.Table

    def facts(self) -> dict[str, float]:
        """What it saved: rows of the log, events, repeats, and bytes of Arrow before and after."""
        log, added = self.events.drop_columns(added_columns(self.events)), added_columns(self.events)
        return {
            "rows": len(self.events) + len(self.repeats),
            "events": len(self.events),
            "repeats": len(self.repeats),
            "bytes_before": log.nbytes + self.repeats.drop_columns([ROW]).nbytes,
            "bytes_after": log.nbytes + self.events.select(added).nbytes,
        }


def added_columns(events: pa.Table) -> list[str]:
    """Those of count, span and kinds that a compressed log has."""
    return [name for name in (COUNT, SPAN, KINDS) if name in events.column_names]


def compress(log: pa.Table, period_s: float, by: str, items: pa.Table | None = None) -> Compressed:
    """A checked log of interactions [R], compressed; `by`: "item", or "category" out of the items' categories.

    Raises DataError for a column that the log has already, or categories that nobody has.
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
    user, what = _codes(log["user_id"]), _codes(log["item_id"]) if by == "item" else _categories(log, items)
    order = np.lexsort((time, user))
    head = _heads(user[order], np.floor_divide(time[order], period), what[order])
    heads = head == np.arange(len(head))
    repeat = ~heads
    until = _next_time(user[order], time[order], heads)
    seen = repeat & (time[order] < until[head])
    count = 1 + np.bincount(head[seen], minlength=len(head))
    last = time[order].copy()
    np.maximum.at(last, head[seen], time[order][seen])
    stays = np.sort(order[heads])
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    at = place[stays]
    events = log.take(pa.array(stays)).append_column(COUNT, pa.array(count[at].astype(np.int32)))
    events = events.append_column(SPAN, pa.array((last - time[order])[at].astype(np.int32)))
    if "event" in log.column_names:
        events = events.append_column(KINDS, _kinds(log["event"], order, head, heads | seen, at))
    rows = np.sort(order[repeat])
    return Compressed(events, log.take(pa.array(rows)).append_column(ROW, pa.array(rows)))


def expand(compressed: Compressed) -> pa.Table:
    """The log as it was, row by row."""
    events = compressed.events.drop_columns(added_columns(compressed.events))
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


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    """Each value's number [R]."""
    return column.combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)


def _categories(log: pa.Table, items: pa.Table | None) -> np.ndarray:
    """A number for the categories of each row's item [R]; an item without any stands for itself."""
    if items is None or "categories" not in items.column_names:
        raise DataError("data.events: by: category wants data.items with a column categories; say by: item")
    text = pa.array(["|".join(row or ()) for row in items["categories"].to_pylist()])
    code = _codes(pa.chunked_array([text])) + len(items)
    code = np.where(pc.equal(text, "").to_numpy(zero_copy_only=False), np.arange(len(items)), code)
    index = pc.index_in(
        log["item_id"].cast(items["item_id"].type), value_set=items["item_id"].combine_chunks()
    )
    row = index.fill_null(-1).to_numpy()
    return np.where(row >= 0, code[np.maximum(row, 0)], 2 * len(items) + _codes(log["item_id"]))


def _heads(user: np.ndarray, period: np.ndarray, what: np.ndarray) -> np.ndarray:
    """The first row of each row's user, period and item [R]; rows are by user and time."""
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


def _next_time(user: np.ndarray, time: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """The time of the user's next event that stays, of each one that does [R]; no limit for a user's last one."""
    until = np.full(len(user), np.iinfo(np.int64).max)
    at = np.flatnonzero(heads)
    same = user[at[1:]] == user[at[:-1]]
    until[at[:-1][same]] = time[at[1:][same]]
    return until


def _kinds(
    event: pa.ChunkedArray, order: np.ndarray, head: np.ndarray, visible: np.ndarray, at: np.ndarray
) -> pa.Array:
    """The kinds of visible events of each one that stays, "click|buy" in the order of the alphabet."""
    coded = event.cast(pa.string()).combine_chunks().dictionary_encode()
    names = coded.dictionary.to_pylist()
    code = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)[order]
    pairs = np.unique(head[visible] * len(names) + code[visible])
    of: dict[int, list[str]] = {}
    for pair in pairs.tolist():
        of.setdefault(pair // len(names), []).append(names[pair % len(names)])
    return pa.array(["|".join(sorted(of[row])) for row in at.tolist()], pa.string())
