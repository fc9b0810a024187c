"""What a person sees while a run goes on: a live panel on a terminal, plain lines everywhere else.

The plain face writes a line when a stage starts and ends and one about every 5 s in between, each flushed, so
that a log or `ray job logs` tells as much as a screen. Rich is imported only for the live face.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

PLAIN_INTERVAL_S = 5.0


@dataclass(slots=True)
class Progress:
    """Where a stage is: `total` steps or None when unknown, the last metrics, seconds since its start.

    `first` steps were done before, by a run that this one resumes.
    """

    stage: str
    total: int | None
    started: float
    first: int = 0
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    elapsed_s: float = 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds left at the speed so far; None before the first step and without a total."""
        if not self.total or not self.first < self.step <= self.total:
            return None
        return self.elapsed_s * (self.total - self.step) / (self.step - self.first)


class Face(Protocol):
    """How a panel shows what happens."""

    def begin(self, progress: Progress) -> None: ...
    def progress(self, progress: Progress) -> None: ...
    def end(self, progress: Progress) -> None: ...
    def say(self, text: str) -> None: ...
    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None: ...
    def users(self, title: str, rows: Sequence[tuple[str, list[str]]]) -> None: ...
    def close(self) -> None: ...


class Panel:
    """Progress of one run on `stream` (standard error when not given); `live` None asks the stream.

    A context manager: leaving it calls `done`, which gives the terminal back.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        live: bool | None = None,
        interval_s: float = PLAIN_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
        face: Face | None = None,
    ):
        out: TextIO = sys.stderr if stream is None else stream
        self._clock = clock
        self._current: Progress | None = None
        live = _is_terminal(out) if live is None else live
        self._face = face or _face(out, live, interval_s, clock)

    def stage(self, name: str, steps_total: int | None = None, *, done: int = 0) -> None:
        """A stage begins, `done` steps of it by an earlier run, and the one before it is over."""
        self._finish()
        self._current = Progress(name, steps_total, self._clock(), done, done)
        self._face.begin(self._current)

    def step(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Steps done so far in a stage, and its latest metrics; a stage that was not begun begins here."""
        if self._current is None or self._current.stage != stage:
            self.stage(stage)
        assert self._current is not None
        self._current.step = step
        self._current.metrics.update(metrics)
        self._current.elapsed_s = self._clock() - self._current.started
        self._face.progress(self._current)

    def note(self, text: str) -> None:
        """One line that stays."""
        self._face.say(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table that stays; numbers get four decimals."""
        self._face.table(title, columns, [[_cell(value) for value in row] for row in rows])

    def users(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """What users would see: each row has `user_id`, `recommended`, maybe `target` and `before` titles.

        Hits are marked ✓; against `before`, what moved is marked: new, or by how many places up (+) or down
        (-).
        """
        self._face.users(title, [(str(row["user_id"]), _marked(row)) for row in rows])

    def done(self) -> None:
        """End the stage that runs and leave the terminal as it was; a second call does nothing."""
        self._finish()
        self._face.close()

    def __enter__(self) -> Panel:
        return self

    def __exit__(self, *_: object) -> None:
        self.done()

    def _finish(self) -> None:
        if self._current is not None:
            self._current.elapsed_s = self._clock() - self._current.started
            self._face.end(self._current)
            self._current = None


class PlainFace:
    """One line at a time, flushed; what the stream cannot encode becomes a question mark."""

    def __init__(self, stream: TextIO, interval_s: float, clock: Callable[[], float]):
        self._stream, self._interval_s, self._clock = stream, interval_s, clock
        self._last = clock()

    def begin(self, progress: Progress) -> None:
        steps = f": {steps_text(progress.total)}" if progress.total else ""
        resumed = f", resumed after step {progress.first:,}" if progress.first else ""
        self._last = self._clock()
        self.say(f"{progress.stage} starts{steps}{resumed}")

    def progress(self, progress: Progress) -> None:
        now = self._clock()
        if now - self._last < self._interval_s:
            return
        self._last = now
        self.say(line(progress))

    def end(self, progress: Progress) -> None:
        ran = progress.step - progress.first
        steps = f"{steps_text(ran)} in " if ran else ""
        metrics = metrics_text(progress.metrics)
        self.say(
            f"{progress.stage} done: {steps}{progress.elapsed_s:.1f} s{'  ' if metrics else ''}{metrics}"
        )

    def say(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        every = [list(columns), *(list(row) for row in rows)]
        widths = [max(len(row[at]) for row in every if at < len(row)) for at in range(len(columns))]
        self.say(title)
        for row in every if columns else []:
            padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
            padded[0] = row[0].ljust(widths[0])
            self.say("  " + "  ".join(padded).rstrip())

    def users(self, title: str, rows: Sequence[tuple[str, list[str]]]) -> None:
        self.say(title)
        for user, titles in rows:
            self.say(f"  {user}: {' · '.join(titles) or 'nothing'}")

    def close(self) -> None:
        self._stream.flush()


def line(progress: Progress) -> str:
    """A running stage in one line, e.g. "pretrain 120/440  loss 8.123  20 s, about 53 s left"."""
    total = f"/{progress.total:,}" if progress.total else ""
    left = f", about {progress.left_s:.0f} s left" if progress.left_s else ""
    parts = [
        f"{progress.stage} {progress.step:,}{total}",
        metrics_text(progress.metrics),
        f"{progress.elapsed_s:.0f} s{left}",
    ]
    return "  ".join(part for part in parts if part)


def steps_text(count: int) -> str:
    """A number of steps in words."""
    return f"{count:,} step{'' if count == 1 else 's'}"


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Metrics in their order: "loss 8.123  6,200 rows/s"."""
    return "  ".join(
        f"{value:,.0f} {name}" if name.endswith("/s") and value >= 10 else f"{name} {value:.4g}"
        for name, value in metrics.items()
    )


def _face(stream: TextIO, live: bool, interval_s: float, clock: Callable[[], float]) -> Face:
    if live:
        from nonet.deploy.run.panel_live import LiveFace

        return LiveFace(stream, clock)
    return PlainFace(stream, interval_s, clock)


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _marked(row: Mapping[str, Any]) -> list[str]:
    targets, before = set(row.get("target") or ()), row.get("before")
    return [
        f"{title}{' ✓' if title in targets else ''}{_movement(title, place, before)}"
        for place, title in enumerate(row["recommended"])
    ]


def _movement(title: str, place: int, before: Sequence[str] | None) -> str:
    if before is None:
        return ""
    if title not in before:
        return " (new)"
    moved = list(before).index(title) - place
    return f" ({moved:+d})" if moved else ""
