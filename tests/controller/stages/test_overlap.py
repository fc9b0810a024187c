"""Rollouts, rewards and trainers that work at once: which of them waits for which."""

from __future__ import annotations

import time
from threading import Barrier, Event, Thread
from types import SimpleNamespace

import pytest
from stand_ins import LoopSession, Now, Recorder

from nonet.controller.groups.handles import PromptRequest
from nonet.controller.groups.reward_handles import QuarantinedPrompts, RewardScores
from nonet.controller.scenario.scenario import make_scenario
from nonet.controller.stages import _reinforced_loop
from nonet.controller.stages._reinforced_loop import OverlappedSteps, run_reinforced
from nonet.deadlines import Deadlines
from nonet.workers.roles.settings import Schedule, StageSetup

BODY = {
    "name": "overlap",
    "data": {"interactions": "events.parquet", "split": {"use": "leave_last_out", "rl": 2}},
    "sparse": {"tables": {"item": {"dim": 8}}},
    "stages": {
        "pretrain": {"epochs": 1},
        "rl": {
            "steps": 3,
            "users": 2,
            "rollout": {"use": "gumbel", "width": 4, "staleness": 1},
            "rewards": {"hit": {"weight": 1.0}},
        },
    },
}
LIMIT_S = 10  # of waits that end at once, unless a test fails


class Beams(Now):
    """The beams of a group, which are there when somebody has waited for them."""

    settled, deadline = False, None

    def set_deadline(self, timeout_s):
        self.deadline = timeout_s
        return self

    def settle(self, timeout_s=None):
        self.settled = True
        return self


class OverlapSession(LoopSession):
    """A session whose reward `hit` answers what `score` returns for a group; rewards attached later answer with their workers."""

    def __init__(self, steps, score=str, *, world=1, users=2, body=BODY):
        setup = StageSetup("rl", first=0, steps=steps, users=users, lr=Schedule(peak=1e-3), base=1e-3)
        super().__init__(make_scenario(body), {"rl": setup})
        self.beams, self.learned, self.records, self.scored, self.behind = {}, [], [], [], []
        self.version, self.deadlines, self._answer = 0, Deadlines(step=7.0), score
        self.rollout = SimpleNamespace(group=SimpleNamespace(world=world), generate=Beams, absent=0)
        self.groups = SimpleNamespace(rollout=SimpleNamespace(generate_group=self._generate))
        self.reward = SimpleNamespace(groups={"hit": "planned"}, score=self._score)
        self.checkpoint_log = SimpleNamespace(
            read_groups=lambda name: [], write_record=lambda **record: self.records.append(record)
        )
        self.began_update, self.trained = Event(), Event()
        self.trained.set()

    def publish(self, stage=None, *, behind=False):
        self.behind.append(behind)

    def _generate(self, slot, prompts, version, part):
        beams = self.beams.setdefault(slot, [])
        assert all(each.settled for each in beams), "the group before is still being answered"
        beams.append(Beams(part[1] * prompts.step + part[0]))
        return beams[-1]

    def _score(self, beams, names=None, step=None):
        groups = {name: group for name, group in self.reward.groups.items() if names is None or name in names}
        scores = RewardScores(groups)
        for name, group in groups.items():
            is_planned = group == "planned"
            scores[name] = self._answer(beams.value) if is_planned else f"{group}: {beams.value}"
            if not is_planned:
                scores.quarantined.append(QuarantinedPrompts(name, ("u",), ("1",), "why", 2))
        self.scored.append(beams.value)
        return scores

    def _update(self, stage, step, beams, scores):
        self.began_update.set()
        assert self.trained.wait(LIMIT_S)
        self.learned.append(dict(scores))
        return {"loss": 0.5, "prompts": 2.0}


@pytest.fixture(autouse=True)
def _joins_are_lists(monkeypatch):
    monkeypatch.setattr(_reinforced_loop, "concat_futures", list)


@pytest.fixture
def open_steps():
    """Return a function that opens the overlapped steps of a session, which are closed at the end."""
    opened = []

    def open_overlap(session, staleness, recorder=None):
        opened.append(OverlappedSteps(session, "rl", recorder or Recorder(), 0, staleness))
        return opened[-1]

    yield open_overlap
    for overlap in opened:
        overlap.close()


@pytest.fixture
def run_steps(open_steps):
    """Run all steps of a stage, and return its session."""

    def run(steps, staleness, score, **options):
        session = OverlapSession(steps, score, **options)
        overlap = open_steps(session, staleness)
        for step in range(steps):
            overlap.run_step(PromptRequest("rl", step, session.stages["rl"].users))
        return session

    return run


