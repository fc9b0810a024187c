"""Features: requests converted to questions for an engine, with the functions that also make offline prompts.

The hidden items follow the run: items seen before under `repeats: mask`, items that the caller excludes or
filters out, and withdrawn items. The model reads the newest events. Windows move in blocks, so that cached
states of a user can be reused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nonet.deploy.serving.features.histories import UserHistories
from nonet.deploy.serving.features.items import CatalogueItems, Refused
from nonet.deploy.serving.features.journal import JournalOptions
from nonet.deploy.serving.features.open_run import ServedRun
from nonet.deploy.serving.features.posted import check_event
from nonet.models.generation import Catalogue, Corpus
from nonet.models.inference import EventHistory, Question, choose_beam_width
from nonet.samples.sequences import ALLOW

MOST = 1000
"""Maximum number of items of an answer, of items to score, and of events in a post."""
_LONGEST_HISTORY = 10_000


@dataclass(frozen=True, slots=True)
class PreparedQuestion:
    """A question and what was noticed while it was made.

    Attributes:
        question: The question.
        cold_start: Whether no event of the user is known.
        unknown: Requested ids that no item has.
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
        window: Number of events that the model reads.
        width: Minimum number of beams.
        block: Number of events by which a window moves.
    """

    def __init__(self, corpus: Corpus, histories: UserHistories, window: int, width: int, block: int = 1):
        self.items, self.histories = CatalogueItems(corpus), histories
        self._window, self._width, self._block = window, width, max(1, min(block, window))
        self._allow = corpus.seq.repeats == ALLOW
        self._withdrawn: tuple[tuple[str, ...], CatalogueItems | None, np.ndarray] = (
            (),
            None,
            np.empty(0, np.int64),
        )

    @classmethod
    def from_run(
        cls,
        run: ServedRun,
        block: int = 1,
        *,
        posts: bool = True,
        store: str | None = None,
        journal: JournalOptions | None = None,
    ) -> RequestFeatures:
        """Open the features of a run, including posted events.

        Args:
            run: The run.
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
        most = min(MOST, self.items.legal)
        if not 1 <= k <= most:
            raise Refused("bad_k", f"k is {k}; with this catalogue it must be 1 to {most}")
        events, seen, key, cold, unknown = self._read_user_events(user, history)
        excluded, not_known = self.items.find_indices(exclude)
        hidden = [excluded, self._find_hidden_items(seen, withdrawn)]
        question = Question(
            self._select_window(events),
            key,
            user or "",
            k,
            choose_beam_width(self._width, k),
            np.unique(np.concatenate(hidden)),
            explain=explain,
            within=self.items.make_filter(where) if where else None,
        )
        return PreparedQuestion(question, cold, [*unknown, *not_known], events.item.astype(np.int64))

    def make_score_question(
        self,
        user: str | None,
        history: Sequence[Any] | None,
        items: Sequence[Any],
        *,
        withdrawn: tuple[str, ...] = (),
        explain: bool = False,
    ) -> PreparedQuestion:
        """Make the question for the scores of items; unknown and withdrawn ones are listed in `unknown`.

        Args:
            user: The user's id.
            history: Item ids, newest last, to use instead of the user's events.
            items: Ids of the items.
            withdrawn: Ids of withdrawn items.
            explain: Whether the answer has scores without votes, and votes.

        Raises:
            Refused: The request is wrong.
            Away: The store of users' events does not answer.
        """
        if not 1 <= len(items) <= MOST:
            raise Refused("bad_items", f"{len(items)} items to score; a request has 1 to {MOST}")
        events, seen, key, cold, _ = self._read_user_events(user, history)
        gone = {str(item) for item in (*withdrawn, *self.items.get_ids(self.items.gone))}
        asked, unknown = self.items.find_indices([item for item in items if str(item) not in gone])
        unknown += [item for item in items if str(item) in gone]
        question = Question(
            self._select_window(events),
            key,
            user or "",
            0,
            0,
            self._find_hidden_items(seen, withdrawn),
            asked,
            explain,
        )
        return PreparedQuestion(question, cold, unknown, events.item.astype(np.int64))

    def post(
        self, user: str, events: Sequence[Mapping[str, Any]], id: str | None
    ) -> tuple[int, list[Any], bool]:
        """Store events of a user on disk.

        Args:
            user: The user's id.
            events: {"item", "time", "event", "values"} each.
            id: The post's id; a post with a known id is ignored.

        Returns:
            The number of stored events, unknown items, and whether the id is new.

        Raises:
            Refused: An event is wrong.
        """
        known, unknown = self.check_posted_events(events)
        if not known:
            return 0, unknown, True
        return len(known), unknown, self.histories.post(user, known, id)

    def list_example_users(self, count: int) -> list[int | str]:
        """Return a few users of the data."""
        return self.histories.list_example_users(count)

    def get_journal_facts(self) -> dict[str, Any]:
        """Return what the journal of posted events has, how long it is kept, and how much of it could not be read."""
        return self.histories.get_facts()

    def check_posted_events(
        self, events: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[Any]]:
        """Check posted events.

        Returns:
            Events as `Histories.post` takes them, and unknown items, whose events are left out.

        Raises:
            Refused: An event is wrong.
        """
        if not 1 <= len(events) <= MOST:
            raise Refused("bad_events", f"{len(events)} events; a request has 1 to {MOST}")
        places, unknown = self.items.find_indices([event["item"] for event in events])
        left, known = iter(places.tolist()), []
        for event in events:
            if event["item"] in unknown:
                continue
            known.append(self._make_posted_event(event, next(left)))
        return known, unknown

    def _make_posted_event(self, event: Mapping[str, Any], item: int) -> dict[str, Any]:
        """Convert one posted event and check it. Raises Refused if a value is not valid."""
        moment = event.get("time")
        kept = {
            "item": item,
            "time": int(time.time()) if moment is None else moment,
            "event": event.get("event"),
            "values": dict(event.get("values") or {}),
        }
        check_event(kept, self.histories.defaults, self.histories.kinds)
        return kept

    def _read_user_events(
        self, user: str | None, history: Sequence[Any] | None
    ) -> tuple[EventHistory, np.ndarray, int, bool, list[int | str]]:
        """Read a user's events.

        Returns:
            The events, the distinct items, the user's sparse key, whether there are no events, and unknown
            ids.
        """
        if user is None and history is None:
            raise Refused("bad_request", "give a `user`, or a `history` of item ids")
        key = self.histories.get_key(user or "")
        if history is None:
            events = self.histories.get_events(user or "")
            return events, self.histories.find_seen_items(user or "", events), key, not len(events), []
        if len(history) > _LONGEST_HISTORY:
            raise Refused("bad_history", f"a history of {len(history)} items; at most {_LONGEST_HISTORY}")
        places, unknown = self.items.find_indices(history)
        start = int(time.time()) - len(places)
        made = [{"item": item, "time": start + place} for place, item in enumerate(places.tolist())]
        return self.histories.make_events(made), places, key, not len(places), unknown

    def _select_window(self, events: EventHistory) -> EventHistory:
        """Return the window that the model reads.

        Its start moves in blocks, so it has between window - block + 1 and window events.
        """
        total = events.start + len(events)
        over = max(0, total - self._window)
        return events.select_last(total - -(-over // self._block) * self._block)

    def _find_hidden_items(self, seen: np.ndarray, withdrawn: tuple[str, ...]) -> np.ndarray:
        """Return the dense indices of items that are hidden from this user."""
        items = self.items
        if self._withdrawn[:2] != (withdrawn, items):
            self._withdrawn = withdrawn, items, np.concatenate([items.find_indices(withdrawn)[0], items.gone])
        masked = np.empty(0, np.int64) if self._allow else seen
        return np.unique(np.concatenate([masked, self._withdrawn[2]]))
