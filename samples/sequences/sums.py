"""Sums over the events of sequences for a run's report and predictions, computed one part of the users at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nonet.samples.sequences.sequences import RL, TEST, TRAIN, VALID, Sequences

_NONE = np.iinfo(np.int64)


@dataclass(slots=True)
class EventTotals:
    """Sums over events.

    Attributes:
        events: Events of each split.
        tested: Users with a TEST event.
        target: TEST events that match the first target.
        taught: TRAIN events that match each target.
        first: Unix seconds of the oldest TRAIN event.
        last: Unix seconds of the newest TRAIN event.
        duplicates: Events with the same user, item and second as an earlier one.
    """

    events: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    tested: int = 0
    target: int | None = None
    taught: dict[str, int] = field(default_factory=dict)
    first: int = _NONE.max
    last: int = _NONE.min
    duplicates: int = 0

    @classmethod
    def from_sequences(cls, seq: Sequences) -> EventTotals:
        """Compute the sums over all users."""
        sums = cls()
        for part in seq.iterate_parts():
            sums._add_part(part)
        return sums

    def _add_part(self, part: Sequences) -> None:
        """Add the events of some users."""
        counts = np.bincount(part.split, minlength=len(self.events)).tolist()
        self.events = [a + b for a, b in zip(self.events, counts, strict=True)]
        test, train = part.split == TEST, part.split == TRAIN
        users = np.zeros(len(part), bool)
        users[part.find_users(np.flatnonzero(test))] = True
        self.tested += int(users.sum())
        for name, mask in part.targets.items():
            self.taught[name] = self.taught.get(name, 0) + int((mask & train).sum())
        for mask in list(part.targets.values())[:1]:
            self.target = (self.target or 0) + int((mask & test).sum())
        times = part.time[train]
        self.first = min(self.first, int(times.min(initial=_NONE.max)))
        self.last = max(self.last, int(times.max(initial=_NONE.min)))
        lengths = np.diff(part.offsets)
        self.duplicates += count_duplicates(np.repeat(np.arange(len(lengths)), lengths), part.item, part.time)

    def get_held_out_counts(self) -> dict[str, int]:
        """Return the held-out events by split, and the TEST events that match the first target."""
        held_out = {
            name: self.events[split] for name, split in (("rl", RL), ("valid", VALID), ("test", TEST))
        }
        return held_out | ({} if self.target is None else {"test_target": self.target})

    def measure_training(self, seq: Sequences) -> dict[str, Any]:
        """Return facts of the training events: time span, spread of users' lengths, share that each target keeps."""
        lengths, trained = seq.train_lengths, self.events[TRAIN]
        return {
            "train_span_s": self.last - self.first if trained else 0,
            "train_spread": float(lengths.std() / max(1e-9, lengths.mean())),
            "trained_share": {name: events / max(1, trained) for name, events in self.taught.items()},
        }


def count_duplicates(user: np.ndarray, item: np.ndarray, time: np.ndarray) -> int:
    """Count the events that repeat another one: the same user, item and second.

    Args:
        user: users [N], each user's events together.
        item: items [N].
        time: unix seconds [N], ascending within a user.

    Returns:
        The events that are left over where one of each group of equal ones is kept.
    """
    tied = (user[1:] == user[:-1]) & (time[1:] == time[:-1])
    if not tied.any():
        return 0
    near = np.concatenate([[False], tied]) | np.concatenate([tied, [False]])
    user, item, time = user[near], item[near], time[near]
    order = np.lexsort((item, time, user))
    same = [values[order][1:] == values[order][:-1] for values in (user, item, time)]
    return int(np.logical_and.reduce(same).sum())
