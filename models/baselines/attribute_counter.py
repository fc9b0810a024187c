"""A baseline without training: transitions of items, weighted by the similarity of items with the history.

    score(y) = log v(y) + sum_k g_k s_k(y)

v(y) are the votes of the ten newest events x, of weight 1 / age^decay, by the pairs of x and y that are up to six events apart
(`models/generation/votes.py`), and s_k(y) the similarity of y with the same events in a column of words of the items
(`models/generation/signals.py`). The weight of reversed pairs, the decay and each g are those with the best NDCG@10 of validation
events. Items without votes are ranked by popularity, below all others. On Amazon Toys and Sports a rule of this kind ranked above
every trained model that was found in print (0.0711 and 0.0359 NDCG@10).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pyarrow as pa

from nonet.models.baselines.base import BaselineSpec, SparseVotes
from nonet.models.baselines.popularity import Popularity
from nonet.models.baselines.transition_counter import score_all_items
from nonet.models.generation import ItemSignals, VoteCounter, VoteOptions
from nonet.models.tokenizer import compute_signals, list_word_columns
from nonet.random import rng
from nonet.samples.batches import (
    find_recommendable_events,
    gather_masked_items,
    locate_events,
    locate_prompts,
)
from nonet.samples.sequences import TRAIN, VALID, CountOptions, Sequences, Transitions

# Shapes: P prompts, Z (prompt, item) pairs with votes, I items, K signals.
_REACH, _VOTERS = 6, 10  # Largest distance of a pair in events; number of newest events that vote.
_NEIGHBOURS = 500  # Neighbours that are kept of an item.
_DECAYS, _REVERSES = (0.5, 0.7, 1.0, 1.5), (0.3, 0.0)
_WEIGHTS = (0.0, 0.15, 0.3, 0.6, 0.9, 1.2, 1.6, 2.2, 3.0, 4.0, 5.5)  # Values of g.
_USUAL_WEIGHT, _USUAL_DECAY = 1.2, 0.7  # Without validation events.
_MAX_EVENTS = 1000  # Validation events that are ranked.
_CUT = 10  # NDCG@10
_TIE = 1e-9  # Scores this close are equal; the target is ranked below its equals.
_PRIOR = 1e-30  # Weight of popularity, below any votes.


@dataclass(frozen=True, slots=True)
class _Cells:
    """What votes and similarities say of validation events.

    Attributes:
        n_events: Number of events.
        event: Event of each candidate with votes [Z], without the masked ones.
        log_vote: Logarithm of its votes [Z].
        similarity: Its similarities [Z, K].
        target: Index of each event's target among the candidates; -1 if it has no votes.
    """

    n_events: int
    event: np.ndarray
    log_vote: np.ndarray
    similarity: np.ndarray
    target: np.ndarray

    def compute_ndcg(self, weights: Sequence[float]) -> float:
        """Compute the mean NDCG@10 of the events with these weights of the signals [K]."""
        score = self.log_vote + self.similarity @ np.asarray(weights, np.float64)
        target_score = np.where(self.target >= 0, score[self.target], np.inf)
        is_above = score >= target_score[self.event] - _TIE
        rank = np.bincount(
            self.event[is_above], minlength=self.n_events
        )  # 1 for the best: the target itself counts
        is_hit = (self.target >= 0) & (rank <= _CUT)
        return float(np.where(is_hit, 1 / np.log2(np.maximum(rank, 1) + 1), 0.0).mean())


class AttributeCounter:
    """Scores items by the votes of the ten newest events and by their similarity with them.

    Args:
        n_items: Number of items I.
        seed: Seed of the run, by which validation events are drawn.
        items: Returns the item table.
        columns: Columns of words to compare items by; by default all.

    Attributes:
        trained: The fitted exponents.
    """

    def __init__(
        self,
        n_items: int,
        *,
        seed: int,
        items: Callable[[], pa.Table],
        columns: list[str] | None = None,
    ):
        self._n_items, self._seed, self._load_items, self._columns = n_items, seed, items, columns
        self._popularity = Popularity(n_items)
        self._signals: ItemSignals | None = None
        self._counter: VoteCounter
        self._weights: list[float] = []
        self.trained: dict[str, Any] = {}

    def fit(self, seq: Sequences, splits: Sequence[int] = (TRAIN,)) -> AttributeCounter:
        """Count the pairs of events in the given splits, fit the exponents to validation, and return the baseline itself."""
        self._popularity.fit(seq, splits)
        items = self._load_items()
        columns = list_word_columns(items) if self._columns is None else self._columns
        self._signals = compute_signals(items, columns) if columns else None
        transitions = {
            reverse: Transitions.fit(
                seq,
                self._n_items,
                CountOptions(reach=_REACH, neighbours=_NEIGHBOURS, reverse=reverse),
                splits,
            )
            for reverse in _REVERSES
        }
        users, positions = self._draw_events(seq, splits)
        reverse, decay, self._weights = _REVERSES[0], _USUAL_DECAY, [_USUAL_WEIGHT] * len(columns)
        self._counter = _make_counter(transitions[reverse], decay)
        if len(users):
            # The weights for the usual shape of votes, the best shape for these weights, then the weights for it.
            self._weights = _fit_weights(self._compare(seq, users, positions), len(columns))
            ndcg_by_shape: dict[tuple[float, float], float] = {}
            for shape in product(_REVERSES, _DECAYS):
                self._counter = _make_counter(transitions[shape[0]], shape[1])
                ndcg_by_shape[shape] = self._compare(seq, users, positions).compute_ndcg(self._weights)
            reverse, decay = max(ndcg_by_shape, key=lambda shape: ndcg_by_shape[shape])
            self._counter = _make_counter(transitions[reverse], decay)
            self._weights = _fit_weights(self._compare(seq, users, positions), len(columns))
        self.trained = {"reverse": reverse, "decay": decay, **dict(zip(columns, self._weights, strict=True))}
        return self

    def scores(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Compute the scores of all items for each prompt, float32 [P, I]."""
        return score_all_items(self, self._n_items, seq, users, positions)

    def votes(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> SparseVotes:
        """Compute exp(score) of the items with votes of each prompt; the popularity is the prior of all items."""
        prompt, item, log_vote, similarity = self._score(seq, users, positions)
        score = log_vote + similarity @ np.asarray(self._weights, np.float64)
        # Relative to the best of each prompt, which keeps its order; the least is far above the prior.
        best = np.full(len(users), -np.inf)
        np.maximum.at(best, prompt, score)
        popularity = self._popularity.popularity
        prior = _PRIOR * popularity / max(popularity.max(initial=0), 1)
        return SparseVotes(prior, prompt, item, np.exp(np.maximum(score - best[prompt], -60.0)))

    def _score(
        self, seq: Sequences, users: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Compute prompt [Z], item [Z], logarithm of the votes [Z] and similarities [Z, K] of the items with votes."""
        prompt, item, vote = self._counter.count_votes(seq, users, positions)
        prompt, item, vote = prompt[vote > 0], item[vote > 0], vote[vote > 0]
        if self._signals is None:
            return prompt, item, np.log(vote), np.zeros((len(item), 0))
        voters = self._counter.weigh_voters(seq, users, positions)
        profiles = self._signals.make_profiles(*voters, len(users))
        return prompt, item, np.log(vote), profiles.compute_similarities(prompt, item).astype(np.float64)

    def _draw_events(self, seq: Sequences, splits: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Draw validation events that are not counted; return their users and positions."""
        users, positions = locate_prompts(seq, find_recommendable_events(seq, VALID))
        if VALID in splits:
            return users[:0], positions[:0]
        drawn = np.sort(rng(self._seed, "attribute_counter").permutation(len(users))[:_MAX_EVENTS])
        return users[drawn], positions[drawn]

    def _compare(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> _Cells:
        """Compute what votes and similarities say of validation events."""
        event, item, log_vote, similarity = self._score(seq, users, positions)
        masked = gather_masked_items(seq, users, positions)
        masked_key = np.repeat(np.arange(len(users)), np.diff(masked.offsets)) * self._n_items + masked.values
        is_allowed = ~np.isin(event * self._n_items + item, masked_key)
        event, item = event[is_allowed], item[is_allowed]
        target_item = seq.item[locate_events(seq, users, positions)]
        is_target = item == target_item[event]
        target = np.full(len(users), -1)
        target[event[is_target]] = np.flatnonzero(is_target)
        return _Cells(len(users), event, log_vote[is_allowed], similarity[is_allowed], target)


def _make_counter(transitions: Transitions, decay: float) -> VoteCounter:
    """Make the counter of the votes of the newest events."""
    return VoteCounter(transitions, VoteOptions(last=_VOTERS, decay=decay))


def _fit_weights(cells: _Cells, n_signals: int) -> list[float]:
    """Return the weights of the signals [K] with the best NDCG@10, each searched with the others fixed, twice."""
    weights = [0.0] * n_signals
    best = cells.compute_ndcg(weights)
    for _, k in product(range(2), range(n_signals)):
        for value in _WEIGHTS:
            candidate = [*weights[:k], value, *weights[k + 1 :]]
            ndcg = cells.compute_ndcg(candidate)
            if ndcg > best:
                best, weights = ndcg, candidate
    return weights


SPEC = BaselineSpec(AttributeCounter)
