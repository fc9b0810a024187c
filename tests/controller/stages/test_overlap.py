"""Rollouts, rewards and trainers that work at once: which of them waits for which."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from nonet.controller.stages._overlap import run_overlapped
from nonet.controller.stages._prompt_groups import PromptGroups


def done(value=None) -> Future:
    future = Future()
    future.set_result(value)
    return future


def test_a_rollout_answers_the_next_group_while_its_last_one_is_scored():
    scored: dict[int, Future] = {}

    def give_up():
        scored[0].set_exception(TimeoutError("the rollout waits until its first group is scored"))

    waiting = threading.Timer(10, give_up)
    waiting.start()

    def ask(slot, number, version):
        scored[number] = Future()
        if len(scored) == 2:  # rewards answer only when both groups are there; one rollout made them
            for each, future in scored.items():
                future.set_result(f"answer {each}")
            waiting.cancel()
        return done(), scored[number]

    learned = []

    def train(step, groups, answers):
        learned.append(answers)
        return done({})

    (applied,) = run_overlapped(PromptGroups(2, 1, 0), 1, ask, train)
    assert learned == [["answer 0", "answer 1"]]
    assert applied.groups == [(0, 0), (1, 0)]


def test_a_rollout_has_one_group_at_a_time():
    asked, given = [], []

    def ask(slot, number, version):
        assert all(each.done() for each in given), "the group before is still being answered"
        asked.append(number)
        given.append(Future())
        given[-1].set_result(None)
        return given[-1], done(number)

    list(run_overlapped(PromptGroups(3, 2, 1), 1, ask, lambda step, groups, answers: done({})))
    assert sorted(asked) == [0, 1, 2, 3, 4, 5]
