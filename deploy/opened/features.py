"""Features: requests converted to questions for an engine. All commands make their questions here.

Hidden items are never recommended: items that the user has seen if the run has `repeats: mask`, items that the caller
excludes, and withdrawn items. The model reads a window of the newest events. Windows move in blocks, so that cached
states of a user can be reused.
"""

from __future__ import annotations

import time as clock
from asyncio import wait_for, wrap_future
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nonet.deploy.opened.histories import UserHistories, sort_events
from nonet.deploy.opened.items import CatalogueItems, Refused
from nonet.deploy.opened.joins import HistoryJoins, HistoryToJoin, get_user_id
from nonet.deploy.opened.journal import JournalOptions
from nonet.deploy.opened.opened_run import OpenedRun
from nonet.deploy.opened.posted import check_event
from nonet.deploy.opened.vocabulary import Vocabulary
from nonet.errors import DeadlineExceeded
from nonet.models.generation import Catalogue, Corpus
from nonet.models.inference import EventHistory, Question, choose_beam_width
from nonet.plugins import load_heavy
from nonet.samples.sequences import ALLOW
from nonet.samples.tables import IdKind

MAX_PER_REQUEST = 1000
"""Maximum number of items of an answer, of items to score, and of events in a post."""
_MAX_HISTORY_ITEMS = 10_000  # that a request may give instead of a user


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


