"""Delayed labels: what happened later to an event, such as a purchase after a click, as a column of the events.

A row of the label file belongs to the newest event of its user and item that is not newer than the row (last touch), if it came
within the window. Times that are finer than seconds decide which event is newer (`FRACTION`). Such an event has the label 1,
and others have 0. If the window of an event was not over when the label file ended, its label is unknown (NaN), so that a late
purchase is not learned as a refusal (Chapelle, Modeling delayed feedback in display advertising, KDD 2014). This holds for
events with a row, too: otherwise, the newest events would have too many positive labels.

A label is known from a certain time on: a 1 from the time of its row in the label file, a 0 from the end of its event's window.
Features read a label only after the second of that time. A second column holds these times.

Whether an event is trained on or measured does not depend on these times: otherwise, the newest events would again have too many
positive labels. It depends on the end of the window, which a third column holds, and of which the label says nothing.
"""

# Shapes: R rows of the log, L rows of the label file; N events, K labels of a condition, O outcomes.

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute
from pydantic import Field

from nonet.errors import DataError
from nonet.options import StrictModel, Word
from nonet.samples.sequences.split import TRAIN, get_training_end
from nonet.samples.tables import FRACTION, list_names, match_rows, replace_column
from nonet.units import Seconds

pc: Any = pyarrow.compute  # its functions are generated at import time, so type checkers do not know them

LABEL_TIME = "label time:"
"""Prefix of the names of columns of label times: before a label's name in a log, before a stage in `Sequences.columns`."""
LABEL_END = "label end:"
"""Prefix of the names of columns of the ends of windows; what follows it is as for LABEL_TIME."""
NEVER = int(np.iinfo(np.int64).max)
"""The time of a label that is not known, or that training must not use."""
REPEAT_EVENTS = "repeat:events"
"""Column of a compressed log: the kinds of the further rows that each event stands for, a list [n]."""
MAX_LABELS = 6
"""How many labels a target may read: for K labels, 2^K conditions are computed over all events."""
_TASKS = ".tasks."
_MISSING = 2  # the outcome of a condition that depends on a missing value


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

    path: Annotated[str, Field(description="a table of users, items and times")]
    within: Annotated[Seconds, Field(ge=1, description="how long after its event a label counts")]
    name: Annotated[
        Word,
        Field(description="the column that events get: 1, 0, or not known where the window is not over"),
    ] = "label"
    columns: Annotated[
        dict[Literal["user", "item", "time"], str],
        Field(description="names of the columns of the table; by default as in the interactions"),
    ] = {}

    def to_fingerprint(self) -> dict[str, Any]:
        """Return the values that, with the table, determine the labels."""
        return self.model_dump(exclude=set() if self.columns else {"columns"})


@dataclass(frozen=True, slots=True)
class LabelCounts:
    """How many rows of a label file found an event, and how many events wait for theirs.

    Attributes:
        rows: Number of rows.
        no_event: Rows whose user has no event with the item until then.
        too_late: Rows that came after the window of the newest such event.
        unknown: Events whose window has not ended, so that their label is unknown.
    """

    rows: int = 0
    no_event: int = 0
    too_late: int = 0
    unknown: int = 0

    def __add__(self, other: LabelCounts) -> LabelCounts:
        return LabelCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def add_labels(log: pa.Table, labels: pa.Table, options: Labels, *, period_s: int = 1) -> pa.Table:
    """Return the log of `attach_label`, without the counts."""
    return attach_label(log, labels, options, period_s=period_s)[0]


