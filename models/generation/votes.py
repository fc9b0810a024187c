"""Votes of item transitions: the likely next items after a user's newest events, as the best-voted leaves of the catalogue.

v(y) ~ sum over the last events x of w(x) c(x, y) / sqrt(n(x)), where w(x) is fade^age or (age + 1)^-decay of an event, n(x) the
count of the events of item x, and c(x, y) that of the events of y soon after one of x. Forbidden items and those outside the
catalogue are dropped, then the best V are selected, by their votes and, in a memory with signals (`signals.py`), their similarity
with the voters. At a prompt before a training event, the counts would contain the events to predict: the user's own events and
pairs from that position on are subtracted first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.models.generation.nearest import ItemRows, NearestItems
from nonet.models.generation.signals import ItemSignals, Profiles
from nonet.models.generation.trie import Trie
from nonet.ranges import expand_ranges
from nonet.samples.batches import count_visible_events, gather_masked_items
from nonet.samples.sequences import Sequences, Transitions, compute_decay, select_kinds
from nonet.types import Jagged

# Shapes: P prompts, V votes per prompt, X votes of both voters, Y distinct (prompt, voter) pairs, where a voter is the item of
# one of the newest events, Z (prompt, item) pairs with a vote, I items, C items with a row, D width of a row, K signals.

# Candidates per selected leaf whose similarity is computed: those with most votes.
_CANDIDATES_PER_VOTE = 4


@dataclass(frozen=True, slots=True)
class Votes:
    """Votes for the leaves of P prompts.

    Attributes:
        leaf: Distinct leaves [P, V] int64, -1 for none.
        weight: Share of each leaf in the votes [P, V] float32; they sum to 1 per prompt, or to 0 without votes.
        nearest: Votes by nearness, which are computed from the model's states; None without such a voter.
        similarity: Similarity of each leaf's item with the voters by signal [P, V, K]; None without signals.
        compare: Computes the similarities [P, X, K] of other leaves [P, X]; None without signals.
    """

    leaf: Tensor
    weight: Tensor
    nearest: NearestItems | None = None
    similarity: Tensor | None = None
    compare: Callable[[Tensor], Tensor] | None = None

    def to(self, device: Any) -> Votes:
        """Return the votes on a device."""
        similarity = None if self.similarity is None else self.similarity.to(device)
        return replace(self, leaf=self.leaf.to(device), weight=self.weight.to(device), similarity=similarity)

    def mix_nearest(self, model: Any, state_PD: Tensor, share: float) -> Votes:
        """Mix in the votes of the items nearest to the states with weight `share`, if there is such a voter; differentiable."""
        if self.nearest is None or not share:
            return replace(self, nearest=None)
        votes, nearest = self.merge_voters(model, state_PD)
        return replace(votes, weight=mix_vote_shares(votes.weight, nearest, share))

    def merge_voters(self, model: Any, state_PD: Tensor) -> tuple[Votes, Tensor]:
        """Return the votes of transitions for the leaves of both voters [P, X], and those of nearest items for them [P, X]."""
        if self.nearest is None:
            return self, torch.zeros_like(self.weight)
        leaf, transitions, nearest = merge_votes(self, *self.nearest.compute_votes(model, state_PD))
        similarity = None if self.compare is None else self.compare(leaf)
        return Votes(leaf, transitions, similarity=similarity), nearest


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
    """

    width: int = 64
    last: int = 5
    fade: float = 0.6
    nearest: bool = False
    decay: float | None = None
    signals: Sequence[str] = ()

    def weigh_ages(self, age: np.ndarray) -> np.ndarray:
        """Return the weight of the events of these ages; the newest event has age 0."""
        return self.fade**age if self.decay is None else (age + 1.0) ** -self.decay


