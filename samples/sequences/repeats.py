"""Finds events that return to an item, and decides how a data set treats them.

`allow`: items that were seen may be recommended; nothing is masked. `mask`: they are never recommended; a held-out event
that returns to one is always a miss and is not an RL prompt. Code that ranks or recommends calls `gather_masked_items`; code
that leases RL prompts calls `find_rl_events`.
"""

from __future__ import annotations

import numpy as np

from nonet.samples.sequences.split import NAMES, TEST

# Shapes: N events of all users.

ALLOW, MASK = "allow", "mask"
LIMIT = 0.01
"""The share of repeats above which the data itself chooses `allow`.

Masking costs at most what it makes impossible: with 1 % of repeats a hundredth of recall, as much as a bootstrap over
a few thousand events can tell. Allowing costs every list the places of items that nobody returns to. Data of things
used once have none (MovieLens, Amazon's reviews, LastFM as published: 0), feeds many (Yoochoose: 22 %), so what lies
between 0 and 1 % is events logged twice.
"""


def find_repeats(user: np.ndarray, item: np.ndarray) -> np.ndarray:
    """Return whether a user had an event's item before [N] bool.

    Args:
        user: User of each event [N], ascending; a user's events are in time order.
        item: Item of each event [N].
    """
    if not len(user):
        return np.zeros(0, bool)
    pair = (user.astype(np.int64) - int(user[0])) * (int(item.max(initial=0)) + 1) + item
    bits = len(pair).bit_length()
    repeated_N = np.ones(len(user), bool)
    if int(pair.max()).bit_length() + bits > 63:
        repeated_N[np.unique(pair, return_index=True)[1]] = False
        return repeated_N
    ordered = np.sort(
        pair << bits | np.arange(len(pair))
    )  # sorting packed integers is ten times as fast as an argsort
    pair = ordered >> bits
    first = np.concatenate([[True], pair[1:] != pair[:-1]])
    repeated_N[ordered[first] & (1 << bits) - 1] = False
    return repeated_N


def find_duplicates(user: np.ndarray, item: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Return which events [N] bool duplicate an earlier one: same user, item and second.

    A duplicate is not a return to an item, so it says nothing about the behaviour of users.

    Args:
        user: User of each event [N], ascending; a user's events are in time order.
        item: Item of each event [N].
        time: Unix seconds of each event [N].
    """
    again = np.zeros(len(user), bool)
    near = np.flatnonzero((user[1:] == user[:-1]) & (time[1:] == time[:-1]))
    near = np.union1d(near, near + 1)
    if not len(near):
        return again
    order = near[np.lexsort((near, item[near], time[near], user[near]))]
    same = [values[order[1:]] == values[order[:-1]] for values in (user, item, time)]
    again[order[1:][np.logical_and.reduce(same)]] = True
    return again


def choose_policy(counts: np.ndarray, requested: str | None = None) -> str:
    """Return `requested`, or the policy that the share of repeats suggests.

    TEST events are not used. RL and VALID events are, because users with few events train on their first ones, which do not
    repeat.

    Args:
        counts: Repeating events and all events by split [2, 4].
        requested: The policy that the scenario sets; None to decide.
    """
    if requested is not None:
        return requested
    back, known = (int(row.sum() - row[TEST]) for row in counts)
    return ALLOW if known and back / known > LIMIT else MASK


def compute_repeat_shares(counts: np.ndarray) -> dict[str, float]:
    """Return the share of repeated items in the events of each split that has any, from counts as in `choose_policy`."""
    return {name: float(back / n) for name, back, n in zip(NAMES, *counts, strict=True) if n}
