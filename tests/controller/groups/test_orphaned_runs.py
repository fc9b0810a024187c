"""A run that starts removes what dead runs left, and nothing of a run that starts, resumes or restarts at the same moment."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest
import ray
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group

from nonet.controller.groups import lifetimes
from nonet.controller.groups.lifetimes import list_remains, reap_orphaned_runs, reap_run

WAIT_S = 60.0


@ray.remote(num_cpus=0, max_restarts=-1)
class Process:
    """A controller or a worker."""

    def get_pid(self) -> int:
        return os.getpid()


def start_actor(name: str, **options):
    actor = Process.options(name=name, namespace="nonet", lifetime="detached", **options).remote()  # pyright: ignore
    ray.get(actor.get_pid.remote())
    return actor


def start_run(run: str, *, workers: int = 0) -> None:
    """Start a controller and then what it makes, as a run does."""
    start_actor(f"{run}/controller")
    start_remains(run, workers=workers)


def start_remains(run: str, *, workers: int = 0) -> None:
    """Make a placement group and workers of a run."""
    group = placement_group([{"CPU": 0.1}], name=f"{run}/trainer", lifetime="detached")
    assert group.wait(WAIT_S)
    for rank in range(workers):
        start_actor(f"{run}/trainer-{rank}")


def end_controller(run: str) -> None:
    """End the controller of a run for good."""
    ray.kill(ray.get_actor(f"{run}/controller", "nonet"), no_restart=True)
    deadline = time.monotonic() + WAIT_S
    while f"{run}/controller" in lifetimes._list_actor_names():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def runs(ray_local):
    """Provide unused ids of runs, and remove these runs after the test."""
    ids = [f"{name}-{time.time_ns()}" for name in ("first", "second")]
    yield ids
    for run in ids:
        with suppress(ValueError):
            ray.kill(ray.get_actor(f"{run}/controller", "nonet"), no_restart=True)
        reap_run(run)


def run_beside(monkeypatch, function: str, call, number: int) -> None:
    """Let something happen on the cluster right after the given call of one of the functions that look at it."""
    look, calls = getattr(lifetimes, function), []

    def look_and_call(*args):
        found = look(*args)
        calls.append(function)
        if len(calls) == number:
            call()
        return found

    monkeypatch.setattr(lifetimes, function, look_and_call)


def test_what_a_dead_controller_left_is_removed_and_what_a_living_one_has_is_not(runs):
    dead, living = runs
    start_run(dead, workers=1)
    start_run(living, workers=1)
    end_controller(dead)
    assert dead in reap_orphaned_runs()
    assert list_remains(dead) == ([], [])
    assert list_remains(living) == ([f"{living}/trainer-0"], [f"{living}/trainer"])


@pytest.mark.parametrize(
    ("function", "number"),
    [
        ("_list_actor_names", 1),
        *(pytest.param("_list_actor_names", number, marks=pytest.mark.slow) for number in (2, 3)),
        pytest.param("_list_placement_groups", 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_starts_between_two_looks_at_the_cluster_is_left_alone(
    runs, monkeypatch, function, number
):
    starting, dead = runs
    start_run(dead)  # so that there is something to remove, and every look is taken
    end_controller(dead)
    run_beside(monkeypatch, function, lambda: start_run(starting), number)
    assert reap_orphaned_runs() == [dead]
    assert list_remains(starting) == ([], [f"{starting}/trainer"])


@pytest.mark.slow
def test_a_run_that_is_resumed_after_the_last_look_keeps_its_new_processes(runs, monkeypatch):
    run, _ = runs
    start_run(run)
    end_controller(run)

    def resume() -> None:
        reap_run(run)  # as a controller that is resumed does
        start_run(run)

    looks = []
    list_controlled = lifetimes._list_controlled_runs

    def list_and_resume():
        found = list_controlled()
        looks.append(0)
        if len(looks) == 2:
            resume()
        return found

    monkeypatch.setattr(lifetimes, "_list_controlled_runs", list_and_resume)
    reap_orphaned_runs()
    assert len(looks) == 2
    assert list_remains(run) == ([], [f"{run}/trainer"])


@pytest.mark.slow
def test_a_run_whose_controller_restarts_is_left_alone(runs):
    run, _ = runs
    controller = start_actor(f"{run}/controller", num_cpus=1)
    start_remains(run)
    free = placement_group([{"CPU": 1}] * int(ray.available_resources()["CPU"]))
    assert free.wait(WAIT_S)
    try:
        os.kill(ray.get(controller.get_pid.remote()), signal.SIGKILL)
        deadline = time.monotonic() + WAIT_S
        while not _has_failed(controller):  # it cannot start again: the placement group has all CPUs
            assert time.monotonic() < deadline
        assert run not in reap_orphaned_runs()
        assert list_remains(run) == ([], [f"{run}/trainer"])
    finally:
        remove_placement_group(free)


@pytest.mark.slow
def test_a_loop_of_a_user_without_a_controller_is_left_to_its_own_guards(runs):
    run, _ = runs
    start_remains(run)
    assert run not in reap_orphaned_runs()
    assert list_remains(run) == ([], [f"{run}/trainer"])
    assert get_placement_group(f"{run}/trainer") is not None


def _has_failed(actor) -> bool:
    """Return whether an actor does not answer any more."""
    try:
        ray.get(actor.get_pid.remote(), timeout=0.5)
    except ray.exceptions.RayError:
        return True
    return False
