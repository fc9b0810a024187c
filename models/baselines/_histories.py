"""What baselines learn from and are chosen by: the items of users and prompts, and NDCG@10 of validation events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from nonet.models.baselines._rehearsal import check_scores
from nonet.models.baselines.kinds import SparseVotes
from nonet.models.ranking import (
    SharedScores,
    SparseScores,
    compute_per_event,
    make_tie_order,
    rank_of_target_np,
)
from nonet.random import rng
from nonet.ranges import expand_ranges
from nonet.samples.batches import (
    count_visible_events,
    find_recommendable_events,
    gather_masked_items,
    locate_events,
    locate_prompts,
)
from nonet.samples.sequences import TRAIN, VALID, Sequences

# Shapes: P prompts, I items, U users.
_MAX_EVENTS = 1000  # Validation events that are ranked.
_MAX_PROMPTS = 512  # Prompts per chunk.
_CHUNK_SCORES = 1 << 25  # Scores [P, I] per chunk.

_Option = TypeVar("_Option")
_Model = TypeVar("_Model")


class FittedInParts(ABC):
    """A baseline that is fitted part by part, so that the evaluator answers other calls between the parts."""

    def fit(self, seq: Sequences, splits: Sequence[int] = (TRAIN,)) -> Self:
        """Fit to the events of the given splits, and return the baseline itself."""
        for _ in self.fit_in_parts(seq, splits):
            pass
        return self

    @abstractmethod
    def fit_in_parts(self, seq: Sequences, splits: Sequence[int] = (TRAIN,)) -> Iterator[None]:
        """Fit as `fit` does, one part per step of the iterator."""


class ChosenByValidation(FittedInParts):
    """A baseline whose options are those with the best NDCG@10 of validation events.

    Args:
        n_items: Number of items I.
        seed: Seed of the run, by which validation events are drawn.

    Attributes:
        name: Name of the kind of baseline.
        trained: The chosen options.
    """

    name: ClassVar[str]

    def __init__(self, n_items: int, seed: int):
        self._n_items, self._seed = n_items, seed
        self.trained: dict[str, Any] = {}

    @abstractmethod
    def scores(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Compute the scores of all items for each prompt [P, I]."""

    def _choose(
        self,
        options: Sequence[_Option],
        fit: Callable[[_Option], _Model],
        seq: Sequences,
        splits: Sequence[int],
        tie_I: np.ndarray | None = None,
    ) -> Generator[None, None, tuple[_Option, _Model]]:
        """Fit each option, one per step, and return the best, of equal ones the first; without events, fit the first alone.

        Args:
            options: The options.
            fit: Fits the baseline to an option, so that it scores by it, and returns what was fitted.
            seq: The sequences.
            splits: The splits that the baseline learns from.
            tie_I: Order of items with equal scores; None for a permutation.

        Returns:
            The best option, and what was fitted for it.

        Raises:
            DataError: Scores or votes are NaN.
        """
        users, positions = draw_validation_events(seq, splits, self._seed, self.name)
        compute = getattr(self, "votes", self.scores)

        def score(users: np.ndarray, positions: np.ndarray) -> np.ndarray | SparseVotes:
            return check_scores(self.name, compute(seq, users, positions), len(users), self._n_items)

        best: tuple[_Option, _Model] | None = None
        best_ndcg = -1.0
        for option in options if len(users) else options[:1]:
            model = fit(option)
            ndcg = compute_ndcg(score, seq, users, positions, self._n_items, tie_I)
            if ndcg > best_ndcg:
                best_ndcg, best = ndcg, (option, model)
            yield
        assert best is not None
        return best


