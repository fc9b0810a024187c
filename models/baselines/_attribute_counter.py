"""A baseline without training: transitions of items, weighted by the similarity of items with the history.

    score(y) = log v(y) + sum_k g_k s_k(y)

v(y) are the votes of the ten newest events x, of weight 1 / age^decay, by the pairs of x and y that are up to six events apart
(`models/generation/votes.py`), and s_k(y) the similarity of y with the same events in a column of words of the items
(`models/generation/signals.py`). The weight of reversed pairs, the decay and each g are those with the best NDCG@10 of validation
events. Items without votes are ranked by popularity, below all others. On Amazon Toys and Sports a rule of this kind ranked above
every trained model that was found in print (0.0711 and 0.0359 NDCG@10).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pyarrow as pa

from nonet.models.baselines._histories import FittedInParts, draw_validation_events
from nonet.models.baselines.kinds import Popularity, SparseVotes, score_all_items
from nonet.models.generation import ItemSignals, VoteCounter, VoteOptions, find_best
from nonet.models.tokenizer import compute_signals, list_word_columns
from nonet.samples.batches import gather_masked_items, locate_events
from nonet.samples.sequences import TRAIN, CountOptions, Sequences, Transitions

# Shapes: P prompts, Z (prompt, item) pairs with votes, I items, K signals.
_REACH, _VOTERS = 6, 10  # Largest distance of a pair in events; number of newest events that vote.
_NEIGHBOURS = 500  # Neighbours that are kept of an item.
_MAX_CANDIDATES = (
    500  # Items with most votes of a prompt that are compared; the rest is ranked by popularity.
)
_CHUNK_PROMPTS = 64
_DECAYS, _REVERSES = (0.5, 0.7, 1.0, 1.5), (0.3, 0.0)
_WEIGHTS = (0.0, 0.15, 0.3, 0.6, 0.9, 1.2, 1.6, 2.2, 3.0, 4.0, 5.5)  # Values of g.
_USUAL_WEIGHT, _USUAL_DECAY = 1.2, 0.7  # Without validation events.
_CUT = 10  # NDCG@10
_TIE = 1e-9  # Scores this close are equal; the target is ranked below its equals.
_PRIOR = 1e-30  # Weight of popularity, below any votes.


@dataclass(frozen=True, slots=True)
class _Cells:
    """What votes and similarities say of prompts.

    Attributes:
        prompt: Prompt of each candidate [Z].
        item: Its item [Z].
        log_vote: Logarithm of its votes [Z].
        similarity: Its similarities [Z, K].
    """

    prompt: np.ndarray
    item: np.ndarray
    log_vote: np.ndarray
    similarity: np.ndarray

    def score(self, weights: Sequence[float]) -> np.ndarray:
        """Compute the scores [Z] with these weights of the signals [K]."""
        return self.log_vote + self.similarity @ np.asarray(weights, np.float64)

    def select(self, is_kept: np.ndarray) -> _Cells:
        """Return the candidates of a mask [Z]."""
        return _Cells(
            self.prompt[is_kept], self.item[is_kept], self.log_vote[is_kept], self.similarity[is_kept]
        )

    @classmethod
    def joined(cls, parts: Sequence[_Cells]) -> _Cells:
        """Concatenate the candidates of parts."""
        fields = ("prompt", "item", "log_vote", "similarity")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in fields))


@dataclass(frozen=True, slots=True)
class _Ranking:
    """Validation events with their candidates, without those that are masked.

    Attributes:
        cells: The candidates; a prompt is an event.
        target: Index of each event's target among the candidates; -1 if it is none.
    """

    cells: _Cells
    target: np.ndarray

    def compute_ndcg(self, weights: Sequence[float]) -> float:
        """Compute the mean NDCG@10 of the events with these weights of the signals [K]."""
        found = np.flatnonzero(self.target >= 0)
        score = self.cells.score(weights)
        target_score = np.full(len(self.target), np.inf)
        target_score[found] = score[self.target[found]]
        is_above = score >= target_score[self.cells.prompt] - _TIE
        rank = np.bincount(
            self.cells.prompt[is_above], minlength=len(self.target)
        )  # The target itself counts.
        is_hit = (self.target >= 0) & (rank <= _CUT)
        return float(np.where(is_hit, 1 / np.log2(np.maximum(rank, 1) + 1), 0.0).mean())


class AttributeCounter(FittedInParts):
    """Scores items by the votes of the ten newest events and by their similarity with them.

    Args:
        n_items: Number of items I.
        seed: Seed of the run, by which validation events are drawn.
        item_table: Returns the item table.
        columns: Columns of words to compare items by; by default all.

    Attributes:
        trained: The fitted exponents.
    """

    def __init__(
        self,
        n_items: int,
        *,
        seed: int,
        item_table: Callable[[], pa.Table],
        columns: Sequence[str] | None = None,
    ):
        self._n_items, self._seed, self._load_items, self._columns = n_items, seed, item_table, columns
        self._popularity = Popularity(n_items)
        self._signals: ItemSignals | None = None
        self._counter: VoteCounter
        self._weights: list[float] = []
        self.trained: dict[str, float] = {}

    def fit_in_parts(self, seq: Sequences, splits: Sequence[int] = (TRAIN,)) -> Iterator[None]:
        """Count the pairs of events in the given splits, and fit the exponents to validation."""
        self._popularity.fit(seq, splits)
        items = self._load_items()
        columns = list_word_columns(items) if self._columns is None else list(self._columns)
        self._signals = compute_signals(items, columns) if columns else None
        yield
        transitions: dict[float, Transitions] = {}
        for reverse in _REVERSES:
            options = CountOptions(reach=_REACH, neighbours=_NEIGHBOURS, reverse=reverse)
            transitions[reverse] = Transitions.fit(seq, self._n_items, options, splits)
            yield
        users, positions = draw_validation_events(seq, splits, self._seed, "attribute_counter")
        reverse, decay, self._weights = _REVERSES[0], _USUAL_DECAY, [_USUAL_WEIGHT] * len(columns)
        self._counter = _make_counter(transitions[reverse], decay)
        if len(users):
            # The weights for the usual shape of votes, the best shape for these weights, then the weights for it.
            self._weights = _fit_weights(self._rank(seq, users, positions), len(columns))
            ndcg_by_shape: dict[tuple[float, float], float] = {}
            for shape in product(_REVERSES, _DECAYS):
                yield
                self._counter = _make_counter(transitions[shape[0]], shape[1])
                ndcg_by_shape[shape] = self._rank(seq, users, positions).compute_ndcg(self._weights)
            reverse, decay = max(ndcg_by_shape, key=lambda shape: ndcg_by_shape[shape])
            self._counter = _make_counter(transitions[reverse], decay)
            self._weights = _fit_weights(self._rank(seq, users, positions), len(columns))
        weights = {f"g {name}": weight for name, weight in zip(columns, self._weights, strict=True)}
        self.trained = {"reverse": reverse, "decay": decay, **weights}

    def scores(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Compute the scores of all items for each prompt, float32 [P, I]."""
        return score_all_items(self, self._n_items, seq, users, positions)

    def votes(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> SparseVotes:
        """Compute exp(score) of the items with votes of each prompt; the popularity is the prior of all items."""
        cells = self._compare(seq, users, positions)
        score = cells.score(self._weights)
        # Relative to the best of each prompt, which keeps its order; the least is far above the prior.
        best = np.full(len(users), -np.inf)
        np.maximum.at(best, cells.prompt, score)
        prior = self._popularity.make_prior(_PRIOR)
        weight = np.exp(np.maximum(score - best[cells.prompt], -60.0))
        return SparseVotes(prior, cells.prompt, cells.item, weight)

    def _compare(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> _Cells:
        """Compute votes and similarities of the items with most votes of each prompt, a chunk of prompts at a time."""
        empty = np.empty(0, np.int64)
        n_signals = 0 if self._signals is None else len(self._signals.names)
        parts = [_Cells(empty, empty, np.empty(0), np.empty((0, n_signals)))]
        for start in range(0, len(users), _CHUNK_PROMPTS):
            part = slice(start, start + _CHUNK_PROMPTS)
            voters = self._counter.weigh_voters(seq, users[part], positions[part])
            prompt, item, vote = self._counter.count_votes(seq, users[part], positions[part], voters)
            best = find_best(prompt, item, vote, _MAX_CANDIDATES, len(users[part]))
            kept = np.sort(best[vote[best] > 0])
            prompt, item, vote = prompt[kept], item[kept], vote[kept]
            similarity = np.zeros((len(item), 0))
            if self._signals is not None:
                profiles = self._signals.make_profiles(*voters, len(users[part]))
                similarity = profiles.compute_similarities(prompt, item).astype(np.float64)
            parts.append(_Cells(prompt + start, item, np.log(vote), similarity))
        return _Cells.joined(parts)

    def _rank(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> _Ranking:
        """Compute what votes and similarities say of validation events."""
        cells = self._compare(seq, users, positions)
        masked = gather_masked_items(seq, users, positions)
        masked_key = np.repeat(np.arange(len(users)), np.diff(masked.offsets)) * self._n_items + masked.values
        cells = cells.select(~np.isin(cells.prompt * self._n_items + cells.item, masked_key))
        is_target = cells.item == seq.item[locate_events(seq, users, positions)][cells.prompt]
        target = np.full(len(users), -1)
        target[cells.prompt[is_target]] = np.flatnonzero(is_target)
        return _Ranking(cells, target)


def _make_counter(transitions: Transitions, decay: float) -> VoteCounter:
    """Make the counter of the votes of the newest events."""
    return VoteCounter(transitions, VoteOptions(last=_VOTERS, decay=decay))


def _fit_weights(ranking: _Ranking, n_signals: int) -> list[float]:
    """Return the weights of the signals [K] with the best NDCG@10, each searched with the others fixed, twice."""
    weights = [0.0] * n_signals
    best = ranking.compute_ndcg(weights)
    for _, k in product(range(2), range(n_signals)):
        for value in _WEIGHTS:
            candidate = [*weights[:k], value, *weights[k + 1 :]]
            ndcg = ranking.compute_ndcg(candidate)
            if ndcg > best:
                best, weights = ndcg, candidate
    return weights
