"""Votes of item transitions: the likely next items after a user's newest events, as the best-voted leaves of the catalogue.

Forbidden items and those outside the catalogue are dropped, then the best V are selected, by their votes (`vote_counter.py`) and,
in a memory with signals (`signals.py`), their similarity with the voters.

With counts of co-occurrence, items that are often in the same histories vote too, as in item KNN (Sarwar et al., 2001):
v(y) = (1 - s) v_transitions(y) + s v_cooccurrence(y), both normalised, with c(x, y) / sqrt(n(x) n(y)) of pairs of a history in
the second, whatever their distance up to `_COOCCURRENCE_REACH`.

Items without a counted event, which no count reaches, may get votes by similarity alone: half of all votes, divided by similarity
among the `_COLD_WIDTH` * V most similar ones. Their last signal is -1, and its fitted weight is how much less they get.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.errors import DataError
from nonet.models.generation.nearest import ItemRows, NearestItems
from nonet.models.generation.signals import SIGNAL_FILES, ItemSearch, ItemSignals, Profiles, open_signals
from nonet.models.generation.trie import Trie
from nonet.models.generation.vote_counter import VoteCells, VoteCounter, VoteOptions
from nonet.ranges import concatenate_rows
from nonet.samples.batches import gather_masked_items
from nonet.samples.sequences import CountOptions, Sequences, Transitions, list_count_names
from nonet.types import Jagged

# Shapes: P prompts, V votes per prompt, X votes of both voters, Y distinct (prompt, voter) pairs, where a voter is the item of
# one of the newest events, Z (prompt, item) pairs with a vote, I items, C items with a row, D width of a row, K signals.

# Candidates per selected leaf whose similarity is computed: those with most votes.
_CANDIDATES_PER_VOTE = 4
# How co-occurring items vote: chosen on validation of five data sets (docs/benchmarks/quality.md, "What was tried").
_COOCCURRENCE_LAST, _COOCCURRENCE_DECAY = 20, 0.7
_COOCCURRENCE_REACH = 20
_COLD_WIDTH = 0.25  # number of leaves of cold items that get votes, relative to the width
COLD_SIGNAL = "cold items"
"""Name of the weight of items without counted events, beside those of the signals."""
COOCCURRENCE_PREFIX = "cooccurrence_"  # of the names of the files of their counts


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


class Voters:
    """Computes the votes of item transitions, and of nearest items, for prompts (users [P], positions [P]) of sequences.

    Args:
        transitions: Counts of item transitions.
        trie: The catalogue.
        options: Options of the votes. Where they leave `decay` out, those apply that validation chose (`choose_votes`).
        signals: Signals of the items; None if the options name none.
        cooccurrence: Counts of co-occurrence; None if the options give them no share.
    """

    def __init__(
        self,
        transitions: Transitions,
        trie: Trie,
        options: VoteOptions | None = None,
        signals: ItemSignals | None = None,
        cooccurrence: Transitions | None = None,
    ):
        options = options or VoteOptions()
        if transitions.chosen and options.decay is None:
            options = replace(options, **transitions.chosen)
        self._transitions, self._trie, self._options = transitions, trie, options
        self._counter = VoteCounter(transitions, self._options)
        self._cooccurrence = None
        if cooccurrence is not None and self._options.cooccurrence > 0:
            self._cooccurrence = make_cooccurrence_counter(cooccurrence)
        self._rows: ItemRows | None = None
        self._signals = signals
        self._cold: ItemSearch | None = None
        if self._options.cold and signals is not None:
            self._cold = ItemSearch.of(
                signals, np.flatnonzero(self._is_cold & (np.asarray(trie.leaf_of_item) >= 0))
            )

    @classmethod
    def open(
        cls,
        files: Mapping[str, Path],
        trie: Trie,
        options: VoteOptions,
        transitions: Transitions | None = None,
    ) -> Voters:
        """Open the voters of a memory.

        Args:
            files: Files of the memory by name (`list_memory_files`).
            trie: The catalogue.
            options: Options of the votes.
            transitions: The counts of transitions if they are open already.

        Raises:
            DataError: A file of a voter or signal that the options name is missing or cannot be used.
        """
        transitions = Transitions.map(files) if transitions is None else transitions
        n_items = len(transitions)
        signals = open_signals(files, options.signals, n_items)
        cooccurrence = open_cooccurrence(files, n_items) if options.cooccurrence else None
        if options.cooccurrence and cooccurrence is None:
            raise DataError(
                "the memory has the voter cooccurrence, and there are no counts of co-occurrence."
            )
        return cls(transitions, trie, options, signals, cooccurrence)

    @property
    def nearest(self) -> bool:
        """Whether the items nearest to a user's state vote too."""
        return self._options.nearest

    @property
    def signal_names(self) -> Sequence[str]:
        """Names of the signals whose similarity with the voters counts, and `COLD_SIGNAL` if cold items get votes."""
        return [*self._options.signals, COLD_SIGNAL] if self._options.cold else self._options.signals

    @cached_property
    def _is_cold(self) -> np.ndarray:
        """Whether each item has no counted event [I] bool."""
        return np.asarray(self._transitions.occurs) == 0

    @property
    def parts(self) -> list[str]:
        """Names of those parts that vote, for `leave_out`: "similarity", "co-occurrence", "nearest items", "cold items"."""
        votes = {
            "similarity": self._signals is not None,
            "co-occurrence": self._cooccurrence is not None,
            "nearest items": self.nearest,
            "cold items": self._cold is not None,
        }
        return [name for name, does_vote in votes.items() if does_vote]

    def leave_out(self, part: str) -> Voters:
        """Return the same voters without one of `parts`; with the same item rows, if these were read."""
        other = copy(self)
        match part:
            case "similarity":
                other._signals = None
            case "co-occurrence":
                other._cooccurrence = None
            case "cold items":
                other._cold = None
            case _:
                other._options = replace(self._options, nearest=False)
        return other

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
        hidden = gather_masked_items(seq, users, positions) if hidden is None else hidden
        cells = self._remove_hidden(self._counter.count_votes(seq, users, positions, voters), hidden, within)
        if self._cooccurrence is not None:
            other = self._remove_hidden(self._cooccurrence.count_votes(seq, users, positions), hidden, within)
            cells = _mix_cells(cells, other, self._options.cooccurrence, len(users), len(self._transitions))
        prompt, item, vote = cells
        leaf = self._trie.leaf_of_item[item].astype(np.int64)
        if within is not None and self.nearest:
            hidden = _append_excluded(hidden, within.list_excluded_items(len(users)))
        nearest = self._make_nearest(hidden)
        width = self._options.width
        if self._signals is None:
            best = find_best(prompt, leaf, vote, width, len(users))
            return replace(_gather_votes(prompt[best], leaf[best], vote[best], len(users)), nearest=nearest)
        profiles = self._signals.make_profiles(*voters, len(users))
        compare = _Comparison(
            profiles, np.asarray(self._trie.item_of_leaf), self._is_cold if self._options.cold else None
        )
        kept = find_best(prompt, leaf, vote, _CANDIDATES_PER_VOTE * width, len(users))
        prompt, leaf, item, vote = prompt[kept], leaf[kept], item[kept], vote[kept]
        similarity, weights = compare.compute(prompt, item), np.asarray(similarity_weights, np.float64)
        best = find_best(prompt, leaf, np.log(vote) + (similarity * weights).sum(1), width, len(users))
        prompt, leaf, item, vote, similarity = (
            cells[best] for cells in (prompt, leaf, item, vote, similarity)
        )
        if self._cold is not None:
            cold = self._vote_for_cold(self._cold, profiles, weights[:-1], hidden, within)
            has_votes = np.isin(cold[0], prompt)  # A prompt without other votes has no memory, as before.
            cold = cold[0][has_votes], cold[1][has_votes], cold[2][has_votes]
            prompt, item, vote = _mix_cells(
                (prompt, item, vote), cold, 0.5, len(users), len(self._transitions)
            )
            leaf, similarity = self._trie.leaf_of_item[item].astype(np.int64), compare.compute(prompt, item)
        votes = _gather_votes(prompt, leaf, vote, len(users), similarity)
        return replace(votes, nearest=nearest, compare=compare)

    def _vote_for_cold(
        self, search: ItemSearch, profiles: Profiles, weights: np.ndarray, hidden: Jagged, within: Any
    ) -> VoteCells:
        """Return the votes for the cold items that are most similar to the voters.

        Args:
            search: The cold items.
            profiles: The words of the voters.
            weights: Weight of each signal [K]; if all are 0, the signals count alike.
            hidden: Items that get no votes.
            within: The sub-catalogue that voted items must belong to.
        """
        n_best = max(1, int(_COLD_WIDTH * self._options.width))
        weights = weights if weights.any() else np.ones_like(weights)
        return search.find_similar(
            profiles, weights, n_best, lambda prompt, item: self._can_vote(prompt, item, hidden, within)
        )

    def _remove_hidden(self, cells: VoteCells, hidden: Jagged, within: Any) -> VoteCells:
        """Return the votes for items of the catalogue, and of the sub-catalogue `within`, that are not hidden."""
        prompt, item, vote = cells
        can_vote = (vote > 0) & self._can_vote(prompt, item, hidden, within)
        return prompt[can_vote], item[can_vote], vote[can_vote]

    def _can_vote(self, prompt: np.ndarray, item: np.ndarray, hidden: Jagged, within: Any) -> np.ndarray:
        """Return which pairs [Z] are of items of the catalogue, and of the sub-catalogue `within`, that are not hidden."""
        leaf = self._trie.leaf_of_item[item].astype(np.int64)
        can_vote = (leaf >= 0) & ~find_hidden(prompt, item, hidden, len(self._transitions))
        if within is not None:
            pairs = torch.from_numpy(prompt[can_vote]), torch.from_numpy(leaf[can_vote])
            excluded = within.mask_excluded_pairs(*pairs, len(hidden.offsets) - 1).numpy()
            can_vote[np.flatnonzero(can_vote)[excluded]] = False
        return can_vote

    def _make_nearest(self, hidden: Jagged) -> NearestItems | None:
        """Prepare the votes of the nearest items, without the hidden ones; None without such a voter."""
        if not self.nearest:
            return None
        assert self._rows is not None, "the rows of the items are read first"
        return NearestItems.of(self._rows, self._trie.leaf_of_item, hidden, self._options.width)


