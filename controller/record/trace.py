"""A Chrome trace of the workers and the controller (chrome://tracing, ui.perfetto.dev), and their idle shares.

Each worker has a lane under its role; the lanes of the controller show stages and the waits within them. Spans are
fetched from the hosts while they work, so that they need little memory in a long run. Times come from the clock of each
node.
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


class ChromeTrace:
    """The events of one run, appended to `trace.json`.

    The file is a JSON array in Chrome's format, which may lack its end after a crash.
    """

    def __init__(self, path: Path):
        self._path = path
        self._lanes: dict[str, int] = {}
        self._busy: dict[str, float] = defaultdict(float)
        self._bytes: dict[str, int] = defaultdict(
            int
        )  # returned bytes, without what was moved to host memory
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        fresh = not path.exists() or path.stat().st_size == 0
        self._out = path.open("a", encoding="utf-8")
        if fresh:
            self._out.write("[\n")
        self._collected = time.monotonic()
        self._write_event(
            name="process_name", ph="M", tid=0, args={"name": f"controller process {os.getpid()}"}
        )

    @contextmanager
    def record_span(self, name: str, **facts: Any) -> Iterator[None]:
        """Record the duration of a `with` block as work of the controller."""
        began = time.time()
        try:
            yield
        finally:
            self.add(CONTROLLER, name, began, time.time(), **facts)

    def add(self, lane: str, name: str, start: float, end: float, **facts: Any) -> None:
        """Add one event.

        Args:
            lane: The lane that shows the event.
            name: The name of the event.
            start: The start in unix seconds.
            end: The end in unix seconds.
            **facts: Details that the viewer shows.
        """
        thread = self._get_lane(lane)
        self._write_event(
            name=name,
            ph="X",
            ts=round(start * 1e6),
            dur=round((end - start) * 1e6),
            tid=thread,
            args=facts,
        )

    def collect_due(self, groups: Iterable[ActorGroup]) -> None:
        """Call `collect` if the last call was more than COLLECT_S seconds ago."""
        if time.monotonic() - self._collected > COLLECT_S:
            self.collect(groups)

    def collect(self, groups: Iterable[ActorGroup]) -> None:
        """Fetch the spans of all workers and add them."""
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

    def compute_idle_shares(self) -> dict[str, float]:
        """Return, by role, the fraction of the time between its first and last span in which its workers were idle."""
        shares = {}
        for role, busy in self._busy.items():
            wall = self._last[role] - self._first[role]
            shares[role] = round(max(0.0, 1 - busy / wall), 4) if wall > 0 else 0.0
        return shares

    def count_returned_bytes(self) -> dict[str, int]:
        """Return the bytes that the methods of each role returned."""
        return dict(self._bytes)

    def close(self) -> None:
        """End the array, so that the file is valid JSON."""
        if not self._out.closed:
            self._write_event(name="end", ph="i", ts=round(time.time() * 1e6), tid=0, s="g", last=True)
            self._out.close()

    def _get_lane(self, name: str) -> int:
        if name not in self._lanes:
            self._lanes[name] = len(self._lanes) + 1
            self._write_event(name="thread_name", ph="M", tid=self._lanes[name], args={"name": name})
        return self._lanes[name]

    def _write_event(self, *, last: bool = False, **event: Any) -> None:
        self._out.write(
            json.dumps({"pid": os.getpid(), "cat": "nonet", **event}) + ("\n]\n" if last else ",\n")
        )


def open_trace(path: Path) -> ChromeTrace:
    """Open a trace, and continue one that an earlier part of the run wrote."""
    if path.exists():
        text = path.read_text(encoding="utf-8").rstrip()
        if text.endswith("]"):  # closed: open it again
            path.write_text(text.removesuffix("]").rstrip() + ",\n", encoding="utf-8")
        elif text and not text.endswith((",", "[")):  # a crash cut the last line
            path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
    return ChromeTrace(path)
