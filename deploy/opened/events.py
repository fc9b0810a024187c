"""EventReader: reads the events of users as requests name them, and stores posted ones."""

from __future__ import annotations

import time as clock
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from nonet.deploy.opened.histories import UserHistories, sort_events
from nonet.deploy.opened.items import CatalogueItems, Refused
from nonet.deploy.opened.posted import check_event
from nonet.deploy.opened.vocabulary import Vocabulary
from nonet.errors import ConfigError
from nonet.models.generation import Corpus
from nonet.models.inference import EventHistory
from nonet.samples.tables import IdKind, as_numbers, infer_types, match_rows

MAX_PER_REQUEST = 1000
"""Maximum number of items of an answer, of items to score, and of events in a post."""
_MAX_AHEAD_S = 86_400  # that the time of a posted event may be ahead, for clocks and time zones that differ
_MAX_HISTORY_ITEMS = 10_000  # that a request may give instead of a user


class EventReader:
    """Reads the events of users, whose ids, times and columns are those of the run's own files.

    Args:
        corpus: The run's items and events.
        histories: The users' events.
        vocabulary: The names of the run; by default seconds, and the kinds of ids of the corpus.
        where: The condition `data.where` of the run, by which events count; None for all.

    Attributes:
        items: The items of the newest catalogue.
    """

    def __init__(
        self,
        corpus: Corpus,
        histories: UserHistories,
        vocabulary: Vocabulary | None = None,
        where: str | None = None,
    ):
        self.items, self.histories, self._where = CatalogueItems(corpus), histories, where
        self.vocabulary = vocabulary or Vocabulary(
            IdKind.from_ids(corpus.seq.user_id), IdKind.from_ids(corpus.item_id)
        )
        id_kinds = {"user_id": self.vocabulary.users, "item_id": self.vocabulary.items}
        id_types = {name: pa.string() if kind.text else pa.int64() for name, kind in id_kinds.items()}
        known_types = {**id_types, "timestamp": pa.int64(), "event": pa.string()}
        self._condition_types = infer_types(where or "", known_types)

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
        known, unknown = self._check_posted_events(events, name)
        if not known:
            return 0, unknown, True
        return len(known), unknown, self.histories.post(name, known, id, events)

    def list_example_users(self, count: int) -> list[int | str]:
        """Return the ids of a few users of the data whose numbers of events are near the median."""
        return self.histories.list_example_users(count)

    def get_journal_facts(self) -> dict[str, Any]:
        """Return the size and retention of the journal of posted events, and the number of entries that cannot be read."""
        return self.histories.get_facts()

    def _check_posted_events(
        self, events: Sequence[Mapping[str, Any]], user: str
    ) -> tuple[list[dict[str, Any]], list[Any]]:
        """Check posted events, and convert them to dense items.

        Args:
            events: Events as `post` takes them.
            user: The user's id as text.

        Returns:
            Events as `UserHistories.post` takes them, and the ids of unknown items, whose events are left out.

        Raises:
            Refused: An event is wrong.
        """
        if not 1 <= len(events) <= MAX_PER_REQUEST:
            raise Refused("bad_events", f"{len(events)} events; a request has 1 to {MAX_PER_REQUEST}")
        now = get_present()
        known, unknown = self._convert_events(events, now, user, spread=False)
        newest = max((event["time"] for event in known), default=now)
        if newest > now + _MAX_AHEAD_S:
            raise Refused(
                "bad_time",
                f"an event has the time {newest} in unix seconds, more than a day from now ({now}); give the time at which it "
                f"happened, in the unit of the run's log ({self.vocabulary.time_unit}) or as ISO 8601 text, or none for now",
            )
        return known, unknown

    def _make_posted_event(self, event: Mapping[str, Any], item_index: int, time: int) -> dict[str, Any]:
        """Convert one event to `UserHistories.post`'s form. Raises Refused if a value is not valid.

        Args:
            event: The event, as `post` takes it.
            item_index: The dense index of its item.
            time: Its unix seconds.
        """
        values = self.vocabulary.rename_values(event.get("values") or {}, self.histories.defaults)
        converted = {
            "item": item_index,
            "time": time,
            "event": event.get("event"),
            "values": {name: self._hash_text(name, value) for name, value in values.items()},
        }
        check_event(converted, self.histories.defaults, self.histories.kinds)
        return converted

    def _check_condition(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Raise Refused if `data.where` leaves an event out of the run, whatever the values are that it does not have.

        Args:
            events: Values by column of each event, by Nonet's names; None for what an event does not have.
        """
        if not self._where or not events:
            return
        untyped = [name for name, column_type in self._condition_types.items() if column_type is None]
        has_text = any(isinstance(event.get(name), str) for name in untyped for event in events)
        columns = {
            name: self._make_column(name, column_type or (pa.string() if has_text else pa.float64()), events)
            for name, column_type in self._condition_types.items()
        }
        try:
            # A comparison with a missing value is null, and so is what depends on it.
            is_left_out = match_rows(f"not ({self._where})", pa.table(columns))
        except ConfigError:  # the negation is one level deeper than a condition may be: no event is refused
            return
        if is_left_out.any():
            raise Refused(
                "left_out",
                f"data.where: {self._where!r} leaves this event out of the run's histories; send only events for which it holds",
            )

    def _make_column(
        self, name: str, column_type: pa.DataType, events: Sequence[Mapping[str, Any]]
    ) -> pa.Array:
        """Return the values of a column that `data.where` names [N], in the kind that the log has; null for missing ones."""
        default = self.histories.defaults.get(name)
        if default is not None and default.dtype.kind != "f" and pa.types.is_floating(column_type):
            column_type = pa.int64()  # of which floating numbers do not have all digits
        convert = {pa.bool_(): bool, pa.string(): str, pa.float64(): float}.get(column_type, int)
        own_values = [
            # A number may stand for a text (`_hash_text`), which is then not known here.
            None if value is None or isinstance(value, str) != (convert is str) else convert(value)
            for value in (event.get(name) for event in events)
        ]
        return pa.array(own_values, column_type)

    def _hash_text(self, name: str, value: Any) -> Any:
        """Return the number that stands for a text in a column of ids or texts; other values as they are."""
        default = self.histories.defaults.get(name)
        if not isinstance(value, str) or default is None or default.dtype != np.int64:
            return value
        try:
            return int(as_numbers(np.array([value]))[0])
        except UnicodeEncodeError:
            raise Refused("bad_value", f"{name}: {value!r} is no text") from None

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
            time: Time of the request in the run's unit or as ISO text; events that are not older are left out. By default the
                present, and all events.

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
        now = self.convert_time(time)
        if history is None and time is None:
            events = self.histories.get_events(name)
            return events, self.histories.find_seen_items(name, events), user_key, not len(events), []
        if history is None:
            events = _select_older(self.histories.get_events(name, whole=True), now)
            return events, np.unique(events.item.astype(np.int64)), user_key, not len(events), []
        if len(history) > _MAX_HISTORY_ITEMS:
            raise Refused("bad_history", f"a history of {len(history)} items; at most {_MAX_HISTORY_ITEMS}")
        given = [event if isinstance(event, Mapping) else {"item": event} for event in history]
        if any("item" not in event for event in given):
            raise Refused(
                "bad_history", "an event of the history has no item; an event is {item, time, event, values}"
            )
        known, unknown = self._convert_events(given, now, name, spread=True)
        events = _select_older(sort_events(self.histories.make_events(known)), None if time is None else now)
        return events, np.unique(events.item.astype(np.int64)), user_key, not len(events), unknown

    def _convert_events(
        self, events: Sequence[Mapping[str, Any]], now: int, user: str, *, spread: bool
    ) -> tuple[list[dict[str, Any]], list[Any]]:
        """Convert events to dense items, and return them and the ids of unknown items, whose events are left out.

        Args:
            events: Events as `post` takes them.
            now: Unix seconds of the request, the time of events without one.
            user: The user's id as text; "" for none.
            spread: Whether these are instead one second apart, the last one a second before the request.

        Raises:
            Refused: An event is wrong.
        """
        item_indices, unknown = self.find_items([event["item"] for event in events])
        unknown_ids = set(unknown)
        known_events = [event for event in events if event["item"] not in unknown_ids]
        times = now - np.arange(len(known_events), 0, -1) if spread else np.full(len(known_events), now)
        timed = [position for position, event in enumerate(known_events) if event.get("time") is not None]
        times[timed] = self.vocabulary.convert_times([known_events[position]["time"] for position in timed])
        converted = [
            self._make_posted_event(event, item, time)
            for event, item, time in zip(known_events, item_indices.tolist(), times.tolist(), strict=True)
        ]
        own_user, item_ids = self.vocabulary.get_own_user_id(user), self.items.get_ids(item_indices)
        self._check_condition(
            [
                self.vocabulary.rename_values(event.get("values") or {}, self.histories.defaults)
                | {"event": event.get("event"), "user_id": own_user, "item_id": item_id}
                | {
                    "timestamp": None if spread and event.get("time") is None else time
                }  # not if it is made up
                for event, item_id, time in zip(known_events, item_ids, times.tolist(), strict=True)
            ]
        )
        return converted, unknown

    def find_items(self, ids: Sequence[Any]) -> tuple[np.ndarray, list[Any]]:
        """Return the dense indices of known items, and the other ids. Raises Refused for a value that can be no id of the run."""
        item_indices, unknown = self.items.find_indices(ids)
        self.vocabulary.check_items(unknown)
        return item_indices, unknown


def get_present() -> int:
    """Return the present time in unix seconds."""
    return int(clock.time())


def _select_older(events: EventHistory, time: int | None) -> EventHistory:
    """Return the events before `time`, in unix seconds; all of them for None."""
    return events if time is None else events.filter_events(events.time < time)