def _gather_votes(
    prompt: np.ndarray,
    leaf: np.ndarray,
    vote: np.ndarray,
    n_prompts: int,
    similarity: np.ndarray | None = None,
) -> Votes:
    """Return votes for (prompt, leaf) pairs, normalised by prompt and ordered by leaf."""
    order = np.lexsort((leaf, prompt))
    row, column = prompt[order], _number_in_rows(prompt[order], n_prompts)
    width = max(1, int(np.bincount(row, minlength=n_prompts).max(initial=0)))
    total = np.bincount(row, weights=vote[order], minlength=n_prompts)
    leaf_PV = np.full((n_prompts, width), -1, np.int64)
    weight_PV = np.zeros((n_prompts, width), np.float32)
    leaf_PV[row, column] = leaf[order]
    weight_PV[row, column] = vote[order] / total[row]
    votes = Votes(torch.from_numpy(leaf_PV), torch.from_numpy(weight_PV))
    if similarity is None:
        return votes
    similarity_PVK = np.zeros((n_prompts, width, similarity.shape[1]), np.float32)
    similarity_PVK[row, column] = similarity[order]
    return replace(votes, similarity=torch.from_numpy(similarity_PVK))


def find_hidden(prompt: np.ndarray, item: np.ndarray, hidden: Jagged, n_items: int) -> np.ndarray:
    """Return which (prompt, item) pairs [Z] bool are among the hidden items of their prompt.

    Args:
        prompt: Prompt of each pair [Z].
        item: Item of each pair [Z].
        hidden: The hidden items of each prompt.
        n_items: Number of items I.
    """
    hidden_prompt = np.repeat(np.arange(len(hidden)), np.diff(hidden.offsets))
    return np.isin(prompt * n_items + item, hidden_prompt * n_items + np.asarray(hidden.values))


