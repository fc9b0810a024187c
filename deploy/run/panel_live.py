"""The live display of a panel: lines of finished stages scroll away above, the current stage is redrawn below.

Texts are passed to Rich as `Text` and not as markup, because titles of items may contain brackets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nonet.deploy.run.progress import StageProgress, format_metrics, format_steps

_REFRESHES_PER_S = 4


class LiveDisplay:
    """Draws the stage, a progress bar, time and metrics four times a second, below earlier notes and tables."""

    def __init__(self, stream: TextIO, clock: Callable[[], float], console: Console | None = None):
        self._clock = clock
        self._console = console or Console(file=stream)
        self._live: Live | None = None
        self._progress: StageProgress | None = None

    def begin(self, progress: StageProgress) -> None:
        """Start to draw a stage."""
        self._progress = progress
        if self._live is None:
            self._live = Live(
                console=self._console,
                refresh_per_second=_REFRESHES_PER_S,
                get_renderable=self._render,
                transient=True,
            )
            self._live.start()

    def update_progress(self, progress: StageProgress) -> None:
        """Draw another state of the stage."""
        self._progress = progress

    def end(self, progress: StageProgress) -> None:
        """Print how long the stage took, and its last metrics."""
        self._progress = None
        step_count = progress.step - progress.first
        steps = f"{format_steps(step_count)}, " if step_count else ""
        text = f"{steps}{progress.elapsed_s:.1f} s  {format_metrics(progress.metrics)}"
        self._console.print(Text.assemble(("✓ ", "green"), (progress.stage, "bold"), "  ", text))

    def print_line(self, text: str) -> None:
        """Print one line of text above the stage."""
        self._console.print(Text(text))

    def print_table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table above the stage."""
        table = Table(title=Text(title, "bold"), title_justify="left")
        for index, name in enumerate(columns):
            table.add_column(Text(name), justify="right" if index else "left")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self._console.print(table)

    def print_users(self, title: str, rows: Sequence[tuple[str, list[str]]]) -> None:
        """Print the titles of each user as a column above the stage."""
        table = Table(title=Text(title, "bold"), title_justify="left")
        for user, _ in rows:
            table.add_column(Text(user))
        longest = max((len(titles) for _, titles in rows), default=0)
        for rank in range(longest):
            cells = [titles[rank] if rank < len(titles) else "" for _, titles in rows]
            table.add_row(*(Text(cell, "green" if "✓" in cell else "") for cell in cells))  # ✓ marks a hit
        self._console.print(table)

    def close(self) -> None:
        """Stop drawing and restore the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self) -> Group | Text:
        """Return the stage in progress as Rich draws it: a line with a progress bar, and a line with metrics."""
        progress = self._progress
        if progress is None:
            return Text("")
        progress.elapsed_s = self._clock() - progress.started
        total = f"/{progress.total:,}" if progress.total else ""
        remaining = f", about {progress.left_s:.0f} s left" if progress.left_s else ""
        grid = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=progress.total, completed=progress.step, width=32, pulse=not progress.total)
        text = f"{progress.step:,}{total}  {progress.elapsed_s:.0f} s{remaining}"
        grid.add_row(Text(progress.stage, "bold"), bar, Text(text))
        return Group(grid, Text(format_metrics(progress.metrics), "cyan"))