class RequestFeatures:
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
    ):
        self.vocabulary = vocabulary or Vocabulary(
            IdKind.from_ids(corpus.seq.user_id), IdKind.from_ids(corpus.item_id)
        )
        self.items, self.histories, self._joins = CatalogueItems(corpus), histories, joins
        self._user_ids = corpus.seq.user_id
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
            run.corpus, histories, window, width, block, joins or None, run.vocabulary, **class_options
        )
        features.renew(run.catalogues.get_newest())
        return features

    @classmethod
    def list_options(cls, run: OpenedRun) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Return the values of columns that a posted event lacks, None for the usual ones, and further arguments of the class."""
        return None, {}

    def renew(self, catalogue: Catalogue) -> None:
        """Use a later version of the catalogue: new items become known, and removed items are never shown."""
        self.items = CatalogueItems(catalogue, self.items)

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
        return HistoryToJoin(question.events, item_ids, get_user_id(question.user, self._user_ids))

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
            time: Time of the request in the run's unit or as ISO text, by default the present.

        Raises:
            Refused: The request is wrong.
            Away: The store of users' events does not answer.
        """
        max_k = min(MAX_PER_REQUEST, self.items.legal)
        if not 1 <= k <= max_k:
            raise Refused("bad_k", f"k is {k}; with this catalogue it must be 1 to {max_k}")
        events, seen_items, user_key, is_cold, unknown = self.read_events(user, history, time)
        excluded_items, unknown_excluded = self._find_items(exclude)
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
            time: Time of the request in the run's unit or as ISO text, by default the present.
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
        item_indices, unknown = self._find_items([item for item in items if str(item) not in withdrawn_ids])
        return item_indices, [*unknown, *(item for item in items if str(item) in withdrawn_ids)]

    def post(
        self, user: int | str, events: Sequence[Mapping[str, Any]], id: str | None
    ) -> tuple[int, list[Any], bool]:
        """Store events of a user on disk.

        Args:
            user: The user's id.
            events: {"item": id, "time": in the run's unit or ISO text, "event": kind, "values": values by column} each; all but
                "item" may be missing.
            id: The post's id; a post with a known id is ignored.

        Returns:
            The number of events of known items, the ids of unknown items, and whether the events were stored:
            False if a post with this id was stored before.

        Raises:
            Refused: An event is wrong.
        """
        name = self.vocabulary.convert_user(user)
        known, unknown = self.check_posted_events(events)
        if not known:
            return 0, unknown, True
        return len(known), unknown, self.histories.post(name, known, id)

    def list_example_users(self, count: int) -> list[int | str]:
        """Return the ids of a few users of the data whose numbers of events are near the median."""
        return self.histories.list_example_users(count)

    def get_journal_facts(self) -> dict[str, Any]:
        """Return the size and retention of the journal of posted events, and the number of entries that cannot be read."""
        return self.histories.get_facts()

    def check_posted_events(
        self, events: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[Any]]:
        """Check posted events, and convert them to dense items.

        Args:
            events: Events as `post` takes them.

        Returns:
            Events as `UserHistories.post` takes them, and the ids of unknown items, whose events are left out.

        Raises:
            Refused: An event is wrong.
        """
        if not 1 <= len(events) <= MAX_PER_REQUEST:
            raise Refused("bad_events", f"{len(events)} events; a request has 1 to {MAX_PER_REQUEST}")
        return self._convert_events(events, get_present(), spread=False)

    def _make_posted_event(self, event: Mapping[str, Any], item_index: int, time: int) -> dict[str, Any]:
        """Convert one event to `UserHistories.post`'s form. Raises Refused if a value is not valid.

        Args:
            event: The event, as `post` takes it.
            item_index: The dense index of its item.
            time: Its unix seconds.
        """
        converted = {
            "item": item_index,
            "time": time,
            "event": event.get("event"),
            "values": self.vocabulary.rename_values(event.get("values") or {}, self.histories.defaults),
        }
        check_event(converted, self.histories.defaults, self.histories.kinds)
        return converted

    def convert_time(self, time: Any) -> int:
        """Return the time of a request as unix seconds; None is the present. Raises Refused for a wrong one."""
        return get_present() if time is None else int(self.vocabulary.convert_times([time])[0])

    def read_events(
        self, user: int | str | None, history: Sequence[Any] | None, time: Any = None
    ) -> tuple[EventHistory, np.ndarray, int, bool, list[int | str]]:
        """Read a user's events, or make events from a history.

        Args:
            user: The user's id.
            history: Events to use instead of the user's: item ids, newest last, or events as `post` takes them. Those without
                a time are one second apart, the last one a second before the request.
            time: Time of the request in the run's unit or as ISO text, by default the present.

        Returns:
            The events, the dense indices of seen items, the user's sparse key, whether there are no events, and
            the ids of unknown items.

        Raises:
            Refused: Neither a user nor a history is given, or the history is too long or has a wrong event.
        """
        if user is None and history is None:
            raise Refused("bad_request", "give a `user`, or a `history` of item ids")
        name = "" if user is None else self.vocabulary.convert_user(user)
        user_key = self.histories.get_key(name)
        if history is None:
            events = self.histories.get_events(name)
            return events, self.histories.find_seen_items(name, events), user_key, not len(events), []
        if len(history) > _MAX_HISTORY_ITEMS:
            raise Refused("bad_history", f"a history of {len(history)} items; at most {_MAX_HISTORY_ITEMS}")
        given = [event if isinstance(event, Mapping) else {"item": event} for event in history]
        if any("item" not in event for event in given):
            raise Refused(
                "bad_history", "an event of the history has no item; an event is {item, time, event, values}"
            )
        known, unknown = self._convert_events(given, self.convert_time(time), spread=True)
        events = sort_events(self.histories.make_events(known))
        return events, np.unique(events.item.astype(np.int64)), user_key, not len(events), unknown

    def _convert_events(
        self, events: Sequence[Mapping[str, Any]], now: int, *, spread: bool
    ) -> tuple[list[dict[str, Any]], list[Any]]:
        """Convert events to dense items, and return them and the ids of unknown items, whose events are left out.

        Args:
            events: Events as `post` takes them.
            now: Unix seconds of the request, the time of events without one.
            spread: Whether these are instead one second apart, the last one a second before the request.

        Raises:
            Refused: An event is wrong.
        """
        item_indices, unknown = self._find_items([event["item"] for event in events])
        unknown_ids = set(unknown)
        known_events = [event for event in events if event["item"] not in unknown_ids]
        times = now - np.arange(len(known_events), 0, -1) if spread else np.full(len(known_events), now)
        timed = [position for position, event in enumerate(known_events) if event.get("time") is not None]
        times[timed] = self.vocabulary.convert_times([known_events[position]["time"] for position in timed])
        return [
            self._make_posted_event(event, item, time)
            for event, item, time in zip(known_events, item_indices.tolist(), times.tolist(), strict=True)
        ], unknown

    def _find_items(self, ids: Sequence[Any]) -> tuple[np.ndarray, list[Any]]:
        """Return the dense indices of known items, and the other ids. Raises Refused for a value that can be no id of the run."""
        item_indices, unknown = self.items.find_indices(ids)
        self.vocabulary.check_items(unknown)
        return item_indices, unknown

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


def get_present() -> int:
    """Return the present time in unix seconds."""
    return int(clock.time())