def _mix_cells(cells: VoteCells, other: VoteCells, share: float, n_prompts: int, n_items: int) -> VoteCells:
    """Add the votes of two voters, each normalised by prompt, with weight `share` for the second."""
    keys, votes = [], []
    for (prompt, item, vote), weight in zip((cells, other), (1 - share, share), strict=True):
        total = np.bincount(prompt, weights=vote, minlength=n_prompts)
        keys.append(prompt * n_items + item)
        votes.append(weight * vote / total[prompt])
    key, index = np.unique(np.concatenate(keys), return_inverse=True)
    return (
        key // n_items,
        key % n_items,
        np.bincount(index, weights=np.concatenate(votes), minlength=len(key)),
    )


def make_cooccurrence_counter(cooccurrence: Transitions) -> VoteCounter:
    """Return the counter of the votes of co-occurring items."""
    return VoteCounter(cooccurrence, VoteOptions(last=_COOCCURRENCE_LAST, decay=_COOCCURRENCE_DECAY))


def count_cooccurrence(folder: Path, seq: Sequences, options: CountOptions, n_items: int) -> Transitions:
    """Count how often items are in the same histories, write the files beside the counts of transitions, and map them.

    Args:
        folder: The folder of the transitions.
        seq: The sequences.
        options: Options of the transitions, whose kinds of events, half-life and number of neighbours apply.
        n_items: Number of items I.
    """
    options = replace(options, reach=_COOCCURRENCE_REACH, reverse=1.0, cosine=True)
    return Transitions.write(folder, seq, n_items, options, prefix=COOCCURRENCE_PREFIX)


