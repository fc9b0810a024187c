"""KnownClicks: what a click model knows of its users and their labels from the events that it was trained on."""

# Shapes: U users, I items.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nonet.samples.batches import ClickRows
from nonet.samples.sequences import COUNT, SPAN, TRAIN, Sequences
from nonet.samples.tables import NONE

LIKED, NOT_LIKED, UNLABELLED = 1, 0, -1
"""The label of a past event; UNLABELLED if it is not known."""


@dataclass(frozen=True)
class KnownClicks:
    """The facts of the TRAIN events from which a click model's features are computed.

    Attributes:
        item_id: Ids of the items.
        user_id: Ids [U] of the users, sorted.
        rates: Mean label of the target, then of each task; 0.5 without labels.
        pair: (user, item) pairs of the events, as keys user * I + item, ascending.
        liked: Newest label of each pair.
        columns: Newest value [U] of each user by column; a missing value for users without events.
    """

    item_id: np.ndarray
    user_id: np.ndarray
    rates: tuple[float, ...]
    pair: np.ndarray
    liked: np.ndarray
    columns: Mapping[str, np.ndarray]

    @classmethod
    def from_rows(cls, clicks: ClickRows, item_id: np.ndarray) -> KnownClicks:
        """Collect the facts from the TRAIN events: the newest label of each pair, and the newest value of each user and column.

        Labels that were not known before the user's first held-out event are left out, because beams are scored at such times.
        """
        rows, seq = clicks.find_history(), clicks.seq
        tasks = [clicks.select_task(task) for task in ("", *clicks.tasks)]
        rates = tuple(compute_rate(task) for task in tasks)
        newest_index = len(rows) - 1 - np.unique(seq.user[rows][::-1], return_index=True)[1]
        users_with_rows = seq.user[rows][newest_index]
        # The row of a compressed log that is asked about has no repeats yet: a count of 1 and a span of 0.
        new_row = {COUNT: 1, SPAN: 0} if seq.folded is not None else {}
        columns = {
            name: np.full(len(seq), value) for name, value in new_row.items() if name in clicks.features
        }
        for name in clicks.features:
            if name in seq.columns and name not in columns:
                columns[name] = np.full(
                    len(seq), get_missing_value(seq.columns[name]), seq.columns[name].dtype
                )
                columns[name][users_with_rows] = seq.columns[name][rows][newest_index]
        if clicks.known_from is not None:
            rows = rows[clicks.known_from[rows] < find_first_held_out(seq)[seq.user[rows]]]
        pair_of_row = seq.user[rows] * len(item_id) + seq.item[rows]
        pair, reversed_index = np.unique(pair_of_row[::-1], return_index=True)
        label = clicks.label[rows][::-1][reversed_index] > 0
        user_id = np.asarray(seq.user_id)
        user_id = user_id.astype(np.str_) if user_id.dtype == object else user_id
        return cls(item_id, user_id, rates, pair, label, columns)

    def label_of(self, user: np.ndarray, item: np.ndarray) -> np.ndarray:
        """Return the labels of (user, item) index pairs; UNLABELLED without an event or if an index is -1."""
        pair = np.where((user < 0) | (item < 0), -1, user * len(self.item_id) + item)
        index = np.minimum(np.searchsorted(self.pair, pair), max(len(self.pair) - 1, 0))
        return np.where(self.pair[index] == pair, self.liked[index].astype(np.int64), UNLABELLED)

    def get_columns(self, user: np.ndarray) -> dict[str, np.ndarray]:
        """Return the values [n] of each column for user indices [n]; a missing value for the index -1."""
        return {
            name: np.where(user >= 0, values[np.maximum(user, 0)], get_missing_value(values))
            if len(values)
            else np.full(len(user), get_missing_value(values), values.dtype)
            for name, values in self.columns.items()
        }


def compute_rate(clicks: ClickRows) -> float:
    """Return the mean label of the TRAIN events; 0.5 if none has a label."""
    label = clicks.label[clicks.find_rows(TRAIN)]
    return float(label.mean()) if len(label) else 0.5


def find_first_held_out(seq: Sequences) -> np.ndarray:
    """Return the time [U] of each user's first event outside the TRAIN split; the largest int64 without one."""
    first_event = seq.offsets[:-1] + seq.train_lengths
    time = np.append(seq.time, np.iinfo(np.int64).max)
    return np.where(first_event < seq.offsets[1:], time[first_event], np.iinfo(np.int64).max)


def get_missing_value(values: np.ndarray) -> float | int:
    """Return the value that stands for a missing one in a column: NaN for numbers, NONE for ids."""
    return np.nan if values.dtype.kind == "f" else NONE
