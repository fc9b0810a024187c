"""The fallback: an answer without a model when there is no time or no engine.

It lists items to which transitions from the newest events were counted, then popular items. It needs no torch module,
no sparse rows and no other process.
"""

from __future__ import annotations

import numpy as np

from nonet.deploy.opened import CatalogueItems
from nonet.models.generation import Corpus, VoteOptions, Voters
from nonet.models.inference import Answer, FilterCache, Question, make_empty_events, pack_questions
from nonet.types import Jagged

COUNTER, POPULARITY = "transition_counter", "popularity"


class FallbackRecommender:
    """Answers from the counted transitions of one corpus; without transitions, by popularity."""

    def __init__(self, corpus: Corpus, items: CatalogueItems):
        self._popular_items, self._trie = items.rank_by_popularity(), corpus.trie
        self._template = corpus.seq.slice_users(0, 0)  # without users, for the kinds and columns of events
        self._voters = None
        self._filters = FilterCache(corpus.trie)
        if "transitions" in corpus.folders:
            self._voters = Voters(corpus.transitions, corpus.trie, VoteOptions())

    def make_empty_question(self, top: int, asked: np.ndarray | None = None) -> Question:
        """Return a question without events, for a user whose events cannot be read.

        Args:
            top: Number of items to list.
            asked: Dense indices of items to score; None for a list.
        """
        return Question(make_empty_events(self._template), user_key=0, top=top, asked=asked)

    def answer(self, question: Question) -> tuple[Answer, str]:
        """Answer a question; it does not raise.

        Returns:
            The answer, with scores of -inf because there is no model, and the name of the method, `COUNTER` or
            `POPULARITY`.
        """
        voted_items = self._rank_by_votes(question)
        if question.asked is not None:
            return Answer(question.asked, np.full(len(question.asked), -np.inf, np.float32)), POPULARITY
        hidden = np.zeros(self._trie.n_items, bool)
        hidden[question.hidden] = True
        hidden[voted_items] = True  # so that popularity does not list them again
        if question.within is not None:
            hidden |= ~question.within.make_mask(len(hidden))
        unhidden_items = self._popular_items[~hidden[self._popular_items]]
        rest = unhidden_items[: max(0, question.top - len(voted_items))]
        item = np.concatenate([voted_items[: question.top], rest])
        method = COUNTER if len(voted_items) else POPULARITY
        return Answer(item, np.full(len(item), -np.inf, np.float32)), method

    def _rank_by_votes(self, question: Question) -> np.ndarray:
        """Return the dense indices of items that counted transitions vote for, best first, without hidden ones."""
        if self._voters is None or not len(question.events):
            return np.empty(0, np.int64)
        seq = pack_questions([question], self._template)  # one user, whose last event is the target
        hidden = Jagged(question.hidden, np.array([0, len(question.hidden)]))
        within = self._filters.make_batch([question.within])
        votes = self._voters.compute_votes(seq, np.zeros(1, np.int64), seq.lengths - 1, hidden, within)
        leaf, weight = votes.leaf[0].numpy(), votes.weight[0].numpy()
        order = np.argsort(-weight, kind="stable")
        order = order[leaf[order] >= 0]  # unused places of the array have leaf -1
        return np.asarray(self._trie.item_of_leaf)[leaf[order]].astype(np.int64)
