"""StageValidation: one stage's validations, asked of the evaluator as commits become whole.

The evaluator works beside the next steps. At a point the stage stops or goes on by the answers to all points before it,
which are waited for there, never by what happens to have come: the same seed decides the same, however late an answer is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
    )


class StageValidation:
    """rule: of the stage; points: its steps that are validated; kept: what is known of them.

    ask         (stage's name, commit's folder) -> the evaluator's answer
    commit_at   global step -> the folder of its commit, None where it is gone
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
    ):
        self.rule, self.points, self.kept = rule, points, kept
        self._stage, self._ask, self._commit_at, self._deadline = stage, ask, commit_at, deadline
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
        before = self._before()
        if self.rule.last and self.kept.history:
            return self.kept.history[-1]
        values = [
            self.rule.judged(self.value(entry), entry.get("reward"), before, entry.get("missing"))
            for entry in self.kept.history
        ]
        known = [index for index, value in enumerate(values) if not math.isnan(value)]
        best = max(known, key=lambda index: (values[index], -index), default=0 if values else None)
        return None if best is None else self.kept.history[best]

    def begin(self, commit: Path | None) -> None:
        """Have the commit before a stage that is judged by its reward validated, where that is not known yet."""
        if self.rule.reward and commit is not None and self.kept.start is None:
            self._start = self._ask(self._stage.name, str(commit))

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
