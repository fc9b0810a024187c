"""Rules of validation: when stages are validated while they train, by which metric, and when they stop early.

Only validation events are used, never test events. Every decision depends only on the results of earlier validations, so
runs with the same seed stop at the same step. Patience follows Prechelt, "Early stopping - but when?", 1998.
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

PREFERRED = "ndcg@10"  # the metric that chooses the best checkpoint, if it is measured and no other is named
_MIN_VALIDATIONS, _MAX_VALIDATIONS = 4, 20  # of one stage, unless `evaluate.every` sets their interval
_MIN_STEPS_APART = 50  # between validations, one of which costs as much as many steps
_MIN_RL_STEPS_APART = 10  # the same in an RL stage, whose steps take longer
_SCORE_GAP = 1e6  # larger than any reward or metric, so that scores minus the gap are below all others
# Values of `best.by` of an RL stage besides metrics.
REWARD = "reward"  # the step with the highest trained reward is the best
LAST = "last"  # the last step is the best, whatever its validation


@dataclass(frozen=True, slots=True)
class ValidationRule:
    """The rule by which one stage is validated.

    Attributes:
        metric: The metric that decides which checkpoint is the best.
        lower: Whether lower values of the metric are better.
        patience: Validations without improvement after which the stage stops; None if it never stops early.
        every: Steps between validations; None to spread them evenly (see `list_validation_steps`).
        reward: Whether the trained reward of validation prompts decides, among steps that keep the floors of rewards and
            the share `least` of the metric.
        least: The share of its value before the stage that the metric must keep, from 0 to 1.
        last: Whether the last step is the best, whatever its validation.
        apart: The smallest number of steps between validations.
    """

    metric: str
    lower: bool = False
    patience: int | None = None
    every: int | None = None
    reward: bool = False
    least: float = 0.0
    last: bool = False
    apart: int = _MIN_STEPS_APART

    def list_validation_steps(self, steps: int, epochs: float) -> tuple[int, ...]:
        """Return the numbers of applied steps after which a stage is validated, in ascending order; the last is `steps`.

        By default they are spread evenly: once per epoch, but at least 4 and at most 20 times, and at least `apart` steps
        apart.

        Args:
            steps: The number of steps of the stage.
            epochs: The number of epochs of the stage.
        """
        if self.every is not None:
            return (*range(self.every, steps, self.every), steps)
        wanted_count = max(_MIN_VALIDATIONS, min(_MAX_VALIDATIONS, round(epochs)))
        count = max(1, min(steps // self.apart, wanted_count))
        return tuple(round(steps * number / count) for number in range(1, count + 1))

    def find_best(self, values: Sequence[float]) -> int | None:
        """Return the index of the best value of the metric, the earlier of equal ones; None if there are no values.

        NaN is never the best value. If all values are NaN, the index is 0.

        Args:
            values: The metric of each validation, in the order of steps.
        """
        sign = -1.0 if self.lower else 1.0
        not_nan = [index for index, value in enumerate(values) if not math.isnan(value)]
        return max(not_nan, key=lambda index: (sign * values[index], -index), default=0 if values else None)

    def score_validation(
        self,
        metric: float,
        reward: float | None,
        metric_before: float | None,
        floor_shortfall: float | None = None,
    ) -> float:
        """Return the score of a validation; higher is better.

        By the metric, the score is the metric, negated if lower values are better. By the reward, validations fall into
        three classes, from high to low scores: those that keep the floors and enough of the metric, ordered by the reward;
        those that keep the floors only, ordered by the metric; and those below a floor, ordered by the shortfall.

        Args:
            metric: The value of the metric.
            reward: The trained reward; None if it was not measured.
            metric_before: The value of the metric before the stage; None if unknown.
            floor_shortfall: The largest shortfall to a floor, as a fraction of that floor; None or 0 if all floors are met.

        Returns:
            The score; NaN if the deciding value is NaN.
        """
        sign = -1.0 if self.lower else 1.0
        if not self.reward or reward is None:
            return sign * metric
        if floor_shortfall:
            return -2 * _SCORE_GAP - floor_shortfall
        is_kept = (
            metric_before is None or math.isnan(metric_before) or self.is_metric_kept(metric, metric_before)
        )
        return reward if is_kept else sign * metric - _SCORE_GAP

    def is_metric_kept(self, metric: float, metric_before: float) -> bool:
        """Return whether a metric keeps the share `least` of its value before the stage."""
        return metric * self.least <= metric_before if self.lower else metric >= self.least * metric_before

    def should_stop(self, values: Sequence[float]) -> bool:
        """Return whether a stage stops early: whether its last `patience` validations brought no better value.

        Args:
            values: The metric of each validation so far, in the order of steps.
        """
        best_index = self.find_best(values)
        if self.patience is None or best_index is None:
            return False
        return len(values) - 1 - best_index >= self.patience


def has_validation_events(scenario: Scenario) -> bool:
    """Return whether the split of a scenario holds out validation events."""
    return bool(scenario.data.split.get_options().get("valid"))


def make_validation_rule(scenario: Scenario, stage: str) -> ValidationRule | None:
    """Return the rule by which a stage is validated; None if the stage is not validated.

    Args:
        scenario: The scenario.
        stage: The name of the stage.
    """
    stage_options = scenario.stages[stage]
    best = getattr(stage_options, "best", None)
    if not has_validation_events(scenario):
        return None
    if isinstance(best, Best):
        by_reward, last = best.by in (REWARD, LAST), best.by == LAST
        metric = choose_best_metric(scenario) if by_reward else best.by
        return ValidationRule(
            metric,
            _is_lower_better(scenario, metric),
            reward=by_reward,
            least=best.least,
            last=last,
            apart=_MIN_RL_STEPS_APART,
        )
    if not stage_options.kind.validates:
        return None
    stop = getattr(stage_options, "stop", None)
    metric = (stop.by if isinstance(stop, Stop) else None) or choose_best_metric(scenario)
    patience = None if stop == "off" else (stop or Stop()).patience
    return ValidationRule(
        metric, _is_lower_better(scenario, metric), patience=patience, every=scenario.evaluate.every
    )


def _is_lower_better(scenario: Scenario, metric: str) -> bool:
    """Return whether lower values of a metric are better."""
    return metric == NATS or scenario.model.spec.is_lower_better(metric)


def choose_best_metric(scenario: Scenario) -> str:
    """Return the name of the metric by which the best checkpoint of supervised stages is chosen."""
    metrics = scenario.evaluate.metrics
    best_metric = scenario.checkpoint.keep.best or (PREFERRED if PREFERRED in metrics else metrics[0])
    # The equal entry of `metrics` also has the location of a metric in a user's file (`LocatedName`).
    return next((metric for metric in metrics if metric == best_metric), best_metric)


def check_validation(scenario: Scenario) -> None:
    """Check that metrics by which checkpoints are chosen are measured, and that the split permits validations.

    Raises:
        ConfigError: Such a metric is not measured, or a key needs validation events and the split has none.
    """
    best_metric, metrics = scenario.checkpoint.keep.best, [*scenario.evaluate.metrics, NATS]
    if best_metric is not None and best_metric not in metrics:
        raise ConfigError(
            f"checkpoint.keep.best: {best_metric!r} is not measured; evaluate.metrics and {NATS} are: {', '.join(metrics)}."
            f"{suggest_sentence(best_metric, metrics)} Add it to evaluate.metrics, or choose one of these"
        )
    for name, stage_options in scenario.stages.items():
        by = getattr(getattr(stage_options, "best", None), "by", REWARD)
        if by not in (REWARD, LAST, *metrics):
            raise ConfigError(
                f"stages.{name}.best.by: {by!r} is neither reward nor measured; evaluate.metrics and {NATS} are: "
                f"{', '.join(metrics)}.{suggest_sentence(by, [REWARD, LAST, *metrics])}"
            )
        by = getattr(getattr(stage_options, "stop", None), "by", None)
        if by not in (None, *metrics):
            raise ConfigError(
                f"stages.{name}.stop.by: {by!r} is not measured; evaluate.metrics and {NATS} are: {', '.join(metrics)}."
                f"{suggest_sentence(by, metrics)}"
            )
    validation_keys = ["checkpoint.keep.best"] if best_metric is not None else []
    validation_keys += ["evaluate.every"] if scenario.evaluate.every is not None else []
    validation_keys += [
        f"stages.{name}.stop"
        for name, stage_options in scenario.stages.items()
        if getattr(getattr(stage_options, "stop", None), "model_fields_set", ())
    ]
    if validation_keys and not has_validation_events(scenario):
        split, key = scenario.data.split, validation_keys[0]
        valid = split.get_options().get("valid")
        valid_text = "none" if valid is None else f"valid: {valid:g}"
        example = "1d" if split.use == "time" else "1"
        raise ConfigError(
            f"{key} needs validation events, and data.split holds out {valid_text}: "
            f"set data.split.valid, e.g. valid: {example}, or leave {key} out"
        )
    steps = {name: getattr(stage_options, "steps", None) for name, stage_options in scenario.stages.items()}
    if None not in steps.values():  # else some numbers of steps are known only after the data are read
        check_validation_interval(
            scenario, {name: count for name, count in steps.items() if count is not None}
        )


def check_validation_interval(scenario: Scenario, steps: Mapping[str, int]) -> None:
    """Check that at least one stage is validated before its end, if `evaluate.every` sets the interval.

    Args:
        scenario: The scenario.
        steps: The number of steps of each stage.

    Raises:
        ConfigError: `evaluate.every` is larger than the number of steps of every validated stage.
    """
    every = scenario.evaluate.every
    # The numbers of steps of the stages that are validated while they train, by stage.
    steps_by_stage = {name: count for name, count in steps.items() if scenario.stages[name].kind.validates}
    if every is not None and steps_by_stage and every > max(steps_by_stage.values()):
        longest = max(steps_by_stage, key=lambda name: steps_by_stage[name])
        raise ConfigError(
            f"evaluate.every: {every} is above the {steps_by_stage[longest]} steps of stages.{longest}, the longest that is "
            "validated, so only ends of stages would be validated; give at most that many, or leave it out"
        )


def describe_validation(scenario: Scenario, stage: str) -> str:
    """Describe the validations of a stage in the words of a plan; "" if the stage is not validated.

    Args:
        scenario: The scenario.
        stage: The name of the stage.
    """
    rule = make_validation_rule(scenario, stage)
    if rule is None:
        return ""
    stage_options = scenario.stages[stage]
    epochs, steps = getattr(stage_options, "epochs", None), getattr(stage_options, "steps", None)
    if isinstance(getattr(stage_options, "best", None), Best):
        by = f"trained reward, with {rule.least:.0%} of {rule.metric} kept" if rule.reward else rule.metric
        best_text = "the last one" if rule.last else f"best by {by}"
        return f"validated up to {_MIN_VALIDATIONS} times, at least {rule.apart} steps apart; {best_text}"
    if rule.every:
        when = f"every {rule.every} steps"
        when += f" ({len(rule.list_validation_steps(steps, epochs=0))} times)" if steps else ""
    elif epochs and _MIN_VALIDATIONS <= epochs <= _MAX_VALIDATIONS:
        when = "once an epoch"
    elif epochs:
        when = f"up to {min(_MAX_VALIDATIONS, max(_MIN_VALIDATIONS, epochs))} times"
    else:
        when = f"{_MIN_VALIDATIONS} to {_MAX_VALIDATIONS} times"
    when += "" if rule.every else f", at least {_MIN_STEPS_APART} steps apart"
    stop_text = (
        f"stops after {rule.patience} validations without improvement"
        if rule.patience
        else "never stops early"
    )
    return f"validated {when}; best by {rule.metric}{' (lowest)' if rule.lower else ''}; {stop_text}"
