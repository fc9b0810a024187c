"""What the controller does with rewards: whom it asks, how long it waits, and the totals it reports; without Ray."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from stand_ins import Group, Now

from nonet.controller.players import RewardPlayers
from nonet.controller.stages import probe_rewards
from nonet.errors import DeadlineExceeded
from nonet.workers.setup import StageSetup


class Late(Now):
    """A future that is late."""

    def settle(self, timeout_s=None):
        raise DeadlineExceeded("late")


def test_every_reward_is_asked_of_the_same_beams_with_its_own_time_out():
    calls, entered = [], []
    groups = {name: Group(calls, name, score=f"scores of {name}") for name in ("price", "hit")}
    players = RewardPlayers(groups, {"price": 1.5, "hit": 60.0}, "rl", lambda *phase: entered.append(phase))
    scores = {name: future.value for name, future in players.score("beams").items()}
    assert scores == {"price": "scores of price", "hit": "scores of hit"}
    assert entered == [("rl", "score")]
    assert {
        name: (arguments, options["timeout_s"], options["retries"]) for name, arguments, options in calls
    } == {
        "price.score": (("beams",), 1.5, 1),
        "hit.score": (("beams",), 60.0, 1),
    }


def test_a_late_reward_is_named():
    players = RewardPlayers({"price": SimpleNamespace(score=lambda *_, **options: Late())}, {"price": 1.5})
    with pytest.raises(DeadlineExceeded, match=r"'price' has not answered within 1\.5 s"):
        players.score("beams")


def test_the_total_of_held_out_users_is_weighted():
    stage = StageSetup("rl", 0, 1, 2, {}, 1.0, weights={"hit": 1.0, "own": 0.25, "off": 0.0})
    scores = {"hit": [[1, 0], [0, 0]], "own": [[4, 0], [8, 8]], "off": [[9, 9], [9, 9]]}
    asked = []
    rollout = SimpleNamespace(
        group=SimpleNamespace(probe=lambda: Now((np.array([3, 5]), np.array([1, 2])))),
        generate=lambda prompts: asked.append(prompts) or "beams",
    )
    futures = {name: Now(np.array(score, np.float32)) for name, score in scores.items()}
    session = SimpleNamespace(
        stages={"rl": stage},
        publish=lambda name: None,
        rollout=rollout,
        rewards_of=lambda name: SimpleNamespace(score=lambda beams: futures),
    )
    found = probe_rewards(session, "rl")
    assert found["hit"].tolist() == [0.5, 0.0]
    assert found["own"].tolist() == [2.0, 8.0]
    assert found["total"].tolist() == [0.5 + 0.25 * 2, 0.25 * 8]
    assert found["user"].tolist() == [3, 5]
    assert asked[0].stage == "rl"
