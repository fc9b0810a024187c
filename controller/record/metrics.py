"""The metrics and events that a run publishes while it is running.

Metrics are written to metrics.jsonl and TensorBoard (one TensorBoard run for each stage) and flushed with every record,
so that they survive a kill. Events (stage, step, note, result) are kept in a feed that the driver polls.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nonet.controller.record.feed import EventFeed
from nonet.renamed import keep_old_name

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# The units of metrics, by name; all others have unit "1".
_UNITS = {"seconds": "s", "loss": "nats", "kl": "nats", "validation nats": "nats", "rows/s": "1/s", "lr": "1"}


class Recorder:
    """The writer of one run's metrics and events.

    Args:
        folder: The folder of the run.
        run_id: The id of the run.
    """

    def __init__(self, folder: Path, run_id: str):
        self._folder, self._run_id, self._start_time = folder, run_id, time.time()
        self._metrics_file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._boards: dict[str, SummaryWriter] = {}  # by stage
        self._feed = EventFeed()

    def begin(self, stage: str, steps: int, applied_steps: int) -> None:
        """Record that a stage starts, or continues after `applied_steps` steps.

        After a resume, TensorBoard hides the points of later steps, which are written again.

        Args:
            stage: The name of the stage.
            steps: The number of steps of the stage.
            applied_steps: The number of steps that were applied before.
        """
        if applied_steps:
            self._boards[stage] = self._open_board(stage, purge_step=applied_steps + 1)
        self.add_event("stage", stage=stage, steps=steps, done=applied_steps)

    def record_step(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step, or of several steps under the last of them, and add them to the feed."""
        self.record_metrics(stage, step, values)
        self.add_event("step", stage=stage, step=step, metrics=dict(values))

    step = keep_old_name("Recorder.step", record_step)

    def record_metrics(
        self, stage: str, step: int, values: Mapping[str, float], role: str = "trainer"
    ) -> None:
        """Write the metrics of a step to metrics.jsonl and TensorBoard, and flush both.

        A line of metrics.jsonl holds one value: {"t", "run", "stage", "step", "role", "rank", "name", "value", "unit"}.

        Args:
            stage: The name of the stage.
            step: The step of the stage.
            values: The metrics by name.
            role: The role that measured them.
        """
        now, board = time.time(), self._get_board(stage)
        for name, value in values.items():
            record = {
                "t": now,
                "run": self._run_id,
                "stage": stage,
                "step": step,
                "role": role,
                "rank": 0,
                "name": name,
            }
            self._metrics_file.write(
                json.dumps(record | {"value": float(value), "unit": _UNITS.get(name, "1")}) + "\n"
            )
            board.add_scalar(name, float(value), step, now)
        self._metrics_file.flush()
        board.flush()

    def record_tables(self, stage: str, step: int, counts: Mapping[str, Mapping[str, int]]) -> None:
        """Record the counters of the sparse tables, such as `<table>.rows` and `<table>.admitted`.

        Args:
            stage: The name of the stage.
            step: The step of the stage.
            counts: Counters by table and name; events are counted since the last record.
        """
        values = {
            f"{table}.{counter}": value
            for table, counters in counts.items()
            for counter, value in counters.items()
        }
        self.record_metrics(stage, step, values, role="embedding")

    def add_event(self, kind: str, **fields: Any) -> None:
        """Add an event to the feed, with the seconds since the start of the run as "at"."""
        self._feed.add(kind, at=time.time() - self._start_time, **fields)

    def list_since(self, number: int) -> list[dict[str, Any]]:
        """Return the retained events whose number is at least `number`."""
        return self._feed.list_since(number)

    def close(self) -> None:
        """Close the metrics file and the TensorBoard writers."""
        self._metrics_file.close()
        for board in self._boards.values():
            board.close()

    def _get_board(self, stage: str) -> SummaryWriter:
        """Return the TensorBoard writer of a stage, which is opened at the first call."""
        if stage not in self._boards:
            self._boards[stage] = self._open_board(stage)
        return self._boards[stage]

    def _open_board(self, stage: str, purge_step: int | None = None) -> SummaryWriter:
        """Open the TensorBoard writer of a stage; existing points from `purge_step` on are hidden."""
        from torch.utils.tensorboard import SummaryWriter  # torch takes seconds to import

        return SummaryWriter(str(self._folder / "tensorboard" / stage), purge_step=purge_step)
