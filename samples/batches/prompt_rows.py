"""Prompts for held-out events: (user, position), based on all events of the user before that position.

Position p of user u is event offsets[u] + p. A prompt never sees the event at its position or a later one.
"""

from __future__ import annotations

import numpy as np

from nonet.random import rng
from nonet.samples.batches.chunks import bounded
from nonet.samples.sequences import ALLOW, RL, Sequences
from nonet.types import Jagged

# Shapes: P prompts, N events of all users, M gathered events.
_FEW_EVENTS = 1 << 22  # up to this many events, repeats are computed once for all events and cached
_GATHERED = 1 << 20  # most events gathered at once


def prompts(seq: Sequences, split: int, among: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return users [P] and positions [P] int64 of every event of a split, users ascending, limited to the mask `among` [N]."""
    return prompts_at(seq, events_of(seq, split, among))


def some_prompts(seq: Sequences, split: int, users: int | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `prompts` of at most `users` users, sampled with the seed; of all users for None.

    Splits with the same users sample the same ones.
    """
    return drawn_prompts(seq, split, users, seed)[:2]


def drawn_prompts(
    seq: Sequences, split: int, users: int | None, seed: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return `some_prompts`, and the number of users that they were sampled from."""
    asked, positions = prompts(seq, split)
    there = asked[np.diff(asked, prepend=-1) > 0]
    if users is None or len(there) <= users:
        return asked, positions, len(there)
    mine = np.zeros(len(seq), bool)
    mine[rng(seed, "evaluated users").choice(there, users, replace=False)] = True
    return asked[mine[asked]], positions[mine[asked]], len(there)


def events_of(seq: Sequences, split: int, among: np.ndarray | None = None) -> np.ndarray:
    """Return the indices of a split's events, ascending, limited to the mask `among` [N]."""
    events = seq.events_of_split(split)
    return events if among is None else events[among[events]]


def listable_events(seq: Sequences, split: int, among: np.ndarray | None = None) -> np.ndarray:
    """Return the indices of a split's events that can be recommended, ascending; with `repeats: mask` no repeats."""
    events = events_of(seq, split, among)
    return events if seq.repeats == ALLOW else events[~returning(seq, events)]


def returning(seq: Sequences, events: np.ndarray) -> np.ndarray:
    """Return which of the events [n] return to an item of their user, in memory that does not grow with all events."""
    if len(seq.item) <= _FEW_EVENTS:
        return seq.repeated[events]
    users = seq.user_of(events)
    back = np.zeros(len(events), bool)
    for part in bounded(events - seq.offsets[users], _GATHERED):
        index, offsets = ranges(seq.offsets[users[part]], events[part])
        same = seq.item[index] == np.repeat(seq.item[events[part]], np.diff(offsets))
        before = np.concatenate([[0], np.cumsum(same)])
        back[part] = before[offsets[1:]] > before[offsets[:-1]]
    return back


def rl_events(seq: Sequences, among: np.ndarray | None = None) -> np.ndarray:
    """Return the indices of the events that RL may use as prompts, ascending."""
    return listable_events(seq, RL, among)


def prompts_at(seq: Sequences, events: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the users and positions of events by index."""
    users = seq.user_of(events)
    return users, events - seq.offsets[users]


def event_at(seq: Sequences, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the indices [P] of the events at the given positions. Raises IndexError for a position out of range."""
    inside = (positions >= 0) & (positions < seq.lengths[users])
    if not inside.all():
        bad = int(np.flatnonzero(~inside)[0])
        raise IndexError(
            f"user row {users[bad]} has {seq.lengths[users[bad]]} events; position {positions[bad]} was "
            "asked for"
        )
    return seq.offsets[users] + positions


def visible(seq: Sequences, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Count the events that each prompt sees [P]: all before its position; if strict, those of earlier seconds."""
    if not seq.strict:
        return positions
    return seq.first_of_second[event_at(seq, users, positions)] - seq.offsets[users]


def seen(seq: Sequences, users: np.ndarray, positions: np.ndarray) -> Jagged:
    """Return all items that are `visible` to each prompt, oldest first, as int64 dense indices."""
    starts = seq.offsets[users]
    index, offsets = ranges(starts, starts + visible(seq, users, positions))
    return Jagged(seq.item[index].astype(np.int64), offsets)


def masked(seq: Sequences, users: np.ndarray, positions: np.ndarray) -> Jagged:
    """Return the items that may not be recommended to each prompt: those it has `seen`, or none with `repeats: allow`."""
    if seq.repeats == ALLOW:
        return Jagged(np.empty(0, np.int64), np.zeros(len(users) + 1, np.int64))
    return seen(seq, users, positions)


def ranges(starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the concatenated indices starts[i]:stops[i] [M], and offsets [P + 1]."""
    lengths = stops - starts
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths), offsets