class VoteCounter:
    """Counts the votes of item transitions for prompts.

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
        own_occurrences, own_pairs = self._count_own_events(seq, users, positions, pair_key)
        occurs = np.maximum(table.occurs[voter_item].astype(np.float64) - own_occurrences, 1e-12)
        voter_weight = voter_weight / np.sqrt(occurs)
        transition, offsets = expand_ranges(table.row[voter_item], table.row[voter_item + 1])
        lengths = np.diff(offsets)
        keys = [np.repeat(voter_prompt, lengths) * n_items + table.item[transition]]
        weights = [np.repeat(voter_weight, lengths) * table.count[transition]]
        for pair_index, item, weight in own_pairs:
            keys.append(pair_key[pair_index] // n_items * n_items + item)
            weights.append(-voter_weight[pair_index] * weight)
        distinct_keys, key_index = np.unique(np.concatenate(keys), return_inverse=True)
        vote = np.bincount(key_index, weights=np.concatenate(weights), minlength=len(distinct_keys))
        # Pairs whose every occurrence is subtracted leave a rounding error.
        prompt, largest = distinct_keys // n_items, np.zeros(len(users))
        np.maximum.at(largest, prompt, vote)
        vote[vote < 1e-6 * largest[prompt]] = 0
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

    def _count_own_events(
        self, seq: Sequences, users: np.ndarray, positions: np.ndarray, pair_key: np.ndarray
    ) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
        """Compute the part of the counts that comes from the users' own training events from the prompt's position on.

        Held-out events were never counted.

        Returns:
            The part of n for each (prompt, voter) pair [Y], and that of c as arrays (index in `pair_key`, item, weight).
        """
        own_occurrences = np.zeros(len(pair_key))
        prompts_in_training = np.flatnonzero(positions < seq.train_lengths[users])
        if not len(prompts_in_training):
            return own_occurrences, []
        options, n_items = self._transitions.options, len(self._transitions)
        start = seq.offsets[users[prompts_in_training]]
        event, offsets = expand_ranges(start, start + seq.train_lengths[users[prompts_in_training]])
        prompt = np.repeat(prompts_in_training, np.diff(offsets))
        if options.events:
            is_counted = select_kinds(seq, options)[event]
            event, prompt = event[is_counted], prompt[is_counted]
        is_unseen = event >= seq.offsets[users[prompt]] + positions[prompt]
        weight = compute_decay(seq.time[event], self._transitions.until, options)
        keys = prompt * n_items + seq.item[event]
        pair_index = np.searchsorted(pair_key, keys).clip(max=max(0, len(pair_key) - 1))
        is_voter = pair_key[pair_index] == keys if len(pair_key) else np.zeros(len(keys), bool)
        np.add.at(own_occurrences, pair_index[is_voter & is_unseen], weight[is_voter & is_unseen])
        own_pairs = []
        for distance in range(1, options.reach + 1):
            is_pair = (prompt[distance:] == prompt[:-distance]) & is_voter[:-distance] & is_unseen[distance:]
            source = np.flatnonzero(is_pair)
            pair_weight = weight[source + distance] / distance
            own_pairs.append((pair_index[source], seq.item[event[source + distance]], pair_weight))
            if options.reverse:
                is_pair = (prompt[distance:] == prompt[:-distance]) & (is_voter & is_unseen)[distance:]
                later = np.flatnonzero(is_pair) + distance
                pair_weight = options.reverse * weight[later] / distance
                own_pairs.append((pair_index[later], seq.item[event[later - distance]], pair_weight))
        return own_occurrences, own_pairs


class Voters:
    """Computes the votes of item transitions, and of nearest items, for prompts (users [P], positions [P]) of sequences.

    Args:
        transitions: Counts of item transitions.
        trie: The catalogue.
        options: Options of the votes.
        signals: Signals of the items; None if the options name none.
    """

    def __init__(
        self,
        transitions: Transitions,
        trie: Trie,
        options: VoteOptions | None = None,
        signals: ItemSignals | None = None,
    ):
        self._transitions, self._trie, self._options = transitions, trie, options or VoteOptions()
        self._counter = VoteCounter(transitions, self._options)
        self._rows: ItemRows | None = None
        self._signals = signals

    @property
    def nearest(self) -> bool:
        """Whether the items nearest to a user's state vote too."""
        return self._options.nearest

    @property
    def signal_names(self) -> Sequence[str]:
        """Names of the signals whose similarity with the voters counts."""
        return self._options.signals

    @cached_property
    def items(self) -> np.ndarray:
        """Items [C] that can vote by nearness: those of the catalogue with a counted event, ordered by leaf."""
        leaf = np.asarray(self._trie.leaf_of_item)
        can_vote = np.flatnonzero((np.asarray(self._transitions.occurs) > 0) & (leaf >= 0))
        return can_vote[np.argsort(leaf[can_vote], kind="stable")]

    def read(self, row_CD: Tensor) -> None:
        """Set the rows [C, D] of `items`, which later votes by nearness use."""
        leaf_C = torch.from_numpy(np.asarray(self._trie.leaf_of_item)[self.items].astype(np.int64))
        self._rows = ItemRows(leaf_C, row_CD)

    def replace_rows(self, convert: Callable[[Tensor], Tensor]) -> Voters:
        """Return voters with other item rows: `convert` applied to the rows [C, D] that were read."""
        if not self.nearest:
            return self
        assert self._rows is not None, "the rows of the items are read first"
        other = copy(self)
        other._rows = ItemRows(self._rows.leaf, convert(self._rows.row))
        return other

    def compute_votes(
        self,
        seq: Sequences,
        users: np.ndarray,
        positions: np.ndarray,
        hidden: Jagged | None = None,
        within: Any = None,
        similarity_weights: Sequence[float] = (),
    ) -> Votes:
        """Compute the votes for each prompt.

        Args:
            seq: Sequences of events.
            users: User of each prompt.
            positions: Number of events before each prompt.
            hidden: Items that get no votes; by default those that the data's policy masks.
            within: The `SubCatalogue` that voted items must belong to.
            similarity_weights: Weight of each signal beside the logarithm of an item's votes, by which voted leaves are selected.
        """
        voters = self._counter.weigh_voters(seq, users, positions)
        prompt, item, vote = self._counter.count_votes(seq, users, positions, voters)
        leaf = self._trie.leaf_of_item[item].astype(np.int64)
        hidden = gather_masked_items(seq, users, positions) if hidden is None else hidden
        n_items = len(self._transitions)
        hidden_keys = np.repeat(np.arange(len(users)), np.diff(hidden.offsets)) * n_items + hidden.values
        can_vote = (vote > 0) & (leaf >= 0) & ~np.isin(prompt * n_items + item, hidden_keys)
        if within is not None:
            pairs = torch.from_numpy(prompt[can_vote]), torch.from_numpy(leaf[can_vote])
            can_vote[np.flatnonzero(can_vote)[within.mask_excluded_pairs(*pairs, len(users)).numpy()]] = False
            hidden = (
                _append_excluded(hidden, within.list_excluded_items(len(users))) if self.nearest else hidden
            )
        prompt, leaf, item, vote = prompt[can_vote], leaf[can_vote], item[can_vote], vote[can_vote]
        nearest = self._make_nearest(hidden)
        if self._signals is None:
            return replace(self._select_best(prompt, leaf, vote, vote, len(users)), nearest=nearest)
        profiles = self._signals.make_profiles(*voters, len(users))
        n_candidates = _CANDIDATES_PER_VOTE * self._options.width
        kept = find_best(prompt, leaf, vote, n_candidates, len(users))
        prompt, leaf, item, vote = prompt[kept], leaf[kept], item[kept], vote[kept]
        similarity = profiles.compute_similarities(prompt, item)
        score = np.log(vote) + (similarity * np.asarray(similarity_weights, np.float64)).sum(1)
        votes = self._select_best(prompt, leaf, score, vote, len(users), similarity)
        return replace(
            votes, nearest=nearest, compare=_Comparison(profiles, np.asarray(self._trie.item_of_leaf))
        )

    def _make_nearest(self, hidden: Jagged) -> NearestItems | None:
        """Prepare the votes of the nearest items, without the hidden ones; None without such a voter."""
        if not self.nearest:
            return None
        assert self._rows is not None, "the rows of the items are read first"
        return NearestItems.of(self._rows, self._trie.leaf_of_item, hidden, self._options.width)

    def _select_best(
        self,
        prompt: np.ndarray,
        leaf: np.ndarray,
        score: np.ndarray,
        vote: np.ndarray,
        n_prompts: int,
        similarity: np.ndarray | None = None,
    ) -> Votes:
        """Select the `width` leaves of each prompt with the highest scores; normalise their votes and order them by leaf."""
        best = find_best(prompt, leaf, score, self._options.width, n_prompts)
        best = best[np.lexsort((leaf[best], prompt[best]))]
        width = max(1, int(np.bincount(prompt[best], minlength=n_prompts).max(initial=0)))
        row, column = prompt[best], _number_in_rows(prompt[best], n_prompts)
        total = np.bincount(row, weights=vote[best], minlength=n_prompts)
        leaf_PV = np.full((n_prompts, width), -1, np.int64)
        weight_PV = np.zeros((n_prompts, width), np.float32)
        leaf_PV[row, column] = leaf[best]
        weight_PV[row, column] = vote[best] / total[row]
        votes = Votes(torch.from_numpy(leaf_PV), torch.from_numpy(weight_PV))
        if similarity is None:
            return votes
        similarity_PVK = np.zeros((n_prompts, width, similarity.shape[1]), np.float32)
        similarity_PVK[row, column] = similarity[best]
        return replace(votes, similarity=torch.from_numpy(similarity_PVK))


