"""Validations: what the validations of a stage found, kept in RUN/results/<stage>.validation.json as they come.

A resume replays them, so it decides as the run before it; what came after the commit that it goes on from is cut off. Kept as
{"history": [{"step", "metrics", "nats", "events"}], "end": {"metric", "best", "ran", "steps"} or null}; of a reinforced stage
also "start", what was found of the commit before it, and "rewards" by step: {"parts", "reward", "missing"} of the lists that
would be served for validation prompts. "parts" has what each scene's lists contribute to the mean of each reward, from which
the trained reward is computed anew when rewards or weights have changed; "missing" is the lack to the floor that is missed most,
as a share of it. Earlier versions kept [reward, missing] or the reward alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        self.rewards: dict[str, dict[str, Any]] = {
            step: _as_record(value) for step, value in stored.get("rewards", {}).items()
        }

    def add(self, step: int, found: Mapping[str, Any]) -> dict[str, Any]:
        """Keep what was found after a step, later than those before; the entry."""
        entry = {"step": step, **found}
        if str(step) in self.rewards:
            found_then = self.rewards[str(step)]
            entry["reward"] = found_then["reward"]
            entry |= {"missing": found_then["missing"]} if found_then["missing"] else {}
        self.history.append(entry)
        self._write()
        return entry

    def rewarded(
        self,
        step: int,
        reward: float,
        missing: float = 0.0,
        parts: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Keep what rewards say of validation prompts after a step, before that step is validated.

        Args:
            step: Step of the stage; 0 for the checkpoint that the stage began from.
            reward: The trained reward by the weights in force.
            missing: What is missing to the floor that is missed most, as a share of it.
            parts: By reward, what each scene's lists contribute to its mean.
        """
        self.rewards[str(step)] = {
            "reward": reward,
            "missing": missing,
            "parts": {name: list(values) for name, values in (parts or {}).items()},
        }
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

    def rejudge(self, judge: Callable[[Mapping[str, Sequence[float]]], tuple[float | None, float]]) -> None:
        """Compute rewards of all steps anew, since rewards or their weights have changed.

        Args:
            judge: Returns the trained reward of parts and what is missing to floors; a reward of None says that a reward
                which counts was not measured there.
        """
        for entry in self.rewards.values():
            if entry["parts"]:
                entry["reward"], entry["missing"] = judge(entry["parts"])
        for entry in self.history:
            if (then := self.rewards.get(str(entry["step"]))) is not None:
                entry["reward"], entry["missing"] = then["reward"], then["missing"]
        self._write()

    def _write(self) -> None:
        more = {"start": self.start} if self.start else {}
        more |= {"rewards": self.rewards} if self.rewards else {}
        self._run.write_json(self._name, {"history": self.history, "end": self.end, **more})


def _as_record(stored: Any) -> dict[str, Any]:
    """Return what was kept of a step's rewards, as this version keeps it."""
    if isinstance(stored, Mapping):
        return dict(stored)
    reward, missing = stored if isinstance(stored, Sequence) else (stored, 0.0)
    return {"reward": reward, "missing": missing, "parts": {}}


def selection_text(stage: str, found: Mapping[str, Any]) -> str:
    """Return in one sentence which checkpoint ends a stage, and why.

    Args:
        stage: What the stage is called.
        found: What `Validations.close` kept, and the "history".
    """
    best, metric, guard = found["best"], found["metric"], found.get("guard")
    entry = next((each for each in found["history"] if each["step"] == best), None)
    if guard is not None and not guard["kept"]:
        text = (
            f"{stage}: no step passed the guard, {guard['least']:.0%} of {guard['metric']} of validation "
            f"({guard['before']:.4f} before the stage); by the fallback, the highest {metric}, step {best} of "
            f"{found['steps']} was best ({guard['value']:.4f}"
        )
        rewards = [
            (each["reward"], each["step"]) for each in found["history"] if each.get("reward") is not None
        ]
        if entry is not None and entry.get("reward") is not None:
            highest, at = max(rewards)
            text += f"; its reward is {entry['reward']:.4f}, the highest {highest:.4f} at step {at}"
        text += ")"
    else:
        value = None if entry is None else _value_by(entry, metric)
        shown = "" if value is None else f" ({value:.4f})"
        text = f"{stage} was best at step {best} of {found['steps']} by {metric} of validation{shown}"
    if found["ran"] < found["steps"]:
        text += f"; stopped after {found['ran']}"
    if found.get("start"):
        loss = found.get("loss")
        why = (
            f"the best step loses significantly on validation ({loss['diff']:+.4f}, 95 % interval {loss['low']:+.4f} to "
            f"{loss['high']:+.4f})"
            if loss
            else "no step has more of the trained reward"
        )
        text += f"; the checkpoint that the stage began from was selected, for {why}. `best: {{by: last}}` keeps the last step"
    elif best < found["ran"]:
        text += f"; its last {found['ran'] - best} steps are not used"
    return text


def _value_by(entry: Mapping[str, Any], metric: str) -> float | None:
    """Return what a validation says by a metric, the nats or the trained reward."""
    if metric in ("nats", "reward"):
        return entry.get(metric)
    return (entry.get("metrics") or {}).get(metric)
