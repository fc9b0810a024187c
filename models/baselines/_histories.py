"""What baselines learn from and are chosen by: the items of users and prompts, and NDCG@10 of validation events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import numpy as np

from nonet.models.ranking import compute_per_event, rank_of_target_np
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


def compute_ndcg(
    score: Callable[[np.ndarray, np.ndarray], np.ndarray],
    seq: Sequences,
    users: np.ndarray,
    positions: np.ndarray,
    n_items: int,
) -> float:
    """Compute NDCG@10 of events over all items that are not masked; 0 without events.

    Args:
        score: Returns the scores [P, I] of prompts, given users [P] and positions [P].
        seq: The sequences.
        users: Users of the events.
        positions: Positions of the events in the users' histories.
        n_items: Number of items I.
    """
    ranks = []
    for part in split_prompts(len(users), n_items):
        target = seq.item[locate_events(seq, users[part], positions[part])]
        masked = gather_masked_items(seq, users[part], positions[part])
        ranks.append(rank_of_target_np(score(users[part], positions[part]), target, masked))
    return float(compute_per_event("ndcg@10", np.concatenate(ranks)).mean()) if ranks else 0.0


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
