"""TensorBoard: event files in the folder of the run, one TensorBoard run per stage, flushed with every record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nonet.controller.record.tracking.kinds.base import MetricPoint, TrackedRun, TrackerKind, TrackerSink

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink(TrackerSink):
    """The event files of a run, RUN/tensorboard/STAGE. After a resume, points of later steps are hidden."""

    def __init__(self, run: TrackedRun):
        self._folder = run.folder / "tensorboard"
        self._boards: dict[str, SummaryWriter] = {}  # by stage

    def begin(self, stage: str, steps: int, applied_steps: int) -> None:
        """Hide the points of the stage after `applied_steps` steps, which are written again."""
        if applied_steps:
            self._boards[stage] = self._open_board(stage, purge_step=applied_steps + 1)

    def write(self, points: Sequence[MetricPoint]) -> None:
        """Write points and flush them to disk, so that they survive a kill."""
        written = {}
        for point in points:
            board = written[point.stage] = self._get_board(point.stage)
            board.add_scalar(point.name, point.value, point.step, point.time)
        for board in written.values():
            board.flush()

    def close(self, state: str) -> None:
        """Close the event files."""
        for board in self._boards.values():
            board.close()

    def _get_board(self, stage: str) -> SummaryWriter:
        """Return the writer of a stage, which is opened at the first call."""
        if stage not in self._boards:
            self._boards[stage] = self._open_board(stage)
        return self._boards[stage]

    def _open_board(self, stage: str, purge_step: int | None = None) -> SummaryWriter:
        """Open the writer of a stage; existing points from `purge_step` on are hidden."""
        from torch.utils.tensorboard import SummaryWriter  # torch takes seconds to import

        return SummaryWriter(str(self._folder / stage), purge_step=purge_step)


SPEC = TrackerKind(TensorBoardSink, remote=False)
