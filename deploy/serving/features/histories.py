"""Histories: the events of users: those of the run's data, and those that came after, each on disk before it is acknowledged.

Posted events go to one file of JSON lines, synced; a process that starts reads it again, so what was acknowledged survives a
kill, and half a line that was not is dropped. A post with an id is taken once. `Features` asks this class alone for events.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nonet.atomic import make_folder
from nonet.deploy.serving.features.items import Away
from nonet.errors import ConfigError, StoreError
from nonet.models.generation import Corpus
from nonet.models.inference import Events, usual_columns
from nonet.samples.tables import as_numbers, keys_in
from nonet.samples.tokenised import UserEvents

_KEPT_IDS = 1 << 17  # posts whose ids are remembered


class Histories:
    """Of the users of a corpus and of those that post events; `journal`: the file of posted events, without it none are taken.

    stored: a store of users' events, which are read there by key instead.
    usual: what columns of an event hold when nobody says, by default what the events of the corpus say.
    """

    def __init__(
        self,
        corpus: Corpus,
        journal: Path | None,
        usual: Mapping[str, Any] | None = None,
        stored: UserEvents | None = None,
    ):
        self._stored = stored
        self._seq = corpus.seq
        self._rows = {str(user): row for row, user in enumerate(self._seq.user_id.tolist())}
        self.usual = usual_columns(self._seq) if usual is None else dict(usual)
        self.kinds = {name: place for place, name in enumerate(self._seq.event_names)}
        self._posted: dict[str, list[dict[str, Any]]] = {}
        self._ids: dict[str, None] = {}
        self._lock = threading.Lock()
        self._file = -1
        if journal is not None:
            make_folder(journal.parent)
            self._replay(journal)
            self._file = os.open(journal, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)

    def __contains__(self, user: str) -> bool:
        return user in self._rows or user in self._posted or self._in_store(user) is not None

    def key(self, user: str) -> int:
        """The sparse key of a user; one whom the data do not have gets that of a row that was never trained."""
        row = self._rows.get(user)
        if row is not None:
            return int(self._seq.keys_of_users(np.array([row]))[0])
        return int(keys_in("user", as_numbers(np.array([user or "nobody"])))[0])

    def of(self, user: str) -> Events:
        """All events of a user, in order of time; none of one who is not known."""
        row = self._rows.get(user)
        found = self._in_store(user)
        if found is not None:
            own = _sorted(Events(found["item"], found["time"], found["event"], found["columns"]))
        elif row is None:
            own = self.made([])
        else:
            cut = slice(int(self._seq.offsets[row]), int(self._seq.offsets[row + 1]))
            columns = {name: values[cut] for name, values in self._seq.columns.items()}
            own = Events(self._seq.item[cut], self._seq.time[cut], self._seq.event[cut], columns)
        posted = self._posted.get(user)
        if not posted:
            return own
        return _sorted(_after(own, self.made(posted)))

    def _in_store(self, user: str) -> dict[str, Any] | None:
        try:
            return None if self._stored is None else self._stored.of(user)
        except StoreError as error:
            raise Away(f"the store of users' events does not answer: {error}") from None

    def made(self, posted: Sequence[Mapping[str, Any]]) -> Events:
        """Events [n] out of {"item": dense index, "time": unix seconds, "event": kind or None, "values": column -> value}."""
        count = len(posted)
        columns = {}
        for name, usual in self.usual.items():
            values = [each.get("values", {}).get(name, usual) for each in posted]
            columns[name] = np.array(values, usual.dtype).reshape(count)
        return Events(
            np.array([each["item"] for each in posted], np.int32).reshape(count),
            np.array([each["time"] for each in posted], np.int64).reshape(count),
            np.array([self.kinds.get(each.get("event") or "", 0) for each in posted], np.int32).reshape(
                count
            ),
            columns,
        )

    def post(self, user: str, events: Sequence[Mapping[str, Any]], id: str | None = None) -> bool:
        """Take events; when this returns they are on disk and in the next answer. False for an id that was taken before.

        Raises ConfigError without a journal.
        """
        if self._file < 0:
            raise ConfigError("these histories are read only: they were opened without a journal")
        with self._lock:
            if id is not None and id in self._ids:
                return False
            line = json.dumps({"user": user, "id": id, "events": list(events)}, allow_nan=False)
            os.write(self._file, f"{line}\n".encode())
            os.fdatasync(self._file)
            self._take(user, events, id)
        return True

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _take(self, user: str, events: Sequence[Mapping[str, Any]], id: str | None) -> None:
        self._posted[user] = [
            *self._posted.get(user, ()),
            *map(dict, events),
        ]  # a reader has the list before or after
        if id is not None:
            self._ids[id] = None
            while len(self._ids) > _KEPT_IDS:
                self._ids.pop(next(iter(self._ids)))

    def _replay(self, journal: Path) -> None:
        if not journal.exists():
            return
        content = journal.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # killed while it wrote: nobody was told that this line is there
            os.truncate(journal, len(whole))
        for line in whole.splitlines():
            try:
                body = json.loads(line)
                self._take(body["user"], body["events"], body["id"])
            except (ValueError, KeyError, TypeError):
                continue


def _after(events: Events, later: Events) -> Events:
    return Events(
        np.concatenate([events.item, later.item]),
        np.concatenate([events.time, later.time]),
        np.concatenate([events.event, later.event]),
        {name: np.concatenate([values, later.columns[name]]) for name, values in events.columns.items()},
    )


def _sorted(events: Events) -> Events:
    order = np.argsort(events.time, kind="stable")
    if (order == np.arange(len(order))).all():
        return events
    columns = {name: values[order] for name, values in events.columns.items()}
    return Events(events.item[order], events.time[order], events.event[order], columns)
