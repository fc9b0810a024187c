"""Prompts for held-out events: a prompt is a pair (user, position).

The event at position p of user row u is event offsets[u] + p, the prompt's target. A prompt sees only the user's events before
that position.
"""

from __future__ import annotations

import numpy as np

from nonet.random import rng
from nonet.ranges import expand_ranges
from nonet.samples.batches.chunks import split_by_size
from nonet.samples.sequences import ALLOW, RL, Sequences
from nonet.types import Jagged

# Shapes: P prompts, N events of all users, n requested events.
_MAX_CACHED_EVENTS = 1 << 22  # up to this many events, repeats are computed once for all events and cached
_MAX_GATHERED = 1 << 20  # maximum number of events that are gathered at once, which bounds memory


def list_prompts(
    seq: Sequences, split: int, event_mask: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the user rows [P] and positions [P] int64 of the events of a split, in the order of the events.

    Only events where `event_mask` [N] is True are returned; None for all events.
    """
    return locate_prompts(seq, find_events(seq, split, event_mask))


def sample_prompts(
    seq: Sequences, split: int, max_users: int | None, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the prompts of at most `max_users` users, sampled with the seed, as `list_prompts` does; None for all users.

    For splits with the same users, the same users are sampled.
    """
    return sample_counted_prompts(seq, split, max_users, seed)[:2]


def sample_counted_prompts(
    seq: Sequences, split: int, max_users: int | None, seed: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the users and positions of `sample_prompts`, and the number of users from which they were sampled."""
    users, positions = list_prompts(seq, split)
    distinct_users = users[np.diff(users, prepend=-1) > 0]
    if max_users is None or len(distinct_users) <= max_users:
        return users, positions, len(distinct_users)
    is_sampled = np.zeros(len(seq), bool)
    is_sampled[rng(seed, "evaluated users").choice(distinct_users, max_users, replace=False)] = True
    return users[is_sampled[users]], positions[is_sampled[users]], len(distinct_users)


def find_events(seq: Sequences, split: int, event_mask: np.ndarray | None = None) -> np.ndarray:
    """Return the ascending indices of a split's events, only of those where `event_mask` [N] is True."""
    events = seq.find_split_events(split)
    return events if event_mask is None else events[event_mask[events]]


def find_recommendable_events(seq: Sequences, split: int, event_mask: np.ndarray | None = None) -> np.ndarray:
    """Return the ascending indices of a split's events whose item can be recommended: with `repeats: mask`, all but repeats."""
    events = find_events(seq, split, event_mask)
    return events if seq.repeats == ALLOW else events[~are_repeats(seq, events)]


def are_repeats(seq: Sequences, events: np.ndarray) -> np.ndarray:
    """Return which of the events [n] have an item that their user had before, [n] bool.

    Of many events, only the histories of the requested ones are read, in parts, so that memory is bounded.
    """
    if len(seq.item) <= _MAX_CACHED_EVENTS:
        return seq.repeated[events]
    users = seq.find_users(events)
    is_repeat = np.zeros(len(events), bool)
    for part in split_by_size(events - seq.offsets[users], _MAX_GATHERED):
        index, offsets = expand_ranges(seq.offsets[users[part]], events[part])
        has_same_item = seq.item[index] == np.repeat(seq.item[events[part]], np.diff(offsets))
        matches_before = np.concatenate([[0], np.cumsum(has_same_item)])
        is_repeat[part] = matches_before[offsets[1:]] > matches_before[offsets[:-1]]
    return is_repeat


def find_rl_events(seq: Sequences, event_mask: np.ndarray | None = None) -> np.ndarray:
    """Return the indices of the events that RL may use as prompts, ascending."""
    return find_recommendable_events(seq, RL, event_mask)


def locate_prompts(seq: Sequences, events: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the user rows [n] and positions [n] of events given by index."""
    users = seq.find_users(events)
    return users, events - seq.offsets[users]


def locate_events(seq: Sequences, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the indices [P] of the events at the given positions. Raises IndexError for a position out of range."""
    in_range = (positions >= 0) & (positions < seq.lengths[users])
    if not in_range.all():
        bad = int(np.flatnonzero(~in_range)[0])
        raise IndexError(
            f"user row {users[bad]} has {seq.lengths[users[bad]]} events; position {positions[bad]} was "
            "asked for"
        )
    return seq.offsets[users] + positions


def count_visible_events(seq: Sequences, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Count the events that each prompt sees [P]: all before its position; if `seq.strict`, only those of earlier seconds."""
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
