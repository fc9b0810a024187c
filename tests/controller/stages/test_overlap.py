"""Rollouts, rewards and trainers that work at once: which of them waits for which."""

from __future__ import annotations

from threading import Barrier
from types import SimpleNamespace

import pytest
from stand_ins import Now, Recorder

from nonet.controller.groups.handles import PromptRequest
from nonet.controller.groups.reward_handles import RewardScores
from nonet.controller.stages import _reinforced_loop
from nonet.controller.stages._reinforced_loop import OverlappedSteps
from nonet.deadlines import DEFAULTS
from nonet.workers.roles.settings import Schedule, StageSetup


class Beams(Now):
    """The beams of a group, which are there when somebody has waited for them."""

    settled = False

    def set_deadline(self, timeout_s):
        return self

    def settle(self, timeout_s=None):
        self.settled = True
        return self


class OverlapSession:
    """A session with one rollout, whose rewards answer what `score` returns for a group."""

    def __init__(self, steps, score):
        self.stages = {
            "rl": StageSetup("rl", first=0, steps=steps, users=2, lr=Schedule(peak=1e-3), base=1e-3)
        }
        self.beams, self.learned, self.records = [], [], []
        self.version, self.deadlines = 0, DEFAULTS
        self.rollout = SimpleNamespace(group=SimpleNamespace(world=1))
        self.groups = SimpleNamespace(rollout=SimpleNamespace(generate_group=self._generate))
        self.reward = SimpleNamespace(
            groups={"hit": None}, score=lambda beams, step: self._score(score, beams)
        )
        self.trainer = SimpleNamespace(update=self._update)
        self.checkpoint_log = SimpleNamespace(
            read_groups=lambda name: [], write_record=lambda **record: self.records.append(record)
        )

    def _generate(self, slot, prompts, version, part):
        assert all(beams.settled for beams in self.beams), "the group before is still being answered"
        self.beams.append(Beams(2 * prompts.step + part[0]))
        return self.beams[-1]

    def _score(self, score, beams):
        scores = RewardScores()
        scores["hit"] = score(beams.value)
        return scores

    def _update(self, stage, step, beams, scores):
        self.learned.append(scores["hit"])
        return {}


@pytest.fixture
def run_steps(monkeypatch):
    """Run all steps of a stage of two groups a step, and return its session."""
    monkeypatch.setattr(_reinforced_loop, "concat_futures", list)

    def run(steps, staleness, score):
        session = OverlapSession(steps, score)
        overlap = OverlappedSteps(session, "rl", Recorder(), 0, staleness)
        for step in range(steps):
            overlap.run_step(PromptRequest("rl", step, 2))
        overlap.close()
        return session

    return run


def test_a_rollout_answers_the_next_group_while_its_last_one_is_scored(run_steps):
    both_there = Barrier(
        2, timeout=10
    )  # rewards answer only when both groups are there; one rollout made them

    def score(number):
        both_there.wait()
        return f"answer {number}"

    session = run_steps(1, 0, score)
    assert session.learned == [["answer 0", "answer 1"]]
    committed = [record for record in session.records if record["group"] == "committed"]
    assert [record["numbers"] for record in committed] == [[0, 1]]


def test_a_rollout_has_one_group_at_a_time(run_steps):
    session = run_steps(3, 1, str)
    assert sorted(beams.value for beams in session.beams) == [0, 1, 2, 3, 4, 5]
