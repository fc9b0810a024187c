"""Counts of the votes of item transitions and of co-occurrence for prompts, over all items.

v(y) ~ sum over the last events x of w(x) c(x, y) / sqrt(n(x)), where w(x) is fade^age or (age + 1)^-decay of an event, n(x) the
count of the events of item x, and c(x, y) that of the events of y soon after one of x. At a prompt before a training event, the
counts would contain the events to predict: the user's own events and pairs from that position on are subtracted first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nonet.ranges import expand_ranges
from nonet.samples.batches import count_visible_events
from nonet.samples.sequences import Sequences, Transitions, compute_decay, select_kinds

# Shapes: P prompts, Y distinct (prompt, voter) pairs, where a voter is the item of one of the newest events, I items,
# Z (prompt, item) pairs with a vote.

_ROUNDING = 1e-6  # share of a count that may be left where every occurrence is subtracted

VoteCells = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Prompt [Z], item [Z] and vote [Z] of (prompt, item) pairs, in the order of prompt and item."""


@dataclass(frozen=True, slots=True)
class VoteOptions:
    """Options of the voters.

    Attributes:
        width: Maximum number of leaves that each voter votes for.
        last: Number of newest events that vote.
        fade: Decay of the weight of an event relative to the next newer one.
        nearest: Whether the items nearest to a user's state vote too.
        decay: Exponent of the weight k^-decay of the k-th newest event, instead of `fade`; None for `fade`.
        signals: Names of the signals whose similarity with the voters counts.
        cooccurrence: Share of the votes that comes from co-occurring items; 0 without this voter.
        cold: Whether items without a counted event get votes by their similarity with the voters.
    """

    width: int = 64
    last: int = 5
    fade: float = 0.6
    nearest: bool = False
    decay: float | None = None
    signals: Sequence[str] = ()
    cooccurrence: float = 0.0
    cold: bool = False

    def weigh_ages(self, age: np.ndarray) -> np.ndarray:
        """Return the weight of the events of these ages; the newest event has age 0."""
        return self.fade**age if self.decay is None else (age + 1.0) ** -self.decay


@dataclass(frozen=True, slots=True)
class _OwnEvents:
    """Counted training events of the users of prompts, in the order of prompts and events.

    Attributes:
        prompt: Prompt of each event.
        item: Item of each event, int64.
        weight: Weight of each event in the counts.
        is_unseen: Whether the event is at or after the prompt's position.
    """

    prompt: np.ndarray
    item: np.ndarray
    weight: np.ndarray
    is_unseen: np.ndarray


