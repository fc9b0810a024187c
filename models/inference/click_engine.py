"""ClickEngine: one version of a click model that answers many questions at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from nonet.embedding.reading import SparseReader
from nonet.models.clicks import ClickModel, ClickRequest, ClickScorer
from nonet.models.inference.question import Answer, Question

LABEL = "label of the target"
"""The column of `Question.events` with the label of each event, as `ClickRequest.label` has it."""


class ClickEngine:
    """Answers questions with one version of a click model; only one thread may call an engine at a time.

    Args:
        dense: File of the dense weights.
        files: The version's other files by name, as `ModelSpec.version_files` names them.
        rows: Reader of the sparse rows.
        version: Number of the version.
    """

    states = None  # no prefixes of users are cached

    def __init__(self, dense: Path, files: Mapping[str, Path], rows: SparseReader, version: int = 0):
        self.version = version
        self.scorer = ClickScorer(
            ClickModel.from_files(files["click_model"], files["click_events"], dense, rows)
        )

    @property
    def items(self) -> int:
        """Number of items of the dense index."""
        return len(self.scorer.model.known.item_id)

    @staticmethod
    def estimate_cost(question: Question) -> float:
        """Estimate the cost of a question in a batch, relative to that of one item."""
        return 1.0 + (0 if question.asked is None else len(question.asked))

    def warm(self) -> None:
        """Answer a question, so that code and pages are loaded before the first call."""
        self.scorer.score([ClickRequest(np.zeros(min(1, self.items), np.int64), joined={})])

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """Return one answer per question, in their order; scores are probabilities of clicks."""
        answers, (_, *tasks) = [], self.scorer.model.setup.tasks
        probabilities = self.scorer.score_tasks([self._make_request(question) for question in questions])
        for question, probability_kT in zip(questions, probabilities, strict=True):
            score, *others = np.where(np.isnan(probability_kT), -np.inf, probability_kT).T
            answers.append(Answer(_get_asked(question), score, tasks=dict(zip(tasks, others, strict=True))))
        return answers

    def _make_request(self, question: Question) -> ClickRequest:
        """Convert a question, without items that are newer than this version."""
        events, asked = question.events, _get_asked(question)
        return ClickRequest(
            item=np.where(asked < self.items, asked, -1),
            user=question.user or None,
            time=question.time,
            past=np.where(events.item < self.items, events.item, -1),
            past_time=events.time,
            label=events.columns[LABEL],
            older=events.start,
            columns=question.values,
            joined=question.asked_columns,
        )


def _get_asked(question: Question) -> np.ndarray:
    """Return the items [m] that a question asks about."""
    assert question.asked is not None  # a click model makes no lists
    return question.asked
