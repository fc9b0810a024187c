"""Which prompts are asked, accepted, asked again and trained: the rule alone, under random schedules."""

from __future__ import annotations

import heapq
import random

import pytest

from nonet.controller.stages._prompt_groups import PromptGroups


def run(seed: int) -> PromptGroups:
    """Run a stage under a random schedule: slow, lost, late and repeated answers, updates at any time, a resume."""
    draw = random.Random(seed)
    batch, steps, staleness = draw.randint(1, 6), draw.randint(1, 8), draw.randint(0, 3)
    groups, slots = PromptGroups(batch, steps, staleness), draw.randint(1, 12)
    trained: list[int] = []
    clock, arrivals, learning, tick = 0.0, [], None, 0
    while not groups.is_finished:
        while len(groups.running) < slots and (number := groups.start_group()) is not None:
            assert groups.accepted + len(groups.running) <= (staleness + groups.step + 1) * batch
            copies = 2 if draw.random() < 0.1 else 1
            for _ in range(copies):
                tick += 1
                took = draw.lognormvariate(0, 1.5)
                heapq.heappush(arrivals, (clock + took, tick, number, groups.step))
        if learning is None and (taken := groups.take_batch()):
            for number, version in taken:
                assert 0 <= groups.step - version <= staleness
                trained.append(number)
            learning = clock + draw.lognormvariate(0, 1.0)
        if learning is not None and (not arrivals or learning <= arrivals[0][0]):
            clock, learning = learning, None
            groups.advance_step()
            if draw.random() < 0.05:  # a resume: all but what was trained is forgotten
                groups = PromptGroups(batch, steps, staleness, step=groups.step, trained=trained)
            continue
        clock, _, number, version = heapq.heappop(arrivals)
        if number in groups.running and draw.random() < 0.05:
            groups.cancel_group(number)  # its worker died; the answer still comes, late
            heapq.heappush(arrivals, (clock + draw.random(), tick, number, version))
            continue
        groups.accept_answer(number, version)
    assert sorted(trained) == list(range(batch * steps)), "lost or doubled"
    return groups


def test_in_a_thousand_random_schedules_nothing_is_lost_doubled_or_trained_staler_than_allowed():
    ended = [run(seed) for seed in range(1000)]
    assert sum(groups.aborted for groups in ended) > 100, "schedules with groups that come too late"
    assert sum(groups.dropped for groups in ended) > 100, "and with late and doubled answers"


def test_without_staleness_a_step_is_asked_trained_and_only_then_the_next_is_asked():
    groups = PromptGroups(2, 2, 0)
    assert [groups.start_group(), groups.start_group(), groups.start_group()] == [0, 1, None]
    assert groups.accept_answer(1, 0) == "accepted"
    assert (groups.start_group(), groups.take_batch()) == (None, None)
    assert groups.accept_answer(0, 0) == "accepted"
    assert groups.take_batch() == [(0, 0), (1, 0)]
    assert groups.start_group() is None
    groups.advance_step()
    assert groups.start_group() == 2


def test_a_group_that_was_overtaken_is_asked_again_under_the_newest_version():
    groups = PromptGroups(1, 4, 1)
    assert [groups.start_group(), groups.start_group()] == [0, 1]
    for number in (1, 2):  # group 0 is slow
        assert groups.accept_answer(number, groups.running[number]) == "accepted"
        groups.take_batch()
        groups.advance_step()
        groups.start_group()
    assert groups.accept_answer(0, 0) == "stale"
    assert groups.aborted == 1
    assert groups.accept_answer(3, groups.running[3]) == "accepted"
    assert groups.start_group() == 0
    assert groups.running == {0: 2}


@pytest.mark.parametrize("version", [0, 1])
def test_the_first_fresh_answer_of_a_group_counts_and_the_second_is_dropped(version):
    groups = PromptGroups(2, 2, 1)
    assert groups.start_group() == 0
    groups.cancel_group(0)
    assert groups.start_group() == 0
    assert groups.accept_answer(0, version) == "accepted"
    assert groups.accept_answer(0, 0) == "dropped"
    assert (groups.aborted, groups.dropped) == (1, 1)