class VoteCounter:
    """Counts the votes of item transitions for prompts.

    If the counts are those of co-occurrence (`CountOptions.cosine`), the votes for y are also divided by sqrt(n(y)), and an item
    votes for itself as for one that always occurs with it.

    Args:
        transitions: Counts of item transitions.
        options: Options of the votes.
    """

    def __init__(self, transitions: Transitions, options: VoteOptions):
        self._transitions, self._options = transitions, options

    def count_votes(
        self,
        seq: Sequences,
        users: np.ndarray,
        positions: np.ndarray,
        voters: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Compute the votes of transitions for all items: prompt [Z], item [Z] and vote [Z], ordered by prompt and item.

        Args:
            seq: Sequences of events.
            users: User of each prompt.
            positions: Number of events before each prompt.
            voters: The result of `weigh_voters` for these prompts, if it is known.
        """
        n_items, table = len(self._transitions), self._transitions
        voter_prompt, voter_item, voter_weight = voters or self.weigh_voters(seq, users, positions)
        positions = count_visible_events(seq, users, positions)
        pair_key = voter_prompt * n_items + voter_item
        own_events = self._list_own_events(seq, users, positions)
        occurs = self._count_occurrences(pair_key, own_events)
        voter_weight = voter_weight / np.sqrt(occurs)
        transition, offsets = expand_ranges(table.row[voter_item], table.row[voter_item + 1])
        voter = np.repeat(np.arange(len(pair_key)), np.diff(offsets))
        item = table.item[transition].astype(np.int64)
        count = self._subtract_own_pairs(
            table.count[transition], voter * n_items + item, pair_key, own_events
        )
        keys, weights = [voter_prompt[voter] * n_items + item], [voter_weight[voter] * count]
        if table.options.cosine:
            keys.append(pair_key)
            weights.append(voter_weight * occurs)
        distinct_keys, key_index = np.unique(np.concatenate(keys), return_inverse=True)
        vote = np.bincount(key_index, weights=np.concatenate(weights), minlength=len(distinct_keys))
        prompt = distinct_keys // n_items
        if table.options.cosine:
            vote = vote / np.sqrt(self._count_occurrences(distinct_keys, own_events))
        return prompt, distinct_keys % n_items, vote

    def weigh_voters(
        self, seq: Sequences, users: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the distinct (prompt, voter) pairs: prompt [Y], item [Y] and weight [Y], ordered by prompt and item."""
        positions = count_visible_events(seq, users, positions)
        distances = np.arange(1, self._options.last + 1)
        prompt, age = np.nonzero(positions[:, None] >= distances)
        event = seq.offsets[users[prompt]] + positions[prompt] - distances[age]
        if self._transitions.options.events:
            is_counted = select_kinds(seq, self._transitions.options)[event]
            prompt, age, event = prompt[is_counted], age[is_counted], event[is_counted]
        keys = prompt * len(self._transitions) + seq.item[event]
        pair_key, pair_index = np.unique(keys, return_inverse=True)
        weight = np.bincount(pair_index, weights=self._options.weigh_ages(age), minlength=len(pair_key))
        return pair_key // len(self._transitions), pair_key % len(self._transitions), weight

    def _count_occurrences(self, key: np.ndarray, own_events: _OwnEvents) -> np.ndarray:
        """Return n of the item of each (prompt, item) pair without the prompt's own events, at least 1e-12.

        Args:
            key: prompt * I + item of each pair, ascending.
            own_events: The own events of the prompts.
        """
        n_items = len(self._transitions)
        own_keys = (own_events.prompt * n_items + own_events.item)[own_events.is_unseen]
        index = np.searchsorted(key, own_keys).clip(max=max(0, len(key) - 1))
        is_pair = key[index] == own_keys if len(key) else np.zeros(len(own_keys), bool)
        own_occurrences = np.zeros(len(key))
        np.add.at(own_occurrences, index[is_pair], own_events.weight[own_events.is_unseen][is_pair])
        return np.maximum(self._transitions.occurs[key % n_items].astype(np.float64) - own_occurrences, 1e-12)

    def _list_own_events(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> _OwnEvents:
        """List the counted training events of users whose prompts precede one of their training events.

        Held-out events were never counted.
        """
        prompts_in_training = np.flatnonzero(positions < seq.train_lengths[users])
        options = self._transitions.options
        start = seq.offsets[users[prompts_in_training]]
        event, offsets = expand_ranges(start, start + seq.train_lengths[users[prompts_in_training]])
        prompt = np.repeat(prompts_in_training, np.diff(offsets))
        if options.events and len(event):
            is_counted = select_kinds(seq, options)[event]
            event, prompt = event[is_counted], prompt[is_counted]
        is_unseen = event >= seq.offsets[users[prompt]] + positions[prompt]
        weight = compute_decay(seq.time[event], self._transitions.until, options)
        return _OwnEvents(prompt, seq.item[event].astype(np.int64), weight, is_unseen)

    def _subtract_own_pairs(
        self, count: np.ndarray, cell_key: np.ndarray, pair_key: np.ndarray, own: _OwnEvents
    ) -> np.ndarray:
        """Return c without the pairs of the prompts' own events from the prompt's position on.

        Args:
            count: The kept counts c of each voter's neighbours. Of other items, nothing is subtracted.
            cell_key: Index in `pair_key` * I + neighbour of each count, ascending.
            pair_key: prompt * I + item of each (prompt, voter) pair [Y], ascending.
            own: The own events of the prompts.
        """
        if not (len(own.prompt) and len(count)):
            return count.astype(np.float64)
        options, n_items = self._transitions.options, len(self._transitions)
        keys = own.prompt * n_items + own.item
        pair_index = np.searchsorted(pair_key, keys).clip(max=len(pair_key) - 1)
        is_voter = pair_key[pair_index] == keys
        own_count = np.zeros(len(count))

        def add_pairs(voter: np.ndarray, other: np.ndarray, weight: np.ndarray) -> None:
            """Add the weights of pairs to the counts of own pairs, given the indices of both events of each pair."""
            own_key = pair_index[voter] * n_items + own.item[other]
            cell = np.searchsorted(cell_key, own_key).clip(max=len(cell_key) - 1)
            is_kept = cell_key[cell] == own_key
            np.add.at(own_count, cell[is_kept], weight[is_kept])

        for distance, distance_weight in enumerate(options.weigh_distances(), 1):
            is_same_prompt = own.prompt[distance:] == own.prompt[:-distance]
            is_pair = is_same_prompt & is_voter[:-distance] & own.is_unseen[distance:]
            source = np.flatnonzero(is_pair)
            add_pairs(source, source + distance, own.weight[source + distance] * distance_weight)
            if options.reverse:
                later = np.flatnonzero(is_same_prompt & (is_voter & own.is_unseen)[distance:]) + distance
                add_pairs(later, later - distance, options.reverse * own.weight[later] * distance_weight)
        remaining = count - own_count
        remaining[(own_count > 0) & (remaining < _ROUNDING * count)] = 0
        return remaining
