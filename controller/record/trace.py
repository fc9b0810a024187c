"""A Chrome trace of the workers and the controller (chrome://tracing, ui.perfetto.dev), and their idle shares.

Each worker has a lane, which shows the spans (timed calls) of its roles; the controller has a lane too. Spans are fetched
from the workers' processes during the run, so that these need little memory. Times come from the clock of each node.
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

from nonet.atomic import read_content, write_whole
from nonet.journal import LineJournal
from nonet.workers.runtime import ActorGroup

CONTROLLER = "controller"  # the lane of the controller
COLLECT_EVERY_S = 10.0  # interval at which spans are fetched
_MAX_UNWRITTEN_LINES = 100  # events in memory, which a crash loses


class ChromeTrace:
    """The events of one run, which are appended to `trace.json`, and sums over them by role.

    The file is a JSON array in Chrome's format, whose closing bracket is missing until `close`.
    """

    def __init__(self, path: Path):
        self._lane_ids: dict[str, int] = {}  # thread ids of the trace, by the name of the lane
        # By role: busy seconds per worker, returned bytes, the start of the first span and the end of the last one.
        self._busy_s: dict[str, float] = defaultdict(float)
        self._returned_bytes: dict[str, int] = defaultdict(int)
        self._first_start: dict[str, float] = {}
        self._last_end: dict[str, float] = {}
        self._journal = LineJournal(path, durable=False)  # which removes what a crash left of the last line
        self._unwritten_lines: list[bytes] = [] if path.stat().st_size else [b"["]
        self._collect_time = time.monotonic()  # of the last call of `collect`
        self._write_event(
            name="process_name", ph="M", tid=0, args={"name": f"controller process {os.getpid()}"}
        )

    @contextmanager
    def record_span(self, name: str, **facts: Any) -> Iterator[None]:
        """Record the duration of a `with` block in the lane of the controller.

        Args:
            name: The name of the span.
            **facts: Details that the viewer shows.
        """
        began = time.time()
        try:
            yield
        finally:
            self.add(CONTROLLER, name, began, time.time(), **facts)

    def add(self, lane: str, name: str, start: float, end: float, **facts: Any) -> None:
        """Add one span.

        Args:
            lane: The name of the lane that shows the span.
            name: The name of the span.
            start: The start in unix seconds.
            end: The end in unix seconds.
            **facts: Details that the viewer shows.
        """
        self._write_event(
            name=name,
            ph="X",  # a complete event; `ts` and `dur` are in microseconds
            ts=round(start * 1e6),
            dur=round((end - start) * 1e6),
            tid=self._get_lane_id(lane),
            args=facts,
        )

    def collect_due(self, groups: Iterable[ActorGroup]) -> None:
        """Call `collect` if the last call was more than COLLECT_EVERY_S seconds ago."""
        if time.monotonic() - self._collect_time > COLLECT_EVERY_S:
            self.collect(groups)

    def collect(self, groups: Iterable[ActorGroup]) -> None:
        """Fetch the new spans of all workers of some groups, and add them to the trace and to the sums by role."""
        self._collect_time = time.monotonic()
        for group in groups:
            role = group.name
            for lane, spans in group.take_spans():
                for name, start, end, size_bytes in spans:
                    self.add(lane, name, start, end, **({"bytes": size_bytes} if size_bytes else {}))
                    self._busy_s[role] += (end - start) / group.world
                    if not name.endswith((".offload", ".resume")):  # their bytes moved to or from host memory
                        self._returned_bytes[role] += size_bytes
                    self._first_start[role] = min(start, self._first_start.get(role, start))
                    self._last_end[role] = max(end, self._last_end.get(role, end))
        self._write_lines()

    def compute_idle_shares(self) -> dict[str, float]:
        """Return, by role, the fraction of the time between its first and last span in which its workers were idle."""
        shares = {}
        for role, busy_s in self._busy_s.items():
            wall_s = self._last_end[role] - self._first_start[role]
            shares[role] = round(max(0.0, 1 - busy_s / wall_s), 4) if wall_s > 0 else 0.0
        return shares

    def count_returned_bytes(self) -> dict[str, int]:
        """Return the number of bytes that method calls of each role returned."""
        return dict(self._returned_bytes)

    def close(self) -> None:
        """Close the array, so that the file is valid JSON; a second call does nothing."""
        if not self._journal.closed:
            self._write_event(name="end", ph="i", ts=round(time.time() * 1e6), tid=0, s="g", last=True)
            self._write_lines()
            self._journal.close()

    def _get_lane_id(self, name: str) -> int:
        """Return the thread id of a lane; a new lane is written to the trace."""
        if name not in self._lane_ids:
            self._lane_ids[name] = len(self._lane_ids) + 1
            self._write_event(name="thread_name", ph="M", tid=self._lane_ids[name], args={"name": name})
        return self._lane_ids[name]

    def _write_event(self, *, last: bool = False, **event: Any) -> None:
        """Add one event of Chrome's format to the lines to be written; with `last`, also the end of the array."""
        text = json.dumps({"pid": os.getpid(), "cat": "nonet", **event})
        self._unwritten_lines.append((text + ("]" if last else ",")).encode())
        if len(self._unwritten_lines) >= _MAX_UNWRITTEN_LINES:
            self._write_lines()

    def _write_lines(self) -> None:
        """Append the lines that are not in the file yet."""
        self._journal.append(*self._unwritten_lines)
        self._unwritten_lines = []


def open_trace(path: Path) -> ChromeTrace:
    """Open the trace of a run for appending; a trace that an earlier part of the run closed is continued."""
    if path.exists():
        content = read_content(path)
        lines = content[: content.rfind(b"\n") + 1].rstrip()
        if lines and not lines.endswith((b",", b"[")):  # closed: remove the end of the array
            write_whole(path, lines.removesuffix(b"]").rstrip() + b",\n")
    return ChromeTrace(path)