def attach_label(
    log: pa.Table,
    labels: pa.Table,
    options: Labels,
    *,
    observed_until: int | None = None,
    period_s: int = 1,
) -> tuple[pa.Table, LabelCounts]:
    """Add the label column and the columns of label times and of ends of windows to a checked log [R].

    Args:
        log: The checked interactions.
        labels: The label file: checked rows of user_id, item_id, timestamp [L]. Rows that belong to no event are counted. Its
            newest time is the end of what is observed, even if the log has newer events.
        options: The window and the name of the column.
        observed_until: Unix seconds at which the label file ends; None for the newest of `labels`, if they are the whole file.
        period_s: Period within which events will become one event, which then has the labels of all (`compress_log`). Their
            windows end together, the window after the period.

    Returns:
        The log with three more columns: `options.name`, float32 (1, 0, or NaN for an unknown label); "label time:<name>", the
        int64 unix seconds from which on the label is known; and "label end:<name>", those at which the window ends. Both are
        NEVER for an unknown label. And how many labels found an event.

    Raises:
        DataError: The log already has a column of that name, or ids have different types.
    """
    if options.name in log.column_names:
        raise DataError(
            f"data.labels: the interactions have a column {options.name!r} already; give labels another name"
        )
    pair_R, pair_L = _encode_pairs(log, labels)
    time_R, time_L = log["timestamp"].to_numpy(), labels["timestamp"].to_numpy()
    moment_R, moment_L = _order_moments(log, labels)
    order = np.lexsort((moment_R, pair_R))
    position_L = _find_newest_before(pair_R[order], moment_R[order], pair_L, moment_L)
    has_event_L = position_L >= 0
    event = order[position_L[has_event_L]]  # the row of the log to which each of these label rows belongs
    delay_s = time_L[has_event_L] - time_R[event]
    value_R = np.zeros(len(log), np.float32)
    window_s = int(np.ceil(options.within))
    known_from_R = time_R + window_s
    end_R = time_R // period_s * period_s + period_s - 1 + window_s
    observed_until = find_newest_time(time_L) if observed_until is None else observed_until
    still_open_R = end_R > observed_until
    in_time = delay_s <= options.within
    value_R[event[in_time]] = 1
    known_from_R[event[in_time]] = NEVER
    np.minimum.at(
        known_from_R, event[in_time], time_L[has_event_L][in_time]
    )  # the oldest of an event's label rows
    value_R[still_open_R], known_from_R[still_open_R], end_R[still_open_R] = np.nan, NEVER, NEVER
    n_unknown = int(still_open_R.sum())
    counts = LabelCounts(len(labels), int((~has_event_L).sum()), int((~in_time).sum()), n_unknown)
    labelled = log.append_column(options.name, pa.array(value_R))
    labelled = labelled.append_column(LABEL_TIME + options.name, pa.array(known_from_R))
    return labelled.append_column(LABEL_END + options.name, pa.array(end_R)), counts


def find_newest_time(time: np.ndarray) -> int:
    """Return the newest of unix seconds [N], which may be before 1970; without any, a time before all others."""
    return int(time.max(initial=np.iinfo(np.int64).min))


def merge_labels(log: pa.Table, head_R: np.ndarray) -> pa.Table:
    """Return a log [R] in which the head of each group of rows has the labels of the whole group.

    A label is 1 from the earliest time of a row with the label 1. Without one, it is unknown if that of a row is, and else 0 from
    the time at which the last one is known. The rows of a group have one end of their windows.

    Args:
        log: The log, to which `attach_label` added labels, with the period of the groups.
        head_R: The row that is the head of each row's group.
    """
    for name in list_labels(log.schema):
        value_R, known_from_R = log[name].to_numpy(), log[LABEL_TIME + name].to_numpy()
        is_one_R, is_zero_R = value_R == 1, value_R == 0
        ones_R, unknown_R = np.zeros((2, len(log)), bool)
        ones_R[head_R[is_one_R]] = True
        unknown_R[head_R[np.isnan(value_R)]] = True
        first_R, last_R = np.full(len(log), NEVER), np.full(len(log), np.iinfo(np.int64).min)
        np.minimum.at(first_R, head_R[is_one_R], known_from_R[is_one_R])
        np.maximum.at(last_R, head_R[is_zero_R], known_from_R[is_zero_R])
        is_head_R = head_R == np.arange(len(log))
        merged_R = np.where(ones_R, 1, np.where(unknown_R, np.nan, 0)).astype(np.float32)
        times_R = np.where(ones_R, first_R, np.where(unknown_R, NEVER, last_R))
        log = replace_column(log, name, pa.array(np.where(is_head_R, merged_R, value_R)))
        log = replace_column(log, LABEL_TIME + name, pa.array(np.where(is_head_R, times_R, known_from_R)))
    return log


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


