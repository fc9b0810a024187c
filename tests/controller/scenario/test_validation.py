"""When stages are validated, which commit is the best, and what is refused in one line."""

from __future__ import annotations

import math

import pytest

from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.scenario.validation import (
    ValidationRule,
    check_validation,
    describe_validation,
    make_validation_rule,
)
from nonet.errors import ConfigError


def rule(*changes, stage="pretrain"):
    return make_validation_rule(load_scenario("quickstart", list(changes))[0], stage)


def wrong(*changes) -> str:
    with pytest.raises(ConfigError) as caught:
        check_validation(load_scenario("quickstart", list(changes))[0])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_supervised_stages_are_validated_by_their_metric_and_rl_by_its_reward_while_that_metric_holds():
    assert rule(stage="finetune") == ValidationRule("ndcg@10", patience=3)
    assert rule() == ValidationRule("nats", lower=True, patience=3)
    assert rule("stages.pretrain.stop.by=recall@10") == ValidationRule("recall@10", patience=3)
    assert rule(stage="rl") == ValidationRule("ndcg@10", patience=None, reward=True, least=0.98, apart=10)
    assert rule("stages.pretrain.stop=off").patience is None
    assert rule("stages.pretrain.stop.patience=7").patience == 7
    assert rule("stages.pretrain={steps: 100, stop: off}") is not None, (
        "stop is a key of supervised stages alone"
    )


def test_without_validation_events_nothing_is_validated():
    assert rule("data.split.valid=0") is None
    assert rule("data.split={use: time, test: 2015-01-01T00:00:00Z}") is None
    assert rule("data.split={use: time, test: 2015-01-01T00:00:00Z, valid: 7d}") is not None


@pytest.mark.parametrize(
    ("changes", "metric", "lower"),
    [
        (["evaluate.metrics=[recall@5, ndcg@10]"], "ndcg@10", False),
        (["evaluate.metrics=[recall@5, mrr@10]"], "recall@5", False),
        (["checkpoint.keep.best=recall@10"], "recall@10", False),
        (["checkpoint.keep.best=nats"], "nats", True),
    ],
)
def test_the_best_commit_is_the_best_by_one_metric(changes, metric, lower):
    found = rule(*changes, stage="finetune")
    assert (found.metric, found.lower) == (metric, lower)


def test_less_log_loss_is_better_and_more_auc():
    ctr = {best: load_scenario("ctr", [f"checkpoint.keep.best={best}"])[0] for best in ("auc", "log_loss")}
    assert [make_validation_rule(ctr[best], "train").lower for best in ("auc", "log_loss")] == [False, True]


def test_points_are_once_an_epoch_but_neither_few_nor_many_nor_close():
    points = ValidationRule("ndcg@10").list_validation_steps
    assert points(840, 10) == tuple(range(84, 841, 84))
    assert points(1000, 1) == (250, 500, 750, 1000)
    assert len(points(100_000, 60)) == 20
    assert points(168, 2) == (56, 112, 168), "no two within 50 steps"
    assert points(18, 3) == (18,)
    assert points(1, 1) == (1,)


def test_points_of_ones_own_are_every_so_many_steps_and_the_end():
    points = ValidationRule("ndcg@10", every=100).list_validation_steps
    assert points(250, 1) == (100, 200, 250)
    assert points(200, 9) == (100, 200)


def test_the_best_is_the_earlier_of_equals_and_never_what_is_no_number():
    assert ValidationRule("ndcg@10").find_best([0.1, 0.3, 0.3]) == 1
    assert ValidationRule("nats", lower=True).find_best([3.0, 2.0, 2.0, 5.0]) == 1
    assert ValidationRule("ndcg@10").find_best([math.nan, 0.1]) == 1
    assert ValidationRule("ndcg@10").find_best([math.nan]) == 0
    assert ValidationRule("ndcg@10").find_best([]) is None


def test_a_stage_is_over_after_as_many_validations_without_a_better_one_as_its_patience():
    patient = ValidationRule("ndcg@10", patience=2)
    assert [patient.should_stop([0.1, 0.3, 0.2, 0.3][:count]) for count in range(5)] == [
        False,
        False,
        False,
        False,
        True,
    ]
    assert not ValidationRule("ndcg@10").should_stop([0.3, 0.2, 0.1, 0.0])


def test_metrics_that_are_not_measured_are_refused_with_what_is():
    assert wrong("checkpoint.keep.best=ndgc@10") == (
        "checkpoint.keep.best: 'ndgc@10' is not measured; evaluate.metrics and nats are: recall@5, recall@10, ndcg@5, ndcg@10, "
        "nats. Did you mean 'ndcg@10'? Add it to evaluate.metrics, or choose one of these"
    )
    assert wrong("stages.pretrain.stop.by=ndgc@10").startswith(
        "stages.pretrain.stop.by: 'ndgc@10' is not measured;"
    )


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("checkpoint.keep.best=ndcg@10", "checkpoint.keep.best"),
        ("stages.pretrain.stop.patience=2", "stages.pretrain.stop"),
        ("stages.pretrain.stop={by: ndcg@10}", "stages.pretrain.stop"),
        ("evaluate.every=20", "evaluate.every"),
    ],
)
def test_keys_that_need_validation_events_say_so_where_there_are_none(change, key):
    assert wrong("data.split.valid=0", change) == (
        f"{key} needs validation events, and data.split holds out valid: 0: set data.split.valid, e.g. valid: 1, or leave "
        f"{key} out"
    )
    check_validation(load_scenario("quickstart", ["data.split.valid=0", "stages.pretrain.stop=off"])[0])


def test_a_patience_of_nothing_and_points_beyond_a_stage_are_refused():
    with pytest.raises(
        ConfigError, match=r"stages\.pretrain\.stop\.patience: input should be greater than 0, got 0"
    ):
        load_scenario("quickstart", ["stages.pretrain.stop.patience=0"])
    with pytest.raises(ConfigError, match=r"stages\.pretrain\.stop.*: unknown key .did you mean 'patience'"):
        load_scenario("quickstart", ["stages.pretrain.stop={patence: 3}"])
    short = "stages={pretrain: {steps: 50, ahead: 1}, finetune: {steps: 40, ahead: 1}}"
    assert wrong(short, "evaluate.every=51") == (
        "evaluate.every: 51 is above the 50 steps of stages.pretrain, the longest that is validated, so only ends of stages "
        "would be validated; give at most that many, or leave it out"
    )
    check_validation(load_scenario("quickstart", [short, "evaluate.every=45"])[0])


def test_a_plan_says_in_words_when_a_stage_is_validated_and_stops():
    def words(*changes, stage="pretrain"):
        return describe_validation(load_scenario("quickstart", list(changes))[0], stage)

    assert words() == (
        "validated once an epoch, at least 50 steps apart; best by nats (lowest); stops after 3 validations without improvement"
    )
    assert words(
        "evaluate.every=20", "stages.pretrain={steps: 50, stop: off}", "checkpoint.keep.best=nats"
    ) == ("validated every 20 steps (3 times); best by nats (lowest); never stops early")
    assert words("data.split.valid=0") == ""