def split_prompts(prompts: int, n_items: int) -> Iterator[slice]:
    """Yield the slices of chunks of prompts whose scores of all items fit in memory."""
    size = max(1, min(_MAX_PROMPTS, _CHUNK_SCORES // max(n_items, 1)))
    return (slice(start, min(start + size, prompts)) for start in range(0, prompts, size))


def draw_validation_events(
    seq: Sequences, splits: Sequence[int], seed: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Draw at most a thousand validation events, by which a baseline chooses its options.

    Args:
        seq: The sequences.
        splits: The splits that the baseline learns from; if validation is among them, no event is drawn.
        seed: Seed of the run.
        name: Name of the baseline.

    Returns:
        Users [P] and positions [P] of the events, in the order of the log.
    """
    users, positions = locate_prompts(seq, find_recommendable_events(seq, VALID))
    if VALID in splits:
        return users[:0], positions[:0]
    drawn = np.sort(rng(seed, name).permutation(len(users))[:_MAX_EVENTS])
    return users[drawn], positions[drawn]


class VoteScorer:
    """Makes scores of the votes of one baseline; a prior that votes share is sorted once.

    Args:
        tie_I: Order of items with equal scores (`make_tie_order`).
    """

    def __init__(self, tie_I: np.ndarray):
        self._tie, self._shared = tie_I, None

    def make_scores(self, n_prompts: int, votes: SparseVotes) -> SparseScores:
        """Return the sums of prior and votes for a number of prompts."""
        prior_I = np.asarray(votes.prior, np.float64)
        if self._shared is None or not np.array_equal(self._shared.score, prior_I.astype(np.float32)):
            self._shared = SharedScores(prior_I, self._tie)
        score = (votes.weight + prior_I[votes.item]).astype(np.float32)
        return SparseScores(n_prompts, self._shared, votes.prompt, votes.item, score)


def compute_ndcg(
    score: Callable[[np.ndarray, np.ndarray], np.ndarray | SparseVotes],
    seq: Sequences,
    users: np.ndarray,
    positions: np.ndarray,
    n_items: int,
    tie_I: np.ndarray | None = None,
) -> float:
    """Compute NDCG@10 of events over all items that are not masked; 0 without events.

    Args:
        score: Returns the scores [P, I] or the votes of prompts, given users [P] and positions [P].
        seq: The sequences.
        users: Users of the events.
        positions: Positions of the events in the users' histories.
        n_items: Number of items I.
        tie_I: Order of items with equal scores; None for a permutation.
    """
    tie_I = _draw_tie_order(n_items) if tie_I is None else tie_I
    scorer, ranks = VoteScorer(tie_I), []
    for part in split_prompts(len(users), n_items):
        target = seq.item[locate_events(seq, users[part], positions[part])]
        masked = gather_masked_items(seq, users[part], positions[part])
        scores = score(users[part], positions[part])
        if isinstance(scores, SparseVotes):
            ranks.append(scorer.make_scores(len(target), scores).compute_ranks(target, masked))
        else:
            ranks.append(rank_of_target_np(scores, target, masked, tie_I))
    return float(compute_per_event("ndcg@10", np.concatenate(ranks)).mean()) if ranks else 0.0


@lru_cache(maxsize=1)
def _draw_tie_order(n_items: int) -> np.ndarray:
    """Return a permutation of the items, which orders those of equal scores; it is the same in all calls."""
    return make_tie_order(np.zeros(n_items), seed=0)


def list_user_items(seq: Sequences, n_items: int, splits: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the offset of each user [U + 1], and the distinct items of each user in some splits in ascending order."""
    events = np.flatnonzero(np.isin(seq.split, splits))
    pair = np.unique(seq.find_users(events) * n_items + seq.item[events])
    return np.searchsorted(pair // n_items, np.arange(len(seq) + 1)), pair % n_items


def list_prompt_items(
    seq: Sequences, users: np.ndarray, positions: np.ndarray, n_items: int, last: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """List the distinct items that each prompt sees, with the age of the newest event of each.

    Args:
        seq: The sequences.
        users: Users [P] of the prompts.
        positions: Positions [P] in the users' histories.
        n_items: Number of items I.
        last: Number of newest events to look at; None for all.

    Returns:
        Prompt, item and age (0 for the newest event) of each pair, in the order of prompt and item.
    """
    stops = seq.offsets[users] + count_visible_events(seq, users, positions)
    starts = seq.offsets[users] if last is None else np.maximum(seq.offsets[users], stops - last)
    events, offsets = expand_ranges(starts, stops)
    prompt = np.repeat(np.arange(len(users)), np.diff(offsets))
    newest_first = slice(None, None, -1)  # so that the newest of equal items is found
    pair, first = np.unique(
        prompt[newest_first] * n_items + seq.item[events][newest_first], return_index=True
    )
    age = (stops[prompt] - 1 - events)[newest_first][first]
    return pair // n_items, pair % n_items, age
