"""The progress of a run: a live panel on a terminal, plain lines otherwise.

The plain display prints a line when a stage starts and ends and about every 5 s in between. Each line is
flushed, so a log or `ray job logs` has the same information as a terminal. Rich is only imported for the
live display.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TextIO

from nonet.deploy.run.progress import StageProgress, format_metrics, format_progress, format_steps

PLAIN_INTERVAL_S = 5.0


class PanelDisplay(Protocol):
    """The methods that a panel calls to display a run."""

    def begin(self, progress: StageProgress) -> None:
        """Show that a stage begins."""

    def update_progress(self, progress: StageProgress) -> None:
        """Show the progress of a stage."""

    def end(self, progress: StageProgress) -> None:
        """Show that a stage has ended."""

    def print_line(self, text: str) -> None:
        """Show one line of text permanently."""

    def print_table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show a table permanently."""

    def print_users(self, title: str, rows: Sequence[tuple[str, list[str]]]) -> None:
        """Show titles by user permanently."""

    def close(self) -> None:
        """Restore the terminal."""


class Panel:
    """The progress of one run on a stream.

    It is a context manager; leaving it calls `close`, which restores the terminal.

    Args:
        stream: The stream to write to, by default standard error.
        live: Whether to use the live display; None to use it if the stream is a terminal.
        interval_s: Seconds between two lines of the plain display.
        clock: The source of time in seconds.
        display: The display to use instead of the plain or live one.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        live: bool | None = None,
        interval_s: float = PLAIN_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
        display: PanelDisplay | None = None,
    ):
        out: TextIO = sys.stderr if stream is None else stream
        self._clock = clock
        self._current: StageProgress | None = None
        live = _is_terminal(out) if live is None else live
        self._display = display or _make_display(out, live, interval_s, clock)

    def begin_stage(self, name: str, steps_total: int | None = None, *, done: int = 0) -> None:
        """Begin a stage and end the one before it.

        Args:
            name: The stage's name.
            steps_total: The stage's number of steps; None if unknown.
            done: Number of steps that were done before the run was resumed.
        """
        self._end_stage()
        self._current = StageProgress(name, steps_total, self._clock(), first=done, step=done)
        self._display.begin(self._current)

    def update_step(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Update the progress of a stage, beginning the stage if it has not begun.

        Args:
            stage: The stage's name.
            step: Number of steps done so far.
            metrics: The latest metrics.
        """
        if self._current is None or self._current.stage != stage:
            self.begin_stage(stage)
        assert self._current is not None
        self._current.step = step
        self._current.metrics.update(metrics)
        self._current.elapsed_s = self._clock() - self._current.started
        self._display.update_progress(self._current)

    def print_note(self, text: str) -> None:
        """Show one line of text permanently."""
        self._display.print_line(text)

    def print_table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a table permanently; numbers get four decimals."""
        self._display.print_table(title, columns, [[_format_cell(value) for value in row] for row in rows])

    def print_users(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show what users would be recommended.

        Hits are marked with ✓. With `before`, each title is also marked as new, or by the number of places
        it moved up (+) or down (-).

        Args:
            title: A heading.
            rows: Each row has `user_id` and `recommended` titles, and optionally `target` and `before`
                titles.
        """
        self._display.print_users(title, [(str(row["user_id"]), _mark_titles(row)) for row in rows])

    def close(self) -> None:
        """End the current stage and restore the terminal; a second call does nothing."""
        self._end_stage()
        self._display.close()

    def __enter__(self) -> Panel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_stage(self) -> None:
        """Show that the current stage has ended, if there is one."""
        if self._current is not None:
            self._current.elapsed_s = self._clock() - self._current.started
            self._display.end(self._current)
            self._current = None


