import math

import numpy as np
import pytest

from nonet.bench.runs.feed import write_feed
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.report import _compare_stage_rewards, make_report
from nonet.controller.scenario.scenario import load_scenario


@pytest.mark.parametrize("prompts", [0, 2])
def test_rewards_are_told_where_somebody_was_kept_out_of_rl_and_left_out_where_nobody_was(tmp_path, prompts):
    write_feed(tmp_path)
    scenario, _ = load_scenario(tmp_path / "feed.yaml")
    run = RunFolder(tmp_path)
    run.results.mkdir()
    run.write_json("results/tokenise.json", {"data": {}, "tokenizer": {}})
    run.metrics.touch()
    for when, score in (("before", 0.25), ("after", 0.5)):
        scores = np.full(prompts, score)
        np.savez(run.results / f"rl.rewards.{when}.npz", hit=scores, total=scores, user=np.arange(prompts))
    report = make_report(run, scenario, {}, {}, {})
    assert report.get("rewards") == (
        {"hit": [0.25, 0.5, 0.25, 0.25], "total": [0.25, 0.5, 0.25, 0.25]} if prompts else None
    )


def test_prompts_without_a_score_before_a_stage_count_in_no_mean(tmp_path):
    run = RunFolder(tmp_path)
    run.results.mkdir(parents=True, exist_ok=True)
    for when, scores in (("before", [math.nan, 0.0, 0.5]), ("after", [1.0, 0.0, 1.0])):
        np.savez(run.results / f"rl.rewards.{when}.npz", hit=scores, total=scores, user=[3, 3, 4])
    found = _compare_stage_rewards(run, "rl", 0)
    assert found["rewards"]["hit"][:2] == [pytest.approx(0.25), pytest.approx(0.5)]
