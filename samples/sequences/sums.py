"""EventTotals: counts of the events of sequences for a run's report and predictions, computed one part of the users at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nonet.samples.sequences.sequences import RL, TEST, TRAIN, VALID, Sequences

_INT64 = np.iinfo(np.int64)  # its bounds stand for the times of no events


@dataclass(slots=True)
class EventTotals:
    """Counts and times of the events of all users.

    Attributes:
        events: Number of events of each split, by split code.
        tested: Number of users with a TEST event.
        target: Number of TEST events that match the first target; None if there is no target.
        taught: Number of TRAIN events that match each target, by stage.
        labelled: Number of TRAIN events that each target labels, by stage.
        first: Unix seconds of the oldest TRAIN event.
        last: Unix seconds of the newest TRAIN event.
        duplicates: Number of events with the same user, item and second as an earlier one.
    """

    events: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    tested: int = 0
    target: int | None = None
    taught: dict[str, int] = field(default_factory=dict)
    labelled: dict[str, int] = field(default_factory=dict)
    first: int = _INT64.max
    last: int = _INT64.min
    duplicates: int = 0

    @classmethod
    def from_sequences(cls, seq: Sequences) -> EventTotals:
        """Compute the sums over all users."""
        totals = cls()
        for part in seq.iterate_parts():
            totals._add_part(part)
        return totals

    def _add_part(self, part: Sequences) -> None:
        """Add the events of some users."""
        counts = np.bincount(part.split, minlength=len(self.events)).tolist()
        self.events = [a + b for a, b in zip(self.events, counts, strict=True)]
        test, train = part.split == TEST, part.split == TRAIN
        has_test = np.zeros(len(part), bool)  # by user
        has_test[part.find_users(np.flatnonzero(test))] = True
        self.tested += int(has_test.sum())
        for name in part.targets:
            self.taught[name] = self.taught.get(name, 0) + int((part.find_targets(name) & train).sum())
            self.labelled[name] = self.labelled.get(name, 0) + int((part.find_labelled(name) & train).sum())
        for name in list(part.targets)[:1]:  # the first target, if there is any
            self.target = (self.target or 0) + int((part.find_targets(name) & test).sum())
        times = part.time[train]
        self.first = min(self.first, int(times.min(initial=_INT64.max)))
        self.last = max(self.last, int(times.max(initial=_INT64.min)))
        lengths = np.diff(part.offsets)
        self.duplicates += count_duplicates(np.repeat(np.arange(len(lengths)), lengths), part.item, part.time)

    def get_held_out_counts(self) -> dict[str, int]:
        """Return the number of events of each held-out split, and of the TEST events that match the first target, if any."""
        held_out = {
            name: self.events[split] for name, split in (("rl", RL), ("valid", VALID), ("test", TEST))
        }
        return held_out | ({} if self.target is None else {"test_target": self.target})

    def measure_training(self, seq: Sequences) -> dict[str, Any]:
        """Return statistics of the TRAIN events.

        Returns:
            "train_span_s": seconds from the oldest to the newest event. "train_spread": standard deviation of the users' numbers
            of events divided by their mean. "trained_share": share of the events that match each target, by stage.
            "labelled_events": number of the events that each target labels, by stage.
        """
        lengths, train_events = seq.train_lengths, self.events[TRAIN]
        return {
            "train_span_s": self.last - self.first if train_events else 0,
            "train_spread": float(lengths.std() / max(1e-9, lengths.mean())),
            "trained_share": {stage: count / max(1, train_events) for stage, count in self.taught.items()},
            "labelled_events": self.labelled,
        }


def count_duplicates(user: np.ndarray, item: np.ndarray, time: np.ndarray) -> int:
    """Count the events with the same user, item and second as an earlier one.

    Args:
        user: User of each event [N]; each user's events are consecutive.
        item: Item of each event [N].
        time: Unix seconds of each event [N], ascending within a user.
    """
    tied = (user[1:] == user[:-1]) & (time[1:] == time[:-1])
    if not tied.any():
        return 0
    is_tied = np.concatenate([[False], tied]) | np.concatenate(
        [tied, [False]]
    )  # with the event before or after
    user, item, time = user[is_tied], item[is_tied], time[is_tied]
    order = np.lexsort((item, time, user))
    same = [values[order][1:] == values[order][:-1] for values in (user, item, time)]
    return int(np.logical_and.reduce(same).sum())
