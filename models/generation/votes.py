"""Votes of item transitions: the likely next items after a user's newest events, as the best-voted leaves of the catalogue.

v(y) ~ sum over the last events x, by age, of 0.6^age c(x, y) / sqrt(n(x)); forbidden items and those outside the catalogue are
dropped before the cut to the best V. At a prompt before a training event, the counts would contain its own answer: the user's
own pairs from that position on are subtracted first, together with the occurrences of their voters.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.models.generation.nearest import ItemRows, NearestItems
from nonet.models.generation.trie import Trie
from nonet.ranges import expand_ranges
from nonet.samples.batches import count_visible_events, gather_masked_items
from nonet.samples.sequences import Sequences, Transitions, compute_decay, select_kinds
from nonet.types import Jagged

# Shapes: P prompts, V votes per prompt, Y distinct (prompt, voter) pairs, C (prompt, item) cells, I items.


@dataclass(frozen=True, slots=True)
class Votes:
    """Votes for the leaves of P prompts.

    Attributes:
        leaf: Distinct leaves [P, V] int64, -1 for none.
        weight: Votes [P, V] float32, which sum to 1 per prompt, or to 0 without votes.
        nearest: Deferred votes by nearness, which need the model's states; None without such a voter.
    """

    leaf: Tensor
    weight: Tensor
    nearest: NearestItems | None = None

    def to(self, device: Any) -> Votes:
        """Return the votes on a device."""
        return Votes(self.leaf.to(device), self.weight.to(device), self.nearest)

    def mix_nearest(self, model: Any, state_PD: Tensor, share: float) -> Votes:
        """Add the votes of the items nearest to the states with weight `share`, if there are such voters; differentiable."""
        if self.nearest is None or not share:
            return Votes(self.leaf, self.weight)
        leaf, transitions, nearest = self.merge_voters(model, state_PD)
        return Votes(leaf, mix_vote_shares(transitions, nearest, share))

    def merge_voters(self, model: Any, state_PD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the leaves [P, X] of both voters, and the votes of transitions and of nearest items for them [P, X]."""
        if self.nearest is None:
            return self.leaf, self.weight, torch.zeros_like(self.weight)
        return merge_votes(self, *self.nearest.compute_votes(model, state_PD))


@dataclass(frozen=True, slots=True)
class VoteOptions:
    """Options of the voters.

    Attributes:
        width: Maximum number of leaves that each voter votes for.
        last: Number of newest events that vote.
        fade: Decay of the weight of an event relative to the next newer one.
        nearest: Whether the items nearest to a user's state vote too.
    """

    width: int = 64
    last: int = 5
    fade: float = 0.6
    nearest: bool = False


