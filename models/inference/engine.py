"""Inference engine: one version of a model that answers many questions at once.

Questions of one kind and width form one jagged batch: histories are packed without padding, beams are a rectangle, and every
operator runs once for all of them. An answer is what the question would get alone: rows do not depend on each other, so scores
differ only by the rounding of larger matrix products, under 1e-5 (tests/models/inference/test_engine.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.models.generation import (
    Recommender,
    SubCatalogue,
    Votes,
    compute_vote_shares,
    move_batch,
    score_leaves,
    search_beams,
)
from nonet.models.inference.filters import FilterCache
from nonet.models.inference.question import (
    Answer,
    Question,
    collect_hidden,
    make_empty_events,
    pack_questions,
)
from nonet.models.inference.states import PrefixStates
from nonet.samples.batches import make_prompt_batch
from nonet.samples.sequences import Sequences
from nonet.types import SampleBatch

# Shapes: Q questions, W beams, X items scored for a question, V votes.
# In positions of a history: what a beam costs, all levels together; an item that is hidden by name; an item that a filter knows.
_BEAM_COST, _HIDDEN_COST, _FILTER_COST = 0.5, 0.02, 1e-4


class InferenceEngine:
    """Answers questions with one version of a model; a newer version is another engine with its own states.

    `states` caches prefixes of users between questions, if the model supports it; only one thread may call the engine at a time.
    """

    def __init__(self, recommender: Recommender, version: int = 0, states: PrefixStates | None = None):
        self._recommender, self.version = recommender, version
        self.states = states if getattr(recommender.model, "extends", False) else None
        self._like = recommender.corpus.seq.slice_users(0, 0)
        self.filters = FilterCache(recommender.corpus.trie)

    @property
    def items(self) -> int:
        """Number of items of the dense index."""
        return self._recommender.corpus.trie.n_items

    @property
    def model(self) -> Any:
        """The module that computes answers."""
        return self._recommender.model

    @staticmethod
    def estimate_cost(question: Question) -> float:
        """Estimate the cost of a question within a batch, in positions of a history."""
        beams = question.width if question.asked is None else len(question.asked)
        hidden = _HIDDEN_COST * len(question.hidden)
        filtered = 0.0 if question.within is None else _FILTER_COST * len(question.within.allowed)
        return question.tokens + _BEAM_COST * beams + hidden + filtered

    def warm(self) -> None:
        """Answer a question without events, so that code and pages are loaded before the first caller asks."""
        self.answer([Question(make_empty_events(self._like), 0, width=4, top=1)])

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """Return one answer per question, in their order."""
        answers: list[Answer | None] = [None] * len(questions)
        kinds: dict[tuple[int, bool], list[int]] = {}
        for place, question in enumerate(questions):
            width = 0 if question.asked is not None else question.width
            kinds.setdefault((width, question.explain), []).append(place)
        for (width, explain), places in kinds.items():
            group = [self._drop_unknown_items(questions[place]) for place in places]
            group_answers = (
                self._rank_lists(group, width, explain) if width else self._score_candidates(group, explain)
            )
            for place, answer in zip(places, group_answers, strict=True):
                asked = questions[place].asked
                answers[place] = answer if asked is None else replace(answer, item=asked)
        return [answer for answer in answers if answer is not None]

    def _drop_unknown_items(self, question: Question) -> Question:
        """Drop the items that came after this version's catalogue; items to be scored are kept."""
        newest = max((int(part.max()) for part in _items(question) if len(part)), default=0)
        if newest < self.items:
            return question
        events, asked = question.events, question.asked
        return replace(
            question,
            events=events.filter_events(events.item < self.items),
            hidden=question.hidden[question.hidden < self.items],
            asked=None if asked is None else np.where(asked < self.items, asked, -1),
        )

    @torch.inference_mode()
    def _rank_lists(self, questions: Sequence[Question], width: int, explain: bool) -> list[Answer]:
        """Answer questions without candidates by beam search."""
        within = self.filters.make_batch([question.within for question in questions])
        cache, votes = self._read(questions, within)
        model, trie = self._recommender.model, self._recommender.corpus.trie
        hidden = collect_hidden(questions)
        forbidden = hidden if len(hidden.values) else None
        beams = search_beams(model, cache, trie, width, forbidden=forbidden, votes=votes, within=within)
        item, score = beams.item.cpu().numpy(), beams.logp.sum(-1).cpu().numpy()
        count = beams.valid.sum(1).tolist()
        tops = [min(question.top, n) for question, n in zip(questions, count, strict=True)]
        if not explain:
            return [Answer(item[q, :top], score[q, :top]) for q, top in enumerate(tops)]
        own, vote = self._explain_scores(cache, votes, beams.item)
        return [
            Answer(item[q, :top], score[q, :top], own[q, :top], vote[q, :top]) for q, top in enumerate(tops)
        ]

    @torch.inference_mode()
    def _score_candidates(self, questions: Sequence[Question], explain: bool) -> list[Answer]:
        """Answer questions with candidates by scoring all of them."""
        cache, votes = self._read(questions)
        most = max(len(_get_candidates(question)) for question in questions)
        item = np.full((len(questions), most), -1, np.int64)
        for q, question in enumerate(questions):
            item[q, : len(_get_candidates(question))] = _get_candidates(question)
        leaf_QX = self._find_leaves(torch.from_numpy(item))
        score_QX = score_leaves(self._recommender.model, cache, self._recommender.corpus.trie, leaf_QX, votes)
        score = score_QX.masked_fill(leaf_QX < 0, -torch.inf).cpu().numpy()
        counts = [len(_get_candidates(question)) for question in questions]
        if not explain:
            return [Answer(item[q, :n], score[q, :n]) for q, n in enumerate(counts)]
        own, vote = self._explain_scores(cache, votes, torch.from_numpy(item))
        return [Answer(item[q, :n], score[q, :n], own[q, :n], vote[q, :n]) for q, n in enumerate(counts)]

    def _read(
        self, questions: Sequence[Question], within: SubCatalogue | None = None
    ) -> tuple[Any, Votes | None]:
        """Compute the prefill of the histories and the votes within filters."""
        recommender = self._recommender
        seq = pack_questions(questions, self._like)
        users, positions = np.arange(len(questions)), seq.lengths - 1
        votes = recommender.compute_votes(users, positions, seq, collect_hidden(questions), within)
        if self.states is None:
            return recommender.prefill(self._batch(seq)), votes
        return self._extend_states(questions, self.states), votes

    def _extend_states(self, questions: Sequence[Question], states: PrefixStates) -> Any:
        """Compute the prefill, reusing the events that a state holds."""
        prefixes = [states.find(question) for question in questions]
        tails = [
            replace(question, events=question.events.select_last(len(question.events) - known))
            for question, (_, known) in zip(questions, prefixes, strict=True)
        ]
        batch = self._batch(pack_questions(tails, self._like))
        rows = self._recommender.read_rows(batch)
        device = self._recommender.device
        cache, longer = self.model.extend(move_batch(batch, device), rows, [prefix for prefix, _ in prefixes])
        for question, prefix in zip(questions, longer, strict=True):
            states.keep(question, prefix)
        return cache

    def _batch(self, seq: Sequences) -> SampleBatch:
        recommender = self._recommender
        users, positions = np.arange(len(seq)), seq.lengths - 1
        return make_prompt_batch(
            seq, recommender.corpus.sids, users, positions, history=recommender.history, stage="serve"
        )

    def _find_leaves(self, item: Tensor) -> Tensor:
        leaf = self._recommender.corpus.trie.get_tensor("leaf_of_item", 0, self._recommender.device)
        return leaf[item.clamp_min(0)].long().masked_fill(item < 0, -1)

    def _explain_scores(
        self, cache: Any, votes: Votes | None, item_QX: Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probability under the model alone and the share of the votes of some items, [Q, X] each."""
        model, trie = self._recommender.model, self._recommender.corpus.trie
        leaf_QX = self._find_leaves(item_QX)
        own = score_leaves(model, cache, trie, leaf_QX, None)
        vote = torch.zeros_like(own) if votes is None else compute_vote_shares(model, cache, votes, leaf_QX)
        return own.cpu().numpy(), vote.cpu().numpy()


def _items(question: Question) -> tuple[np.ndarray, ...]:
    return question.events.item, question.hidden, *(() if question.asked is None else (question.asked,))


def _get_candidates(question: Question) -> np.ndarray:
    assert question.asked is not None
    return question.asked
