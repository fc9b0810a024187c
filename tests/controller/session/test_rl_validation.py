"""Which step of an RL stage goes on: by its trained reward among steps that keep the metric, and what a resume knows of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from nonet.controller.record.run_folder import RunFolder
from nonet.controller.record.validations import ValidationRecord, describe_selection
from nonet.controller.scenario.options import RewardOptions
from nonet.controller.scenario.scenario import make_scenario
from nonet.controller.scenario.validation import ValidationRule, check_validation, make_validation_rule
from nonet.controller.session.objectives import RewardObjectives
from nonet.controller.session.stage_validation import StageValidation
from nonet.errors import ConfigError

RULE = ValidationRule("ndcg@10", reward=True, least=0.98, apart=10)


class Answer:
    def __init__(self, value):
        self.value = value

    def get(self, deadline):
        return {"metrics": {"ndcg@10": self.value}, "nats": 1.0, "events": 3}

    def done(self):
        return True


def judged(tmp_path, metrics, rewards, *, before=0.1, rule=RULE, missing=None, compare=None):
    """Validate a stage of 40 steps with these metrics and rewards, and record how its start was evaluated."""
    kept = ValidationRecord(RunFolder(tmp_path), "rl")
    answers = {"start": before} | {f"step-{step}": value for step, value in metrics.items()}
    asked = []

    def ask(stage, folder):
        asked.append(folder)
        return Answer(answers[Path(folder).name])

    stage = SimpleNamespace(name="rl", first=100, steps=40)
    validation = StageValidation(
        stage, rule, (10, 20, 30, 40), kept, ask, lambda step: tmp_path / f"step-{step - 100}", None, compare
    )
    validation.begin(tmp_path / "start")
    for step, reward in rewards.items():
        kept.add_rewards(step, reward, (missing or {}).get(step, 0.0))
    validation.wait_until(40)
    return validation, asked


def test_the_highest_reward_among_steps_that_keep_the_metric_goes_on(tmp_path):
    metrics = {10: 0.101, 20: 0.0985, 30: 0.0979, 40: 0.05}
    validation, asked = judged(tmp_path, metrics, {10: 0.2, 20: 0.3, 30: 0.4, 40: 0.9})
    assert validation.find_best()["step"] == 20
    assert [Path(folder).name for folder in asked] == ["start", "step-10", "step-20", "step-30", "step-40"]


def test_a_resumed_stage_first_validates_the_steps_whose_validations_were_lost(tmp_path):
    record = ValidationRecord(RunFolder(tmp_path), "rl")
    record.add(10, Answer(0.1).get(None))
    asked = []

    def validate(stage: str, folder: str) -> Answer:
        asked.append(Path(folder).name)
        return Answer(0.1)

    stage = SimpleNamespace(name="rl", first=100, steps=40)
    validation = StageValidation(
        stage, RULE, (10, 20, 30, 40), record, validate, lambda step: tmp_path / f"step-{step - 100}", None
    )  # resumed from a checkpoint after step 24, when the evaluator had not answered for step 20
    validation.request(30)
    validation.pop_news()
    validation.wait_until(40)
    assert asked == ["step-20", "step-30", "step-40"]
    assert [entry["step"] for entry in record.history] == [10, 20, 30, 40]


def test_where_no_step_keeps_the_metric_the_one_that_ranks_best_goes_on(tmp_path):
    validation, _ = judged(
        tmp_path, {10: 0.08, 20: 0.09, 30: 0.07, 40: 0.06}, {10: 0.2, 20: 0.1, 30: 0.9, 40: 1.0}
    )
    assert validation.find_best()["step"] == 20


def test_a_metric_that_is_better_when_low_may_rise_as_far(tmp_path):
    rule = ValidationRule("ndcg@10", lower=True, reward=True, least=0.98, apart=10)
    metrics = {10: 0.1, 20: 0.102, 30: 0.103, 40: 0.2}
    validation, _ = judged(tmp_path, metrics, {10: 0.2, 20: 0.3, 30: 0.4, 40: 0.9}, rule=rule)
    assert validation.find_best()["step"] == 20


def test_a_step_below_a_floor_goes_on_only_where_none_holds_it(tmp_path):
    metrics, rewards = {10: 0.1, 20: 0.1, 30: 0.1, 40: 0.09}, {10: 0.9, 20: 0.3, 30: 0.4, 40: 0.5}
    held, _ = judged(tmp_path / "a", metrics, rewards, missing={10: 0.1, 30: 0.001})
    assert held.find_best()["step"] == 20, (
        "and a metric that is lost counts more than a reward, less than a floor"
    )
    missed, _ = judged(tmp_path / "b", metrics, rewards, missing={10: 0.1, 20: 0.05, 30: 0.001, 40: 0.02})
    assert missed.find_best()["step"] == 30
    metric_lost, _ = judged(tmp_path / "c", metrics, rewards, missing={10: 0.1, 20: 0.1, 30: 0.1})
    assert metric_lost.find_best()["step"] == 40


def test_the_last_step_goes_on_where_that_is_asked_for(tmp_path):
    rule = make_validation_rule(scenario(best={"by": "last"}), "rl")
    validation, _ = judged(
        tmp_path, {10: 0.1, 20: 0.1, 30: 0.1, 40: 0.01}, {10: 0.9, 20: 0.3, 30: 0.4, 40: 0.1}, rule=rule
    )
    assert validation.find_best()["step"] == 40


def test_a_resume_knows_start_and_rewards_up_to_its_commit_and_asks_no_start_again(tmp_path):
    metrics, rewards = {10: 0.101, 20: 0.1, 30: 0.1, 40: 0.1}, {10: 0.2, 20: 0.3, 30: 0.4, 40: 0.5}
    assert judged(tmp_path, metrics, rewards)[0].find_best()["step"] == 40
    kept = ValidationRecord(RunFolder(tmp_path), "rl")
    kept.cut(20)
    again = ValidationRecord(RunFolder(tmp_path), "rl")
    assert [entry["reward"] for entry in again.history] == [0.2, 0.3]
    assert {step: entry["reward"] for step, entry in again.rewards.items()} == {"10": 0.2, "20": 0.3}
    assert again.start["metrics"] == {"ndcg@10": 0.1}
    kept.cut(0)
    assert (kept.history, kept.rewards, kept.start) == ([], {}, None)


BODY = {
    "name": "validated",
    "data": {
        "interactions": "events.parquet",
        "split": {"use": "leave_last_out", "valid": 1, "rl": 2},
    },
    "sparse": {"tables": {"item": {"dim": 8}}},
    "stages": {"pretrain": {"epochs": 1}, "rl": {"steps": 60, "users": 8, "rewards": {"hit": {}}}},
}


def scenario(**rl):
    stages = {**BODY["stages"], "rl": {**BODY["stages"]["rl"], **rl}}
    return make_scenario({**BODY, "stages": stages})


def test_an_rl_stage_is_validated_up_to_four_times_by_its_reward():
    rule = make_validation_rule(scenario(), "rl")
    assert (rule.metric, rule.reward, rule.least, rule.patience) == ("ndcg@10", True, 0.98, None)
    assert rule.list_validation_steps(60, 1.4) == (15, 30, 45, 60)
    assert rule.list_validation_steps(8, 1.0) == (8,)
    assert make_validation_rule(scenario(best="last"), "rl") is None
    assert not make_validation_rule(scenario(best={"by": "recall@10"}), "rl").reward


def test_a_metric_that_is_not_measured_is_told():
    with pytest.raises(
        ConfigError,
        match=r"stages.rl.best.by: 'ndcg@11' is neither reward nor measured.*Did you mean 'ndcg@1",
    ):
        check_validation(scenario(best={"by": "ndcg@11"}))
    with pytest.raises(ConfigError, match="token_mask does not go with algorithm rloo; sequence_mask does"):
        scenario(algorithm={"use": "rloo"}, mismatch={"correct": "token_mask"})
    with pytest.raises(ConfigError, match=r"scenes.of.home: the stage has no reward 'hut'.*'hit'"):
        scenario(scenes={"column": "surface", "of": {"home": {"rewards": ["hut"]}}})
    with pytest.raises(ConfigError, match="has a floor"):
        scenario(
            rewards={"hit": {"at_least": 0.1}},
            scenes={"column": "surface", "of": {"home": {"weights": {"hit": 0.5}}}},
        )


class Compared:
    """The evaluator's comparison of two checkpoints by a metric."""

    def __init__(self, low, high, metric="ndcg@10"):
        self.found, self.asked = {metric: {"diff": (low + high) / 2, "low": low, "high": high}}, []

    def __call__(self, *names):
        self.asked.append(names)
        return self

    def get(self, deadline):
        return self.found