class Voters:
    """Computes votes over a catalogue from transitions, for prompts (users [P], positions [P]) of sequences."""

    def __init__(self, transitions: Transitions, trie: Trie, options: VoteOptions | None = None):
        self._transitions, self._trie, self._options = transitions, trie, options or VoteOptions()
        self._rows: ItemRows | None = None

    @property
    def nearest(self) -> bool:
        """Whether the items nearest to a user's state vote too."""
        return self._options.nearest

    @cached_property
    def items(self) -> np.ndarray:
        """Items [C] that can vote by nearness: those of the catalogue with a counted event, ordered by leaf."""
        leaf = np.asarray(self._trie.leaf_of_item)
        some = np.flatnonzero((np.asarray(self._transitions.occurs) > 0) & (leaf >= 0))
        return some[np.argsort(leaf[some], kind="stable")]

    def read(self, row_CD: Tensor) -> None:
        """Set the rows of `items` that the next votes use."""
        leaf_C = torch.from_numpy(np.asarray(self._trie.leaf_of_item)[self.items].astype(np.int64))
        self._rows = ItemRows(leaf_C, row_CD)

    def replace_rows(self, change: Callable[[Tensor], Tensor]) -> Voters:
        """Return voters with other item rows: `change` applied to the rows [C, D] that were read."""
        if not self.nearest:
            return self
        assert self._rows is not None, "the rows of the items are read first"
        other = copy(self)
        other._rows = ItemRows(self._rows.leaf, change(self._rows.row))
        return other

    def compute_votes(
        self,
        seq: Sequences,
        users: np.ndarray,
        positions: np.ndarray,
        hidden: Jagged | None = None,
        within: Any = None,
    ) -> Votes:
        """Compute the votes for each prompt.

        Args:
            seq: Sequences of events.
            users: User of each prompt.
            positions: Number of events before each prompt.
            hidden: Items that get no votes; by default those that the data's policy masks.
            within: The `SubCatalogue` that voted items must belong to.
        """
        prompt, item, vote = self.count_votes(seq, users, positions)
        leaf = self._trie.leaf_of_item[item].astype(np.int64)
        hidden = gather_masked_items(seq, users, positions) if hidden is None else hidden
        n_items = len(self._transitions)
        barred = np.repeat(np.arange(len(users)), np.diff(hidden.offsets)) * n_items + hidden.values
        chosen = (vote > 0) & (leaf >= 0) & ~np.isin(prompt * n_items + item, barred)
        if within is not None:
            pairs = torch.from_numpy(prompt[chosen]), torch.from_numpy(leaf[chosen])
            chosen[np.flatnonzero(chosen)[within.mask_excluded_pairs(*pairs, len(users)).numpy()]] = False
            hidden = (
                _append_excluded(hidden, within.list_excluded_items(len(users))) if self.nearest else hidden
            )
        votes = self._cut(prompt[chosen], leaf[chosen], vote[chosen], len(users))
        return replace(votes, nearest=self._make_nearest(hidden))

    def _make_nearest(self, hidden: Jagged) -> NearestItems | None:
        if not self.nearest:
            return None
        assert self._rows is not None, "the rows of the items are read first"
        return NearestItems.of(self._rows, self._trie.leaf_of_item, hidden, self._options.width)

    def count_votes(
        self, seq: Sequences, users: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Compute all votes before masks and the cut: prompt, item and vote, each [C], ordered by prompt and item."""
        n_items, table = len(self._transitions), self._transitions
        positions = count_visible_events(seq, users, positions)
        pair, power = self._weigh_voters(seq, users, positions)
        later, taken = self._count_own_events(seq, users, positions, pair)
        occurs = np.maximum(table.occurs[pair % n_items].astype(np.float64) - later, 1e-12)
        power = power / np.sqrt(occurs)
        voter = pair % n_items
        edge, offsets = expand_ranges(table.row[voter], table.row[voter + 1])
        lengths = np.diff(offsets)
        keys = [np.repeat(pair // n_items, lengths) * n_items + table.item[edge]]
        weights = [np.repeat(power, lengths) * table.count[edge]]
        for place, item, weight in taken:
            keys.append(pair[place] // n_items * n_items + item)
            weights.append(-power[place] * weight)
        cell, where = np.unique(np.concatenate(keys), return_inverse=True)
        vote = np.bincount(where, weights=np.concatenate(weights), minlength=len(cell))
        vote[vote < 1e-6 * vote.max(initial=0.0)] = 0  # what is left of a pair that was taken out whole
        return cell // n_items, cell % n_items, vote

    def _weigh_voters(
        self, seq: Sequences, users: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct (prompt, voter) pairs as prompt * I + item [Y], ascending, and the weight of each."""
        back = np.arange(1, self._options.last + 1)
        prompt, age = np.nonzero(positions[:, None] >= back)
        event = seq.offsets[users[prompt]] + positions[prompt] - back[age]
        if self._transitions.options.events:
            right = select_kinds(seq, self._transitions.options)[event]
            prompt, age, event = prompt[right], age[right], event[right]
        key = prompt * len(self._transitions) + seq.item[event]
        pair, where = np.unique(key, return_inverse=True)
        return pair, np.bincount(where, weights=self._options.fade**age, minlength=len(pair))

    def _count_own_events(
        self, seq: Sequences, users: np.ndarray, positions: np.ndarray, pair: np.ndarray
    ) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
        """Find what the users' own training events from the prompt's position on added to the counts.

        Held-out events were never counted.

        Returns:
            The addition to n of each (prompt, voter) [Y], and additions to its pairs as (index in `pair`, item, weight).
        """
        later = np.zeros(len(pair))
        asked = np.flatnonzero(positions < seq.train_lengths[users])
        if not len(asked):
            return later, []
        options, n_items = self._transitions.options, len(self._transitions)
        start = seq.offsets[users[asked]]
        event, offsets = expand_ranges(start, start + seq.train_lengths[users[asked]])
        prompt = np.repeat(asked, np.diff(offsets))
        if options.events:
            right = select_kinds(seq, options)[event]
            event, prompt = event[right], prompt[right]
        after = event >= seq.offsets[users[prompt]] + positions[prompt]
        weight = compute_decay(seq.time[event], self._transitions.until, options)
        key = prompt * n_items + seq.item[event]
        place = np.searchsorted(pair, key).clip(max=max(0, len(pair) - 1))
        votes = pair[place] == key if len(pair) else np.zeros(len(key), bool)
        np.add.at(later, place[votes & after], weight[votes & after])
        taken = []
        for step in range(1, options.reach + 1):
            same = (prompt[step:] == prompt[:-step]) & votes[:-step] & after[step:]
            source = np.flatnonzero(same)
            taken.append((place[source], seq.item[event[source + step]], weight[source + step] / step))
        return later, taken

    def _cut(self, prompt: np.ndarray, leaf: np.ndarray, vote: np.ndarray, prompts: int) -> Votes:
        """Keep the best `width` leaves of each prompt (ties to the lower leaf), normalised and ordered by leaf."""
        order = np.lexsort((leaf, -vote, prompt))
        place = _number_in_rows(prompt[order], prompts)
        best = order[place < self._options.width]
        best = best[np.lexsort((leaf[best], prompt[best]))]
        width = max(1, int(np.bincount(prompt[best], minlength=prompts).max(initial=0)))
        row, column = prompt[best], _number_in_rows(prompt[best], prompts)
        total = np.bincount(row, weights=vote[best], minlength=prompts)
        leaf_PV, weight_PV = np.full((prompts, width), -1, np.int64), np.zeros((prompts, width), np.float32)
        leaf_PV[row, column] = leaf[best]
        weight_PV[row, column] = vote[best] / total[row]
        return Votes(torch.from_numpy(leaf_PV), torch.from_numpy(weight_PV))


def _number_in_rows(row: np.ndarray, rows: int) -> np.ndarray:
    """Return the index of each entry within its row; rows are ascending."""
    return np.arange(len(row)) - np.searchsorted(row, np.arange(rows))[row]


def _append_excluded(hidden: Jagged, out: list[np.ndarray]) -> Jagged:
    """Append more hidden items to each row of `hidden`."""
    rows = [hidden.values[start:stop] for start, stop in pairwise(np.asarray(hidden.offsets).tolist())]
    together = [np.concatenate([row, more]) for row, more in zip(rows, out, strict=True)]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(row) for row in together])])
    return Jagged(np.concatenate(together), offsets)


