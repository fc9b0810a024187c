"""Finds repeats, events whose item their user had before, and chooses how a data set treats them.

With `allow`, items that a user has seen may be recommended. With `mask`, they are never recommended, so a held-out event that
is a repeat is always a miss and is not used as an RL prompt. Code that ranks or recommends calls `gather_masked_items`; code
that leases RL prompts calls `find_rl_events`.
"""

from __future__ import annotations

import numpy as np

from nonet.samples.sequences.split import NAMES, TEST

# Shapes: N events of all users.

ALLOW, MASK = "allow", "mask"
LIMIT = 0.01
"""The share of repeats above which `choose_policy` chooses `allow`.

Masking loses at most the recall of repeats: with 1 % of repeats a hundredth, which is as much as a bootstrap over a few thousand
events can detect. Allowing fills positions of every list with items to which nobody returns. Data of things that are used once
have no repeats (MovieLens, Amazon's reviews, LastFM as published: 0), feeds have many (Yoochoose: 22 %). A share between 0 and
1 % comes from events that were logged twice.
"""


def find_repeats(user: np.ndarray, item: np.ndarray) -> np.ndarray:
    """Return whether the user of each event had its item before, [N] bool.

    Args:
        user: User of each event [N], ascending; a user's events are in time order.
        item: Item of each event [N].
    """
    if not len(user):
        return np.zeros(0, bool)
    pair = (user.astype(np.int64) - int(user[0])) * (int(item.max(initial=0)) + 1) + item
    index_bits = len(pair).bit_length()
    repeated_N = np.ones(len(user), bool)
    if int(pair.max()).bit_length() + index_bits > 63:
        repeated_N[np.unique(pair, return_index=True)[1]] = False
        return repeated_N
    # Sorting integers with the index packed into the low bits is ten times as fast as an argsort.
    packed = np.sort(pair << index_bits | np.arange(len(pair)))
    pair = packed >> index_bits
    is_first = np.concatenate([[True], pair[1:] != pair[:-1]])
    repeated_N[packed[is_first] & (1 << index_bits) - 1] = False
    return repeated_N


def find_duplicates(user: np.ndarray, item: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Return which events duplicate an earlier one, with the same user, item and second, [N] bool.

    A duplicate is one event that was logged twice and not a repeat.

    Args:
        user: User of each event [N], ascending; a user's events are in time order.
        item: Item of each event [N].
        time: Unix seconds of each event [N].
    """
    is_duplicate = np.zeros(len(user), bool)
    tied = np.flatnonzero((user[1:] == user[:-1]) & (time[1:] == time[:-1]))
    tied = np.union1d(tied, tied + 1)  # events in the same second as the one before or after
    if not len(tied):
        return is_duplicate
    order = tied[np.lexsort((tied, item[tied], time[tied], user[tied]))]
    same = [values[order[1:]] == values[order[:-1]] for values in (user, item, time)]
    is_duplicate[order[1:][np.logical_and.reduce(same)]] = True
    return is_duplicate


def choose_policy(counts: np.ndarray, requested: str | None = None) -> str:
    """Return `requested`, or choose between "allow" and "mask" by the share of repeats.

    TEST events are not counted. RL and VALID events are, because the TRAIN events of users with few events are their first ones,
    which do not repeat.

    Args:
        counts: Number of repeats and of all events by split [2, 4], see `count_repeats`.
        requested: The policy that the scenario sets; None to choose.
    """
    if requested is not None:
        return requested
    repeat_count, event_count = (int(by_split.sum() - by_split[TEST]) for by_split in counts)
    return ALLOW if event_count and repeat_count / event_count > LIMIT else MASK


def compute_repeat_shares(counts: np.ndarray) -> dict[str, float]:
    """Return the share of repeats in the events of each split that has events; `counts` are those of `choose_policy`."""
    return {
        name: float(repeat_count / event_count)
        for name, repeat_count, event_count in zip(NAMES, *counts, strict=True)
        if event_count
    }
