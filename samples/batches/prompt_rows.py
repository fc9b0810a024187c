"""Prompts for held-out events: (user, position), based on all events of the user before that position.

Position p of user u is event offsets[u] + p. A prompt never sees the event at its position or a later one.
"""

from __future__ import annotations

import numpy as np

from nonet.random import rng
from nonet.ranges import expand_ranges
from nonet.samples.batches.chunks import split_by_size
from nonet.samples.sequences import ALLOW, RL, Sequences
from nonet.types import Jagged

# Shapes: P prompts, N events of all users, M gathered events.
_FEW_EVENTS = 1 << 22  # up to this many events, repeats are computed once for all events and cached
_GATHERED = 1 << 20  # most events gathered at once


def list_prompts(
    seq: Sequences, split: int, event_mask: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return users [P] and positions [P] int64 of every event of a split, users ascending, limited to `event_mask` [N]."""
    return locate_prompts(seq, find_events(seq, split, event_mask))


def sample_prompts(
    seq: Sequences, split: int, max_users: int | None, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the prompts (see `list_prompts`) of at most `max_users` users, sampled with the seed; of all users for None.

    Splits with the same users sample the same ones.
    """
    return sample_counted_prompts(seq, split, max_users, seed)[:2]


def sample_counted_prompts(
    seq: Sequences, split: int, max_users: int | None, seed: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return `sample_prompts`, and the number of users that they were sampled from."""
    asked, positions = list_prompts(seq, split)
    there = asked[np.diff(asked, prepend=-1) > 0]
    if max_users is None or len(there) <= max_users:
        return asked, positions, len(there)
    mine = np.zeros(len(seq), bool)
    mine[rng(seed, "evaluated users").choice(there, max_users, replace=False)] = True
    return asked[mine[asked]], positions[mine[asked]], len(there)


def find_events(seq: Sequences, split: int, event_mask: np.ndarray | None = None) -> np.ndarray:
    """Return the indices of a split's events, ascending, limited to `event_mask` [N]."""
    events = seq.find_split_events(split)
    return events if event_mask is None else events[event_mask[events]]


def find_recommendable_events(seq: Sequences, split: int, event_mask: np.ndarray | None = None) -> np.ndarray:
    """Return the indices of a split's events that can be recommended, ascending; with `repeats: mask` no repeats."""
    events = find_events(seq, split, event_mask)
    return events if seq.repeats == ALLOW else events[~are_repeats(seq, events)]


def are_repeats(seq: Sequences, events: np.ndarray) -> np.ndarray:
    """Return which of the events [n] return to an item of their user, in memory that does not grow with all events."""
    if len(seq.item) <= _FEW_EVENTS:
        return seq.repeated[events]
    users = seq.find_users(events)
    back = np.zeros(len(events), bool)
    for part in split_by_size(events - seq.offsets[users], _GATHERED):
        index, offsets = expand_ranges(seq.offsets[users[part]], events[part])
        same = seq.item[index] == np.repeat(seq.item[events[part]], np.diff(offsets))
        before = np.concatenate([[0], np.cumsum(same)])
        back[part] = before[offsets[1:]] > before[offsets[:-1]]
    return back


def find_rl_events(seq: Sequences, event_mask: np.ndarray | None = None) -> np.ndarray:
    """Return the indices of the events that RL may use as prompts, ascending."""
    return find_recommendable_events(seq, RL, event_mask)


def locate_prompts(seq: Sequences, events: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the users and positions of events by index."""
    users = seq.find_users(events)
    return users, events - seq.offsets[users]


def locate_events(seq: Sequences, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the indices [P] of the events at the given positions. Raises IndexError for a position out of range."""
    inside = (positions >= 0) & (positions < seq.lengths[users])
    if not inside.all():
        bad = int(np.flatnonzero(~inside)[0])
        raise IndexError(
            f"user row {users[bad]} has {seq.lengths[users[bad]]} events; position {positions[bad]} was "
            "asked for"
        )
    return seq.offsets[users] + positions


def count_visible_events(seq: Sequences, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Count the events that each prompt sees [P]: all before its position; if strict, those of earlier seconds."""
    if not seq.strict:
        return positions
    return seq.first_of_second[locate_events(seq, users, positions)] - seq.offsets[users]


def gather_seen_items(seq: Sequences, users: np.ndarray, positions: np.ndarray) -> Jagged:
    """Return all items that are visible to each prompt, oldest first, as int64 dense indices."""
    starts = seq.offsets[users]
    index, offsets = expand_ranges(starts, starts + count_visible_events(seq, users, positions))
    return Jagged(seq.item[index].astype(np.int64), offsets)


def gather_masked_items(seq: Sequences, users: np.ndarray, positions: np.ndarray) -> Jagged:
    """Return the items that may not be recommended to each prompt: its seen items, or none with `repeats: allow`."""
    if seq.repeats == ALLOW:
        return Jagged(np.empty(0, np.int64), np.zeros(len(users) + 1, np.int64))
    return gather_seen_items(seq, users, positions)
