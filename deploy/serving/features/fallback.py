"""The fallback: an answer without a model when there is no time or no engine.

It uses transitions of the newest events, then popularity. It needs no torch module, no rows and no other
process.
"""

from __future__ import annotations

import numpy as np

from nonet.deploy.serving.features.items import CatalogueItems
from nonet.models.generation import Corpus, VoteOptions, Voters
from nonet.models.inference import Answer, FilterCache, Question, make_empty_events, pack_questions
from nonet.types import Jagged

COUNTER, POPULARITY = "transition_counter", "popularity"


class FallbackRecommender:
    """Answers from the counted transitions of one corpus; without transitions, by popularity."""

    def __init__(self, corpus: Corpus, items: CatalogueItems):
        self._popular, self._trie = items.rank_by_popularity(), corpus.trie
        self._like = corpus.seq.slice_users(0, 0)
        self._voters = None
        self._filters = FilterCache(corpus.trie)
        if "transitions" in corpus.folders:
            self._voters = Voters(corpus.transitions, corpus.trie, VoteOptions())

    def make_empty_question(self, top: int, asked: np.ndarray | None = None) -> Question:
        """Return a question without events, for a user whose events cannot be read.

        Args:
            top: Number of items to list.
            asked: Dense indices of items to score.
        """
        return Question(make_empty_events(self._like), 0, top=top, asked=asked)

    def answer(self, question: Question) -> tuple[Answer, str]:
        """Answer a question; it does not raise.

        Returns:
            The answer, with scores of -inf because there is no model, and the name of the method that made
            it.
        """
        voted = self._rank_by_votes(question)
        if question.asked is not None:
            return Answer(question.asked, np.full(len(question.asked), -np.inf, np.float32)), POPULARITY
        hidden = np.zeros(self._trie.n_items, bool)
        hidden[question.hidden] = True
        hidden[voted] = True
        if question.within is not None:
            hidden |= ~question.within.make_mask(len(hidden))
        rest = self._popular[~hidden[self._popular]][: max(0, question.top - len(voted))]
        item = np.concatenate([voted[: question.top], rest])
        return Answer(item, np.full(len(item), -np.inf, np.float32)), COUNTER if len(voted) else POPULARITY

    def _rank_by_votes(self, question: Question) -> np.ndarray:
        """Return the items that transitions vote for, best first."""
        if self._voters is None or not len(question.events):
            return np.empty(0, np.int64)
        seq = pack_questions([question], self._like)
        hidden = Jagged(question.hidden, np.array([0, len(question.hidden)]))
        within = self._filters.make_batch([question.within])
        votes = self._voters.compute_votes(seq, np.zeros(1, np.int64), seq.lengths - 1, hidden, within)
        leaf, weight = votes.leaf[0].numpy(), votes.weight[0].numpy()
        best = np.argsort(-weight, kind="stable")
        best = best[leaf[best] >= 0]
        return np.asarray(self._trie.item_of_leaf)[leaf[best]].astype(np.int64)
