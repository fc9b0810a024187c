"""The validations of one stage, which the evaluator computes as checkpoints are completed.

The evaluator works while the next steps run. At a validation point, the stage waits for the results of all earlier points
and decides by them whether to stop. Results that happen to have arrived early are not used, so that the same seed leads to
the same decisions.

If the labels of the validation events do not define the metric that decides, such as AUC if all are the same, the nats decide. If
they are not defined either, the stage does not stop early, and its last step counts as the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from nonet.controller.record import ValidationRecord
from nonet.controller.scenario import ValidationRule
from nonet.deadlines import Deadline
from nonet.models import NATS
from nonet.workers.roles import StageSetup
from nonet.workers.runtime import GroupFuture


class ValidationFuture(Protocol):
    """The result of a validation that the evaluator computes, as a `GroupFuture` is that of a call."""

    def done(self) -> bool:
        """Return whether the evaluator has answered."""
        ...

    def get(self, timeout_s: Deadline | float | None = None) -> Any:
        """Wait for the result."""
        ...


@dataclass(frozen=True, slots=True)
class StageSelection:
    """The checkpoint that ends a stage, and why.

    Attributes:
        best: The history entry (`ValidationRecord.history`) of the best validated step, or None without validations.
        start: Whether the checkpoint that the stage began from was selected instead.
        guard: The result of the metric guard at the best step, or None without a guard: {metric, least, before, value,
            kept}, where `kept` is whether `value` keeps the share `least` of `before`, its value before the stage.
        loss: The difference of the metric between the best step and the start with its 95 % interval, {diff, low, high},
            if that difference made the stage select its start; otherwise None.
    """

    best: dict[str, Any] | None
    start: bool = False
    guard: dict[str, Any] | None = None
    loss: dict[str, float] | None = None


class StageValidation:
    """The validation requests and results of one stage.

    Attributes:
        rule: The rule by which the stage is validated; another one if the metric is not defined.
        points: The numbers of applied steps after which the stage is validated, in ascending order.
        record: The results so far.
        served: The served lists that rewards were computed from, by step.

    Args:
        stage: The stage.
        rule: The rule by which the stage is validated.
        points: The numbers of applied steps after which the stage is validated.
        record: The results so far.
        validate: Starts the validation of (stage name, checkpoint folder) on the evaluator.
        find_checkpoint: Returns the folder of the checkpoint of a global step, or None.
        deadline: The longest time to wait for one result.
        compare: Compares the metrics of (stage name, checkpoint name, checkpoint name of the start) on the evaluator; None
            if the evaluator cannot.
    """

    def __init__(
        self,
        stage: StageSetup,
        rule: ValidationRule,
        points: tuple[int, ...],
        record: ValidationRecord,
        validate: Callable[[str, str], ValidationFuture],
        find_checkpoint: Callable[[int], Path | None],
        deadline: Deadline,
        compare: Callable[[str, str, str], GroupFuture] | None = None,
    ):
        self.rule, self.points, self.record = rule, points, record
        self._stage, self._deadline = stage, deadline
        self._validate, self._find_checkpoint, self._compare = validate, find_checkpoint, compare
        self._start_name: str | None = None  # the folder name of the checkpoint that the stage began from
        self.served: dict[int, list[GroupFuture]] = {}
        self._pending: dict[
            int, ValidationFuture
        ] = {}  # requested validations without a recorded result, by step
        self._start_future: ValidationFuture | None = None  # its validation, until the result is recorded
        self._popped_count = len(record.history)  # entries of the history that `pop_news` has returned
        self._replace_undefined_metric()

    def find_next_point(self, step: int) -> int:
        """Return the first validation point after a step, or the last step of the stage."""
        return next((point for point in self.points if point > step), self._stage.steps)

    def request(self, step: int) -> None:
        """Request the validations of all points up to `step` applied steps, in their order.

        No request is sent for a point that has a request or a result, or whose checkpoint is missing. Points before `step` lack
        a request if a part of the run before a resume had requested them: their results must be recorded first.
        """
        validated_steps = self._list_validated_steps()
        for point in self.points:
            if point > step or point in self._pending or point in validated_steps:
                continue
            folder = self._find_checkpoint(self._stage.first + point)
            if folder is not None:
                self._pending[point] = self._validate(self._stage.name, str(folder))

    def should_stop(self, step: int) -> bool:
        """Wait for all validations before a step, and return whether the stage stops at this step."""
        if step not in self.points:
            return False
        self.wait_until(step - 1)
        return self.rule.should_stop(
            [self.get_value(entry) for entry in self.record.history if entry["step"] < step]
        )

    def wait_until(self, step: int) -> None:
        """Wait for the results of all points up to a step, including those that an earlier part of the run had requested."""
        self.request(step)
        self._collect_results(wait_for=step)

    def pop_news(self) -> list[dict[str, Any]]:
        """Return the history entries of the results that arrived since the last call, in the order of steps, without waiting."""
        self._collect_results(wait_for=0)
        first, self._popped_count = self._popped_count, len(self.record.history)
        return self.record.history[first:]

    def find_best(self) -> dict[str, Any] | None:
        """Return the history entry of the best validation so far (the earlier of equal ones); None if there are none.

        For a rule with `last`, the last validation counts as the best.
        """
        metric_before = self._wait_for_start_value() if self.rule.reward else None
        if self.rule.last and self.record.history:
            return self.record.history[-1]
        scores = [self._compute_score(entry, metric_before) for entry in self.record.history]
        scored = [index for index, score in enumerate(scores) if not math.isnan(score)]
        best_index = max(scored, key=lambda index: (scores[index], -index), default=0 if scores else None)
        return None if best_index is None else self.record.history[best_index]

    def _compute_score(self, entry: Mapping[str, Any], metric_before: float | None) -> float:
        """Return the score of a validation, higher is better; NaN if not all rewards with a weight were measured.

        Args:
            entry: The history entry of the validation.
            metric_before: The value of the metric before the stage; None if unknown.
        """
        reward = entry.get("reward")
        if self.rule.reward and reward is None and any("reward" in other for other in self.record.history):
            return math.nan
        return self.rule.score_validation(
            self.get_value(entry), reward, metric_before, floor_shortfall=entry.get("missing")
        )

    def begin(self, checkpoint: Path | None) -> None:
        """Request the validation of the checkpoint that the stage begins from, for `select` and for reports.

        Args:
            checkpoint: The folder of that checkpoint, or None if there is none.
        """
        self._start_name = None if checkpoint is None else checkpoint.name
        if checkpoint is not None and self.record.start is None:
            self._start_future = self._validate(self._stage.name, str(checkpoint))

    def select(self) -> StageSelection:
        """Select the checkpoint that ends the stage: its best validated step, or the checkpoint that it began from.

        A stage that is judged by its metric selects its start if the best step is significantly worse (a paired bootstrap
        over users). A stage that is judged by its reward selects its start if the start has a higher trained reward than
        the best step; but if none of its steps passed the guard (the share `least` of the metric before the stage), it
        selects its start as a stage that is judged by its metric. `best: {by: last}` always selects the last step.
        """
        best, metric_before = self.find_best(), self._wait_for_start_value()
        if best is None or self.rule.last:
            return StageSelection(best)
        guard = self._compute_guard(best, metric_before)
        guard_failed = guard is not None and not guard["kept"]
        if self._start_name is None or self.record.start is None:
            return StageSelection(best, guard=guard)
        start_entry = {"step": 0, **self.record.start, **self.record.rewards.get("0", {})}
        by_reward = self.rule.reward and not guard_failed
        have_rewards = None not in (start_entry.get("reward"), best.get("reward"))
        if (
            by_reward
            and have_rewards
            and self._compute_score(start_entry, metric_before) > self._compute_score(best, metric_before)
        ):
            return StageSelection(best, start=True, guard=guard)
        loss = None if by_reward else self._find_significant_loss(best)
        return StageSelection(best, start=loss is not None, guard=guard, loss=loss)

    def _compute_guard(self, best: Mapping[str, Any], metric_before: float | None) -> dict[str, Any] | None:
        """Return the result of the metric guard at the best step (`StageSelection.guard`), or None without a guard."""
        if not self.rule.reward or metric_before is None or math.isnan(metric_before):
            return None
        value = self.get_value(best)
        return {
            "metric": self.rule.metric,
            "least": self.rule.least,
            "before": metric_before,
            "value": value,
            "kept": self.rule.is_metric_kept(value, metric_before),
        }

    def _find_significant_loss(self, best: Mapping[str, Any]) -> dict[str, float] | None:
        """Compare the best step with the start on the evaluator, and wait for the result.

        Returns:
            The difference of the metric and its 95 % interval, {diff, low, high}, if the best step is significantly worse;
                otherwise None.
        """
        if self._compare is None or self._start_name is None:
            return None
        folder = self._find_checkpoint(self._stage.first + best["step"])
        if folder is None:
            return None
        intervals = self._compare(self._stage.name, folder.name, self._start_name).get(self._deadline)
        interval = intervals.get(self.rule.metric)
        if interval is None:
            return None
        # The difference is significant if its whole interval is on the worse side of 0.
        is_worse = interval["low"] > 0 if self.rule.lower else interval["high"] < 0
        return dict(interval) if is_worse else None

    def _wait_for_start_value(self) -> float | None:
        """Return the metric of the start, or None if it is not validated; wait for a requested result and record it first."""
        if self._start_future is not None:
            future, self._start_future = self._start_future, None
            self.record.begin(future.get(self._deadline))
            self._replace_undefined_metric()
        return self.get_value(self.record.start) if self.record.start else None

    def get_value(self, entry: Mapping[str, Any]) -> float:
        """Return the value of the rule's metric in a history entry, or NaN if it is null."""
        value = _get_metric(entry, self.rule.metric)
        return float("nan") if value is None else value

    def _replace_undefined_metric(self) -> None:
        """Decide by the nats, or by the last step, if the metric that decides is null in the first results."""
        results = next(filter(None, (*self.record.history[:1], self.record.start)), None)
        if results is None or self.rule.reward or _get_metric(results, self.rule.metric) is not None:
            return
        if _get_metric(results, NATS) is None:
            self.rule = replace(self.rule, last=True, patience=None)
        else:
            self.rule = replace(self.rule, metric=NATS, lower=True)

    def list_kept_steps(self) -> frozenset[int]:
        """Return the global steps whose checkpoints must be kept: the best one, and the points without a result yet."""
        best, validated_steps = self.find_best(), self._list_validated_steps()
        kept_steps = {point for point in self.points if point not in validated_steps}
        return frozenset(
            self._stage.first + step for step in kept_steps | ({best["step"]} if best else set())
        )

    def _collect_results(self, wait_for: int) -> None:
        """Record results in the order of steps until one is missing; wait for those of steps up to `wait_for`."""
        for step in sorted(self._pending):
            if step > wait_for and not self._pending[step].done():
                return
            self.record.add(step, self._pending.pop(step).get(self._deadline))
            self._replace_undefined_metric()

    def _list_validated_steps(self) -> set[int]:
        """Return the steps of the stage that have a result."""
        return {entry["step"] for entry in self.record.history}


def _get_metric(results: Mapping[str, Any], metric: str) -> float | None:
    """Return the value of a metric in the results of a validation; None if it is not defined."""
    return results[NATS] if metric == NATS else results["metrics"][metric]
