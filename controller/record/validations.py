"""The validation results of a stage, kept in RUN/results/<stage>.validation.json.

A resumed run replays them, so it makes the same decisions as before. Results after the restored checkpoint are deleted. The
file holds {"history": [{"step", "metrics", "nats", "events"}], "end": {"metric", "best", "ran", "steps"} or null}. A
reinforced stage adds "start", the results of the checkpoint before it, and "rewards" by step: {"parts", "reward",
"missing"} of the lists that would be served for validation prompts. "parts" holds the contribution of each scene's lists
to the mean of each reward, from which the trained reward is recomputed when rewards or weights change. "missing" is the
largest shortfall to a floor, as a fraction of that floor. Earlier versions stored [reward, missing] or the
reward alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nonet.controller.record.run_folder import RunFolder


class ValidationRecord:
    """The validation results of one stage, by step of the stage.

    Attributes:
        history: The results in the order of the steps.
        end: The summary of the finished stage, or None.
        start: The results of the checkpoint before the stage, or None.
        rewards: The rewards of the validation prompts, by step.
    """

    def __init__(self, run: RunFolder, stage: str):
        self._run, self._name = run, f"results/{stage}.validation.json"
        stored = run.read_json(self._name) or {"history": [], "end": None}
        self.history: list[dict[str, Any]] = stored["history"]
        self.end: dict[str, Any] | None = stored["end"]
        self.start: dict[str, Any] | None = stored.get("start")
        self.rewards: dict[str, dict[str, Any]] = {
            step: _as_record(value) for step, value in stored.get("rewards", {}).items()
        }

    def add(self, step: int, results: Mapping[str, Any]) -> dict[str, Any]:
        """Add the results of a step that is later than all steps before.

        Args:
            step: The step of the stage.
            results: The results.

        Returns:
            The entry of the history, with the rewards of the step if they are known.
        """
        entry = {"step": step, **results}
        if str(step) in self.rewards:
            rewards = self.rewards[str(step)]
            entry["reward"] = rewards["reward"]
            entry |= {"missing": rewards["missing"]} if rewards["missing"] else {}
        self.history.append(entry)
        self._write()
        return entry

    def add_rewards(
        self,
        step: int,
        reward: float,
        missing: float = 0.0,
        parts: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Record the rewards of the validation prompts after a step, before the step is validated.

        Args:
            step: The step of the stage; 0 for the checkpoint that the stage began from.
            reward: The trained reward, computed with the current weights.
            missing: The largest shortfall to a floor, as a fraction of that floor.
            parts: The contribution of each scene's lists to the mean of a reward, by reward.
        """
        self.rewards[str(step)] = {
            "reward": reward,
            "missing": missing,
            "parts": {name: list(values) for name, values in (parts or {}).items()},
        }
        self._write()

    def begin(self, results: Mapping[str, Any]) -> None:
        """Record the results of the checkpoint before the stage."""
        self.start = dict(results)
        self._write()

    def close(self, **end: Any) -> None:
        """Record the summary of the finished stage."""
        self.end = end
        self._write()

    def cut(self, step: int) -> None:
        """Delete the results after a step and the summary; step 0 deletes everything."""
        kept = [entry for entry in self.history if entry["step"] <= step]
        rewards = {key: value for key, value in self.rewards.items() if step > 0 and int(key) <= step}
        start = self.start if step else None
        if (kept, rewards, start) != (self.history, self.rewards, self.start) or self.end is not None:
            self.history, self.rewards, self.start, self.end = kept, rewards, start, None
            self._write()

    def recompute_rewards(
        self, judge: Callable[[Mapping[str, Sequence[float]]], tuple[float | None, float]]
    ) -> None:
        """Recompute the rewards of all steps after rewards or their weights have changed.

        Args:
            judge: A function from the parts of a step to the trained reward and the shortfall to floors. The trained reward
                is None if a reward with a weight was not measured at that step.
        """
        for entry in self.rewards.values():
            if entry["parts"]:
                entry["reward"], entry["missing"] = judge(entry["parts"])
        for entry in self.history:
            if (then := self.rewards.get(str(entry["step"]))) is not None:
                entry["reward"], entry["missing"] = then["reward"], then["missing"]
        self._write()

    def _write(self) -> None:
        optional_fields = {"start": self.start} if self.start else {}
        optional_fields |= {"rewards": self.rewards} if self.rewards else {}
        self._run.write_json(self._name, {"history": self.history, "end": self.end, **optional_fields})


def _as_record(stored: Any) -> dict[str, Any]:
    """Convert the stored rewards of a step to the current format."""
    if isinstance(stored, Mapping):
        return dict(stored)
    reward, missing = stored if isinstance(stored, Sequence) else (stored, 0.0)
    return {"reward": reward, "missing": missing, "parts": {}}


def describe_selection(stage: str, summary: Mapping[str, Any]) -> str:
    """Describe in one sentence which checkpoint ends a stage, and why.

    Args:
        stage: The name of the stage.
        summary: The summary that `ValidationRecord.close` recorded, and the "history".
    """
    best, metric, guard = summary["best"], summary["metric"], summary.get("guard")
    entry = next((validation for validation in summary["history"] if validation["step"] == best), None)
    if guard is not None and not guard["kept"]:
        text = (
            f"{stage}: no step passed the guard, {guard['least']:.0%} of {guard['metric']} of validation "
            f"({guard['before']:.4f} before the stage); by the fallback, the highest {metric}, step {best} of "
            f"{summary['steps']} was best ({guard['value']:.4f}"
        )
        rewards = [
            (validation["reward"], validation["step"])
            for validation in summary["history"]
            if validation.get("reward") is not None
        ]
        if entry is not None and entry.get("reward") is not None:
            highest, highest_step = max(rewards)
            text += f"; its reward is {entry['reward']:.4f}, the highest {highest:.4f} at step {highest_step}"
        text += ")"
    else:
        value = None if entry is None else _get_value(entry, metric)
        value_text = "" if value is None else f" ({value:.4f})"
        text = f"{stage} was best at step {best} of {summary['steps']} by {metric} of validation{value_text}"
    if summary["ran"] < summary["steps"]:
        text += f"; stopped after {summary['ran']}"
    if summary.get("start"):
        loss = summary.get("loss")
        reason = (
            f"the best step loses significantly on validation ({loss['diff']:+.4f}, 95 % interval {loss['low']:+.4f} to "
            f"{loss['high']:+.4f})"
            if loss
            else "no step has more of the trained reward"
        )
        text += f"; the checkpoint that the stage began from was selected, for {reason}. `best: {{by: last}}` keeps the last step"
    elif best < summary["ran"]:
        text += f"; its last {summary['ran'] - best} steps are not used"
    return text


def _get_value(entry: Mapping[str, Any], metric: str) -> float | None:
    """Return the value of a metric in a history entry; "nats" and "reward" have fields of their own."""
    if metric in ("nats", "reward"):
        return entry.get(metric)
    return (entry.get("metrics") or {}).get(metric)