def open_cooccurrence(files: Mapping[str, Path], n_items: int) -> Transitions | None:
    """Open the counts of co-occurrence of a memory; None if it has none.

    Args:
        files: Files of the memory by name (`list_memory_files`).
        n_items: Number of items of the memory's transitions.

    Raises:
        DataError: A file cannot be read, or the counts are of other items.
    """
    names = {name: f"{COOCCURRENCE_PREFIX}{name}" for name in list_count_names()}
    if names["meta"] not in files:
        return None
    counts = Transitions.map({name: files[file] for name, file in names.items()})
    if len(counts) != n_items:
        raise DataError(
            f"the memory counts transitions of {n_items:,} items, and co-occurrence of {len(counts):,} items."
        )
    return counts


def list_memory_files(folder: Path) -> dict[str, Path]:
    """Return the files of a memory in a folder by name: counts of transitions, and those of co-occurrence and signals if any."""
    present = [{name: folder / file for name, file in names.items()} for names in _list_names()]
    return {
        name: path
        for number, files in enumerate(present)
        if number == 0 or list(files.values())[-1].is_file()
        for name, path in files.items()
    }


def get_memory_file_name(name: str) -> str:
    """Return the name in a folder of a file of `list_memory_files`."""
    return {name: file for names in _list_names() for name, file in names.items()}[name]


def _list_names() -> list[dict[str, str]]:
    """Return the names of the files of transitions, co-occurrence and signals by name; the last file of each completes it."""
    cooccurrence = {
        f"{COOCCURRENCE_PREFIX}{name}": file for name, file in list_count_names(COOCCURRENCE_PREFIX).items()
    }
    return [list_count_names(), cooccurrence, SIGNAL_FILES]


@dataclass(frozen=True, slots=True, eq=False)
class _Comparison:
    """Computes the similarities of leaves with the voters of their prompts.

    Attributes:
        profiles: The words of the voters.
        item_of_leaf: Item of each leaf.
        is_cold: Whether each item [I] is cold, for the last signal, `COLD_SIGNAL`; None without this signal.
    """

    profiles: Profiles
    item_of_leaf: np.ndarray
    is_cold: np.ndarray | None

    def compute(self, prompt: np.ndarray, item: np.ndarray) -> np.ndarray:
        """Return the similarities [Z, K] of items [Z] with the voters of their prompts [Z], and -1 for a cold item."""
        similarity = self.profiles.compute_similarities(prompt, item)
        if self.is_cold is None:
            return similarity
        return np.concatenate([similarity, -self.is_cold[item, None].astype(np.float32)], 1)

    def __call__(self, leaf_PX: Tensor) -> Tensor:
        """Return the similarities [P, X, K] on the device of the leaves [P, X]; 0 for a leaf of -1."""
        leaf = leaf_PX.cpu().numpy()
        prompt, column = np.nonzero(leaf >= 0)
        item = self.item_of_leaf[leaf[prompt, column]]
        similarity = self.compute(prompt, item)
        similarity_PXK = np.zeros((*leaf.shape, similarity.shape[1]), np.float32)
        similarity_PXK[prompt, column] = similarity
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
    return concatenate_rows(
        [np.concatenate([values, extra]) for values, extra in zip(rows, items, strict=True)]
    )


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
