"""Inference engine: one version of a model that answers many questions at once.

Questions of one kind and width form one jagged batch: histories are packed without padding, beams are a rectangle, and every
operator runs once for all of them. A question gets the same answer as in a batch of its own: rows do not depend on each other, so
scores differ only by the rounding of larger matrix products, under 1e-5 (tests/models/inference/test_engine.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
# Costs relative to that of one position of a history: of a beam (all levels), a hidden item, and an item of a filter's mask.
_BEAM_COST, _HIDDEN_COST, _FILTER_COST = 0.5, 0.02, 1e-4


class InferenceEngine:
    """Answers questions with one version of a model; only one thread may call an engine at a time.

    Args:
        recommender: The model with its rows and corpus.
        version: Number of the version.
        states: Cache of users' prefixes between questions, which is used if the model supports it; None for none.
    """

    def __init__(self, recommender: Recommender, version: int = 0, states: PrefixStates | None = None):
        self._recommender, self.version = recommender, version
        self.states = states if getattr(recommender.model, "extends", False) else None
        self._template = _add_joined_columns(recommender.corpus.seq.slice_users(0, 0), recommender.features)
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
        """Estimate the cost of a question in a batch, relative to that of one position of a history."""
        beams = question.width if question.asked is None else len(question.asked)
        hidden = _HIDDEN_COST * len(question.hidden)
        filtered = 0.0 if question.within is None else _FILTER_COST * len(question.within.allowed)
        return question.tokens + _BEAM_COST * beams + hidden + filtered

    def warm(self) -> None:
        """Answer a question without events, so that code and pages are loaded before the first call."""
        self.answer([Question(make_empty_events(self._template), user_key=0, width=4, top=1)])

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """Return one answer per question, in their order."""
        answers: list[Answer | None] = [None] * len(questions)
        indices_by_kind: dict[tuple[int, bool], list[int]] = {}
        for index, question in enumerate(questions):
            width = 0 if question.asked is not None else question.width
            indices_by_kind.setdefault((width, question.explain), []).append(index)
        for (width, explain), indices in indices_by_kind.items():
            questions_of_kind = [self._drop_unknown_items(questions[index]) for index in indices]
            answers_of_kind = (
                self._rank_lists(questions_of_kind, width, explain)
                if width
                else self._score_candidates(questions_of_kind, explain)
            )
            for index, answer in zip(indices, answers_of_kind, strict=True):
                asked = questions[index].asked
                answers[index] = answer if asked is None else replace(answer, item=asked)
        return [answer for answer in answers if answer is not None]

    def _drop_unknown_items(self, question: Question) -> Question:
        """Remove items that are newer than this version's catalogue; in `asked` they become -1, so that positions stay."""
        max_item = max((int(items.max()) for items in _list_item_arrays(question) if len(items)), default=0)
        if max_item < self.items:
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
        """Answer questions for lists by beam search of one width."""
        within = self.filters.make_batch([question.within for question in questions])
        cache, votes = self._prefill_and_vote(questions, within)
        model, trie = self._recommender.model, self._recommender.corpus.trie
        hidden = collect_hidden(questions)
        forbidden = hidden if len(hidden.values) else None
        beams = search_beams(model, cache, trie, width, forbidden=forbidden, votes=votes, within=within)
        item, score = beams.item.cpu().numpy(), beams.logp.sum(-1).cpu().numpy()
        counts = beams.valid.sum(1).tolist()
        lengths = [min(question.top, count) for question, count in zip(questions, counts, strict=True)]
        if not explain:
            return [Answer(item[q, :length], score[q, :length]) for q, length in enumerate(lengths)]
        model_score, vote = self._explain_scores(cache, votes, beams.item)
        return [
            Answer(item[q, :length], score[q, :length], model_score[q, :length], vote[q, :length])
            for q, length in enumerate(lengths)
        ]

    @torch.inference_mode()
    def _score_candidates(self, questions: Sequence[Question], explain: bool) -> list[Answer]:
        """Answer questions for the scores of given candidates, padded to the largest number of them."""
        cache, votes = self._prefill_and_vote(questions)
        max_candidates = max(len(_get_candidates(question)) for question in questions)
        item = np.full((len(questions), max_candidates), -1, np.int64)
        for q, question in enumerate(questions):
            item[q, : len(_get_candidates(question))] = _get_candidates(question)
        leaf_QX = self._find_leaves(torch.from_numpy(item))
        score_QX = score_leaves(self._recommender.model, cache, self._recommender.corpus.trie, leaf_QX, votes)
        score = score_QX.masked_fill(leaf_QX < 0, -torch.inf).cpu().numpy()
        counts = [len(_get_candidates(question)) for question in questions]
        if not explain:
            return [Answer(item[q, :n], score[q, :n]) for q, n in enumerate(counts)]
        model_score, vote = self._explain_scores(cache, votes, torch.from_numpy(item))
        return [
            Answer(item[q, :n], score[q, :n], model_score[q, :n], vote[q, :n]) for q, n in enumerate(counts)
        ]

    def _prefill_and_vote(
        self, questions: Sequence[Question], within: SubCatalogue | None = None
    ) -> tuple[Any, Votes | None]:
        """Compute the prefill of the histories, and the votes for items that the filters allow; None without a memory."""
        recommender = self._recommender
        seq = pack_questions(questions, self._template)
        users, positions = np.arange(len(questions)), seq.lengths - 1
        votes = recommender.compute_votes(users, positions, seq, collect_hidden(questions), within)
        if self.states is None:
            return recommender.prefill(self._make_batch(seq)), votes
        return self._prefill_from_states(questions, self.states), votes

    def _prefill_from_states(self, questions: Sequence[Question], states: PrefixStates) -> Any:
        """Compute the prefill from cached prefixes and the later events, and store the longer prefixes in `states`."""
        prefixes = [states.find(question) for question in questions]
        rests = [
            replace(question, events=question.events.select_last(len(question.events) - n_cached))
            for question, (_, n_cached) in zip(questions, prefixes, strict=True)
        ]
        batch = self._make_batch(pack_questions(rests, self._template))
        rows = self._recommender.read_rows(batch)
        device = self._recommender.device
        cache, longer_prefixes = self.model.extend(
            move_batch(batch, device), rows, [prefix for prefix, _ in prefixes]
        )
        for question, prefix in zip(questions, longer_prefixes, strict=True):
            states.keep(question, prefix)
        return cache

    def _make_batch(self, seq: Sequences) -> SampleBatch:
        """Build the batch of the whole history of each user of `seq`."""
        recommender = self._recommender
        users, positions = np.arange(len(seq)), seq.lengths - 1
        return make_prompt_batch(
            seq, recommender.corpus.sids, users, positions, history=recommender.history, stage="serve"
        )

    def _find_leaves(self, item: Tensor) -> Tensor:
        """Return the leaf of each item; -1 for an item of -1."""
        leaf = self._recommender.corpus.trie.get_tensor("leaf_of_item", 0, self._recommender.device)
        return leaf[item.clamp_min(0)].long().masked_fill(item < 0, -1)

    def _explain_scores(
        self, cache: Any, votes: Votes | None, item_QX: Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probability of items [Q, X] under the model alone, and their share of the votes, [Q, X] each."""
        model, trie = self._recommender.model, self._recommender.corpus.trie
        leaf_QX = self._find_leaves(item_QX)
        score = score_leaves(model, cache, trie, leaf_QX, votes=None)
        share = (
            torch.zeros_like(score) if votes is None else compute_vote_shares(model, cache, votes, leaf_QX)
        )
        return score.cpu().numpy(), share.cpu().numpy()


def _add_joined_columns(template: Sequences, features: Collection[str]) -> Sequences:
    """Return a template without events that also has the features that are joined from stores, which are ids."""
    joined = set(features) - {"item", "user"} - set(template.columns)
    empty = {name: np.empty(0, np.int64) for name in sorted(joined)}
    return replace(template, columns=template.columns | empty, joined=None)


def _list_item_arrays(question: Question) -> tuple[np.ndarray, ...]:
    """Return the arrays of dense items in a question."""
    return question.events.item, question.hidden, *(() if question.asked is None else (question.asked,))


def _get_candidates(question: Question) -> np.ndarray:
    """Return the items [m] to score of a question that asks for scores."""
    assert question.asked is not None
    return question.asked
