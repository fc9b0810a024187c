"""The curve of `nonet tradeoff`: what is chosen, on which side of the floor, and what cannot be swept."""

from __future__ import annotations

import json

import pytest
from ring_world import Ring
from run_folders import folder_of

from nonet.controller.scenario import load_scenario, make_scenario
from nonet.controller.setup import write_start
from nonet.deploy.after.tradeoff import (
    _build_curve,
    _make_point_scenario,
    draw_curve,
    format_curve,
    run_tradeoff,
)
from nonet.errors import ConfigError


def point(value, reward, metric, *, lower=False):
    return {
        "value": value,
        "rewards": {"novelty": reward},
        "metric": metric,
        "before": 0.1,
        "name": "ndcg@10",
        "lower": lower,
        "test": {"recall@10": 0.2},
        "held_out": {"novelty": [0.1, reward, 0.0, 0.1]},
    }


KEY = "stages.rl.rewards.novelty.weight"


def test_the_most_of_a_reward_that_keeps_the_metric_is_chosen():
    points = [point(0.0, 0.2, 0.101), point(0.2, 0.3, 0.0981), point(0.5, 0.4, 0.0979)]
    curve = _build_curve(points, KEY, "novelty", 0.98)
    assert (curve["chosen"], curve["monotone"]) == (0.2, True)
    assert "0.2" in format_curve(curve).split(" *")[0].splitlines()[-1]
    assert 'class="best"' in draw_curve(curve)


def test_a_metric_that_is_better_when_low_may_rise_as_far():
    points = [point(0.0, 0.2, 0.1, lower=True), point(0.2, 0.3, 0.103, lower=True)]
    curve = _build_curve(points, KEY, "novelty", 0.98)
    assert curve["chosen"] == 0.0
    assert "required: 0.102<" in draw_curve(curve), "the dashed line is above the metric before"


def test_no_point_is_chosen_where_none_keeps_enough_and_a_fall_is_told():
    curve = _build_curve([point(0.0, 0.3, 0.09), point(0.2, 0.2, 0.09)], KEY, "novelty", 0.98)
    assert curve["chosen"] is None
    assert "no point keeps 98% of ndcg@10" in format_curve(curve)
    assert "does not rise" in format_curve(curve)


def test_a_sweep_of_floors_tells_where_they_held_for_held_out_users():
    points = [point(0.3, 0.31, 0.1), point(0.33, 0.324, 0.1), point(0.36, 0.352, 0.1)]
    told = format_curve(_build_curve(points, "stages.rl.rewards.novelty.at_least", "novelty", 0.98))
    assert told.endswith("floors held within 2 % for held-out users: 2 of 3: 0.3, 0.33")


@pytest.mark.parametrize(
    ("sweep", "told"),
    [
        ("stages.rl.rewards.own.weight=0.1", "two numbers or more"),
        ("stages.rl.rewards.own.weight=a,b", "two numbers or more"),
        ("stages.rl.lr=1e-4,1e-3", "only weights and floors can"),
        ("stages.rl.rewards.novel.weight=0,1", "the run has no stages.rl.rewards.novel; it has"),
    ],
)
def test_what_cannot_be_swept_is_told_before_anything_runs(tmp_path, sweep, told):
    run = folder_of(Ring(tmp_path), tmp_path / "run")
    with pytest.raises(ConfigError, match=told):
        run_tradeoff(str(run.path), sweep)


def test_points_are_not_kept_in_a_storage(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = folder_of(Ring(tmp_path), tmp_path / "run")
    sweep, changes = "stages.rl.rewards.own.weight=0,1", ["storage=s3://feed-runs/x"]
    with pytest.raises(ConfigError, match="tradeoff keeps its runs in a folder; add --set storage=null"):
        run_tradeoff(str(run.path), sweep, changes=changes)
    assert not (tmp_path / "runs").exists()


def test_tables_beside_the_scenario_are_found_from_any_folder(tmp_path):
    run = folder_of(Ring(tmp_path), tmp_path / "run")
    write_start(run, tmp_path / "shop", "")
    scenario, _ = load_scenario(run.scenario)
    document = scenario.data.model_copy(update={"interactions": "log.parquet", "items": "builtin:items"})
    scenario = scenario.model_copy(update={"data": document})
    point = _make_point_scenario(run, scenario, "rl", {"from": str(run.path), "stage": "pretrain"}, {}, ())
    data = point.scenario.data
    assert (data.interactions, data.items) == (str(tmp_path / "shop" / "log.parquet"), "builtin:items")


@pytest.mark.parametrize(
    ("tokenizer", "key", "resolved"),
    [
        ({"use": "file", "path": "ids.json"}, "path", "SHOP/ids.json"),
        (
            {"use": "rq_kmeans", "vectors": ["title", "cf.npy", {"brand": 0.5, "text.parquet": 0.2}]},
            "vectors",
            ["title", "SHOP/cf.npy", {"brand": 0.5, "SHOP/text.parquet": 0.2}],
        ),
        (
            {"use": "rq_kmeans", "vectors": [{"use": "hf", "path": "models/bge"}]},
            "vectors",
            [{"use": "hf", "path": "SHOP/models/bge", "columns": ["title"], "pool": "mean", "weight": 1.0}],
        ),
    ],
)
def test_files_of_the_tokenizer_are_found_beside_the_scenario(tmp_path, tokenizer, key, resolved):
    run = folder_of(Ring(tmp_path), tmp_path / "run")
    write_start(run, tmp_path / "shop", "")
    document = load_scenario(run.scenario)[0].model_dump(mode="python", exclude_none=True, by_alias=True)
    scenario = make_scenario({**document, "tokenizer": tokenizer}, "shop")
    point = _make_point_scenario(run, scenario, "rl", {"from": str(run.path), "stage": "pretrain"}, {}, ())
    shop = str(tmp_path / "shop")
    assert point.scenario.tokenizer.get_options()[key] == json.loads(
        json.dumps(resolved).replace("SHOP", shop)
    )
