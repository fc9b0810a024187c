"""Workers that join, leave and die, the coordinator among them: every row once, in the order that the seed gives."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from elastic_world import ids_of, parts, run_schedules

from nonet.errors import DeadlineExceeded
from nonet.samples.ledger.coordinator import Coordinator, Worker, serve
from nonet.samples.ledger.leases import Leases
from nonet.samples.ledger.ledger import Ledger


def alone(seed, epochs):
    """The history of one reader that nothing happens to."""
    manifest, order, steps = parts(seed)
    every = [steps.slices(step) for step in range(epochs * steps.an_epoch)]
    return [[id_ for part in slices for id_ in ids_of(manifest, order, part)] for slices in every]


def check(history, seed):
    manifest, _, steps = parts(seed)
    every = np.concatenate([manifest.ids(g, np.arange(n)) for g, n in enumerate(manifest.group_rows)])
    for epoch in range(2):
        of_epoch = history[epoch * steps.an_epoch : (epoch + 1) * steps.an_epoch]
        assert sorted(id_ for step in of_epoch for id_ in step) == sorted(every.tolist())
    assert history == alone(seed, 2)


def test_six_random_schedules_of_kills_leave_every_row_exactly_once(tmp_path):
    answers = run_schedules(tmp_path, list(range(6)))
    for seed, (history, _) in answers.items():
        check(history, seed)
    assert sum(kills["coordinator"] for _, kills in answers.values()) >= 2
    assert sum(kills["worker"] for _, kills in answers.values()) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 300, 20))
def test_two_hundred_random_schedules_of_kills_leave_every_row_exactly_once(tmp_path, first):
    for seed, (history, _) in run_schedules(tmp_path, list(range(first, first + 20))).items():
        check(history, seed)


def leases(seed=3):
    manifest, order, steps = parts(seed)
    return Leases(Ledger(manifest, order.digest, order.rows), steps, 0, 4)


def test_what_a_lost_worker_leased_goes_to_the_next_before_anything_newer():
    given = leases()
    lost, other = given.lease("a"), given.lease("b")
    given.left("a")
    assert given.lease("b") == lost
    assert given.done("b", lost, 1)
    assert given.done("b", other, 2)
    assert given.applied() is None  # three more slices of the step are out


def test_an_answer_that_comes_after_its_slice_went_to_another_does_not_count():
    given = leases()
    part = given.lease("a")
    given.left("a")
    assert given.lease("b") == part
    assert not given.done("a", part, "late")
    assert given.done("b", part, "right")


def test_a_worker_that_holds_a_slice_too_long_is_passed_over():
    manifest, order, steps = parts(3)
    history = []
    coordinator = Coordinator(
        Leases(Ledger(manifest, order.digest, order.rows), steps, 0, 1, ahead=0),
        lambda step, answers: history.append(answers),
        lease_s=0.05,
    )
    slow = coordinator.lease("slow")
    until = time.monotonic() + 20
    while not coordinator.over and time.monotonic() < until:
        part = coordinator.lease("quick")
        if not isinstance(part, str):
            coordinator.done("quick", part, part.part)
    assert history == [[0, 1, 2, 3, 4]]
    assert not coordinator.done("slow", slow, "late")


def test_a_worker_without_a_coordinator_says_whom_it_waited_for(tmp_path):
    with (
        pytest.raises(DeadlineExceeded, match=r"worker w1 waited 0.1 s for the coordinator at .*socket"),
        Worker(str(tmp_path / "socket"), "w1", patience_s=0.1) as worker,
    ):
        next(worker.slices())


def test_workers_hear_that_it_is_over(tmp_path):
    manifest, order, steps = parts(3)
    history = []
    given = Leases(Ledger(manifest, order.digest, order.rows), steps, 0, 3)
    address = str(tmp_path / "socket")
    coordinator = Coordinator(given, lambda step, answers: history.append(answers))
    thread = threading.Thread(target=serve, args=(coordinator, address))
    thread.start()
    with Worker(address, "w") as worker:
        for part in worker.slices():
            worker.done(part, part.part)
    thread.join()
    assert [len(answers) for answers in history] == [5, 5, 5]
