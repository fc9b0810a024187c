"""When supervised stages are validated while they train, by which metric, and when they stop early.

Validation events alone are looked at, never test events. A decision is a pure function of the validations before it, so the same
seed stops at the same step. Patience after Prechelt, "Early stopping - but when?", 1998.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nonet.controller.scenario.scenario import Scenario
from nonet.controller.scenario.stage import Stop
from nonet.errors import ConfigError
from nonet.models import NATS
from nonet.suggest import did_you_mean

PREFERRED = "ndcg@10"
FEWEST, MOST, LEAST_STEPS = 4, 20, 50


@dataclass(frozen=True, slots=True)
class ValidationRule:
    """How one stage is validated.

    metric    that says which commit is the best one; `lower`: whether less of it is better
    patience  validations without a better one after which the stage stops; None: all its steps run
    every     steps between validations; None: as `points` says
    """

    metric: str
    lower: bool = False
    patience: int | None = None
    every: int | None = None

    def points(self, steps: int, epochs: float) -> tuple[int, ...]:
        """Steps of the stage after which it is validated, ascending; the last is its end. Evenly spread by default: once an
        epoch, at least 4 and at most 20 times, with 50 steps or more between them."""
        if self.every is not None:
            return (*range(self.every, steps, self.every), steps)
        count = max(1, min(steps // LEAST_STEPS, max(FEWEST, min(MOST, round(epochs)))))
        return tuple(round(steps * number / count) for number in range(1, count + 1))

    def best(self, values: Sequence[float]) -> int | None:
        """Which of the values is the best one, the earlier of equals; None of none. A value that is NaN is never it."""
        sign = -1.0 if self.lower else 1.0
        known = [index for index, value in enumerate(values) if not math.isnan(value)]
        return max(known, key=lambda index: (sign * values[index], -index), default=0 if values else None)

    def over(self, values: Sequence[float]) -> bool:
        """Whether a stage with these validations so far stops."""
        best = self.best(values)
        return self.patience is not None and best is not None and len(values) - 1 - best >= self.patience


def holds_out_validation(scenario: Scenario) -> bool:
    """Whether the split leaves validation events."""
    return bool(scenario.data.split.options().get("valid"))


def validation_rule(scenario: Scenario, stage: str) -> ValidationRule | None:
    """How a stage is validated; None where it is not."""
    body = scenario.stages[stage]
    if not body.kind.validates or not holds_out_validation(scenario):
        return None
    metric = best_metric(scenario)
    stop = getattr(body, "stop", None)
    patience = None if stop == "off" else (stop or Stop()).patience
    lower = metric == NATS or metric in scenario.model.spec.lower_is_better
    return ValidationRule(metric, lower, patience, scenario.evaluate.every)


def best_metric(scenario: Scenario) -> str:
    """The metric that the best commit is the best by."""
    metrics = scenario.evaluate.metrics
    return scenario.checkpoint.keep.best or (PREFERRED if PREFERRED in metrics else metrics[0])


def check_validation(scenario: Scenario) -> None:
    """Raises ConfigError for a metric that is not measured, and for keys that ask for validations nobody can make."""
    best, metrics = scenario.checkpoint.keep.best, [*scenario.evaluate.metrics, NATS]
    if best is not None and best not in metrics:
        raise ConfigError(
            f"checkpoint.keep.best: {best!r} is not measured; evaluate.metrics and {NATS} are: {', '.join(metrics)}."
            f"{did_you_mean(best, metrics)} Add it to evaluate.metrics, or choose one of these"
        )
    asked = ["checkpoint.keep.best"] if best is not None else []
    asked += ["evaluate.every"] if scenario.evaluate.every is not None else []
    asked += [
        f"stages.{name}.stop"
        for name, body in scenario.stages.items()
        if isinstance(getattr(body, "stop", None), Stop)
    ]
    if asked and not holds_out_validation(scenario):
        split = scenario.data.split
        given = "none" if split.options().get("valid") is None else f"valid: {split.options()['valid']:g}"
        example = "1d" if split.use == "time" else "1"
        raise ConfigError(
            f"{asked[0]} wants validation events, and data.split holds out {given}: "
            f"set data.split.valid, e.g. valid: {example}, or leave {asked[0]} out"
        )
    steps = {name: getattr(body, "steps", None) for name, body in scenario.stages.items()}
    if None not in steps.values():
        check_every(scenario, {name: count for name, count in steps.items() if count is not None})


def check_every(scenario: Scenario, steps: Mapping[str, int]) -> None:
    """Raises ConfigError where every validated stage is over before its first validation; `steps` of the stages."""
    every = scenario.evaluate.every
    lengths = {name: count for name, count in steps.items() if scenario.stages[name].kind.validates}
    if every is not None and lengths and every > max(lengths.values()):
        longest = max(lengths, key=lambda name: lengths[name])
        raise ConfigError(
            f"evaluate.every: {every} is above the {lengths[longest]} steps of stages.{longest}, the longest that is validated, "
            "so ends alone would be; give at most that many, or leave it out"
        )


def validation_words(scenario: Scenario, stage: str) -> str:
    """A stage's validations in words, as plans print them; "" where there are none."""
    rule = validation_rule(scenario, stage)
    if rule is None:
        return ""
    body = scenario.stages[stage]
    epochs, steps = getattr(body, "epochs", None), getattr(body, "steps", None)
    if rule.every:
        when = f"every {rule.every} steps"
        when += f" ({len(rule.points(steps, 0))} times)" if steps else ""
    elif epochs and FEWEST <= epochs <= MOST:
        when = "once an epoch"
    else:
        count = min(MOST, max(FEWEST, epochs)) if epochs else f"{FEWEST} to {MOST}"
        when = f"{'up to ' if epochs else ''}{count} times"
    when += "" if rule.every else f", at least {LEAST_STEPS} steps apart"
    stops = f"stops after {rule.patience} without a better one" if rule.patience else "never stops early"
    return f"validated {when}; best by {rule.metric}{' (lowest)' if rule.lower else ''}; {stops}"
