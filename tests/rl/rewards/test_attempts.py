"""A prompt that a reward fails on costs its own row and its time: raising, hanging, NaN, a wrong shape. No Ray."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from nonet.errors import DataError
from nonet.rl.rewards.api import FunctionReward, Reward
from nonet.rl.rewards.attempts import RewardCalls
from nonet.types import Jagged


def attempts(function, timeout_s=5.0):
    return RewardCalls(lambda: FunctionReward(function, {}), "own", timeout_s)


def one(rollouts, row):
    """Select the rollouts of one prompt."""
    cut = {name: getattr(rollouts, name) for name in rollouts.__slots__}
    for name, value in cut.items():
        if isinstance(value, np.ndarray):
            cut[name] = value[row : row + 1]
        if isinstance(value, Jagged):
            cut[name] = Jagged(value[row], np.array([0, len(value[row])]))
    return type(rollouts)(**cut)


def test_nan_of_one_user_leaves_the_others_their_scores(make_rollouts):
    def nan(user_id, item):
        return np.where((user_id == 502)[:, None], np.nan, item * 1.0)

    scores, troubles = attempts(nan).score(make_rollouts(3))
    assert np.isnan(scores[1]).all()
    assert np.array_equal(scores[[0, 2]], [[10, 11], [14, 15]])
    assert [(each.row, each.uid, each.user) for each in troubles] == [(1, "rl/0/1", "502")]
    assert "returned nan for user 502, item 12" in troubles[0].why


def test_one_by_one_finds_who_raises_and_scores_the_rest(make_rollouts):
    def picky(user_id, item):
        if (user_id == 502).any():
            raise ValueError("not this one")
        return item

    rollouts, tried = make_rollouts(3), attempts(picky)
    scores, troubles = tried.score(rollouts)
    assert np.isnan(scores).all()
    assert len(troubles) == 3
    parts, left = tried.score_one_by_one([one(rollouts, row) for row in range(3)])
    assert [each.row for each in left] == [1]
    assert "not this one" in left[0].why
    assert left[0].user == "502"
    assert np.array_equal(np.concatenate(parts)[[0, 2]], [[10, 11], [14, 15]])


def test_a_call_that_hangs_costs_its_time_and_the_reward_is_made_anew(make_rollouts):
    release, made = threading.Event(), []

    class Hangs(Reward):
        def __init__(self):
            made.append(self)

        def score(self, r):
            if len(made) == 1:
                release.wait(30)
            return np.ones(r.valid.shape)

    tried = RewardCalls(Hangs, "slow", 0.2)
    began = time.monotonic()
    scores, troubles = tried.score(make_rollouts(2))
    assert time.monotonic() - began < 20, "it does not wait for the reward"
    assert np.isnan(scores).all()
    assert "has not answered within 0.2" in troubles[0].why
    scores, troubles = tried.score(make_rollouts(2))
    assert not troubles
    assert (scores == 1).all()
    assert len(made) == 2
    release.set()


def test_a_wrong_shape_is_shown_with_what_came_back(make_rollouts):
    def flat(item):
        return item[:, 0]

    _, troubles = attempts(flat).score(make_rollouts(3))
    assert "returned numpy.ndarray of shape [3] int64" in troubles[0].why
    assert "wanted numbers of shape [3, 2]" in troubles[0].why


def test_an_async_function_is_waited_for(make_rollouts):
    import asyncio

    async def later(item):
        await asyncio.sleep(0)
        return item * 2.0

    scores, troubles = attempts(later).score(make_rollouts(1))
    assert not troubles
    assert scores.tolist() == [[20, 22]]


def test_an_error_in_setup_still_raises():
    class Broken(Reward):
        def __init__(self):
            raise DataError("no model")

    with pytest.raises(DataError, match="no model"):
        RewardCalls(Broken, "own", 1.0)


def test_one_bad_prompt_among_64_costs_its_own_row_at_the_latency_of_a_judge(make_rollouts):
    calls = []

    def judge(user_id, item):
        calls.append(len(user_id))
        time.sleep(0.02)
        if (user_id == 508).any():
            raise ValueError("bad user")
        return item

    tried, rollouts = attempts(judge, timeout_s=4.0), make_rollouts(64)
    began = time.monotonic()
    scores, left = tried.score_one_by_one([one(rollouts, row) for row in range(64)])
    assert time.monotonic() - began < 8.0, "twice its timeout_s"
    assert [each.user for each in left] == ["508"]
    assert np.isfinite(np.concatenate(scores)).all(1).sum() == 63
    assert len(calls) <= 2 * 6 + 1, "halves, not one call for each prompt"


def test_a_prompt_that_spins_is_found_and_its_thread_is_interrupted(make_rollouts):
    def spins(user_id, item):
        while (user_id == 502).any():
            pass
        return item

    tried, rollouts = attempts(spins, timeout_s=0.5), make_rollouts(8)
    for _ in range(2):
        assert len(tried.score(rollouts)[1]) == 8
        _, left = tried.score_one_by_one([one(rollouts, row) for row in range(8)])
        assert [each.user for each in left] == ["502"]
    deadline = time.monotonic() + 10
    while tried.hung and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not tried.hung


def test_a_call_that_no_interrupt_reaches_is_said_to_hang(make_rollouts):
    release = threading.Event()

    def waits(item):
        release.wait(30)
        return item

    tried = attempts(waits, timeout_s=0.1)
    tried.score(make_rollouts(2))
    assert tried.hung
    release.set()


def test_a_service_that_comes_back_is_asked_again_with_pauses_and_nothing_is_lost(make_rollouts):
    refused = []

    def judge(item):
        if len(refused) < 3:
            refused.append(time.monotonic())
            raise ConnectionRefusedError("down")
        return item

    tried, rollouts = attempts(judge, timeout_s=5.0), make_rollouts(4)
    scores, left = tried.score_one_by_one([one(rollouts, row) for row in range(4)])
    assert not left
    assert np.isfinite(np.concatenate(scores)).all()
    pauses = np.diff(refused)
    assert (pauses >= [0.1, 0.2]).all()


def test_a_reward_that_fails_on_every_prompt_is_given_up_early(make_rollouts):
    calls = []

    def broken(item):
        calls.append(len(item))
        raise ValueError("never")

    tried, rollouts = attempts(broken, timeout_s=60.0), make_rollouts(64)
    _, left = tried.score_one_by_one([one(rollouts, row) for row in range(64)])
    assert len(left) == 64
    assert all("never" in each.why for each in left)
    assert len(calls) < 24


def test_all_attempts_end_with_their_budget(make_rollouts):
    def slow(user_id, item):
        time.sleep(0.2)
        if (user_id % 2 == 0).any():
            raise ValueError("even")
        return item

    tried, rollouts = attempts(slow, timeout_s=0.4), make_rollouts(16)
    began = time.monotonic()
    tried.score_one_by_one([one(rollouts, row) for row in range(16)])
    assert time.monotonic() - began < 5.0


def test_a_semaphore_made_in_setup_serves_every_call(make_rollouts):
    import asyncio

    class Judge(Reward):
        def setup(self):
            self.gate = asyncio.Semaphore(2)

        async def one(self, row):
            async with self.gate:
                await asyncio.sleep(0.001)
                return row * 2.0

        async def score(self, r):
            return np.stack(await asyncio.gather(*(self.one(row) for row in r.item)))

    tried = RewardCalls(Judge, "judge", 5.0)
    tried.reward.setup()
    for _ in range(3):
        scores, troubles = tried.score(make_rollouts(5))
        assert not troubles
        assert scores[0].tolist() == [20, 22]
