"""A reward that ends its process or writes into its inputs is an error that names it, in each of its stages."""

from __future__ import annotations

import asyncio
import sys

import numpy as np
import pytest

from nonet.errors import ConfigError
from nonet.rl.rewards import Reward, RewardCalls, open_reward, score_checked, set_up
from nonet.rl.rewards.api import as_reward
from nonet.types import Jagged


class Exits(Reward):
    """Calls `sys.exit` in one stage."""

    def __init__(self, stage: str = "init"):
        self.stage = stage
        self._end("init")

    def _end(self, stage):
        if stage == self.stage:
            sys.exit("no licence")

    def setup(self):
        self._end("setup")

    def open(self, run):
        self._end("open")

    def score(self, r):
        self._end("score")
        return self._score(r)

    async def _score(self, r):
        self._end("async")
        if self.stage == "task":
            await asyncio.gather(asyncio.create_task(self._end_later()))
        return np.zeros(r.valid.shape)

    async def _end_later(self):
        sys.exit("no licence")


@pytest.mark.parametrize("stage", ["init", "setup", "open", "score", "async", "task", "none"])
def test_a_reward_that_calls_exit_is_refused_by_its_name_in_every_stage(stage, make_rollouts):
    def run():
        reward = as_reward(Exits, {"stage": stage}, name="mine")
        set_up(reward, "mine")
        open_reward(reward, "mine", None)
        return score_checked(reward, "mine", make_rollouts())

    if stage == "none":
        assert not run().any()  # also after a task has ended the event loop
        return
    with pytest.raises(ConfigError, match=r"reward 'mine'.* SystemExit: no licence"):
        run()


def _write_column(r):
    r["price"][:] = 0.0


def _write_valid(r):
    r.valid[:] = True


def _sort_history(r):
    r.history[0].sort()


def _scale_items(r):
    items = r.item_id
    items *= 2


@pytest.mark.parametrize("write", [_write_column, _write_valid, _sort_history, _scale_items])
def test_what_a_reward_gets_is_read_only_and_stays_as_it_was(write, make_rollouts):
    class Writes(Reward):
        def score(self, r):
            write(r)
            return np.zeros(r.valid.shape)

    rollouts = make_rollouts(
        columns={"price": np.ones((2, 2))}, history=Jagged(np.array([3, 1, 2]), np.array([0, 3, 3]))
    )
    scores, failures = RewardCalls(Writes, "mine", 5.0).score(rollouts)
    assert np.isnan(scores).all()
    assert "read-only" in failures[0].why
    assert "copy it first" in failures[0].why
    assert rollouts["price"].tolist() == [[1, 1], [1, 1]]
    assert rollouts.history[0].tolist() == [3, 1, 2]
    rollouts["price"][:] = 2.0  # the caller's own arrays stay writable
