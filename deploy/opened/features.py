"""Features: requests converted to questions for an engine. All commands make their questions here.

Hidden items are never recommended: items that the user has seen if the run has `repeats: mask`, items that the caller
excludes, and withdrawn items. The model reads a window of the newest events. Windows move in blocks, so that cached
states of a user can be reused.
"""

from __future__ import annotations

from asyncio import wait_for, wrap_future
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nonet.deploy.opened.events import MAX_PER_REQUEST, EventReader
from nonet.deploy.opened.histories import UserHistories
from nonet.deploy.opened.items import CatalogueItems, Refused
from nonet.deploy.opened.joins import HistoryJoins, HistoryToJoin
from nonet.deploy.opened.opened_run import OpenedRun
from nonet.deploy.opened.vocabulary import Vocabulary
from nonet.errors import DeadlineExceeded
from nonet.journal import JournalOptions
from nonet.models.generation import Catalogue, Corpus
from nonet.models.inference import EventHistory, Question, choose_beam_width
from nonet.plugins import load_heavy
from nonet.samples.sequences import ALLOW


@dataclass(frozen=True, slots=True)
class PreparedQuestion:
    """A question for an engine, with facts about its user and request that the response contains.

    Attributes:
        question: The question.
        cold_start: Whether no event of the user is known.
        unknown: Ids in the request that no item has.
        history: Dense indices of the user's items, newest last.
        joins: Names of the joins that were read for the question.
        missing: Those whose store did not answer, so that their columns have missing values.
    """

    question: Question
    cold_start: bool
    unknown: list[int | str] = field(default_factory=list)
    history: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    joins: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


