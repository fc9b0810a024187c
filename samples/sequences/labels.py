"""Delayed labels: what happened later to an event, such as a purchase after a click, as a column of the events.

A row of the label file belongs to the newest event of its user and item that is not newer than the row (last touch), if it came
within the window. Such an event has the label 1, others 0. If an event has no such row yet, and its window was not over when the
label file ended, its label is unknown (NaN), so that a late purchase is not learned as a refusal (Chapelle, Modeling delayed
feedback in display advertising, KDD 2014).

A label is known from a certain time on: a 1 from the time of its row in the label file, a 0 from the end of its event's window.
Features and training read a label only from that time on. A second column holds these times.
"""

# Shapes: R rows of the log, L rows of the label file.

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
"""Prefix of the names of columns of label times: before a label's name in a log, before a stage in `Sequences.columns`."""
NEVER = int(np.iinfo(np.int64).max)
"""The time of a label that is not known, or that training must not use."""
_TASKS = ".tasks."


def name_task(stage: str, task: str) -> str:
    """Return the name of the target of a task of a stage, under which sequences have its mask and label times."""
    return stage + _TASKS + task


def find_tasks(stage: str, targets: Iterable[str]) -> dict[str, str]:
    """Return the names of the targets of a stage's tasks, by task."""
    prefix = name_task(stage, "")
    return {name.removeprefix(prefix): name for name in targets if name.startswith(prefix)}


def is_task(target: str) -> bool:
    """Return whether a target is that of a task, which an event may lack (`name_task`)."""
    return _TASKS in target


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


def add_labels(
    log: pa.Table,
    labels: pa.Table,
    options: Labels,
    *,
    observed_until: int | None = None,
) -> pa.Table:
    """Add the label column and the column of label times to a checked log [R].

    Args:
        log: The checked interactions.
        labels: The label file: checked rows of user_id, item_id, timestamp [L]. Rows that belong to no event are ignored. Its
            newest time is the end of what is observed, even if the log has newer events.
        options: The window and the name of the column.
        observed_until: Unix seconds at which the label file ends; None for the newest of `labels`, if they are the whole file.

    Returns:
        The log with two more columns: `options.name`, float32 (1, 0, or NaN for an unknown label), and "label time:<name>", the
        int64 unix seconds from which on the label is known, NEVER for an unknown one.

    Raises:
        DataError: The log already has a column of that name, or ids have different types.
    """
    if options.name in log.column_names:
        raise DataError(
            f"data.labels: the interactions have a column {options.name!r} already; give labels another name"
        )
    pair_R, pair_L = _encode_pairs(log, labels)
    time_R, time_L = log["timestamp"].to_numpy(), labels["timestamp"].to_numpy()
    order = np.lexsort((time_R, pair_R))
    position_L = _find_newest_before(pair_R[order], time_R[order], pair_L, time_L)
    has_event_L = position_L >= 0
    event = order[position_L[has_event_L]]  # the row of the log to which each of these label rows belongs
    delay_s = time_L[has_event_L] - time_R[event]
    value_R = np.zeros(len(log), np.float32)
    known_from_R = time_R + int(np.ceil(options.within))
    observed_until = int(time_L.max(initial=0)) if observed_until is None else observed_until
    still_open_R = observed_until - time_R < options.within
    value_R[still_open_R], known_from_R[still_open_R] = np.nan, NEVER
    in_time = delay_s <= options.within
    value_R[event[in_time]] = 1
    known_from_R[event[in_time]] = NEVER
    np.minimum.at(
        known_from_R, event[in_time], time_L[has_event_L][in_time]
    )  # the oldest of an event's label rows
    labelled = log.append_column(options.name, pa.array(value_R))
    return labelled.append_column(LABEL_TIME + options.name, pa.array(known_from_R))


def drop_unlabelled_events(
    labelled: pa.Table, labels: Sequence[Labels], *, required: bool = False
) -> pa.Table:
    """Return the events of a log [R] of which at least one label is known.

    Args:
        labelled: The log, to which `add_labels` added each of the labels.
        labels: The windows and the names of the columns.
        required: Whether to raise DataError if no event is left.
    """
    known = labelled
    if len(labelled):
        is_known_RL = np.stack([~np.isnan(labelled[options.name].to_numpy()) for options in labels], 1)
        known = labelled.filter(pa.array(is_known_RL.any(1)))
    if required and not len(known):
        shortest = min(options.within for options in labels)
        raise DataError(
            f"data.labels: no event is older than the window of {shortest:g} s; shorten `within`, or take a longer log"
        )
    return known


def check_label_ids(log: pa.Schema, labels: pa.Schema) -> None:
    """Raise DataError if the ids of a label file have other types than those of the log."""
    for name in ("user_id", "item_id"):
        log_type, label_type = (schema.field(name).type for schema in (log, labels))
        if log_type != label_type:
            raise DataError(f"data.labels: {name} is {label_type}, and {log_type} in the interactions")


def _encode_pairs(log: pa.Table, labels: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return a code of the (user, item) pair of each row of the log [R] and of the label file [L], both int64.

    The code is -1 if the log does not have the user or the item.
    """
    check_label_ids(log.schema, labels.schema)
    codes = []
    for name in ("user_id", "item_id"):
        log_ids, label_ids = log[name].combine_chunks(), labels[name].combine_chunks()
        encoded = log_ids.dictionary_encode()
        code_R = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        codes.append((code_R, _index_in(label_ids, encoded.dictionary), len(encoded.dictionary)))
    (user_R, user_L, _), (item_R, item_L, item_count) = codes
    pair_L = np.where((user_L >= 0) & (item_L >= 0), user_L * item_count + item_L, -1)
    return user_R * item_count + item_R, pair_L


def _index_in(column: pa.Array, dictionary: pa.Array) -> np.ndarray:
    """Return the index of each value in the dictionary, int64; -1 for values that are not in it."""
    index = pc.index_in(column, value_set=dictionary)
    return index.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


def _find_newest_before(
    pair_R: np.ndarray, time_R: np.ndarray, pair_L: np.ndarray, time_L: np.ndarray
) -> np.ndarray:
    """Return for each label row the last row of the log with the same pair that is not newer, [L] int64; -1 if there is none.

    The rows of the log must be sorted by pair and time.
    """
    first_of_pair = np.searchsorted(pair_R, pair_L, "left")
    # Sort both kinds of rows together by pair and time; at the same time, rows of the log come first.
    is_label = np.r_[np.zeros(len(pair_R)), np.ones(len(pair_L))]
    merged = np.lexsort((is_label, np.r_[time_R, time_L], np.r_[pair_R, pair_L]))
    log_rows_so_far = np.cumsum(merged < len(pair_R))
    last_log_row = np.empty(len(merged), np.int64)
    last_log_row[merged] = log_rows_so_far - 1
    last_L = last_log_row[len(pair_R) :]
    return np.where((last_L >= first_of_pair) & (pair_L >= 0), last_L, -1)