HURTS = ({10: 0.08, 20: 0.09, 30: 0.07, 40: 0.06}, {10: 0.2, 20: 0.1, 30: 0.9, 40: 1.0})


def test_where_no_step_passes_the_guard_and_the_best_loses_significantly_the_start_is_selected(tmp_path):
    compare = Compared(-0.02, -0.005)
    validation, _ = judged(tmp_path, *HURTS, compare=compare)
    selected = validation.select()
    assert selected.start
    assert selected.best["step"] == 20
    assert selected.guard == {"metric": "ndcg@10", "least": 0.98, "before": 0.1, "value": 0.09, "kept": False}
    assert selected.loss["high"] == -0.005
    assert compare.asked == [("rl", "step-20", "start")]


def test_a_loss_that_is_not_significant_selects_the_step_and_names_guard_and_fallback(tmp_path):
    validation, _ = judged(tmp_path, *HURTS, compare=Compared(-0.02, 0.001))
    selected = validation.select()
    assert not selected.start
    found = {"best": 20, "ran": 40, "steps": 40, "metric": "ndcg@10", "guard": selected.guard}
    text = describe_selection("RL", found | {"history": validation.record.history})
    assert text == (
        "RL: no step passed the guard, 98% of ndcg@10 of validation (0.1000 before the stage); by the fallback, the highest "
        "ndcg@10, step 20 of 40 was best (0.0900; its reward is 0.1000, the highest 1.0000 at step 40); its last 20 steps are "
        "not used"
    )