class RequestFeatures(EventReader):
    """Converts requests to questions.

    Attributes:
        value_columns: Names of the columns of a request that the model reads.

    Args:
        corpus: The run's items and events.
        histories: The users' events.
        window: Maximum number of events that the model reads.
        width: Minimum number of beams.
        block: Number of events by which a window moves, at most `window`.
        joins: Readers of the model's joined columns; None for a model without them.
        vocabulary: The names of the run; by default seconds, and the kinds of ids of the corpus.
        where: The condition `data.where` of the run, by which events count; None for all.
    """

    value_columns: tuple[str, ...] = ()

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
    ):
        super().__init__(corpus, histories, vocabulary, where)
        self._joins = joins
        self._window, self._width, self._block = window, width, max(1, min(block, window))
        self._allows_repeats = corpus.seq.repeats == ALLOW
        # The last result of `_find_hidden_items` for all users: its arguments (withdrawn ids, items), and dense indices.
        self._withdrawn_cache: tuple[tuple[str, ...], CatalogueItems | None, np.ndarray] = (
            (),
            None,
            np.empty(0, np.int64),
        )

    @classmethod
    def from_run(
        cls,
        run: OpenedRun,
        block: int = 1,
        *,
        posts: bool = True,
        store: str | None = None,
        journal: JournalOptions | None = None,
        stores: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> RequestFeatures:
        """Create the features of a run, including its posted events.

        Args:
            run: The run to serve.
            block: Number of events by which a window moves.
            posts: Whether more events may be posted; if not, nothing on disk changes.
            store: The address of the store of users' events, by default that of the run's scenario.
            journal: Size and age of the journal's segments.
            stores: Addresses and options of the stores of joins by name, instead of those of the scenario.

        Raises:
            ConfigError: A store does not exist, or lacks a column that the model reads.
        """
        features_class = load_heavy(run.scenario.model.spec.request_features)
        defaults, class_options = features_class.list_options(run)
        joins = HistoryJoins(run.replace_stores(stores or {}), run.setup.features)
        joins.check()
        stored = run.events if store is None else run.open_events(store)
        histories = UserHistories(
            run.corpus,
            run.beside / "events.jsonl",
            defaults,
            stored,
            window=run.setup.history,
            n_items=len(run.catalogues.get_newest().item_id),
            options=journal,
            read_only=not posts,
        )
        window, width = run.setup.history, run.scenario.evaluate.width
        features = features_class(
            run.corpus,
            histories,
            window,
            width,
            block,
            joins or None,
            run.vocabulary,
            run.scenario.data.where,
            **class_options,
        )
        features.renew(run.catalogues.get_newest())
        return features

    @classmethod
    def list_options(cls, run: OpenedRun) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Return the values of columns that a posted event lacks, None for the usual ones, and further arguments of the class."""
        return None, {}

    def renew(self, catalogue: Catalogue) -> None:
        """Use a later version of the catalogue: new items become known, and removed items are never shown."""
        items = CatalogueItems(catalogue, self.items)
        self.histories.n_items, self.items = len(items), items

    def make_list_question(self, *arguments: Any, **options: Any) -> PreparedQuestion:
        """Make the question for the k best items with its joined columns; arguments are those of `prepare_list_question`.

        Raises:
            Refused: The request is wrong.
            Away: The store of users' events does not answer.
            StoreError: A joined store does not answer.
        """
        return self.read_joined_columns([self.prepare_list_question(*arguments, **options)])[0]

    def make_score_question(self, *arguments: Any, **options: Any) -> PreparedQuestion:
        """Make the question for the scores of items with its joined columns; as `make_list_question`."""
        return self.read_joined_columns([self.prepare_score_question(*arguments, **options)])[0]

    def read_joined_columns(self, prepared: Sequence[PreparedQuestion]) -> list[PreparedQuestion]:
        """Return the questions with the joined columns of their events, read by one look-up per join.

        Raises:
            StoreError: A joined store does not answer.
        """
        if self._joins is None:
            return list(prepared)
        histories = self._joins.add_columns([self._get_history_to_join(each) for each in prepared])
        return [
            self._replace_events(each, events, self._joins.names)
            for each, events in zip(prepared, histories, strict=True)
        ]

    def read_available_columns(self, prepared: Sequence[PreparedQuestion]) -> list[PreparedQuestion]:
        """Return the questions as `read_joined_columns`; columns of stores that do not answer have missing values."""
        if self._joins is None:
            return list(prepared)
        read = self._joins.add_available_columns([self._get_history_to_join(each) for each in prepared])
        return [
            self._replace_events(each, events, self._joins.names, missing)
            for each, (events, missing) in zip(prepared, read, strict=True)
        ]

    async def add_joined_columns(self, prepared: PreparedQuestion, within_s: float) -> PreparedQuestion:
        """Return a question with the joined columns of its events, read together with those of other requests.

        Columns of a store that does not answer within `within_s` seconds have missing values, and `missing` names their joins.
        """
        if self._joins is None:
            return prepared
        try:
            future = self._joins.submit(self._get_history_to_join(prepared), within_s)
            events, missing = await wait_for(wrap_future(future), within_s)
        except (TimeoutError, DeadlineExceeded):
            events = self._joins.fill_missing(self._get_history_to_join(prepared).events)
            missing = self._joins.names
        return self._replace_events(prepared, events, self._joins.names, missing)

    def _get_history_to_join(self, prepared: PreparedQuestion) -> HistoryToJoin:
        """Return the events of a question with the own ids of their items and of its user."""
        question = prepared.question
        item_ids = self.items.get_id_array(question.events.item)
        return HistoryToJoin(question.events, item_ids, self.vocabulary.get_own_user_id(question.user))

    def _replace_events(
        self,
        prepared: PreparedQuestion,
        events: EventHistory,
        joins: tuple[str, ...],
        missing: tuple[str, ...] = (),
    ) -> PreparedQuestion:
        """Return a prepared question with joined columns, the names of its joins, and those that are missing."""
        question = self._add_joined(prepared.question, events)
        return replace(prepared, question=question, joins=joins, missing=missing)

    @staticmethod
    def _add_joined(question: Question, events: EventHistory) -> Question:
        """Return a question with the joined columns of the history that `_get_history_to_join` returned."""
        return replace(question, events=events)

    def prepare_list_question(
        self,
        user: int | str | None,
        history: Sequence[Any] | None,
        k: int,
        *,
        exclude: Sequence[Any] = (),
        where: str | None = None,
        withdrawn: tuple[str, ...] = (),
        explain: bool = False,
        time: Any = None,
    ) -> PreparedQuestion:
        """Make the question for the k best items, without joined columns.

        Args:
            user: The user's id.
            history: Events to use instead of the user's: item ids, newest last, or events as `post` takes them.
            k: Number of items.
            exclude: Ids of items to hide.
            where: A condition over item columns.
            withdrawn: Ids of withdrawn items.
            explain: Whether the answer has scores without votes, and votes.
            time: Time of the request in the run's unit or as ISO text, before which events are history; by default the present,
                and all events.

        Raises:
            Refused: The request is wrong.
            Away: The store of users' events does not answer.
        """
        max_k = min(MAX_PER_REQUEST, self.items.legal)
        if not 1 <= k <= max_k:
            raise Refused("bad_k", f"k is {k}; with this catalogue it must be 1 to {max_k}")
        events, seen_items, user_key, is_cold, unknown = self.read_events(user, history, time)
        excluded_items, unknown_excluded = self.find_items(exclude)
        hidden = [excluded_items, self._find_hidden_items(seen_items, withdrawn)]
        question = Question(
            self._select_window(events),
            user_key,
            user="" if user is None else str(user),
            top=k,
            width=choose_beam_width(self._width, k),
            hidden=np.unique(np.concatenate(hidden)),
            explain=explain,
            within=self.items.make_filter(where) if where else None,
        )
        return PreparedQuestion(
            question, is_cold, [*unknown, *unknown_excluded], events.item.astype(np.int64)
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
        """Make the question for the scores of items, without joined columns; unknown and withdrawn items are left out.

        Args:
            user: The user's id.
            history: Events to use instead of the user's: item ids, newest last, or events as `post` takes them.
            items: Ids of the items.
            withdrawn: Ids of withdrawn items.
            explain: Whether the answer has scores without votes, and votes.
            time: Time of the request in the run's unit or as ISO text, before which events are history; by default the present,
                and all events.
            values: Values of the request by column, which only models of single events read.

        Returns:
            The question, with the left out items in `unknown`.

        Raises:
            Refused: The request is wrong.
            Away: The store of users' events does not answer.
        """
        if values:
            raise Refused("bad_values", "values: this model reads no columns of a request; leave them out")
        item_indices, unknown = self._find_asked_items(items, withdrawn)
        events, seen_items, user_key, is_cold, _ = self.read_events(user, history, time)
        question = Question(
            self._select_window(events),
            user_key,
            user="" if user is None else str(user),
            top=0,
            width=0,
            hidden=self._find_hidden_items(seen_items, withdrawn),
            asked=item_indices,
            explain=explain,
        )
        return PreparedQuestion(question, is_cold, unknown, events.item.astype(np.int64))

    def _find_asked_items(
        self, items: Sequence[Any], withdrawn: tuple[str, ...]
    ) -> tuple[np.ndarray, list[int | str]]:
        """Return the dense indices of items to score, and the ids of unknown and withdrawn ones. Raises Refused for too many."""
        if not 1 <= len(items) <= MAX_PER_REQUEST:
            raise Refused("bad_items", f"{len(items)} items to score; a request has 1 to {MAX_PER_REQUEST}")
        withdrawn_ids = {str(item) for item in (*withdrawn, *self.items.get_ids(self.items.gone))}
        item_indices, unknown = self.find_items([item for item in items if str(item) not in withdrawn_ids])
        return item_indices, [*unknown, *(item for item in items if str(item) in withdrawn_ids)]

    def _select_window(self, events: EventHistory) -> EventHistory:
        """Return the window that the model reads.

        Its start moves in blocks, so the window of a longer history has window - block + 1 to window events.
        """
        total = events.start + len(events)
        excess = max(0, total - self._window)
        skipped_blocks = -(-excess // self._block)  # rounded up
        return events.select_last(total - skipped_blocks * self._block)

    def _find_hidden_items(self, seen_items: np.ndarray, withdrawn: tuple[str, ...]) -> np.ndarray:
        """Return the sorted dense indices of withdrawn items, and of seen ones if they must not be repeated."""
        items = self.items
        if self._withdrawn_cache[:2] != (withdrawn, items):
            withdrawn_items = np.concatenate([items.find_indices(withdrawn)[0], items.gone])
            self._withdrawn_cache = withdrawn, items, withdrawn_items
        masked_items = np.empty(0, np.int64) if self._allows_repeats else seen_items
        return np.unique(np.concatenate([masked_items, self._withdrawn_cache[2]]))
