"""UserHistories: the events of users from the run's data, and the events that clients have posted since.

Posted events are on disk before they are acknowledged (`nonet.journal`) and are read again when a process starts. Memory has
each user's newest posted events, as many as a model reads. Older ones are arrays, for questions about the past, and because
their items are not recommended again if `repeats` is `mask`. Entries of the journal that this run cannot read are quarantined:
they are listed in a file next to the journal and affect no answer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nonet.atomic import write_whole
from nonet.deploy.opened.items import Away, Refused
from nonet.deploy.opened.posted import PostedEvents, check_event, concatenate_events
from nonet.errors import ConfigError, NonetError, StoreError
from nonet.journal import JournalOptions, LineJournal
from nonet.models.generation import Corpus
from nonet.models.inference import EventHistory, find_default_values
from nonet.samples.tables import as_numbers, compute_keys
from nonet.samples.tokenised import UserEvents

_MAX_POST_IDS = 1 << 17  # newest ids of posts that are remembered, to recognize repeated posts
_MIN_EVENTS = 20  # newest posted events that memory keeps at least, because answers with `explain` show them
_EXPIRE_EVERY_S = (
    3600.0  # interval at which segments beyond the retention are deleted while nothing is posted
)
_log = logging.getLogger(__name__)


class UserHistories:
    """The events of all users of a corpus, and of all users with posted events.

    Args:
        corpus: The run's items and events.
        journal: The file of posted events; None to accept none.
        defaults: The value of each event column for events that lack it; None to derive them from the corpus.
        stored: A store from which a user's events are read, instead of from the corpus.
        window: Number of events that a model reads; memory keeps that many posted events per user. None
            keeps all.
        n_items: Number of items of the newest catalogue, by default that of the corpus; posted events of
            other items are quarantined.
        options: Size and age of the journal's segments.
        read_only: Whether to read the journal without changing it, because a server may be writing to it.

    Attributes:
        n_items: As above; set it when the catalogue gets new items.
    """

    def __init__(
        self,
        corpus: Corpus,
        journal: Path | None,
        defaults: Mapping[str, Any] | None = None,
        stored: UserEvents | None = None,
        *,
        window: int | None = None,
        n_items: int | None = None,
        options: JournalOptions | None = None,
        read_only: bool = False,
    ):
        self._stored = stored
        self._seq = corpus.seq
        self._row_by_user = {str(user): row for row, user in enumerate(self._seq.user_id.tolist())}
        self.defaults = find_default_values(self._seq) if defaults is None else dict(defaults)
        self.kinds = {name: index for index, name in enumerate(self._seq.event_names)}
        self._max_posted_events = None if window is None else max(window, _MIN_EVENTS)
        self._posted_by_user: dict[str, PostedEvents] = {}
        self._post_ids: dict[str, bytes] = {}  # the hash of each post by its id, oldest first
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._journal: LineJournal | None = None
        self.quarantined = 0
        self.n_items = len(corpus.item_id) if n_items is None else n_items
        if journal is not None:
            self._journal = LineJournal(journal, options or JournalOptions(), read_only=read_only)
            self._replay(self._journal, read_only)
            if options is not None and options.retention_days is not None and not read_only:
                threading.Thread(target=self._expire_segments, name="retention", daemon=True).start()

    def __contains__(self, user: str) -> bool:
        return (
            user in self._row_by_user
            or user in self._posted_by_user
            or self._read_from_store(user) is not None
        )

    def get_key(self, user: str) -> int:
        """Return the sparse key of a user; an unknown user gets the key of a row that was never trained."""
        row = self._row_by_user.get(user)
        if row is not None:
            return int(self._seq.get_user_keys(np.array([row]))[0])
        return int(compute_keys("user", as_numbers(np.array([user or "nobody"])))[0])

    def get_events(self, user: str, *, whole: bool = False) -> EventHistory:
        """Return a user's events in order of time; an unknown user has none.

        Args:
            user: The user's id.
            whole: Whether to return all of them, for a question about the past.

        Returns:
            The events of the store or the run's data, and the posted ones. `start` is the number of older posted
            events that are left out because no model reads them in the present.
        """
        row = self._row_by_user.get(user)
        stored = self._read_from_store(user)
        if stored is not None:
            unposted = sort_events(
                EventHistory(stored["item"], stored["time"], stored["event"], stored["columns"])
            )
        elif row is None:
            unposted = self.make_events([])
        else:
            of_user = slice(int(self._seq.offsets[row]), int(self._seq.offsets[row + 1]))
            columns = self._seq.get_history_columns(of_user.start, of_user.stop)
            unposted = EventHistory(
                self._seq.item[of_user], self._seq.time[of_user], self._seq.event[of_user], columns
            )
        posted = self._posted_by_user.get(user)
        if posted is None:
            return unposted
        older, newest = posted.older, self.make_events(posted.events)
        if older is not None and whole:
            newest = concatenate_events(older, newest)
        merged = sort_events(concatenate_events(unposted, newest))
        return replace(merged, start=0 if whole or older is None else len(older))

    def find_seen_items(self, user: str, events: EventHistory) -> np.ndarray:
        """Return the distinct dense items of a user's events and of its older posted events, sorted.

        Args:
            user: The user's id.
            events: The events that `get_events` returned for this user.
        """
        posted = self._posted_by_user.get(user)
        older = None if posted is None else posted.older
        items = [events.item] if older is None else [events.item, older.item]
        return np.unique(np.concatenate(items).astype(np.int64))

    def list_example_users(self, count: int) -> list[int | str]:
        """Return the ids of a few users whose numbers of events are closest to the median."""
        if not len(self._seq):
            return []
        lengths = np.diff(self._seq.offsets)
        rows = np.argsort(np.abs(lengths - np.median(lengths)), kind="stable")[:count]
        return self._seq.user_id[np.sort(rows)].tolist()

    def get_facts(self) -> dict[str, Any]:
        """Return facts about the journal and the number of its quarantined entries; empty without a journal."""
        return {} if self._journal is None else self._journal.get_facts() | {"quarantined": self.quarantined}

    def _read_from_store(self, user: str) -> dict[str, Any] | None:
        """Read a user's events from the store; None if there are none or no store is used. Raises Away if the store fails."""
        try:
            return None if self._stored is None else self._stored.get_user_events(user)
        except StoreError as error:
            raise Away(f"the store of users' events does not answer: {error}") from None

    def make_events(self, posted: Sequence[Mapping[str, Any]]) -> EventHistory:
        """Convert posted events to arrays.

        Args:
            posted: Events, each {"item": dense index, "time": unix seconds, "event": kind or None, "values":
                values by column}.
        """
        count = len(posted)
        columns = {}
        for name, default in self.defaults.items():
            values = [(event.get("values") or {}).get(name, default) for event in posted]
            columns[name] = np.array(values, default.dtype).reshape(count)
        kinds = [self.kinds.get(event.get("event") or "", 0) for event in posted]
        return EventHistory(
            np.array([event["item"] for event in posted], np.int32).reshape(count),
            np.array([event["time"] for event in posted], np.int64).reshape(count),
            np.array(kinds, np.int32).reshape(count),
            columns,
        )

    def post(
        self,
        user: str,
        events: Sequence[Mapping[str, Any]],
        id: str | None = None,
        sent: Sequence[Mapping[str, Any]] | None = None,
    ) -> bool:
        """Store events of a user. When this method returns, they are on disk and the next answer uses them.

        Args:
            user: The user's id.
            events: Events as `make_events` takes them.
            id: The post's id; None to store the events in any case.
            sent: All events as they were sent, by which a repeated post is recognized; by default `events`.

        Returns:
            Whether the events were stored: False if a post with this id was stored before.

        Raises:
            ConfigError: There is no journal.
            Refused: The id is that of another post.
            StorageFull: The disk is full.
            DeadlineExceeded: Another process holds the lock of the journal.
        """
        if self._journal is None:
            raise ConfigError("these histories are read-only because they were opened without a journal")
        with self._lock:
            digest = b"" if id is None else _hash_post(user, events if sent is None else sent)
            if id is not None and id in self._post_ids:
                if not self._has_stored(id, digest, user, events):
                    raise Refused(
                        "id_conflict",
                        f"id: a post with the id {id[:40]!r} and other events is stored; give each post its own id",
                    )
                return False
            post = {"user": user, "id": id, "events": list(events)}
            if id is not None:
                post["sent"] = digest.hex()
            line = json.dumps(post, allow_nan=False)
            self._journal.append(line.encode())
            self._add_to_memory(user, events, id, digest)
        return True

    def close(self) -> None:
        """Close the journal."""
        self._closed.set()
        if self._journal is not None:
            self._journal.close()

    def _expire_segments(self) -> None:
        """Delete segments beyond the retention every hour until `close`, because a post does so only if there is one."""
        assert self._journal is not None
        while not self._closed.wait(_EXPIRE_EVERY_S):
            try:
                self._journal.delete_old_segments()
                if self.quarantined:
                    self._renew_quarantined()
            except (NonetError, OSError) as error:  # it is tried again
                _log.warning("%s: old posts were not deleted: %s", self._journal.path, error)

    def _add_to_memory(
        self, user: str, events: Sequence[Mapping[str, Any]], id: str | None, digest: bytes
    ) -> None:
        """Add a post's id and hash, and its events to those of a user in memory, atomically for concurrent readers."""
        before = self._posted_by_user.get(user) or PostedEvents([])
        copies = [dict(event) for event in events]
        self._posted_by_user[user] = before.extend(copies, self._max_posted_events, self.make_events)
        if id is not None:
            self._post_ids[id] = digest
            while len(self._post_ids) > _MAX_POST_IDS:
                self._post_ids.pop(next(iter(self._post_ids)))

    def _has_stored(
        self, id: str | None, digest: bytes, user: str, events: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Return whether a post was stored, by its id and hash, or by its events if an older version has stored it."""
        stored = None if id is None else self._post_ids.get(id)
        return stored is not None and stored in (digest, _hash_events(user, events))

    def _replay(self, journal: LineJournal, read_only: bool) -> None:
        """Read the journal into memory, and quarantine lines and events that do not fit this run.

        Quarantined entries are written to a file beside the journal, unless `read_only` is set.
        """
        quarantined: list[dict[str, Any]] = []
        for place, line in journal.iterate_lines():
            post = self._read_post(place, line, quarantined)
            if post is None:
                continue
            user, readable, id, digest = post
            if self._has_stored(id, digest, user, readable):  # it was sent to two servers
                continue
            if readable or id is not None:
                self._add_to_memory(user, readable, id, digest)
        if quarantined:
            text = "%s: %d posted lines or events cannot be read; see %s"
            _log.warning(text, journal.path, len(quarantined), self._quarantine_path.name)
        self.quarantined = len(quarantined)
        if not read_only:
            self._write_quarantined(quarantined)

    def _read_post(
        self, place: str, line: bytes, quarantined: list[dict[str, Any]]
    ) -> tuple[str, list[dict[str, Any]], str | None, bytes] | None:
        """Return the user, readable events, id and hash (empty without an id) of a line of the journal; None if it is no post.

        What cannot be read is added to `quarantined`.
        """
        try:
            post = json.loads(line)
            user, events, id = post["user"], list(post["events"]), post["id"]
            if not isinstance(user, str) or not isinstance(id, str | None):
                raise TypeError("user and id are text")
            user.encode()  # raises for text that UTF-8 cannot hold
            sent = post.get("sent")  # lines of older versions lack it
            digest = b"" if sent is None else bytes.fromhex(sent)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            text = line.decode(errors="replace")
            quarantined.append({"place": place, "reason": f"not a post: {error}", "line": text})
            return None
        readable = []
        for event in events:
            problem = _explain_unreadable(event, self.defaults, self.kinds, self.n_items)
            if problem is None:
                readable.append(event)
            else:
                quarantined.append({"place": place, "user": user, "reason": problem, "event": event})
        whole = [event for event in events if isinstance(event, dict)]
        if id is not None and sent is None:
            digest = _hash_events(user, whole)
        return user, readable, id, digest

    def _renew_quarantined(self) -> None:
        """Write the file of quarantined entries anew, after some of them may have been deleted from the journal."""
        assert self._journal is not None
        quarantined: list[dict[str, Any]] = []
        for place, line in self._journal.iterate_lines():
            self._read_post(place, line, quarantined)
        self.quarantined = len(quarantined)
        self._write_quarantined(quarantined)

    @property
    def _quarantine_path(self) -> Path:
        """The file of quarantined entries."""
        assert self._journal is not None
        return self._journal.path.with_suffix(".quarantined.jsonl")

    def _write_quarantined(self, quarantined: Sequence[Mapping[str, Any]]) -> None:
        """Write the file of quarantined entries; without any, there is none."""
        if quarantined:
            write_whole(
                self._quarantine_path, "".join(f"{json.dumps(entry)}\n" for entry in quarantined).encode()
            )
        else:
            self._quarantine_path.unlink(missing_ok=True)


def _hash_post(user: str, sent: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a hash of the events of a post as they were sent; a field that is None counts as one that is missing."""
    content = [user, *({name: value for name, value in event.items() if value is not None} for event in sent)]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).digest()[:8]


def _hash_events(user: str, events: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the hash by which older versions recognize a post: of the events that were stored, without their times."""
    stored = [{name: event.get(name) for name in ("item", "event", "values")} for event in events]
    return hashlib.sha256(json.dumps([user, *stored], sort_keys=True, default=str).encode()).digest()[:8]


def _explain_unreadable(
    event: Any, defaults: Mapping[str, Any], kinds: Mapping[str, int], n_items: int
) -> str | None:
    """Return why an event of the journal does not fit this run; None if it fits."""
    if not isinstance(event, dict) or not isinstance(event.get("values", {}), dict | None):
        return "not an event: an event is an object with item, time, event and values"
    item = event.get("item")
    if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < n_items:
        return f"item {str(item)[:40]} is not an index into a catalogue of {n_items} items"
    try:
        check_event({"time": None, **event}, defaults, kinds)
    except Refused as error:
        return str(error)
    return None


def sort_events(events: EventHistory) -> EventHistory:
    """Sort events by time; equal times keep their order."""
    order = np.argsort(events.time, kind="stable")
    if (order == np.arange(len(order))).all():
        return events
    columns = {name: values[order] for name, values in events.columns.items()}
    return EventHistory(events.item[order], events.time[order], events.event[order], columns)