def test_a_rollout_answers_the_next_group_while_its_last_one_is_scored(run_steps):
    both_there = Barrier(
        2, timeout=LIMIT_S
    )  # rewards answer only when both groups are there; one rollout made them

    def score(number):
        both_there.wait()
        return f"answer {number}"

    session = run_steps(1, 0, score)
    assert session.learned == [{"hit": ["answer 0", "answer 1"]}]
    committed = [record for record in session.records if record["group"] == "committed"]
    assert [record["numbers"] for record in committed] == [[0, 1]]


def test_a_rollout_has_one_group_at_a_time(run_steps):
    session = run_steps(3, 1, str)
    assert sorted(beams.value for beams in session.beams[0]) == [0, 1, 2, 3, 4, 5]
    assert {beams.deadline for beams in session.beams[0]} == {7.0}


def test_all_groups_that_staleness_allows_are_scored_at_once(run_steps):
    all_there = Barrier(8, timeout=LIMIT_S)

    def score(number):
        if number < 8:
            all_there.wait()
        return str(number)

    assert len(run_steps(2, 1, score, world=2, users=4).learned) == 2


@pytest.fixture
def one_step_done(open_steps):
    """A session and its steps after the first one, when the groups of the next step are scored."""
    session, recorder = OverlapSession(2), Recorder()
    overlap = open_steps(session, 1, recorder)
    session.trained.clear()

    def score(number):
        assert number < 2 or session.began_update.wait(LIMIT_S)
        return str(number)

    session._answer = score
    stepping = Thread(target=overlap.run_step, args=(PromptRequest("rl", 0, 2),))
    stepping.start()
    deadline_s = time.monotonic() + LIMIT_S
    while len(session.scored) < 4 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    session.trained.set()
    stepping.join()
    return session, overlap, recorder


def test_groups_that_wait_are_scored_by_the_reward_that_has_replaced_another_of_the_name(one_step_done):
    session, overlap, recorder = one_step_done
    session.reward.groups = {"hit": "replaced"}
    overlap.run_step(PromptRequest("rl", 1, 2))
    assert session.learned == [{"hit": ["0", "1"]}, {"hit": ["replaced: 2", "replaced: 3"]}]
    assert len(recorder.events) == 2, "the prompts that it could not score"


def test_groups_that_wait_are_scored_by_rewards_that_were_attached_and_not_by_those_detached(one_step_done):
    session, overlap, _ = one_step_done
    session.reward.groups = {"hit": "planned", "new": "attached"}
    overlap.run_step(PromptRequest("rl", 1, 2))
    assert session.learned[1] == {"hit": ["2", "3"], "new": ["attached: 2", "attached: 3"]}
    assert session.scored[4:] == [2, 3], "each once more"


def test_the_age_of_groups_counts_the_updates_since_the_version_that_made_them(one_step_done):
    _, overlap, _ = one_step_done
    assert overlap.metrics == {"staleness": 0.0, "aborted": 0.0}
    overlap.run_step(PromptRequest("rl", 1, 2))
    assert overlap.metrics == {"staleness": 1.0, "aborted": 0.0}


def test_an_error_ends_a_stage_without_a_wait_for_groups(open_steps):
    answered = Event()

    def score(number):
        assert number < 2 or answered.wait(LIMIT_S)
        return str(number)

    def fail(*_):
        raise RuntimeError("no update")

    session = OverlapSession(2, score)
    session.trainer.update = fail
    overlap = open_steps(session, 1)
    with pytest.raises(RuntimeError, match="no update"):
        overlap.run_step(PromptRequest("rl", 0, 2))
    closing = Thread(target=overlap.close)
    closing.start()
    closing.join(LIMIT_S / 4)
    has_closed = not closing.is_alive()
    answered.set()
    closing.join()
    assert has_closed


@pytest.mark.parametrize("staleness", [0, 1])
def test_versions_are_published_behind_busy_rollouts_and_a_step_lasts_from_one_to_the_next(
    monkeypatch, staleness
):
    rl = BODY["stages"]["rl"]
    rollout = {**rl["rollout"], "staleness": staleness}
    body = {**BODY, "stages": {**BODY["stages"], "rl": {**rl, "rollout": rollout}}}
    session, ticks, elapsed = OverlapSession(3, body=body), iter(range(100)), []
    report_step = _reinforced_loop.report_policy_step

    def report(*arguments, **options):
        elapsed.append(arguments[4])
        return report_step(*arguments, **options)

    monkeypatch.setattr(_reinforced_loop, "report_policy_step", report)
    monkeypatch.setattr(_reinforced_loop, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    assert run_reinforced(session, "rl", Recorder(), lambda: False)
    assert session.behind == [staleness > 0] * 3
    assert elapsed == [1.0] * 3
