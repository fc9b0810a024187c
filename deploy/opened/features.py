"""Features: requests converted to questions for an engine, with the functions that also make offline prompts.

Hidden items are never recommended: items that the user has seen if the run has `repeats: mask`, items that the caller
excludes, and withdrawn items. The model reads a window of the newest events. Windows move in blocks, so that cached
states of a user can be reused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nonet.deploy.opened.histories import UserHistories
from nonet.deploy.opened.items import CatalogueItems, Refused
from nonet.deploy.opened.journal import JournalOptions
from nonet.deploy.opened.opened_run import OpenedRun
from nonet.deploy.opened.posted import check_event
from nonet.models.generation import Catalogue, Corpus
from nonet.models.inference import EventHistory, Question, choose_beam_width
from nonet.samples.sequences import ALLOW

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
    """

    question: Question
    cold_start: bool
    unknown: list[int | str] = field(default_factory=list)
    history: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))


class RequestFeatures:
    """Converts requests to questions.

    Args:
        corpus: The run's items and events.
        histories: The users' events.
        window: Maximum number of events that the model reads.
        width: Minimum number of beams.
        block: Number of events by which a window moves, at most `window`.
    """

    def __init__(self, corpus: Corpus, histories: UserHistories, window: int, width: int, block: int = 1):
        self.items, self.histories = CatalogueItems(corpus), histories
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
    ) -> RequestFeatures:
        """Create the features of a run, including its posted events.

        Args:
            run: The run to serve.
            block: Number of events by which a window moves.
            posts: Whether more events may be posted; if not, nothing on disk changes.
            store: The address of the store of users' events, by default that of the run's scenario.
            journal: Size and age of the journal's segments.
        """
        stored = run.events if store is None else run.open_events(store)
        histories = UserHistories(
            run.corpus,
            run.beside / "events.jsonl",
            stored=stored,
            window=run.setup.history,
            n_items=len(run.catalogues.get_newest().item_id),
            options=journal,
            read_only=not posts,
        )
        features = cls(run.corpus, histories, run.setup.history, run.scenario.evaluate.width, block)
        features.renew(run.catalogues.get_newest())
        return features

    def renew(self, catalogue: Catalogue) -> None:
        """Use a later version of the catalogue: new items become known, and removed items are never shown."""
        self.items = CatalogueItems(catalogue, self.items)

    def make_list_question(
        self,
        user: str | None,
        history: Sequence[Any] | None,
        k: int,
        *,
        exclude: Sequence[Any] = (),
        where: str | None = None,
        withdrawn: tuple[str, ...] = (),
        explain: bool = False,
    ) -> PreparedQuestion:
        """Make the question for the k best items.

        Args:
            user: The user's id.
            history: Item ids, newest last, to use instead of the user's events.
            k: Number of items.
            exclude: Ids of items to hide.
            where: A condition over item columns.
            withdrawn: Ids of withdrawn items.
            explain: Whether the answer has scores without votes, and votes.

        Raises:
            Refused: The request is wrong.
            Away: The store of users' events does not answer.
        """
        max_k = min(MAX_PER_REQUEST, self.items.legal)
        if not 1 <= k <= max_k:
            raise Refused("bad_k", f"k is {k}; with this catalogue it must be 1 to {max_k}")
        events, seen_items, user_key, is_cold, unknown = self._read_user_events(user, history)
        excluded_items, unknown_excluded = self.items.find_indices(exclude)
        hidden = [excluded_items, self._find_hidden_items(seen_items, withdrawn)]
        question = Question(
            self._select_window(events),
            user_key,
            user=user or "",
            top=k,
            width=choose_beam_width(self._width, k),
            hidden=np.unique(np.concatenate(hidden)),
            explain=explain,
            within=self.items.make_filter(where) if where else None,
        )
        return PreparedQuestion(
            question, is_cold, [*unknown, *unknown_excluded], events.item.astype(np.int64)
        )

    def make_score_question(
        self,
        user: str | None,
        history: Sequence[Any] | None,
        items: Sequence[Any],
        *,
        withdrawn: tuple[str, ...] = (),
        explain: bool = False,
    ) -> PreparedQuestion:
        """Make the question for the scores of items; unknown and withdrawn items are left out.

        Args:
            user: The user's id.
            history: Item ids, newest last, to use instead of the user's events.
            items: Ids of the items.
            withdrawn: Ids of withdrawn items.
            explain: Whether the answer has scores without votes, and votes.

        Returns:
            The question, with the left out items in `unknown`.

        Raises:
            Refused: The request is wrong.
            Away: The store of users' events does not answer.
        """
        if not 1 <= len(items) <= MAX_PER_REQUEST:
            raise Refused("bad_items", f"{len(items)} items to score; a request has 1 to {MAX_PER_REQUEST}")
        events, seen_items, user_key, is_cold, _ = self._read_user_events(user, history)
        withdrawn_ids = {str(item) for item in (*withdrawn, *self.items.get_ids(self.items.gone))}
        item_indices, unknown = self.items.find_indices(
            [item for item in items if str(item) not in withdrawn_ids]
        )
        unknown += [item for item in items if str(item) in withdrawn_ids]
        question = Question(
            self._select_window(events),
            user_key,
            user=user or "",
            top=0,
            width=0,
            hidden=self._find_hidden_items(seen_items, withdrawn),
            asked=item_indices,
            explain=explain,
        )
        return PreparedQuestion(question, is_cold, unknown, events.item.astype(np.int64))

    def post(
        self, user: str, events: Sequence[Mapping[str, Any]], id: str | None
    ) -> tuple[int, list[Any], bool]:
        """Store events of a user on disk.

        Args:
            user: The user's id.
            events: {"item": id, "time": unix seconds, "event": kind, "values": values by column} each; all but
                "item" may be missing.
            id: The post's id; a post with a known id is ignored.

        Returns:
            The number of events of known items, the ids of unknown items, and whether the events were stored:
            False if a post with this id was stored before.

        Raises:
            Refused: An event is wrong.
        """
        known, unknown = self.check_posted_events(events)
        if not known:
            return 0, unknown, True
        return len(known), unknown, self.histories.post(user, known, id)

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
        item_indices, unknown = self.items.find_indices([event["item"] for event in events])
        next_indices, known = iter(item_indices.tolist()), []  # the indices are those of the known items only
        for event in events:
            if event["item"] in unknown:
                continue
            known.append(self._make_posted_event(event, next(next_indices)))
        return known, unknown

    def _make_posted_event(self, event: Mapping[str, Any], item_index: int) -> dict[str, Any]:
        """Convert one posted event to `UserHistories.post`'s form. Raises Refused if a value is not valid."""
        event_time = event.get("time")
        converted = {
            "item": item_index,
            "time": int(time.time()) if event_time is None else event_time,
            "event": event.get("event"),
            "values": dict(event.get("values") or {}),
        }
        check_event(converted, self.histories.defaults, self.histories.kinds)
        return converted

    def _read_user_events(
        self, user: str | None, history: Sequence[Any] | None
    ) -> tuple[EventHistory, np.ndarray, int, bool, list[int | str]]:
        """Read a user's events, or make events from a history.

        Returns:
            The events, the dense indices of seen items, the user's sparse key, whether there are no events, and
            the ids of unknown items.

        Raises:
            Refused: Neither a user nor a history is given, or the history is too long.
        """
        if user is None and history is None:
            raise Refused("bad_request", "give a `user`, or a `history` of item ids")
        user_key = self.histories.get_key(user or "")
        if history is None:
            events = self.histories.get_events(user or "")
            return events, self.histories.find_seen_items(user or "", events), user_key, not len(events), []
        if len(history) > _MAX_HISTORY_ITEMS:
            raise Refused("bad_history", f"a history of {len(history)} items; at most {_MAX_HISTORY_ITEMS}")
        item_indices, unknown = self.items.find_indices(history)
        start_time = int(time.time()) - len(item_indices)  # one event per second, the last one a second ago
        posted = [
            {"item": item, "time": start_time + position}
            for position, item in enumerate(item_indices.tolist())
        ]
        return self.histories.make_events(posted), item_indices, user_key, not len(item_indices), unknown

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
