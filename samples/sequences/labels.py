"""Delayed labels: what happened later to an event, such as a purchase after a click, as a column of the events.

A label belongs to the newest event of its user and item at or before it (last touch), where it came within the window. An event
whose window was not over when the label file ended and that has no label yet is unknown: NaN, neither yes nor no, so nothing is
learned to be a refusal that is only late (Chapelle, Modeling delayed feedback in display advertising, KDD 2014).

Every label has a time from which on it is known: a positive one the time of its row in the label file, a negative one the end of
its event's window. Features and training read a label from that time on only. A second column holds these times.
"""

# Shapes: R rows of the log, L labels.

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from pydantic import Field

from nonet.errors import DataError
from nonet.options import StrictModel, Word
from nonet.units import Seconds

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

LABEL_TIME = "label time:"
"""Prefix of columns of label times: of a label by its name in a log, of a stage's target by the stage in `Sequences.columns`."""
NEVER = int(np.iinfo(np.int64).max)
"""The time of a label that is not known, or that training must not use."""


class Labels(StrictModel):
    """What happened later to events, such as purchases after clicks (`nonet.samples.sequences.add_labels`)."""

    path: Annotated[
        str, Field(description="a table of user_id, item_id and timestamp, named as in the interactions")
    ]
    within: Annotated[Seconds, Field(ge=1, description="how long after its event a label counts")]
    name: Annotated[
        Word,
        Field(description="the column that events get: 1, 0, or not known where the window is not over"),
    ] = "label"


def add_labels(log: pa.Table, labels: pa.Table, options: Labels, *, drop_unknown: bool = False) -> pa.Table:
    """Add the label column and the column of label times to a checked log [R].

    Args:
        log: checked interactions.
        labels: checked rows of user_id, item_id, timestamp [L]. Rows that belong to no event are ignored. The newest time among
            them is the end of what is observed, however far the log reaches.
        options: the window and the column's name.
        drop_unknown: whether events whose label is not known yet are removed.

    Returns:
        The log with `name`, float32: 1 and 0, NaN where the label is not known; and "label time:<name>", int64 unix seconds
        from which on the label is known.

    Raises:
        DataError: a column of that name exists already, or ids have another type.
    """
    if options.name in log.column_names:
        raise DataError(
            f"data.labels: the interactions have a column {options.name!r} already; give labels another name"
        )
    pair_R, pair_L = _encode_pairs(log, labels)
    time_R, time_L = log["timestamp"].to_numpy(), labels["timestamp"].to_numpy()
    order = np.lexsort((time_R, pair_R))
    at = _find_newest_before(pair_R[order], time_R[order], pair_L, time_L)
    there = at >= 0
    event = order[at[there]]
    late = time_L[there] - time_R[event]
    value = np.zeros(len(log), np.float32)
    known_from = time_R + int(np.ceil(options.within))
    still_open = time_L.max(initial=0) - time_R < options.within
    value[still_open], known_from[still_open] = np.nan, NEVER
    in_time = late <= options.within
    value[event[in_time]] = 1
    known_from[event[in_time]] = NEVER
    np.minimum.at(known_from, event[in_time], time_L[there][in_time])
    whole = log.append_column(options.name, pa.array(value))
    whole = whole.append_column(LABEL_TIME + options.name, pa.array(known_from))
    if not drop_unknown:
        return whole
    left = whole.filter(pa.array(~np.isnan(value)))
    if not len(left):
        raise DataError(
            f"data.labels: no event is older than the window of {options.within:g} s; shorten `within`, or take a longer log"
        )
    return left


def _encode_pairs(log: pa.Table, labels: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return a code for the user and item of each row [R] and of each label [L]; -1 for pairs that the log cannot have."""
    codes = []
    for name in ("user_id", "item_id"):
        column, other = log[name].combine_chunks(), labels[name].combine_chunks()
        if column.type != other.type:
            raise DataError(f"data.labels: {name} is {other.type}, and {column.type} in the interactions")
        coded = column.dictionary_encode()
        mine = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        codes.append((mine, _index_in(other, coded.dictionary), len(coded.dictionary)))
    (user_R, user_L, _), (item_R, item_L, items) = codes
    pair_L = np.where((user_L >= 0) & (item_L >= 0), user_L * items + item_L, -1)
    return user_R * items + item_R, pair_L


def _index_in(column: pa.Array, dictionary: pa.Array) -> np.ndarray:
    index = pc.index_in(column, value_set=dictionary)
    return index.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


def _find_newest_before(
    pair_R: np.ndarray, time_R: np.ndarray, pair_L: np.ndarray, time_L: np.ndarray
) -> np.ndarray:
    """Return the index [L] of the last row of the same pair that is not newer, or -1; rows are sorted by pair and time."""
    begin = np.searchsorted(pair_R, pair_L, "left")
    merged = np.lexsort(
        (np.r_[np.zeros(len(pair_R)), np.ones(len(pair_L))], np.r_[time_R, time_L], np.r_[pair_R, pair_L])
    )
    rows_before = np.cumsum(merged < len(pair_R))
    last = np.empty(len(merged), np.int64)
    last[merged] = rows_before - 1
    at = last[len(pair_R) :]
    return np.where((at >= begin) & (pair_L >= 0), at, -1)
