"""The validation results of a stage, kept in RUN/results/<stage>.validation.json.

A resumed run reads them again, so it makes the same decisions as before. Results after the restored checkpoint are deleted.
The file holds {"history": [{"step", "metrics", "nats", "events"}], "end": {"metric", "best", "ran", "steps"} or null} and,
if the stage began from a checkpoint, "start", the results of that checkpoint.

For an RL stage, "rewards" holds {"parts", "reward", "missing"} by step, of the lists that would be served for validation
prompts. "reward" is the trained reward, and "missing" the largest shortfall to a floor, as a fraction of that floor.
"parts" holds the contribution of each scene's lists to the mean of each reward, from which the other two are recomputed
when rewards or weights change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nonet.controller.record.run_folder import RunFolder


class ValidationRecord:
    """The validation results of one stage, in memory and in their file, which every change writes anew.

    Attributes:
        history: The results in the order of the steps, each with its "step" of the stage.
        end: The summary of the finished stage, or None before its end.
        start: The results of the checkpoint that the stage began from, or None.
        rewards: The rewards of the validation prompts, by step (as a string); "0" is the start.
    """

    def __init__(self, run: RunFolder, stage: str):
        self._run, self._file = run, f"results/{stage}.validation.json"
        stored = run.read_json(self._file) or {"history": [], "end": None}
        self.history: list[dict[str, Any]] = stored["history"]
        self.end: dict[str, Any] | None = stored["end"]
        self.start: dict[str, Any] | None = stored.get("start")
        self.rewards: dict[str, dict[str, Any]] = stored.get("rewards", {})

    def add(self, step: int, results: Mapping[str, Any]) -> dict[str, Any]:
        """Add the results of a step that is later than all steps before.

        Args:
            step: The step of the stage.
            results: The results.

        Returns:
            The new entry of the history, with the rewards of the step if they were recorded.
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
        floor_shortfall: float = 0.0,
        parts: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Record the rewards of the validation prompts after a step, before the step is validated.

        Args:
            step: The step of the stage; 0 for the checkpoint that the stage began from.
            reward: The trained reward, computed with the current weights.
            floor_shortfall: The largest shortfall to a floor, as a fraction of that floor; 0 if all floors are met.
            parts: The contribution of each scene's lists to the mean of a reward, by reward.
        """
        self.rewards[str(step)] = {
            "reward": reward,
            "missing": floor_shortfall,
            "parts": {name: list(by_scene) for name, by_scene in (parts or {}).items()},
        }
        self._write()

    def begin(self, results: Mapping[str, Any]) -> None:
        """Record the results of the checkpoint that the stage began from."""
        self.start = dict(results)
        self._write()

    def close(self, **end: Any) -> None:
        """Record the summary of the finished stage.

        Args:
            **end: The fields of the summary: "metric", "best", "ran", "steps", and optionally "guard", "start", "loss".
        """
        self.end = end
        self._write()

    def cut(self, step: int) -> None:
        """Delete the results after a step and the summary; step 0 deletes everything."""
        history = [entry for entry in self.history if entry["step"] <= step]
        rewards = {key: value for key, value in self.rewards.items() if step > 0 and int(key) <= step}
        start = self.start if step else None
        if (history, rewards, start) != (self.history, self.rewards, self.start) or self.end is not None:
            self.history, self.rewards, self.start, self.end = history, rewards, start, None
            self._write()

    def forget(self, first_step: int | None, *, start: bool) -> None:
        """Forget the results from a step on, none of them if that is None, and those of the start if `start`."""
        kept = [entry for entry in self.history if first_step is None or entry["step"] < first_step]
        if len(kept) < len(self.history) or (start and self.start):
            self.history, self.start = kept, None if start else self.start
            self._write()

    def recompute_rewards(
        self, judge: Callable[[Mapping[str, Sequence[float]]], tuple[float | None, float]]
    ) -> None:
        """Recompute the rewards of all steps after rewards or their weights have changed.

        Args:
            judge: A function from the "parts" of a step to the trained reward and the largest shortfall to a floor. The
                trained reward is None if a reward with a weight was not measured at that step.
        """
        for rewards in self.rewards.values():
            if rewards["parts"]:
                rewards["reward"], rewards["missing"] = judge(rewards["parts"])
        for entry in self.history:
            if (rewards := self.rewards.get(str(entry["step"]))) is not None:
                entry["reward"], entry["missing"] = rewards["reward"], rewards["missing"]
        self._write()

    def _write(self) -> None:
        """Write all results to the file."""
        optional_fields = {"start": self.start} if self.start else {}
        optional_fields |= {"rewards": self.rewards} if self.rewards else {}
        self._run.write_json(self._file, {"history": self.history, "end": self.end, **optional_fields})


def describe_selection(stage: str, summary: Mapping[str, Any]) -> str:
    """Describe in one sentence which checkpoint ends a stage, and why.

    Args:
        stage: The name of the stage.
        summary: The summary that `ValidationRecord.close` recorded, with the "history" added.
    """
    best_step, metric, guard = summary["best"], summary["metric"], summary.get("guard")
    best_entry = next((entry for entry in summary["history"] if entry["step"] == best_step), None)
    rewards_with_step = [
        (entry["reward"], entry["step"]) for entry in summary["history"] if entry.get("reward") is not None
    ]
    if guard is not None and not guard["kept"]:
        text = (
            f"{stage}: no step passed the guard, {guard['least']:.0%} of {guard['metric']} of validation "
            f"({guard['before']:.4f} before the stage); by the fallback, the highest {metric}, step {best_step} of "
            f"{summary['steps']} was best ({guard['value']:.4f}"
        )
        if best_entry is not None and best_entry.get("reward") is not None:
            highest, highest_step = max(rewards_with_step)
            text += f"; its reward is {best_entry['reward']:.4f}, the highest {highest:.4f} at step {highest_step}"
        text += ")"
    else:
        value = None if best_entry is None else _get_value(best_entry, metric)
        value_text = "" if value is None else f" ({value:.4f})"
        text = f"{stage} was best at step {best_step} of {summary['steps']} by {metric} of validation{value_text}"
        if best_entry is not None and value is None:
            text = (
                f"{stage} ended with its last step, {best_step} of {summary['steps']}: the labels of the validation events "
                f"do not define {metric}"
            )
        if guard is not None and value is not None and any(reward > value for reward, _ in rewards_with_step):
            text += f", of the steps that keep {guard['least']:.0%} of {guard['metric']} ({guard['before']:.4f} before the stage)"
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
    elif best_step < summary["ran"]:
        text += f"; its last {summary['ran'] - best_step} steps are not used"
    return text


def _get_value(entry: Mapping[str, Any], metric: str) -> float | None:
    """Return the value of a metric in a history entry; "nats" and "reward" have fields of their own."""
    if metric in ("nats", "reward"):
        return entry.get(metric)
    return (entry.get("metrics") or {}).get(metric)
