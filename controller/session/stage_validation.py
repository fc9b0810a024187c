"""StageValidation: one stage's validations, asked of the evaluator as commits become whole.

The evaluator works beside the next steps. At a point the stage stops or goes on by the answers to all points before it,
which are waited for there, never by what happens to have come: the same seed decides the same, however late an answer is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nonet.controller.record import Validations
from nonet.controller.scenario import ValidationRule, validation_rule
from nonet.deadlines import Deadline
from nonet.models import NATS
from nonet.workers.roles import StageSetup
from nonet.workers.runtime import GroupFuture

if TYPE_CHECKING:
    from nonet.controller.session.session import Session


def stage_validation(session: Session) -> StageValidation | None:
    """The validations of the stage under way; None where there are none."""
    stage, rule = session.stage, validation_rule(session.scenario, session.stage.name)
    if (
        rule is None
        or not session.facts["data"]["held_out"]["valid"]
        or not hasattr(session.evaluator, "validate")
    ):
        return None
    return StageValidation(
        stage,
        rule,
        rule.points(stage.steps, stage.epochs),
        Validations(session.run, stage.name),
        lambda name, folder: session.evaluator.validate(name, folder),
        session.commits.at,
        session.deadlines.evaluate,
        session.evaluator.compare_validated if hasattr(session.evaluator, "compare_validated") else None,
    )


@dataclass(frozen=True, slots=True)
class Selection:
    """What ends a stage.

    Attributes:
        best: The best validated step's entry; None without validations.
        start: Whether the checkpoint that the stage began from was selected in its place.
        guard: What the guard on the metric said of the best step: {metric, least, before, value, kept}; None without one.
        loss: {diff, low, high} of the best step less the start, where that made the stage select its start.
    """

    best: dict[str, Any] | None
    start: bool = False
    guard: dict[str, Any] | None = None
    loss: dict[str, float] | None = None


class StageValidation:
    """rule: of the stage; points: its steps that are validated; kept: what is known of them.

    ask         (stage's name, commit's folder) -> the evaluator's answer
    commit_at   global step -> the folder of its commit, None where it is gone
    compare     (stage's name, folder's name, other folder's name) -> the evaluator's comparison; None where it makes none
    """

    def __init__(
        self,
        stage: StageSetup,
        rule: ValidationRule,
        points: tuple[int, ...],
        kept: Validations,
        ask: Callable[[str, str], GroupFuture],
        commit_at: Callable[[int], Path | None],
        deadline: Deadline,
        compare: Callable[[str, str, str], GroupFuture] | None = None,
    ):
        self.rule, self.points, self.kept = rule, points, kept
        self._stage, self._ask, self._commit_at, self._deadline = stage, ask, commit_at, deadline
        self._compare = compare
        self._start_folder: str | None = None
        self.served: dict[int, list[GroupFuture]] = {}  # by step, the lists that rewards were taken of
        self._asked: dict[int, GroupFuture] = {}
        self._start: GroupFuture | None = None
        self._untold = len(kept.history)

    def next_point(self, step: int) -> int:
        """The first point after a step of the stage, or its end."""
        return next((point for point in self.points if point > step), self._stage.steps)

    def ask(self, step: int) -> None:
        """Have the whole commit after `step` steps validated, where that is a point which nobody asked about."""
        if step not in self.points or step in self._asked or step in self._answered():
            return
        folder = self._commit_at(self._stage.first + step)
        if folder is not None:
            self._asked[step] = self._ask(self._stage.name, str(folder))

    def over(self, step: int) -> bool:
        """Whether the stage stops at a step, by all validations before it; waits for those."""
        if step not in self.points:
            return False
        self.settle(step - 1)
        return self.rule.over([self.value(entry) for entry in self.kept.history if entry["step"] < step])

    def settle(self, step: int) -> None:
        """Have the answers to all points up to a step, those too that a run before asked about and had no answer to."""
        for point in self.points:
            if point <= step:
                self.ask(point)
        self._take(step)

    def news(self) -> list[dict[str, Any]]:
        """What has been answered since the last time asked, in the order of steps; never waits."""
        self._take(0)
        told, self._untold = self._untold, len(self.kept.history)
        return self.kept.history[told:]

    def best(self) -> dict[str, Any] | None:
        """The best validation so far, the earlier of equals; the last one where the rule says so."""
        before = self._before() if self.rule.reward else None
        if self.rule.last and self.kept.history:
            return self.kept.history[-1]
        values = [self._judged(entry, before) for entry in self.kept.history]
        known = [index for index, value in enumerate(values) if not math.isnan(value)]
        best = max(known, key=lambda index: (values[index], -index), default=0 if values else None)
        return None if best is None else self.kept.history[best]

    def _judged(self, entry: Mapping[str, Any], before: float | None) -> float:
        """Return what a validation counts, more is better; NaN where the rewards that count were not all measured there."""
        reward = entry.get("reward")
        if self.rule.reward and reward is None and any("reward" in each for each in self.kept.history):
            return math.nan
        return self.rule.judged(self.value(entry), reward, before, entry.get("missing"))

    def begin(self, commit: Path | None) -> None:
        """Have the checkpoint that the stage begins from validated, where that is not known yet: it is a candidate too."""
        self._start_folder = None if commit is None else commit.name
        if not self.rule.last and commit is not None and self.kept.start is None:
            self._start = self._ask(self._stage.name, str(commit))

    def select(self) -> Selection:
        """Choose what ends the stage: its best validated step, or the checkpoint that it began from.

        The start is chosen where the best step loses significantly on validation, by the metric, a paired bootstrap over users;
        in a stage that is judged by its reward a loss that `least` allows is none. There the start is also chosen where it
        has more of the trained reward than every step that passed the guard. `best: {by: last}` chooses the last step whatever
        it is like.
        """
        best, before = self.best(), self._before()
        if best is None or self.rule.last:
            return Selection(best)
        guard = self._guard(best, before)
        failed = guard is not None and not guard["kept"]
        if self._start_folder is None or self.kept.start is None:
            return Selection(best, guard=guard)
        start = {"step": 0, **self.kept.start, **self.kept.rewards.get("0", {})}
        rewards = (start.get("reward"), best.get("reward"))
        judged = self.rule.reward and not failed and None not in rewards
        if judged and self._judged(start, before) > self._judged(best, before):
            return Selection(best, start=True, guard=guard)
        loss = self._loss(best) if not self.rule.reward or failed else None
        return Selection(best, start=loss is not None, guard=guard, loss=loss)

    def _guard(self, best: Mapping[str, Any], before: float | None) -> dict[str, Any] | None:
        """Return what the guard on the metric said of the best step; None where there is no guard."""
        if not self.rule.reward or before is None or math.isnan(before):
            return None
        value = self.value(best)
        return {
            "metric": self.rule.metric,
            "least": self.rule.least,
            "before": before,
            "value": value,
            "kept": self.rule.keeps(value, before),
        }

    def _loss(self, best: Mapping[str, Any]) -> dict[str, float] | None:
        """Return {diff, low, high} of the best step less the start by the metric where that is a significant loss."""
        if self._compare is None or self._start_folder is None:
            return None
        folder = self._commit_at(self._stage.first + best["step"])
        if folder is None:
            return None
        asked = self._compare(self._stage.name, folder.name, self._start_folder).get(self._deadline)
        found = asked.get(self.rule.metric)
        if found is None:
            return None
        lost = found["low"] > 0 if self.rule.lower else found["high"] < 0
        return dict(found) if lost else None

    def _before(self) -> float | None:
        """The metric before the stage; None where it is not needed, or nothing came before."""
        if self._start is not None:
            start, self._start = self._start, None
            self.kept.begin(start.get(self._deadline))
        return self.value(self.kept.start) if self.kept.start else None

    def value(self, entry: Mapping[str, Any]) -> float:
        """What the stage is judged by; NaN where there is none."""
        value = entry[NATS] if self.rule.metric == NATS else entry["metrics"][self.rule.metric]
        return float("nan") if value is None else value

    def spared(self) -> frozenset[int]:
        """Global steps whose commits must stay: the best one's, and those that are not validated yet."""
        best, answered = self.best(), self._answered()
        waiting = {point for point in self.points if point not in answered}
        return frozenset(self._stage.first + step for step in waiting | ({best["step"]} if best else set()))

    def _take(self, wait_for: int) -> None:
        """Keep what is answered, in the order of steps; points up to `wait_for` are waited for."""
        for step in sorted(self._asked):
            if step > wait_for and not self._asked[step].done():
                return
            self.kept.add(step, self._asked.pop(step).get(self._deadline))

    def _answered(self) -> set[int]:
        return {entry["step"] for entry in self.kept.history}
