"""When stages are validated while they train, by which metric, and when supervised ones stop early.

Validation events alone are looked at, never test events. A decision is a pure function of the validations before it, so the same
seed stops at the same step. Patience after Prechelt, "Early stopping - but when?", 1998.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nonet.controller.scenario.scenario import Scenario
from nonet.controller.scenario.stage import Best, Stop
from nonet.errors import ConfigError
from nonet.models import NATS
from nonet.suggest import suggest_sentence

PREFERRED = "ndcg@10"
FEWEST, MOST, LEAST_STEPS = 4, 20, 50
_LEAST_RL_STEPS = 10
_FAR = 1e6  # below every reward
REWARD = "reward"  # what a reinforced stage is judged by, where no metric is named
LAST = "last"  # the last step goes on, and is validated like those before


@dataclass(frozen=True, slots=True)
class ValidationRule:
    """How one stage is validated.

    metric    that says which commit is the best one; `lower`: whether less of it is better
    patience  validations without a better one after which the stage stops; None: all its steps run
    every     steps between validations; None: as `points` says
    reward    whether the trained reward of validation prompts says which is the best, among those that hold the floors of
              rewards and keep `least` of what the metric was before the stage
    last      whether the last one goes on, whatever it is like
    apart     steps between validations at least
    """

    metric: str
    lower: bool = False
    patience: int | None = None
    every: int | None = None
    reward: bool = False
    least: float = 0.0
    last: bool = False
    apart: int = LEAST_STEPS

    def points(self, steps: int, epochs: float) -> tuple[int, ...]:
        """Steps of the stage after which it is validated, ascending; the last is its end. Evenly spread by default: once an
        epoch, at least 4 and at most 20 times, with `apart` steps or more between them."""
        if self.every is not None:
            return (*range(self.every, steps, self.every), steps)
        count = max(1, min(steps // self.apart, max(FEWEST, min(MOST, round(epochs)))))
        return tuple(round(steps * number / count) for number in range(1, count + 1))

    def best(self, values: Sequence[float]) -> int | None:
        """Which of the values is the best one, the earlier of equals; None of none. A value that is NaN is never it."""
        sign = -1.0 if self.lower else 1.0
        known = [index for index, value in enumerate(values) if not math.isnan(value)]
        return max(known, key=lambda index: (sign * values[index], -index), default=0 if values else None)

    def judged(
        self, metric: float, reward: float | None, before: float | None, missing: float | None = None
    ) -> float:
        """What a validation counts, more is better: its reward where the metric kept enough of what it was `before`; one that
        did not counts less than any that did, by its metric; one below a floor less still, by what is `missing` as a share of
        the floor. NaN where it says nothing."""
        sign = -1.0 if self.lower else 1.0
        if not self.reward or reward is None:
            return sign * metric
        if missing:
            return -2 * _FAR - missing
        enough = before is None or math.isnan(before) or self.keeps(metric, before)
        return reward if enough else sign * metric - _FAR

    def keeps(self, metric: float, before: float) -> bool:
        """Return whether a metric keeps `least` of what it was before the stage."""
        return metric * self.least <= before if self.lower else metric >= self.least * before

    def over(self, values: Sequence[float]) -> bool:
        """Whether a stage with these validations so far stops."""
        best = self.best(values)
        return self.patience is not None and best is not None and len(values) - 1 - best >= self.patience


def holds_out_validation(scenario: Scenario) -> bool:
    """Whether the split leaves validation events."""
    return bool(scenario.data.split.options().get("valid"))


def validation_rule(scenario: Scenario, stage: str) -> ValidationRule | None:
    """How a stage is validated; None where it is not."""
    body, best = scenario.stages[stage], getattr(scenario.stages[stage], "best", None)
    if not holds_out_validation(scenario):
        return None
    if isinstance(best, Best):
        reward, last = best.by in (REWARD, LAST), best.by == LAST
        metric = best_metric(scenario) if reward else best.by
        lower = metric == NATS or metric in scenario.model.spec.lower_is_better
        return ValidationRule(
            metric, lower, reward=reward, least=best.least, last=last, apart=_LEAST_RL_STEPS
        )
    if not body.kind.validates:
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
            f"{suggest_sentence(best, metrics)} Add it to evaluate.metrics, or choose one of these"
        )
    for name, body in scenario.stages.items():
        by = getattr(getattr(body, "best", None), "by", REWARD)
        if by not in (REWARD, LAST, *metrics):
            raise ConfigError(
                f"stages.{name}.best.by: {by!r} is neither reward nor measured; evaluate.metrics and {NATS} are: "
                f"{', '.join(metrics)}.{suggest_sentence(by, [REWARD, LAST, *metrics])}"
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
    if isinstance(getattr(body, "best", None), Best):
        by = f"trained reward, with {rule.least:.0%} of {rule.metric} kept" if rule.reward else rule.metric
        by = "the last one" if rule.last else f"best by {by}"
        return f"validated up to {FEWEST} times, at least {rule.apart} steps apart; {by}"
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