def merge_votes(votes: Votes, leaf_PV: Tensor, vote_PV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the leaves of both voters.

    Returns:
        The distinct leaves [P, X], padded with -1, and the votes of transitions and of nearest items for them, [P, X] each.
    """
    none_PV, last = torch.zeros_like(vote_PV), torch.iinfo(torch.int64).max
    leaf_PX = torch.cat([votes.leaf, leaf_PV], 1)
    leaf_PX, order_PX = leaf_PX.masked_fill(leaf_PX < 0, last).sort(dim=1, stable=True)
    said = torch.stack(
        [
            torch.cat([votes.weight, none_PV], 1).gather(1, order_PX),
            torch.cat([torch.zeros_like(votes.weight), vote_PV], 1).gather(1, order_PX),
        ]
    )
    again_PX = torch.zeros_like(leaf_PX, dtype=torch.bool)
    again_PX[:, 1:] = (leaf_PX[:, 1:] == leaf_PX[:, :-1]) & (leaf_PX[:, 1:] < last)
    second = said.masked_fill(~again_PX, 0.0)
    first = said.masked_fill(again_PX, 0.0)
    said = first + torch.cat([second[..., 1:], torch.zeros_like(second[..., :1])], -1)
    return leaf_PX.masked_fill(again_PX | (leaf_PX == last), -1), said[0], said[1]


def mix_vote_shares(transitions_PX: Tensor, nearest_PX: Tensor, share: float) -> Tensor:
    """Mix the votes [P, X] of both voters with share m for the nearest items, or 1 for prompts without votes of transitions."""
    some_P1 = transitions_PX.sum(1, keepdim=True) > 0
    return torch.where(some_P1, (1 - share) * transitions_PX + share * nearest_PX, nearest_PX)