@dataclass(frozen=True, slots=True, eq=False)
class _Comparison:
    """Computes the similarities of leaves with the voters of their prompts.

    Attributes:
        profiles: The words of the voters.
        item_of_leaf: Item of each leaf.
    """

    profiles: Profiles
    item_of_leaf: np.ndarray

    def __call__(self, leaf_PX: Tensor) -> Tensor:
        """Return the similarities [P, X, K] on the device of the leaves [P, X]; 0 for a leaf of -1."""
        leaf = leaf_PX.cpu().numpy()
        prompt, column = np.nonzero(leaf >= 0)
        item = self.item_of_leaf[leaf[prompt, column]]
        n_signals = len(self.profiles.signals.names)
        similarity_PXK = np.zeros((*leaf.shape, n_signals), np.float32)
        similarity_PXK[prompt, column] = self.profiles.compute_similarities(prompt, item)
        return torch.from_numpy(similarity_PXK).to(leaf_PX.device)


def find_best(
    prompt: np.ndarray, item: np.ndarray, score: np.ndarray, n_best: int, n_prompts: int
) -> np.ndarray:
    """Find the items or leaves with the highest scores of each prompt; ties prefer the lower one.

    Args:
        prompt: Prompt of each (prompt, item) pair [Z].
        item: Item or leaf of each pair [Z].
        score: Score of each pair [Z].
        n_best: Maximum number of pairs per prompt.
        n_prompts: Number of prompts.

    Returns:
        The indices of these pairs, by prompt, the best ones first.
    """
    order = np.lexsort((item, -score, prompt))
    return order[_number_in_rows(prompt[order], n_prompts) < n_best]