def test_a_step_selected_by_the_guard_before_one_with_more_reward_names_the_guard(tmp_path):
    metrics, rewards = {10: 0.1, 20: 0.099, 30: 0.09, 40: 0.09}, {10: 0.2, 20: 0.3, 30: 0.4, 40: 0.9}
    validation, _ = judged(tmp_path, metrics, rewards)
    found = {"best": 20, "ran": 40, "steps": 40, "metric": "reward", "guard": validation.select().guard}
    assert describe_selection("RL", found | {"history": validation.record.history}) == (
        "RL was best at step 20 of 40 by reward of validation (0.3000), of the steps that keep 98% of ndcg@10 (0.1000 before the "
        "stage); its last 20 steps are not used"
    )


def test_best_by_last_keeps_the_last_step_whatever_it_loses(tmp_path):
    rule = make_validation_rule(scenario(best={"by": "last"}), "rl")
    validation, _ = judged(tmp_path, *HURTS, rule=rule, compare=Compared(-0.02, -0.005))
    assert validation.select().best["step"] == 40
    assert not validation.select().start


def test_a_loss_that_the_guard_allows_is_none(tmp_path):
    metrics, rewards = {10: 0.0985, 20: 0.099, 30: 0.1, 40: 0.0985}, {10: 0.2, 20: 0.3, 30: 0.4, 40: 0.9}
    compare = Compared(-0.002, -0.001)
    assert not judged(tmp_path, metrics, rewards, compare=compare)[0].select().start
    assert not compare.asked


def test_the_start_is_selected_where_no_step_has_more_of_the_reward(tmp_path):
    metrics, rewards = dict.fromkeys((10, 20, 30, 40), 0.1), {0: 0.5, 10: 0.2, 20: 0.3, 30: 0.4, 40: 0.4}
    selected = judged(tmp_path, metrics, rewards)[0].select()
    assert (selected.start, selected.best["step"]) == (True, 30)
    better = judged(tmp_path / "better", metrics, rewards | {20: 0.6})[0].select()
    assert (better.start, better.best["step"]) == (False, 20)


@pytest.mark.parametrize(("interval", "start"), [((-0.02, -0.001), True), ((-0.02, 0.001), False)])
def test_a_supervised_stage_selects_its_start_where_its_best_step_loses_significantly(
    tmp_path, interval, start
):
    rule = ValidationRule("ndcg@10")
    validation, _ = judged(
        tmp_path, {10: 0.09, 20: 0.08, 30: 0.08, 40: 0.07}, {}, rule=rule, compare=Compared(*interval)
    )
    assert validation.select().start is start


def test_candidates_are_judged_by_the_rewards_and_weights_that_are_in_force_at_the_end(tmp_path):
    validation, _ = judged(tmp_path, dict.fromkeys((10, 20, 30, 40), 0.1), {})
    parts = {10: {"hit": [0.3], "new": [0.1]}, 20: {"hit": [0.2], "new": [0.9]}, 30: {"hit": [0.9]}}
    kept = validation.record
    for step, each in parts.items():
        kept.add_rewards(step, each["hit"][0], 0.0, each)
    objectives = RewardObjectives({"hit": RewardOptions(), "new": RewardOptions(weight=2.0)})
    kept.recompute_rewards(lambda each: (objectives.compute_total(each, 39), 0.0))
    assert [entry.get("reward") for entry in kept.history] == [0.5, 2.0, None, None]
    assert validation.find_best()["step"] == 20  # step 30 was never scored by the reward attached since
    objectives.apply_command({"verb": "set", "name": "stages.rl.rewards.new.weight", "value": 0.0})
    kept.recompute_rewards(lambda each: (objectives.compute_total(each, 39), 0.0))
    assert validation.find_best()["step"] == 30


def test_a_stage_that_ends_with_its_last_step_has_the_metric_before_it_for_a_tradeoff(tmp_path):
    rule = ValidationRule("ndcg@10", last=True)
    validation, asked = judged(tmp_path, {10: 0.1, 20: 0.2, 30: 0.3, 40: 0.05}, {}, rule=rule)
    selected = validation.select()
    assert (selected.start, selected.best["step"]) == (False, 40)
    assert Path(asked[0]).name == "start"
    assert validation.record.start["metrics"] == {"ndcg@10": 0.1}
