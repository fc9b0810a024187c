"""V-SKNN: recommends the items of the training sessions that are most like the newest events of the history.

    sim(h, s) = 1/|h| sum over items x of both h and s of (|h| - age(x)) / |h|
    score(y)  = sum over the k most similar sessions s with y of sim(h, s) / (1 + least age of an item of both)

h are the distinct items among the newest events, age(x) is 0 for the newest event, and s is the training events of another user,
one of the most recent that share an item with h. With `idf`, the score of an item is multiplied by
log(sessions / sessions with y). On logs of sessions it was above most neural models of its time (Ludewig and Jannach, "Evaluation
of session-based recommendation algorithms", UMUAI 2018; weights `div` of the authors' code).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from nonet.models.baselines._histories import (
    ChosenByValidation,
    list_prompt_items,
    list_user_items,
)
from nonet.models.baselines.kinds import Popularity, SparseVotes, score_all_items, sum_votes
from nonet.ranges import expand_ranges
from nonet.samples.batches import count_visible_events, split_by_size
from nonet.samples.sequences import TRAIN, Sequences, find_user_rows

# Shapes: P prompts, I items, S sessions.
_NEIGHBOURS, _IDFS = (100, 50, 500), (False, True)
_MAX_SESSIONS = 1000  # The most recent sessions with an item of the history that are compared with it.
_CHUNK_PAIRS = 1 << 22  # Pairs of a prompt and a session with an item of it that are compared at once.
_PRIOR = 1e-9  # Weight of popularity, which is scaled to a maximum of 1; below any vote.


class VSknn(ChosenByValidation):
    """Scores items by the sessions of other users.

    Args:
        n_items: Number of items I.
        seed: Seed of the run, by which validation events are drawn.
        neighbours: Number of most similar sessions k; by default chosen by validation, as is whether to use `idf`.
        last: Number of newest events of a history that are compared with sessions.

    Attributes:
        trained: The chosen options.
    """

    name = "v_sknn"

    def __init__(self, n_items: int, *, seed: int, neighbours: int | None = None, last: int = 20):
        super().__init__(n_items, seed)
        self._last = last
        self._choices = tuple(product(_NEIGHBOURS if neighbours is None else (neighbours,), _IDFS))
        self._popularity = Popularity(n_items)
        self._session_offsets = self._session_items = np.zeros(1, np.int64)
        self._recency_offsets = self._recent_sessions = np.zeros(1, np.int64)
        self._rank_of_session = self._idf = np.zeros(0)
        self._n_neighbours, self._uses_idf = self._choices[0]
        self._user_ids = self._known_ids = np.zeros(0, np.int64)
        self._session_of_user = np.zeros(0, np.int64)

    def fit_in_parts(self, seq: Sequences, splits: Sequence[int] = (TRAIN,)) -> Iterator[None]:
        """Index the sessions of the given splits, and choose the options by validation."""
        self._popularity.fit(seq, splits)
        self._session_offsets, self._session_items = list_user_items(seq, self._n_items, splits)
        self._index_recent_sessions(seq, splits)
        self._user_ids = self._known_ids = seq.user_id
        self._session_of_user = np.arange(len(seq))
        yield

        def set_choice(choice: tuple[int, bool]) -> None:
            """Set the number of neighbours and whether idf counts, by which sessions vote."""
            self._n_neighbours, self._uses_idf = choice

        chosen, _ = yield from self._choose(self._choices, set_choice, seq, splits)
        set_choice(chosen)
        self.trained = {"neighbours": chosen[0], "idf": chosen[1]}

    def _index_recent_sessions(self, seq: Sequences, splits: Sequence[int]) -> None:
        """List the most recent sessions of each item, the newest first."""
        events = np.flatnonzero(np.isin(seq.split, splits))
        newest = np.full(len(seq), seq.time[events].min(initial=0))  # of a user without events: any
        np.maximum.at(newest, seq.find_users(events), seq.time[events])
        order = np.argsort(-newest, kind="stable")
        self._rank_of_session = np.empty(len(seq), np.int64)
        self._rank_of_session[order] = np.arange(len(seq))
        session = np.repeat(np.arange(len(seq)), np.diff(self._session_offsets))
        by_item = np.lexsort((self._rank_of_session[session], self._session_items))
        starts = np.searchsorted(self._session_items[by_item], np.arange(self._n_items + 1))
        lengths = np.diff(starts)
        # One more, because one of them may be the user's own.
        kept, self._recency_offsets = expand_ranges(
            starts[:-1], starts[:-1] + np.minimum(lengths, _MAX_SESSIONS + 1)
        )
        self._recent_sessions = session[by_item][kept]
        n_sessions = np.count_nonzero(np.diff(self._session_offsets))
        self._idf = np.log(max(n_sessions, 1) / np.maximum(lengths, 1))

    def scores(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Compute the scores of all items for each prompt, float32 [P, I]."""
        return score_all_items(self, self._n_items, seq, users, positions)

    def votes(self, seq: Sequences, users: np.ndarray, positions: np.ndarray) -> SparseVotes:
        """Compute the votes of the most similar sessions of each prompt; the popularity is the prior of all items."""
        length = np.minimum(count_visible_events(seq, users, positions), self._last)
        neighbours = []
        for part in split_by_size(length * (_MAX_SESSIONS + 1), _CHUNK_PAIRS):
            prompt, *columns = self._find_neighbours(seq, users[part], positions[part])
            neighbours.append((prompt + part.start, *columns))
        prompt, session, similarity, age = (
            np.concatenate(columns) for columns in zip(*neighbours, strict=True)
        )
        vote_of_session = similarity / (1 + age)

        def weigh(index: np.ndarray, voter: np.ndarray) -> np.ndarray:
            """Return the weights of the votes of sessions for items."""
            vote = vote_of_session[voter]
            return vote * self._idf[self._session_items[index]] if self._uses_idf else vote

        starts, stops = self._session_offsets[session], self._session_offsets[session + 1]
        prior = self._popularity.make_prior(_PRIOR)
        return sum_votes(prior, (prompt, starts, stops), len(users), self._session_items, weigh)

    def _find_own_sessions(self, seq: Sequences) -> np.ndarray:
        """Return the session of each user of sequences, which may not be the fitted ones, [U] int64; -1 for none."""
        if seq.user_id is not self._known_ids:
            self._known_ids, self._session_of_user = seq.user_id, find_user_rows(seq.user_id, self._user_ids)
        return self._session_of_user

    def _find_neighbours(
        self, seq: Sequences, users: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return prompt, session, similarity and least age of a shared item of the k most similar sessions of each prompt."""
        prompt, item, age = list_prompt_items(seq, users, positions, self._n_items, self._last)
        n_items = np.bincount(prompt, minlength=len(users))
        length = np.minimum(count_visible_events(seq, users, positions), self._last)  # with repeated items
        index, offsets = expand_ranges(self._recency_offsets[item], self._recency_offsets[item + 1])
        lengths = np.diff(offsets)
        session = self._recent_sessions[index]
        prompt, age = np.repeat(prompt, lengths), np.repeat(age, lengths)
        # A user's own session would recommend what the user has seen.
        is_other = session != self._find_own_sessions(seq)[users][prompt]
        session, prompt, age = session[is_other], prompt[is_other], age[is_other]
        pair, pair_index = np.unique(prompt * len(self._rank_of_session) + session, return_inverse=True)
        points = np.bincount(pair_index, weights=length[prompt] - age, minlength=len(pair))
        least_age = np.full(len(pair), self._last)
        np.minimum.at(least_age, pair_index, age)
        prompt, session = pair // len(self._rank_of_session), pair % len(self._rank_of_session)
        similarity = points / (length[prompt] * n_items[prompt])  # equal for equal points
        recency = self._rank_of_session[session]
        is_recent = _find_first(prompt, np.lexsort((recency, prompt)), _MAX_SESSIONS)
        order = np.lexsort((recency, -similarity, prompt))
        kept = _find_first(prompt, order[is_recent[order]], self._n_neighbours)
        return prompt[kept], session[kept], similarity[kept], least_age[kept]


def _find_first(prompt: np.ndarray, order: np.ndarray, most: int) -> np.ndarray:
    """Return a mask of the first pairs of each prompt, at most `most`, in an order that is sorted by prompt."""
    is_first = np.zeros(len(prompt), bool)
    ordered = prompt[order]
    place = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    is_first[order[place < most]] = True
    return is_first
