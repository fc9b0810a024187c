"""ClickRequestFeatures: requests for scores converted to questions for a click model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nonet.deploy.opened.features import PreparedQuestion, RequestFeatures
from nonet.deploy.opened.histories import UserHistories
from nonet.deploy.opened.items import Refused
from nonet.deploy.opened.joins import HistoryJoins, HistoryToJoin
from nonet.deploy.opened.opened_run import OpenedRun
from nonet.deploy.opened.vocabulary import Vocabulary
from nonet.errors import ConfigError
from nonet.models.clicks import EventLabeller, convert_values
from nonet.models.generation import Corpus
from nonet.models.inference import LABEL, EventHistory, Question
from nonet.samples.tables import NONE

_MAX_LABELLED_USERS = 4096  # whose labels are cached


class ClickRequestFeatures(RequestFeatures):
    """Converts requests for scores to questions with labelled events, and with columns of the request and of its items.

    Args:
        corpus: The run's items and events.
        histories: The users' events.
        window: Maximum number of events that the model reads.
        width: Not used; as in `RequestFeatures`.
        block: Not used; the model reads exactly the newest events.
        joins: Readers of the model's joined columns; None for a model without them.
        vocabulary: The names of the run.
        where: The condition `data.where` of the run, by which events count; None for all.
        labels: Labels events by the target of the run.
        features: Names of the model's features.
    """

    def __init__(
        self,
        corpus: Corpus,
        histories: UserHistories,
        window: int,
        width: int,
        block: int = 1,
        joins: HistoryJoins | None = None,
        vocabulary: Vocabulary | None = None,
        where: str | None = None,
        *,
        labels: EventLabeller,
        features: Sequence[str],
    ):
        super().__init__(corpus, histories, window, width, 1, joins, vocabulary, where)
        self._labels = labels
        self._columns = {
            name: values for name, values in corpus.seq.columns.items() if name in features
        }  # those of the interactions that are features
        self.value_columns = tuple(self._columns)
        # Labels by user and number of events, oldest first.
        self._labels_by_user: dict[tuple[str | None, int], np.ndarray] = {}

    @classmethod
    def list_options(cls, run: OpenedRun) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the values of columns that a posted event lacks, which are missing, and the further arguments of the class."""
        seq, setup = run.corpus.seq, run.setup
        stage = setup.target or ""
        condition = str(getattr(run.scenario.stages[stage], "target", ""))
        labels = EventLabeller(stage, condition, list(seq.columns), seq.event_names)
        return make_missing_values(seq.columns), {"labels": labels, "features": tuple(setup.features)}

    def prepare_list_question(self, *arguments: Any, **options: Any) -> PreparedQuestion:
        """Refuse the request, because a click model recommends no lists."""
        raise Refused(
            "no_lists", "this run has a click model, which recommends no lists; ask /score with items"
        )

    def prepare_score_question(
        self,
        user: int | str | None,
        history: Sequence[Any] | None,
        items: Sequence[Any],
        *,
        withdrawn: tuple[str, ...] = (),
        explain: bool = False,
        time: Any = None,
        values: Mapping[str, Any] | None = None,
    ) -> PreparedQuestion:
        """Make the question for the click probabilities of items, as `RequestFeatures.prepare_score_question`.

        With a `time`, only events that are strictly older are history; without, all events are.
        """
        item_indices, unknown = self._find_asked_items(items, withdrawn)
        now = self.convert_time(time)
        events, _, user_key, *_ = self.read_events(user, history, time)
        # Labels of a user are kept for the present only, by the number of all events.
        label = self._label_events(events, str(user) if history is None and time is None else None, now)
        events = replace(events, columns=events.columns | {LABEL: label})
        newest = self._find_newest_values(events)
        past_items = events.item.astype(np.int64)
        events = events.select_last(self._window)
        question = Question(
            replace(events, columns={LABEL: events.columns[LABEL]}),
            user_key,
            user="" if user is None else str(user),
            top=0,
            width=0,
            asked=item_indices,
            time=now,
            values=newest | self._convert_values(values or {}),
        )
        return PreparedQuestion(question, not len(past_items), unknown, past_items)

    def _label_events(self, events: EventHistory, user: str | None, now: int) -> np.ndarray:
        """Return the label of each event that is known by now; those of a user are computed once per number of events."""
        key = user, events.start + len(events)
        label = None if user is None else self._labels_by_user.get(key)
        if label is None:
            label = self._labels.label_events(events.columns, events.event)
            if user is not None:
                self._labels_by_user[key] = label
                while len(self._labels_by_user) > _MAX_LABELLED_USERS:
                    self._labels_by_user.pop(next(iter(self._labels_by_user)), None)
        return self._labels.hide_later_labels(label, events.columns, now)

    def _find_newest_values(self, events: EventHistory) -> dict[str, Any]:
        """Return the newest value of each column that is a feature and that an event has."""
        newest = {}
        for name in self._columns:
            values = events.columns[name]
            has_value = ~np.isnan(values) if values.dtype.kind == "f" else values != NONE
            if has_value.any():
                newest[name] = values[np.flatnonzero(has_value)[-1]]
        return newest

    def _convert_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the values of a request to those of columns; None is a missing value. Raises Refused for a wrong one."""
        values = self.vocabulary.rename_values(values, self._columns)
        for name in values:
            if name not in self._columns:
                known = ", ".join(self._columns) or "none"
                raise Refused("bad_column", f"values: the model reads no column {name!r}; columns: {known}")
        missing = make_missing_values({name: self._columns[name] for name in values})
        try:
            return missing | convert_values(values, self._columns)
        except ConfigError as error:
            raise Refused("bad_value", f"values: {error}") from None

    def _get_history_to_join(self, prepared: PreparedQuestion) -> HistoryToJoin:
        """Return the items that are asked about, at the time of the request."""
        question = prepared.question
        asked = np.empty(0, np.int64) if question.asked is None else question.asked
        events = EventHistory(
            asked.astype(np.int32), np.full(len(asked), question.time), np.zeros(len(asked), np.int32)
        )
        return HistoryToJoin(
            events, self.items.get_id_array(asked), self.vocabulary.get_own_user_id(question.user)
        )

    @staticmethod
    def _add_joined(question: Question, events: EventHistory) -> Question:
        """Return a question with the joined columns of the items that are asked about."""
        return replace(question, asked_columns=events.columns)


def make_missing_values(columns: Mapping[str, np.ndarray]) -> dict[str, np.generic]:
    """Return the value that stands for a missing one in each column: NaN for numbers, NONE for ids."""
    return {
        name: values.dtype.type(np.nan if values.dtype.kind == "f" else NONE)
        for name, values in columns.items()
    }
