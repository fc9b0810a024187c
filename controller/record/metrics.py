"""Recorder: what a run leaves for people to read while it goes on, and what the driver shows.

Metrics go to metrics.jsonl and TensorBoard (a run of curves a stage), flushed with every record: a killed run keeps them.
Events (stage, step, note, result) wait in a feed that the driver polls.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nonet.controller.record.feed import Feed

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# Losses and rewards are numbers without a unit of their own; what has one says so.
_UNITS = {"seconds": "s", "loss": "nats", "kl": "nats", "validation nats": "nats", "rows/s": "1/s", "lr": "1"}


class Recorder:
    """Metrics and events of one run."""

    def __init__(self, folder: Path, run_id: str):
        self._folder, self._run, self._started = folder, run_id, time.time()
        self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._boards: dict[str, SummaryWriter] = {}
        self._feed = Feed()

    def begin(self, stage: str, steps: int, done: int) -> None:
        """A stage starts, or goes on after `done` steps: curves after them are written anew."""
        if done:
            self._boards[stage] = self._opened(stage, purge_step=done + 1)
        self.event("stage", stage=stage, steps=steps, done=done)

    def step(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """What a step, or the last of a few, found."""
        self.metrics(stage, step, values)
        self.event("step", stage=stage, step=step, metrics=dict(values))

    def metrics(self, stage: str, step: int, values: Mapping[str, float], role: str = "trainer") -> None:
        """One record a value, {"t", "run", "stage", "step", "role", "rank", "name", "value", "unit"}."""
        now, board = time.time(), self._board(stage)
        for name, value in values.items():
            record = {
                "t": now,
                "run": self._run,
                "stage": stage,
                "step": step,
                "role": role,
                "rank": 0,
                "name": name,
            }
            self._metrics.write(
                json.dumps(record | {"value": float(value), "unit": _UNITS.get(name, "1")}) + "\n"
            )
            board.add_scalar(name, float(value), step, now)
        self._metrics.flush()
        board.flush()

    def tables(self, stage: str, step: int, counts: Mapping[str, Mapping[str, int]]) -> None:
        """What each sparse table did since the record before: `<table>.rows` held, `<table>.admitted` and so on."""
        values = {f"{name}.{what}": value for name, every in counts.items() for what, value in every.items()}
        self.metrics(stage, step, values, role="embedding")

    def event(self, kind: str, **body: Any) -> None:
        """Something for the driver to show."""
        self._feed.add(kind, at=time.time() - self._started, **body)

    def since(self, number: int) -> list[dict[str, Any]]:
        """Events from a number on, as far as they are kept."""
        return self._feed.since(number)

    def close(self) -> None:
        self._metrics.close()
        for board in self._boards.values():
            board.close()

    def _board(self, stage: str) -> SummaryWriter:
        if stage not in self._boards:
            self._boards[stage] = self._opened(stage)
        return self._boards[stage]

    def _opened(self, stage: str, purge_step: int | None = None) -> SummaryWriter:
        """A stage's curves; what the folder has of `purge_step` and later steps is hidden."""
        from torch.utils.tensorboard import SummaryWriter  # torch takes seconds to import

        return SummaryWriter(str(self._folder / "tensorboard" / stage), purge_step=purge_step)