def list_labels(schema: pa.Schema) -> list[str]:
    """Return the names of the label columns that `add_labels` added to a log of this schema."""
    return [name.removeprefix(LABEL_TIME) for name in schema.names if name.startswith(LABEL_TIME)]


def match_target(condition: str, interactions: pa.Table, *, name: str) -> np.ndarray:
    """Return for which events [N] bool the condition of a target holds; any value stands for labels that are not known.

    Where labels that are not known matter, `compute_label_times` is NEVER. An event of a compressed log has the kinds of all its
    rows: a condition over `event` holds if it holds for one of them.
    """
    for label in _list_read_labels(interactions.schema, condition):
        known_or_0 = np.nan_to_num(interactions[label].to_numpy(), nan=0.0)
        interactions = replace_column(interactions, label, pa.array(known_or_0))
    return _match_any_kind(condition, interactions, name=name)


def compute_label_times(interactions: pa.Table, targets: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Compute the time from which on the target of each event [N] is known, for each task, and each stage that reads a label.

    This is the earliest time at which no value of the labels still to come can change the target, given the other columns of the
    event. A target that reads no label column is known at the time of its event. The target of a task is never known for an
    event that lacks a column on which it depends; that of a stage is then false.

    For each target that reads a label, the end of the longest window of these labels is computed, too. It is NEVER if one of
    them is not known, even if the others decide the target.

    Returns:
        Unix seconds [N] int64 by the name of their column: "label time:<stage>" and "label end:<stage>".
    """
    known_from = {}
    for stage, condition in _select_timed_targets(interactions.schema, targets).items():
        labels = _list_read_labels(interactions.schema, condition)
        times = interactions["timestamp"].to_numpy()
        if labels:
            times = _find_decision_times(
                condition, interactions, labels, _compute_outcomes if is_task(stage) else _match_any_kind
            )
        if is_task(stage):
            times = np.where(_compute_outcomes(condition, interactions) == _MISSING, NEVER, times)
        known_from[LABEL_TIME + stage] = times
        if labels:
            ends_KN = np.stack([interactions[LABEL_END + name].to_numpy() for name in labels])
            known_from[LABEL_END + stage] = np.where(times < NEVER, ends_KN.max(0), NEVER)
    return known_from


def list_label_time_columns(schema: pa.Schema, targets: Mapping[str, str]) -> list[str]:
    """Return the names of the columns that `compute_label_times` computes for a log of this schema."""
    return [
        prefix + stage
        for stage, condition in _select_timed_targets(schema, targets).items()
        for prefix in ((LABEL_TIME, LABEL_END) if _list_read_labels(schema, condition) else (LABEL_TIME,))
    ]


def limit_label_ends(ends: np.ndarray, codes: np.ndarray, split: Mapping[str, Any]) -> np.ndarray:
    """Return the ends of windows, NEVER for those of events that training must not use.

    If the split is by time, these are the TRAIN events whose window ends after the end of training, whatever their label is.

    Args:
        ends: Unix seconds [N] of `compute_label_times`.
        codes: Split of each event [N].
        split: Options of the split.
    """
    training_end = get_training_end(split)
    if training_end is None:
        return ends
    return np.where((codes == TRAIN) & (ends >= training_end), NEVER, ends)


def _select_timed_targets(schema: pa.Schema, targets: Mapping[str, str]) -> dict[str, str]:
    """Return the targets that have label times: those of tasks, and those that read a label."""
    return {
        stage: condition
        for stage, condition in targets.items()
        if is_task(stage) or _list_read_labels(schema, condition)
    }


def _list_read_labels(schema: pa.Schema, condition: str) -> list[str]:
    """Return the label columns that a condition reads."""
    names = list_names(condition)
    return [name for name in list_labels(schema) if name in names]


def _find_decision_times(
    condition: str,
    interactions: pa.Table,
    labels: Sequence[str],
    compute_outcomes: Callable[[str, pa.Table], np.ndarray],
) -> np.ndarray:
    """Return the earliest time [N] int64 at which the known labels decide a condition, whatever the others will be.

    Every assignment of values to the K labels is tried. It agrees with the labels of an event, in the order of their times, up to
    the first label that has another value. The first k labels decide the condition if all assignments that agree with them have
    the same outcome.

    Args:
        condition: The condition.
        interactions: The events, with their labels and label times.
        labels: Names of the K labels.
        compute_outcomes: Returns the outcome of the condition for each event: 0, 1 or _MISSING.
    """
    time_KN = np.stack([interactions[LABEL_TIME + name].to_numpy() for name in labels])
    value_KN = np.stack([interactions[name].to_numpy() for name in labels])
    # A label that is never known agrees with no value, whatever its column holds.
    value_KN = np.where(time_KN < NEVER, value_KN, np.nan)
    order_KN = np.argsort(time_KN, axis=0, kind="stable")
    rank_KN = np.argsort(order_KN, axis=0)
    n_labels, n_events = time_KN.shape
    # The largest number of first labels with which an assignment agrees that has this outcome.
    agreeing_ON, events = np.full((3, n_events), -1), np.arange(n_events)
    for values in itertools.product(*map(_list_values, value_KN)):
        assigned = interactions
        for name, value in zip(labels, values, strict=True):
            assigned = replace_column(assigned, name, pa.array(np.full(n_events, value, np.float32)))
        outcome = compute_outcomes(condition, assigned).astype(np.int64)
        differs_KN = value_KN != np.array(values, np.float32)[:, None]
        agreeing = np.where(differs_KN, rank_KN, n_labels).min(0)
        agreeing_ON[outcome, events] = np.maximum(agreeing_ON[outcome, events], agreeing)
    # Two outcomes agree with so many first labels; one label more decides.
    undecided = np.sort(agreeing_ON, axis=0)[1]
    last_label = np.take_along_axis(order_KN, np.maximum(undecided, 0)[None], 0)
    decided_from = np.take_along_axis(time_KN, last_label, 0)[0]
    return np.where(undecided < 0, interactions["timestamp"].to_numpy(), decided_from)


def _list_values(label_N: np.ndarray) -> list[float]:
    """Return the values that a label can have: 0, 1, and what its column holds besides."""
    return np.union1d([0.0, 1.0], label_N[~np.isnan(label_N)]).tolist()


def _compute_outcomes(condition: str, interactions: pa.Table) -> np.ndarray:
    """Return for each event [N] int64 whether a condition holds, 1 or 0, or depends on a missing value, _MISSING."""
    names = {*list_names(condition), REPEAT_EVENTS}
    table = interactions.select([name for name in interactions.column_names if name in names])
    for index, field in enumerate(table.schema):
        if pa.types.is_floating(field.type):  # NaN is a missing value.
            column = table.column(index)
            table = table.set_column(index, field, pc.if_else(pc.is_nan(column), None, column))
    holds, fails = np.zeros(len(table), bool), np.ones(len(table), bool)
    for index, rows in _iterate_kinds(condition, table):
        holds[index] |= match_rows(condition, rows)
        fails[index] &= match_rows(f"not ({condition})", rows)
    return np.select([holds, fails], [1, 0], _MISSING)


def _match_any_kind(condition: str, interactions: pa.Table, *, name: str = "condition") -> np.ndarray:
    """Return which events [N] bool match a condition with one of the kinds of their rows, as `match_rows`."""
    matches = np.zeros(len(interactions), bool)
    for index, rows in _iterate_kinds(condition, interactions):
        matches[index] |= match_rows(condition, rows, name=name)
    return matches


def _iterate_kinds(condition: str, interactions: pa.Table) -> Iterator[tuple[np.ndarray, pa.Table]]:
    """Yield the events as they are, and those with each kind of further rows of compressed ones if a condition reads it.

    Each table comes with the indices of its events.
    """
    yield np.arange(len(interactions)), interactions
    if REPEAT_EVENTS not in interactions.column_names or "event" not in list_names(condition):
        return
    repeats = interactions[REPEAT_EVENTS].combine_chunks()
    kinds, event_of_repeat = repeats.flatten(), pc.list_parent_indices(repeats).to_numpy()
    code = kinds.dictionary_encode()
    code_of_repeat = code.indices.to_numpy(zero_copy_only=False)
    order = np.argsort(code_of_repeat, kind="stable")
    bounds = np.searchsorted(code_of_repeat[order], np.arange(len(code.dictionary) + 1))
    for number, kind in enumerate(code.dictionary):
        index = np.unique(event_of_repeat[order[bounds[number] : bounds[number + 1]]])
        rows = interactions.take(pa.array(index))
        yield index, replace_column(rows, "event", pa.repeat(kind, len(index)))


def check_label_ids(log: pa.Schema, labels: pa.Schema) -> None:
    """Raise DataError if the ids of a label file have other types than those of the log."""
    for name in ("user_id", "item_id"):
        log_type, label_type = (schema.field(name).type for schema in (log, labels))
        if log_type != label_type:
            role = name.removesuffix("_id")
            raise DataError(
                f"data.labels: {name} is {label_type}, and {log_type} in the interactions, so no {role} would be found; write "
                f"the {role}s of both tables as one type"
            )


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


def _order_moments(log: pa.Table, labels: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers in the order of time of the rows of the log [R] and of the label file [L], both int64.

    A time without a fraction of a second is the beginning of its second.
    """
    tables = (log, labels)
    seconds = np.concatenate([table["timestamp"].to_numpy() for table in tables])
    if any(FRACTION in table.column_names for table in tables):
        fractions = [
            table[FRACTION].to_numpy() if FRACTION in table.column_names else np.zeros(len(table), np.int64)
            for table in tables
        ]
        seconds = np.unique(seconds, return_inverse=True)[1] * 1_000_000_000 + np.concatenate(fractions)
    return seconds[: len(log)], seconds[len(log) :]


def _index_in(column: pa.Array, dictionary: pa.Array) -> np.ndarray:
    """Return the index of each value in the dictionary, int64; -1 for values that are not in it."""
    index = pc.index_in(column, value_set=dictionary)
    return index.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


def _find_newest_before(
    pair_R: np.ndarray, moment_R: np.ndarray, pair_L: np.ndarray, moment_L: np.ndarray
) -> np.ndarray:
    """Return for each label row the last row of the log with the same pair that is not newer, [L] int64; -1 if there is none.

    The rows of the log must be sorted by pair and time.
    """
    first_of_pair = np.searchsorted(pair_R, pair_L, "left")
    # Sort both kinds of rows together by pair and moment; at the same moment, rows of the log come first.
    is_label = np.r_[np.zeros(len(pair_R)), np.ones(len(pair_L))]
    merged = np.lexsort((is_label, np.r_[moment_R, moment_L], np.r_[pair_R, pair_L]))
    log_rows_so_far = np.cumsum(merged < len(pair_R))
    last_log_row = np.empty(len(merged), np.int64)
    last_log_row[merged] = log_rows_so_far - 1
    last_L = last_log_row[len(pair_R) :]
    return np.where((last_L >= first_of_pair) & (pair_L >= 0), last_L, -1)
