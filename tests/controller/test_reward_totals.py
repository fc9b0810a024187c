"""What the controller does with rewards: whom it asks, how long it waits, and the totals it reports; without Ray."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from nonet.controller.players import RewardPlayers
from nonet.controller.stages import probe_rewards
from nonet.errors import DeadlineExceeded
from nonet.workers.setup import StageSetup


class Future:
    """A value that is there, or one that is late."""

    def __init__(self, value=None, late=False):
        self.value, self.late = value, late

    def get(self, timeout_s=None):
        return self.value

    def settle(self, timeout_s=None):
        if self.late:
            raise DeadlineExceeded("late")
        return self


class Group:
    """A reward's group that notes what it was asked."""

    def __init__(self, answer):
        self.answer, self.calls = answer, []

    def score(self, beams, **options):
        self.calls.append((beams, options))
        return self.answer


def test_every_reward_is_asked_of_the_same_beams_with_its_own_time_out():
    groups = {"price": Group(Future(1)), "hit": Group(Future(2))}
    entered = []
    players = RewardPlayers(groups, {"price": 1.5, "hit": 60.0}, "rl", lambda *phase: entered.append(phase))
    assert {name: future.value for name, future in players.score("beams").items()} == {"price": 1, "hit": 2}
    assert entered == [("rl", "score")]
    for name, timeout_s in (("price", 1.5), ("hit", 60.0)):
        ((beams, options),) = groups[name].calls
        assert beams == "beams"
        assert options["timeout_s"] == timeout_s
        assert options["retries"] == 1


def test_a_late_reward_is_named():
    players = RewardPlayers({"price": Group(Future(late=True))}, {"price": 1.5})
    with pytest.raises(DeadlineExceeded, match=r"'price' has not answered within 1\.5 s"):
        players.score("beams")


def test_the_total_of_held_out_users_is_weighted():
    stage = StageSetup("rl", 0, 1, 2, {}, 1.0, weights={"hit": 1.0, "own": 0.25, "off": 0.0})
    scores = {"hit": [[1, 0], [0, 0]], "own": [[4, 0], [8, 8]], "off": [[9, 9], [9, 9]]}
    asked = []
    rollout = SimpleNamespace(
        group=SimpleNamespace(probe=lambda: Future((np.array([3, 5]), np.array([1, 2])))),
        generate=lambda prompts: asked.append(prompts) or "beams",
    )
    futures = {name: Future(np.array(score, np.float32)) for name, score in scores.items()}
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
