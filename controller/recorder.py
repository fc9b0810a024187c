"""Recorder: what a run leaves for people to read while it goes on, and what the driver shows.

Metrics go to metrics.jsonl and TensorBoard; events (stage, step, note, table, users) wait in a list that the driver polls.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nonet.controller.events import EventWriter

# Losses and rewards are numbers without a unit of their own; what has one says so.
_UNITS = {"seconds": "s", "loss": "nats", "kl": "nats", "rows/s": "1/s", "lr": "1"}


class Recorder:
    """Metrics and events of one run."""

    def __init__(self, folder: Path, run_id: str):
        self._run, self._started = run_id, time.time()
        self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._board = EventWriter(folder / "tensorboard")
        self._events: list[dict[str, Any]] = []

    def metrics(
        self, stage: str, step: int, values: Mapping[str, float], role: str = "trainer", rank: int = 0
    ) -> None:
        """One record a value, {"t", "run", "stage", "step", "role", "rank", "name", "value", "unit"}."""
        now = time.time()
        for name, value in values.items():
            record = {
                "t": now,
                "run": self._run,
                "stage": stage,
                "step": step,
                "role": role,
                "rank": rank,
                "name": name,
            }
            self._metrics.write(
                json.dumps(record | {"value": float(value), "unit": _UNITS.get(name, "1")}) + "\n"
            )
            self._board.scalar(f"{stage}/{name}", float(value), step, now)
        self._metrics.flush()

    def event(self, kind: str, **body: Any) -> None:
        """Something for the driver to show."""
        self._events.append({"kind": kind, "at": time.time() - self._started, **body})

    def since(self, seen: int) -> list[dict[str, Any]]:
        """Events after the first `seen`."""
        return self._events[seen:]

    def close(self) -> None:
        self._metrics.close()
        self._board.close()
