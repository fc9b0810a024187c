"""The validations of one stage, which the evaluator computes as checkpoints are completed.

The evaluator works while the next steps run. At a validation point, the stage decides whether to stop by the results of
all earlier points and waits for them. It never decides by whatever results happen to have arrived, so that the same seed
leads to the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nonet.controller.record import ValidationRecord
from nonet.controller.scenario import ValidationRule
from nonet.deadlines import Deadline
from nonet.models import NATS
from nonet.workers.roles import StageSetup
from nonet.workers.runtime import GroupFuture


@dataclass(frozen=True, slots=True)
class StageSelection:
    """The checkpoint that ends a stage, and why.

    Attributes:
        best: The entry of the best validated step, or None without validations.
        start: Whether the checkpoint that the stage began from was selected instead.
        guard: The result of the metric guard at the best step, {metric, least, before, value, kept}, or None without a
            guard.
        loss: {diff, low, high} of the best step minus the start, if that loss made the stage select its start.
    """

    best: dict[str, Any] | None
    start: bool = False
    guard: dict[str, Any] | None = None
    loss: dict[str, float] | None = None


class StageValidation:
    """The validation requests and results of one stage.

    Attributes:
        rule: The rule by which the stage is validated.
        points: The steps that are validated.
        record: The results so far.
        served: The served lists that rewards were computed from, by step.
    """

    def __init__(
        self,
        stage: StageSetup,
        rule: ValidationRule,
        points: tuple[int, ...],
        record: ValidationRecord,
        validate: Callable[[str, str], GroupFuture],
        find_checkpoint: Callable[[int], Path | None],
        deadline: Deadline,
        compare: Callable[[str, str, str], GroupFuture] | None = None,
    ):
        self.rule, self.points, self.record = rule, points, record
        self._stage, self._validate, self._find_checkpoint, self._deadline = (
            stage,
            validate,
            find_checkpoint,
            deadline,
        )
        self._compare = compare
        self._start_folder: str | None = None
        self.served: dict[int, list[GroupFuture]] = {}
        self._pending: dict[int, GroupFuture] = {}
        self._start: GroupFuture | None = None
        self._reported_count = len(record.history)

    def find_next_point(self, step: int) -> int:
        """Return the first validation point after a step, or the last step of the stage."""
        return next((point for point in self.points if point > step), self._stage.steps)

    def request(self, step: int) -> None:
        """Request the validation of the checkpoint after `step` steps, if that is a point without a request or a result."""
        if step not in self.points or step in self._pending or step in self._list_validated_steps():
            return
        folder = self._find_checkpoint(self._stage.first + step)
        if folder is not None:
            self._pending[step] = self._validate(self._stage.name, str(folder))

    def should_stop(self, step: int) -> bool:
        """Return whether the stage stops at a step, judged by all earlier validations, which are waited for."""
        if step not in self.points:
            return False
        self.wait_until(step - 1)
        return self.rule.should_stop(
            [self.get_value(entry) for entry in self.record.history if entry["step"] < step]
        )

    def wait_until(self, step: int) -> None:
        """Wait for the results of all points up to a step, including those that an earlier part of the run had requested."""
        for point in self.points:
            if point <= step:
                self.request(point)
        self._collect_results(step)

    def pop_news(self) -> list[dict[str, Any]]:
        """Return the results that arrived since the last call, in the order of steps, without waiting."""
        self._collect_results(0)
        first, self._reported_count = self._reported_count, len(self.record.history)
        return self.record.history[first:]

    def find_best(self) -> dict[str, Any] | None:
        """Return the best validation so far (the earlier of equal ones), or the last one if the rule says so."""
        before = self._find_start_value() if self.rule.reward else None
        if self.rule.last and self.record.history:
            return self.record.history[-1]
        values = [self._compute_score(entry, before) for entry in self.record.history]
        known = [index for index, value in enumerate(values) if not math.isnan(value)]
        best = max(known, key=lambda index: (values[index], -index), default=0 if values else None)
        return None if best is None else self.record.history[best]

    def _compute_score(self, entry: Mapping[str, Any], before: float | None) -> float:
        """Return the score of a validation, higher is better; NaN if not all rewards with a weight were measured."""
        reward = entry.get("reward")
        if self.rule.reward and reward is None and any("reward" in each for each in self.record.history):
            return math.nan
        return self.rule.score_validation(self.get_value(entry), reward, before, entry.get("missing"))

    def begin(self, checkpoint: Path | None) -> None:
        """Request the validation of the checkpoint that the stage begins from, which is a candidate too."""
        self._start_folder = None if checkpoint is None else checkpoint.name
        if not self.rule.last and checkpoint is not None and self.record.start is None:
            self._start = self._validate(self._stage.name, str(checkpoint))

    def select(self) -> StageSelection:
        """Select the checkpoint that ends the stage: its best validated step, or the checkpoint that it began from.

        The start is selected if the best step is significantly worse on the validation metric (a paired bootstrap over
        users). In a stage that is judged by its reward, a loss that `least` allows does not count; there the start is
        also selected if it has a higher trained reward than every step that passed the guard. `best: {by: last}` always
        selects the last step.
        """
        best, before = self.find_best(), self._find_start_value()
        if best is None or self.rule.last:
            return StageSelection(best)
        guard = self._guard(best, before)
        failed = guard is not None and not guard["kept"]
        if self._start_folder is None or self.record.start is None:
            return StageSelection(best, guard=guard)
        start = {"step": 0, **self.record.start, **self.record.rewards.get("0", {})}
        rewards = (start.get("reward"), best.get("reward"))
        judged = self.rule.reward and not failed and None not in rewards
        if judged and self._compute_score(start, before) > self._compute_score(best, before):
            return StageSelection(best, start=True, guard=guard)
        loss = self._find_loss(best) if not self.rule.reward or failed else None
        return StageSelection(best, start=loss is not None, guard=guard, loss=loss)

    def _guard(self, best: Mapping[str, Any], before: float | None) -> dict[str, Any] | None:
        """Return the result of the metric guard at the best step, or None without a guard."""
        if not self.rule.reward or before is None or math.isnan(before):
            return None
        value = self.get_value(best)
        return {
            "metric": self.rule.metric,
            "least": self.rule.least,
            "before": before,
            "value": value,
            "kept": self.rule.is_metric_kept(value, before),
        }

    def _find_loss(self, best: Mapping[str, Any]) -> dict[str, float] | None:
        """Return {diff, low, high} of the best step minus the start if the metric is significantly worse, else None."""
        if self._compare is None or self._start_folder is None:
            return None
        folder = self._find_checkpoint(self._stage.first + best["step"])
        if folder is None:
            return None
        intervals = self._compare(self._stage.name, folder.name, self._start_folder).get(self._deadline)
        interval = intervals.get(self.rule.metric)
        if interval is None:
            return None
        lost = interval["low"] > 0 if self.rule.lower else interval["high"] < 0
        return dict(interval) if lost else None

    def _find_start_value(self) -> float | None:
        """Return the metric before the stage, or None if it is not needed or nothing came before."""
        if self._start is not None:
            start, self._start = self._start, None
            self.record.begin(start.get(self._deadline))
        return self.get_value(self.record.start) if self.record.start else None

    def get_value(self, entry: Mapping[str, Any]) -> float:
        """Return the value of the metric that the stage is judged by, or NaN if there is none."""
        value = entry[NATS] if self.rule.metric == NATS else entry["metrics"][self.rule.metric]
        return float("nan") if value is None else value

    def list_kept_steps(self) -> frozenset[int]:
        """Return the global steps whose checkpoints must be kept: the best one, and those that are not validated yet."""
        best, validated = self.find_best(), self._list_validated_steps()
        waiting = {point for point in self.points if point not in validated}
        return frozenset(self._stage.first + step for step in waiting | ({best["step"]} if best else set()))

    def _collect_results(self, wait_for: int) -> None:
        """Record the results that have arrived, in the order of steps; wait for points up to `wait_for`."""
        for step in sorted(self._pending):
            if step > wait_for and not self._pending[step].done():
                return
            self.record.add(step, self._pending.pop(step).get(self._deadline))

    def _list_validated_steps(self) -> set[int]:
        return {entry["step"] for entry in self.record.history}
