"""Rules of validation: when stages are validated while they train, by which metric, and when they stop early.

Only validation events are used, never test events. A decision is a pure function of the validations before it, so runs with
the same seed stop at the same step. Patience follows Prechelt, "Early stopping - but when?", 1998.
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
_FAR = 1e6  # larger than any reward, to rank validations below all rewards
REWARD = "reward"  # a reinforced stage is judged by its reward unless a metric is named
LAST = "last"  # the last step is kept; it is validated like those before


@dataclass(frozen=True, slots=True)
class ValidationRule:
    """The rule by which one stage is validated.

    Attributes:
        metric: The metric that decides which checkpoint is the best.
        lower: Whether lower values of the metric are better.
        patience: Validations without improvement after which the stage stops; None if it never stops early.
        every: Steps between validations; None to spread them evenly (see `list_validation_steps`).
        reward: Whether the trained reward of validation prompts decides, among steps that keep the floors of rewards and
            `least`.
        least: The share of the metric before the stage that must be kept.
        last: Whether the last step is kept, whatever its validation.
        apart: The smallest number of steps between validations.
    """

    metric: str
    lower: bool = False
    patience: int | None = None
    every: int | None = None
    reward: bool = False
    least: float = 0.0
    last: bool = False
    apart: int = LEAST_STEPS

    def list_validation_steps(self, steps: int, epochs: float) -> tuple[int, ...]:
        """Return the steps after which a stage is validated, in ascending order; the last is its end.

        By default they are spread evenly: once per epoch, but at least 4 and at most 20 times, and at least `apart` steps
        apart.

        Args:
            steps: The number of steps of the stage.
            epochs: The number of epochs of the stage.
        """
        if self.every is not None:
            return (*range(self.every, steps, self.every), steps)
        count = max(1, min(steps // self.apart, max(FEWEST, min(MOST, round(epochs)))))
        return tuple(round(steps * number / count) for number in range(1, count + 1))

    def find_best(self, values: Sequence[float]) -> int | None:
        """Return the index of the best value, the earlier of equal ones; None if there are no values.

        NaN is never the best value, except that 0 is returned if all values are NaN.
        """
        sign = -1.0 if self.lower else 1.0
        known = [index for index, value in enumerate(values) if not math.isnan(value)]
        return max(known, key=lambda index: (sign * values[index], -index), default=0 if values else None)

    def score_validation(
        self,
        metric: float,
        reward: float | None,
        metric_before: float | None,
        floor_shortfall: float | None = None,
    ) -> float:
        """Return the score of a validation; higher is better.

        The score is the reward if the metric kept enough of its value before the stage. Validations that did not keep it
        score lower than all that did, ordered by the metric; those below a floor of a reward score lower still, ordered by
        the shortfall.

        Args:
            metric: The value of the metric.
            reward: The trained reward; None if it was not measured.
            metric_before: The value of the metric before the stage; None if unknown.
            floor_shortfall: The shortfall below a floor, as a share of the floor; None or 0 if all floors are kept.

        Returns:
            The score; NaN if the deciding value is NaN.
        """
        sign = -1.0 if self.lower else 1.0
        if not self.reward or reward is None:
            return sign * metric
        if floor_shortfall:
            return -2 * _FAR - floor_shortfall
        enough = (
            metric_before is None or math.isnan(metric_before) or self.is_metric_kept(metric, metric_before)
        )
        return reward if enough else sign * metric - _FAR

    def is_metric_kept(self, metric: float, metric_before: float) -> bool:
        """Return whether a metric keeps the share `least` of its value before the stage."""
        return metric * self.least <= metric_before if self.lower else metric >= self.least * metric_before

    def should_stop(self, values: Sequence[float]) -> bool:
        """Return whether a stage with these validations so far stops."""
        best = self.find_best(values)
        return self.patience is not None and best is not None and len(values) - 1 - best >= self.patience


def has_validation_events(scenario: Scenario) -> bool:
    """Return whether the split holds out validation events."""
    return bool(scenario.data.split.get_options().get("valid"))


def make_validation_rule(scenario: Scenario, stage: str) -> ValidationRule | None:
    """Return the rule by which a stage is validated; None if it is not validated.

    Args:
        scenario: The scenario.
        stage: The name of the stage.
    """
    body, best = scenario.stages[stage], getattr(scenario.stages[stage], "best", None)
    if not has_validation_events(scenario):
        return None
    if isinstance(best, Best):
        reward, last = best.by in (REWARD, LAST), best.by == LAST
        metric = choose_best_metric(scenario) if reward else best.by
        lower = metric == NATS or metric in scenario.model.spec.lower_is_better
        return ValidationRule(
            metric, lower, reward=reward, least=best.least, last=last, apart=_LEAST_RL_STEPS
        )
    if not body.kind.validates:
        return None
    metric = choose_best_metric(scenario)
    stop = getattr(body, "stop", None)
    patience = None if stop == "off" else (stop or Stop()).patience
    lower = metric == NATS or metric in scenario.model.spec.lower_is_better
    return ValidationRule(metric, lower, patience, scenario.evaluate.every)


def choose_best_metric(scenario: Scenario) -> str:
    """Return the metric by which the best checkpoint is chosen."""
    metrics = scenario.evaluate.metrics
    best = scenario.checkpoint.keep.best or (PREFERRED if PREFERRED in metrics else metrics[0])
    return next((metric for metric in metrics if metric == best), best)


def check_validation(scenario: Scenario) -> None:
    """Check that metrics are measured, and that validations that are asked for are possible.

    Raises:
        ConfigError: They are not.
    """
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
    if asked and not has_validation_events(scenario):
        split = scenario.data.split
        given = (
            "none" if split.get_options().get("valid") is None else f"valid: {split.get_options()['valid']:g}"
        )
        example = "1d" if split.use == "time" else "1"
        raise ConfigError(
            f"{asked[0]} needs validation events, and data.split holds out {given}: "
            f"set data.split.valid, e.g. valid: {example}, or leave {asked[0]} out"
        )
    steps = {name: getattr(body, "steps", None) for name, body in scenario.stages.items()}
    if None not in steps.values():
        check_validation_interval(
            scenario, {name: count for name, count in steps.items() if count is not None}
        )


def check_validation_interval(scenario: Scenario, steps: Mapping[str, int]) -> None:
    """Check that a validated stage has at least one validation before its end.

    Args:
        scenario: The scenario.
        steps: The number of steps of each stage.

    Raises:
        ConfigError: `evaluate.every` is larger than every validated stage.
    """
    every = scenario.evaluate.every
    lengths = {name: count for name, count in steps.items() if scenario.stages[name].kind.validates}
    if every is not None and lengths and every > max(lengths.values()):
        longest = max(lengths, key=lambda name: lengths[name])
        raise ConfigError(
            f"evaluate.every: {every} is above the {lengths[longest]} steps of stages.{longest}, the longest that is validated, "
            "so only ends of stages would be validated; give at most that many, or leave it out"
        )


def describe_validation(scenario: Scenario, stage: str) -> str:
    """Describe the validations of a stage, as plans print them; "" if there are none.

    Args:
        scenario: The scenario.
        stage: The name of the stage.
    """
    rule = make_validation_rule(scenario, stage)
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
        when += f" ({len(rule.list_validation_steps(steps, 0))} times)" if steps else ""
    elif epochs and FEWEST <= epochs <= MOST:
        when = "once an epoch"
    else:
        count = min(MOST, max(FEWEST, epochs)) if epochs else f"{FEWEST} to {MOST}"
        when = f"{'up to ' if epochs else ''}{count} times"
    when += "" if rule.every else f", at least {LEAST_STEPS} steps apart"
    stops = (
        f"stops after {rule.patience} validations without improvement"
        if rule.patience
        else "never stops early"
    )
    return f"validated {when}; best by {rule.metric}{' (lowest)' if rule.lower else ''}; {stops}"
