"""Trace: what every worker and the controller did, as a Chrome trace (chrome://tracing, ui.perfetto.dev), and idle shares.

A lane a worker, under its role; the controller's lanes hold stages and the waits inside them. Spans are fetched from the hosts
while they work, so that a long run keeps few of them in memory; times are each node's own clock.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nonet.workers.runtime import ActorGroup

CONTROLLER = "controller"
COLLECT_S = 10.0


class Trace:
    """Events of one run, appended to `trace.json` in Chrome's array form, which may stay unclosed after a crash."""

    def __init__(self, path: Path):
        self._path = path
        self._lanes: dict[str, int] = {}
        self._busy: dict[str, float] = defaultdict(float)
        self._bytes: dict[str, int] = defaultdict(int)  # given back, without what moved to host memory
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        fresh = not path.exists() or path.stat().st_size == 0
        self._out = path.open("a", encoding="utf-8")
        if fresh:
            self._out.write("[\n")
        self._collected = time.monotonic()
        self._event(name="process_name", ph="M", tid=0, args={"name": f"controller process {os.getpid()}"})

    @contextmanager
    def span(self, name: str, **facts: Any) -> Iterator[None]:
        """Something the controller does."""
        began = time.time()
        try:
            yield
        finally:
            self.add(CONTROLLER, name, began, time.time(), **facts)

    def add(self, lane: str, name: str, start: float, end: float, **facts: Any) -> None:
        """One event; start and end in unix seconds."""
        thread = self._lane(lane)
        self._event(
            name=name,
            ph="X",
            ts=round(start * 1e6),
            dur=round((end - start) * 1e6),
            tid=thread,
            args=facts,
        )

    def collect_due(self, groups: Iterable[ActorGroup]) -> None:
        """As `collect`, when the last time is COLLECT_S ago."""
        if time.monotonic() - self._collected > COLLECT_S:
            self.collect(groups)

    def collect(self, groups: Iterable[ActorGroup]) -> None:
        """Fetch the spans of every worker and note them."""
        self._collected = time.monotonic()
        for hosts in groups:
            for lane, spans in hosts.take_spans():
                for name, start, end, size in spans:
                    self.add(lane, name, start, end, **({"bytes": size} if size else {}))
                    role = hosts.name
                    self._busy[role] += (end - start) / hosts.world
                    if not name.endswith((".offload", ".resume")):
                        self._bytes[role] += size
                    self._first[role] = min(start, self._first.get(role, start))
                    self._last[role] = max(end, self._last.get(role, end))
        self._out.flush()

    def idle(self) -> dict[str, float]:
        """Share of the time between a role's first and last work in which its workers had none, 0 to 1."""
        shares = {}
        for role, busy in self._busy.items():
            wall = self._last[role] - self._first[role]
            shares[role] = round(max(0.0, 1 - busy / wall), 4) if wall > 0 else 0.0
        return shares

    def bytes_out(self) -> dict[str, int]:
        """Bytes that a role's methods gave back, by role."""
        return dict(self._bytes)

    def close(self) -> None:
        """Finish the file: from then on it is also plain JSON."""
        if not self._out.closed:
            self._event(name="end", ph="i", ts=round(time.time() * 1e6), tid=0, s="g", last=True)
            self._out.close()

    def _lane(self, name: str) -> int:
        if name not in self._lanes:
            self._lanes[name] = len(self._lanes) + 1
            self._event(name="thread_name", ph="M", tid=self._lanes[name], args={"name": name})
        return self._lanes[name]

    def _event(self, *, last: bool = False, **event: Any) -> None:
        self._out.write(
            json.dumps({"pid": os.getpid(), "cat": "nonet", **event}) + ("\n]\n" if last else ",\n")
        )


def open_trace(path: Path) -> Trace:
    """A trace that goes on where an earlier part of the run ended."""
    if path.exists():
        text = path.read_text(encoding="utf-8").rstrip()
        if text.endswith("]"):  # closed: open it again
            path.write_text(text.removesuffix("]").rstrip() + ",\n", encoding="utf-8")
        elif text and not text.endswith((",", "[")):  # a crash cut the last line
            path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
    return Trace(path)