class PlainDisplay:
    """Prints one line at a time and flushes it; characters that the stream cannot encode become question marks."""

    def __init__(self, stream: TextIO, interval_s: float, clock: Callable[[], float]):
        self._stream, self._interval_s, self._clock = stream, interval_s, clock
        self._last_print = clock()

    def begin(self, progress: StageProgress) -> None:
        """Print that a stage begins."""
        steps = f": {format_steps(progress.total)}" if progress.total else ""
        resumed = f", resumed after step {progress.first:,}" if progress.first else ""
        self._last_print = self._clock()
        self.print_line(f"{progress.stage} starts{steps}{resumed}")

    def update_progress(self, progress: StageProgress) -> None:
        """Print the progress if the last line is older than the interval."""
        now = self._clock()
        if now - self._last_print < self._interval_s:
            return
        self._last_print = now
        self.print_line(format_progress(progress))

    def end(self, progress: StageProgress) -> None:
        """Print how long the stage took, and its last metrics."""
        step_count = progress.step - progress.first
        steps = f"{format_steps(step_count)} in " if step_count else ""
        metrics = format_metrics(progress.metrics)
        self.print_line(
            f"{progress.stage} done: {steps}{progress.elapsed_s:.1f} s{'  ' if metrics else ''}{metrics}"
        )

    def print_line(self, text: str) -> None:
        """Print one line of text."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()

    def print_table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table with aligned columns."""
        table = [list(columns), *(list(row) for row in rows)]
        widths = [max(len(row[i]) for row in table if i < len(row)) for i in range(len(columns))]
        self.print_line(title)
        for row in table if columns else []:
            padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
            padded[0] = row[0].ljust(widths[0])  # names are aligned to the left, numbers to the right
            self.print_line("  " + "  ".join(padded).rstrip())

    def print_users(self, title: str, rows: Sequence[tuple[str, list[str]]]) -> None:
        """Print the titles of each user in one line."""
        self.print_line(title)
        for user, titles in rows:
            self.print_line(f"  {user}: {' · '.join(titles) or 'nothing'}")

    def close(self) -> None:
        """Flush the stream."""
        self._stream.flush()


def _make_display(stream: TextIO, live: bool, interval_s: float, clock: Callable[[], float]) -> PanelDisplay:
    """Return a live or a plain display."""
    if live:
        from nonet.deploy.run.panel_live import LiveDisplay

        return LiveDisplay(stream, clock)
    return PlainDisplay(stream, interval_s, clock)


def _is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can redraw lines."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def _format_cell(value: Any) -> str:
    """Format a value of a table; a missing one becomes a dash."""
    if value is None:
        return "–"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _mark_titles(row: Mapping[str, Any]) -> list[str]:
    """Return the recommended titles of a row of `Panel.print_users` with their marks."""
    targets, before = set(row.get("target") or ()), row.get("before")
    return [
        f"{title}{' ✓' if title in targets else ''}{_describe_movement(title, rank, before)}"
        for rank, title in enumerate(row["recommended"])
    ]


def _describe_movement(title: str, rank: int, before: Sequence[str] | None) -> str:
    """Describe how many ranks a title moved since the list `before`; "" if it did not move or there is no such list."""
    if before is None:
        return ""
    if title not in before:
        return " (new)"
    moved_up = list(before).index(title) - rank
    return f" ({moved_up:+d})" if moved_up else ""


class EventView:
    """Shows the controller's events on a panel, if there is one."""

    def __init__(self, panel: Panel | None):
        self._panel = panel
        self._lists_by_stage: dict[str, list[list[str]]] = {}
        self._last_stage: str | None = None

    def note(self, text: str) -> None:
        """Show one line of text, if there is a panel."""
        if self._panel:
            self._panel.print_note(text)

    def show(self, events: list[dict[str, Any]]) -> None:
        """Show events in their order."""
        if self._panel is None:
            return
        for event in events:
            getattr(self, f"_{event['kind']}")(event)  # one of the methods below

    def _note(self, event: dict[str, Any]) -> None:
        """Show the text of the controller."""
        self.note(event["text"])

    def _stage(self, event: dict[str, Any]) -> None:
        """Show that a stage begins."""
        assert self._panel
        self._panel.begin_stage(event["stage"], event["steps"], done=event["done"])

    def _step(self, event: dict[str, Any]) -> None:
        """Show the step and the metrics of a stage."""
        assert self._panel
        self._panel.update_step(event["stage"], event["step"], event["metrics"])

    def _result(self, event: dict[str, Any]) -> None:
        """Show the metrics of a stage or baseline and, for a stage, the lists of up to three users.

        The lists are compared with those of the stage before.
        """
        assert self._panel
        metrics = event["metrics"]
        how = (
            "test, full ranking" if event.get("users") else "test"
        )  # a model that ranks nothing shows no users
        self._panel.print_table(f"{event['name']} ({how})", list(metrics), [list(metrics.values())])
        if event.get("baseline") or not event["shown"]:
            return
        lists_before = self._lists_by_stage.get(self._last_stage or "")
        rows = [
            {
                "user_id": event["users"][i]["user_id"],
                "target": event["users"][i]["target"],
                "recommended": titles,
            }
            | ({"before": lists_before[i]} if lists_before else {})
            for i, titles in enumerate(event["shown"][:3])
        ]
        self._panel.print_users(f"after {event['name']}", rows)
        self._lists_by_stage[event["name"]], self._last_stage = event["shown"], event["name"]
