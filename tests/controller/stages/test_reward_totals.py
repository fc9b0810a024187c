"""The totals that the controller reports of rewards; without Ray."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from stand_ins import Now

from nonet.controller.scenario.scenario import make_scenario
from nonet.controller.stages._loops import probe_rewards
from nonet.deadlines import DEFAULTS
from nonet.workers.roles.settings import Schedule, StageSetup

BODY = {
    "name": "totals",
    "data": {"interactions": "events.parquet"},
    "stages": {"rl": {"steps": 1, "users": 2, "rewards": {"hit": {}, "own": {}, "off": {}}}},
}


def test_the_total_of_held_out_users_is_weighted():
    stage = StageSetup(
        "rl",
        first=0,
        steps=1,
        users=2,
        lr=Schedule(peak=1.0),
        base=1.0,
        weights={"hit": 1.0, "own": 0.25, "off": 0.0},
        rolls_out=True,
        phases=("update", "publish"),
    )
    scores = {"hit": [[1, 0], [0, 0]], "own": [[4, 0], [8, 8]], "off": [[9, 9], [9, 9]]}
    asked = []
    probe = np.array([3, 5]), np.array([1, 2])
    rollout = SimpleNamespace(
        group=SimpleNamespace(
            draw_held_out_prompts=lambda max_prompts: Now(probe), count_held_out_prompts=lambda: Now(2)
        ),
        generate=lambda prompts: asked.append(prompts) or "beams",
    )
    rewards = SimpleNamespace(
        groups=scores,
        score=lambda beams, step: scores,
        compute_means=lambda each: {name: np.mean(score, 1) for name, score in each.items()},
    )
    session = SimpleNamespace(
        scenario=make_scenario(BODY),
        stages={"rl": stage},
        deadlines=DEFAULTS,
        publish=lambda name: None,
        rollout=rollout,
        get_rewards=lambda name: rewards,
        compute_current_weights=lambda name: stage.weights,
    )
    found = probe_rewards(session, "rl")
    assert found["hit"].tolist() == [0.5, 0.0]
    assert found["own"].tolist() == [2.0, 8.0]
    assert found["total"].tolist() == [0.5 + 0.25 * 2, 0.25 * 8]
    assert found["user"].tolist() == [3, 5]
    assert asked[0].stage == "rl"
