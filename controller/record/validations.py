"""Validations: what the validations of a stage found, kept in RUN/results/<stage>.validation.json as they come.

A resume replays them, so it decides as the run before it; what came after the commit that it goes on from is cut off. Kept as
{"history": [{"step", "metrics", "nats", "events"}], "end": {"metric", "best", "ran", "steps"} or null}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nonet.controller.record.run_folder import RunFolder


class Validations:
    """Those of one stage, by step of the stage."""

    def __init__(self, run: RunFolder, stage: str):
        self._run, self._name = run, f"results/{stage}.validation.json"
        stored = run.read_json(self._name) or {"history": [], "end": None}
        self.history: list[dict[str, Any]] = stored["history"]
        self.end: dict[str, Any] | None = stored["end"]

    def add(self, step: int, found: Mapping[str, Any]) -> dict[str, Any]:
        """Keep what was found after a step, later than those before; the entry."""
        entry = {"step": step, **found}
        self.history.append(entry)
        self._write()
        return entry

    def close(self, **end: Any) -> None:
        """The stage is over."""
        self.end = end
        self._write()

    def cut(self, step: int) -> None:
        """Forget what came after a step, and the end; all of it with step 0."""
        kept = [entry for entry in self.history if entry["step"] <= step]
        if kept != self.history or self.end is not None:
            self.history, self.end = kept, None
            self._write()

    def _write(self) -> None:
        self._run.write_json(self._name, {"history": self.history, "end": self.end})