def _number_in_rows(row: np.ndarray, n_rows: int) -> np.ndarray:
    """Return the index of each entry within its row, for the ascending row numbers `row` of the entries."""
    return np.arange(len(row)) - np.searchsorted(row, np.arange(n_rows))[row]


def _append_excluded(hidden: Jagged, items: list[np.ndarray]) -> Jagged:
    """Append `items`, one array per row, to the hidden items of each row."""
    rows = [hidden.values[start:stop] for start, stop in pairwise(np.asarray(hidden.offsets).tolist())]
    joined_rows = [np.concatenate([values, extra]) for values, extra in zip(rows, items, strict=True)]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(values) for values in joined_rows])])
    return Jagged(np.concatenate(joined_rows), offsets)


def merge_votes(votes: Votes, leaf_PV: Tensor, vote_PV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the leaves of both voters.

    Returns:
        The distinct leaves [P, X], padded with -1, and the votes of transitions and of nearest items for them, [P, X] each.
    """
    none_PV, padding = torch.zeros_like(vote_PV), torch.iinfo(torch.int64).max
    leaf_PX = torch.cat([votes.leaf, leaf_PV], 1)
    leaf_PX, order_PX = leaf_PX.masked_fill(leaf_PX < 0, padding).sort(dim=1, stable=True)
    votes_2PX = torch.stack(
        [
            torch.cat([votes.weight, none_PV], 1).gather(1, order_PX),
            torch.cat([torch.zeros_like(votes.weight), vote_PV], 1).gather(1, order_PX),
        ]
    )
    is_repeat_PX = torch.zeros_like(leaf_PX, dtype=torch.bool)
    is_repeat_PX[:, 1:] = (leaf_PX[:, 1:] == leaf_PX[:, :-1]) & (leaf_PX[:, 1:] < padding)
    second = votes_2PX.masked_fill(~is_repeat_PX, 0.0)
    first = votes_2PX.masked_fill(is_repeat_PX, 0.0)
    # A leaf of both voters stands twice in a row; its second entry is added to the first.
    votes_2PX = first + torch.cat([second[..., 1:], torch.zeros_like(second[..., :1])], -1)
    return leaf_PX.masked_fill(is_repeat_PX | (leaf_PX == padding), -1), votes_2PX[0], votes_2PX[1]


def mix_vote_shares(transitions_PX: Tensor, nearest_PX: Tensor, share: float) -> Tensor:
    """Mix the votes [P, X] of both voters; the nearest items have weight `share`, or 1 where transitions have no votes."""
    has_transitions_P1 = transitions_PX.sum(1, keepdim=True) > 0
    return torch.where(has_transitions_P1, (1 - share) * transitions_PX + share * nearest_PX, nearest_PX)
