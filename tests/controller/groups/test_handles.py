"""Who is late is named: a reward's time counts from when its beams are there. No Ray."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest

from nonet.controller.groups.handles import PromptRequest, RolloutHandle
from nonet.controller.groups.reward_handles import RewardHandles
from nonet.deadlines import Deadlines
from nonet.errors import DeadlineExceeded
from nonet.rl.rewards.attempts import PromptFailure

DEADLINES = Deadlines(step=50.0)


class Future:
    """A pending answer that notes what is done with it; `late`: it never comes."""

    def __init__(self, name, log, late=False):
        self.name, self._log, self._late, self._limit = name, log, late, None

    def set_deadline(self, timeout_s):
        self._log.append(f"{self.name} has {timeout_s:g} s from now")
        self._limit = timeout_s
        return self

    def request_row_counts(self):
        return []

    def get_row_counts(self):
        return [0]

    def settle(self, timeout_s=None):
        self._log.append(f"wait for {self.name}")
        limit = timeout_s if timeout_s is not None else self._limit
        if self._late:
            raise DeadlineExceeded(f"{self.name}: no answer within {limit:g} s")
        return self


class Group:
    def __init__(self, name, log, late=False):
        self._name, self._log, self._late = name, log, late

    def score(self, beams, strict, call, retries=0):
        self._log.append(f"ask {self._name}")
        return Future(self._name, self._log, self._late)

    def list_failures(self, scores, call):
        return Future(f"troubles of {self._name}", self._log)


def rewards(log, late=False):
    groups = {"hit": Group("hit", log), "price": Group("price", log, late)}
    return RewardHandles(groups, {"hit": 60.0, "price": 1.5}, deadlines=DEADLINES)  # type: ignore[arg-type]


def test_rewards_are_asked_before_the_beams_are_there_and_their_time_counts_from_then():
    log: list[str] = []
    rewards(log).score(Future("rollout.generate", log))  # type: ignore[arg-type]
    assert log == [
        "ask hit",
        "ask price",
        "rollout.generate has 50 s from now",
        "wait for rollout.generate",
        "hit has 65 s from now",  # five above its own, which a rank keeps by itself
        "price has 6.5 s from now",
        "wait for hit",
        "wait for price",
    ]


def test_a_call_that_waits_behind_another_has_the_time_of_both():
    log: list[str] = []
    handles = rewards(log)

    class During(Future):
        """Beams during whose making other beams are scored."""

        def settle(self, timeout_s=None):
            handles.score(Future("others", log), names={"price"})  # type: ignore[arg-type]
            return super().settle(timeout_s)

    handles.score(During("rollout.generate", log))  # type: ignore[arg-type]
    assert "price has 11 s from now" in log  # 1.5 s, three times that of the call before, and five
    assert "price has 6.5 s from now" in log
    handles.score(Future("rollout.generate", log))  # type: ignore[arg-type]
    assert log.count("price has 6.5 s from now") == 2


def test_a_reward_is_removed_when_no_call_computes_it_any_more():
    log: list[str] = []
    handles, begun = rewards(log), Event()

    class Held(Future):
        """Beams that are there as soon as the reward is no longer one of the stage."""

        def settle(self, timeout_s=None):
            begun.set()
            while "price" in handles.groups:
                time.sleep(0.05)
            return super().settle(timeout_s)

    def remove() -> None:
        begun.wait(10)
        handles.remove("price")
        log.append("removed")

    with ThreadPoolExecutor(1) as threads:
        removal = threads.submit(remove)
        scores = handles.score(Held("rollout.generate", log))  # type: ignore[arg-type]
        removal.result(10)
    assert set(scores) == {"hit", "price"}
    assert log.index("wait for price") < log.index("removed")
    assert set(handles.score(Future("rollout.generate", log))) == {"hit"}  # type: ignore[arg-type]


def test_a_slow_rollout_is_named_as_the_rollout():
    with pytest.raises(DeadlineExceeded, match=r"rollout\.generate: no answer within 50 s"):
        rewards([]).score(Future("rollout.generate", [], late=True))  # type: ignore[arg-type]


def test_a_reward_that_is_late_is_named_with_its_own_time():
    with pytest.raises(DeadlineExceeded, match=r"reward 'price' has not answered within 1\.5 s"):
        rewards([], late=True).score(Future("rollout.generate", []), strict=True)  # type: ignore[arg-type]


def test_beams_are_as_wide_as_their_stage_says():
    told = []
    group = SimpleNamespace(generate=lambda users, positions, request: told.append(request.width))
    rollout = RolloutHandle(group, {"rl": {"width": 4}, "again": {"width": 9}})  # type: ignore[arg-type]
    for stage in ("again", "rl"):
        rollout.generate(PromptRequest(stage, 0, 0, np.arange(2), np.arange(2)), 0)
    assert told == [9, 4]


def test_a_reward_that_hangs_for_longer_than_a_step_may_take_is_asked_again():
    """Its prompts would be without a score, although the process that was started in its place can score them."""
    asked = []

    class Scores(Future):
        def __init__(self, seconds=0.0, value=None):
            super().__init__("scores", [])
            self._seconds, self._value = seconds, value

        def get_row_counts(self):
            return [1]

        def settle(self, timeout_s=None):
            time.sleep(self._seconds)
            return self

        def get(self, timeout_s=None):
            return self._value

    class Restarted(Group):
        world = 1

        def score(self, beams, strict, call, retries=0):
            return Scores(seconds=0.2)

        def list_failures(self, scores, call):
            return Scores(value=[[] if asked else [PromptFailure(0, "u1", "1", "it did not answer")]])

        def score_again(self, beams, rows, call, budget_s):
            asked.append(rows.value)
            return Scores()

        def patch_scores(self, scores, rescored, order, count):
            return rescored

        def is_hung(self, retries=0):
            return Scores(value=[False])

    handles = RewardHandles({"hit": Restarted("hit", [])}, {"hit": 60.0}, deadlines=Deadlines(step=0.1))  # type: ignore[arg-type, dict-item]
    results = handles.score(Scores())  # type: ignore[arg-type]
    assert (len(asked), results.quarantined, results.retried) == (1, [], 1)


class _Step:
    """A step between rollout and rewards, or the rollout itself."""

    def __init__(self, name):
        self.name = name

    def apply(self, beams):
        return f"{beams} {self.name}"

    def generate_step(self, *args):
        return "beams"

    def call_rank(self, *args):
        return "beams"


def test_steps_between_rollout_and_rewards_follow_one_another_in_both_ways_of_generating():
    steps = [_Step("first"), _Step("second")]
    handle = RolloutHandle(_Step("rollout"), {"rl": {"width": 4}}, between={"rl": steps})
    prompts = PromptRequest("rl", step=0, size=8)
    assert handle.generate(prompts, 0) == "beams first second"
    assert handle.generate_group(0, prompts, 0, (0, 2)) == "beams first second"
