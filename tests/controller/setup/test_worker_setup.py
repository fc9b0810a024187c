"""From a scenario to what workers are told: how many steps, of how many rows, at which rate, on what."""

from __future__ import annotations

import pytest

from nonet.controller.scenario.scenario import make_scenario
from nonet.controller.setup.worker_setup import get_targets, make_run_setup, make_stage_setups
from nonet.workers.roles import Schedule

BODY = {
    "name": "setups",
    "seed": 11,
    "data": {"interactions": "events.parquet", "history": 7, "split": {"use": "leave_last_out", "rl": 2}},
    "model": {"use": "sid_decoder", "width": 16, "layers": 1, "heads": 2},
    "sparse": {
        "defaults": {"lr": 0.05},
        "tables": {"items": {"dim": 8, "features": ["item"]}, "user": {"dim": 4, "lr": 0.01}},
    },
    "stages": {
        "pretrain": {
            "epochs": 3,
            "batch": {"users": 10},
            "lr": {"peak": 4e-3, "warmup": 0.1, "decay": "linear"},
        },
        "liked": {"epochs": 2, "batch": {"tokens": 100}, "lr": 1e-3, "target": "rating >= 4", "ahead": 2},
        "short": {"tokens": 1500, "batch": {"users": 20}},
        "rl": {
            "steps": 5,
            "users": 8,
            "lr": 1e-5,
            "algorithm": {"use": "grpo", "kl": 0.03, "clip": [0.1, 0.3], "normalise": "gdpo"},
            "rewards": {"hit": {"weight": 2.0}, "rank": {"weight": 0.25}},
        },
    },
}


@pytest.fixture(scope="module")
def stages():
    return make_stage_setups(make_scenario(BODY), users=64, events=1000)


def test_steps_cover_the_epochs_and_stages_follow_each_other(stages):
    assert list(stages) == ["pretrain", "liked", "short", "rl"]
    # 64 users: in tens 7 steps an epoch; 100 of 1,000 events are 6.4 users, so 6 a step and 11 steps; 1,500 events are 1.5 epochs
    assert {name: (stage.users, stage.steps) for name, stage in stages.items()} == {
        "pretrain": (10, 21),
        "liked": (6, 22),
        "short": (20, 6),
        "rl": (8, 5),
    }
    assert [stage.first for stage in stages.values()] == [0, 21, 43, 49]


def test_rates_are_the_stages_own_and_tables_go_by_the_first(stages):
    assert stages["pretrain"].lr == Schedule(peak=4e-3, warmup=0.1, decay="linear")
    assert stages["liked"].lr == Schedule(peak=1e-3)
    assert stages["rl"].lr == Schedule(peak=1e-5)
    assert {stage.base for stage in stages.values()} == {4e-3}


def test_targets_and_ahead_belong_to_their_stage(stages):
    assert {name: stage.target for name, stage in stages.items()} == {
        "pretrain": None,
        "liked": "liked",
        "short": None,
        "rl": None,
    }
    assert [stages[name].ahead for name in ("pretrain", "liked", "rl")] == [3, 2, 1]
    assert get_targets(make_scenario(BODY)) == {"liked": "rating >= 4"}


def test_rl_has_its_algorithm_and_its_weights(stages):
    given = {"use": "grpo", "kl": 0.03, "clip": [0.1, 0.3], "normalise": "gdpo"}
    filled = {"estimator": "k3", "reference": "frozen", "epochs": 1, "minibatches": 1}
    assert stages["rl"].algorithm == given | filled
    assert stages["rl"].weights == {"hit": 2.0, "rank": 0.25}
    assert not stages["pretrain"].weights


def test_a_step_has_no_more_users_than_there_are():
    few = make_stage_setups(make_scenario(BODY), users=5, events=1000)
    assert (few["pretrain"].users, few["pretrain"].steps) == (5, 3)


def test_a_run_knows_its_tables_by_the_feature_they_are_of():
    run = make_run_setup(make_scenario(BODY))
    assert (run.seed, run.history) == (11, 7)
    assert run.features == {"item": "items", "user": "user"}
    assert run.get_feature_dims() == {"item": 8, "user": 4}
    assert {name: spec.lr for name, spec in run.make_table_specs().items()} == {"items": 0.05, "user": 0.01}
    assert run.model["width"] == 16


def test_an_epoch_of_a_click_stage_is_what_its_target_labels():
    body = {
        "name": "clicks",
        "data": {"interactions": "events.parquet", "history": 7, "split": {"use": "leave_last_out"}},
        "model": {"use": "deepfm"},
        "stages": {"train": {"epochs": 2, "batch": {"users": 50}, "lr": 1e-3, "target": "bought"}},
    }
    scenario = make_scenario(body)
    every, known = (
        make_stage_setups(scenario, users=64, events=1000, labelled=labelled)["train"]
        for labelled in (None, {"train": 400})
    )
    assert (every.steps, known.steps) == (40, 16)
    assert known.epochs == every.epochs == 2
