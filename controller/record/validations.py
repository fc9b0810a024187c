"""Validations: what the validations of a stage found, kept in RUN/results/<stage>.validation.json as they come.

A resume replays them, so it decides as the run before it; what came after the commit that it goes on from is cut off. Kept as
{"history": [{"step", "metrics", "nats", "events"}], "end": {"metric", "best", "ran", "steps"} or null}; of a reinforced stage
also "start", what was found of the commit before it, and "rewards" by step: the trained reward of validation prompts, and
what is missing to the floor that is missed most, as a share of it, 0 where all hold.
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
        self.start: dict[str, Any] | None = stored.get("start")
        self.rewards: dict[str, list[float]] = stored.get("rewards", {})

    def add(self, step: int, found: Mapping[str, Any]) -> dict[str, Any]:
        """Keep what was found after a step, later than those before; the entry."""
        entry = {"step": step, **found}
        if str(step) in self.rewards:
            entry["reward"], missing = self.rewards[str(step)]
            entry |= {"missing": missing} if missing else {}
        self.history.append(entry)
        self._write()
        return entry

    def rewarded(self, step: int, reward: float, missing: float = 0.0) -> None:
        """Keep the trained reward of validation prompts after a step, before it is validated, and what is missing to floors."""
        self.rewards[str(step)] = [reward, missing]
        self._write()

    def begin(self, found: Mapping[str, Any]) -> None:
        """Keep what was found of the commit before the stage."""
        self.start = dict(found)
        self._write()

    def close(self, **end: Any) -> None:
        """The stage is over."""
        self.end = end
        self._write()

    def cut(self, step: int) -> None:
        """Forget what came after a step, and the end; all of it with step 0."""
        kept = [entry for entry in self.history if entry["step"] <= step]
        rewards = {key: value for key, value in self.rewards.items() if step > 0 and int(key) <= step}
        start = self.start if step else None
        if (kept, rewards, start) != (self.history, self.rewards, self.start) or self.end is not None:
            self.history, self.rewards, self.start, self.end = kept, rewards, start, None
            self._write()

    def _write(self) -> None:
        more = {"start": self.start} if self.start else {}
        more |= {"rewards": self.rewards} if self.rewards else {}
        self._run.write_json(self._name, {"history": self.history, "end": self.end, **more})
