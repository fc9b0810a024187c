"""How the injector chooses processes, and measures the recovery of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nonet.controller.record import RunFolder
from nonet.deploy.after.chaos import injector as injector_module
from nonet.deploy.after.chaos.agents import FaultAgents
from nonet.deploy.after.chaos.faults import Fault
from nonet.deploy.after.chaos.injector import FaultInjector, select_process

FAULT = Fault("trainer", "kill", "step", 3, 0.0, 0.0)


class Clock:
    """A clock that a test sets, in place of the module `time`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(injector_module, "time", clock)
    return clock


def make_injector(monkeypatch: pytest.MonkeyPatch, answers: list[tuple[str, str]], lines: list[str]):
    """Return an injector whose faults have given results, and a function that tells it how far the run is."""
    injector = FaultInjector(RunFolder(Path("run")), [FAULT], FaultAgents(), lines.append)
    progress: dict[str, Any] = {"applied": 3, "checkpoint": "", "groups": {}, "losses": 0, "moment": "step"}
    monkeypatch.setattr(injector, "_read_progress", lambda *_: progress)
    monkeypatch.setattr(injector, "_apply", lambda *_: answers.pop(0))

    def follow(applied: int, losses: int) -> bool:
        progress.update(applied=applied, losses=losses)
        return injector._follow(progress)

    return injector, follow


def test_the_recovery_lasts_until_the_run_is_further_than_ever_after_the_last_continuation(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    lines: list[str] = []
    injector, follow = make_injector(monkeypatch, [("trainer-0", "")], lines)
    injector._inject(FAULT)
    clock.now = 1.0
    assert not follow(3, 0)
    clock.now = 2.0
    assert follow(5, 0)  # a step that was on its way
    assert injector.done[0].recovery_s == 2.0
    clock.now = 3.0
    assert not follow(2, 1)  # the run continues from the checkpoint of step 2
    assert not follow(5, 1)
    clock.now = 9.0
    assert follow(6, 1)
    fault = injector.done[0]
    assert (fault.recovery_s, fault.restarts, fault.hit_step) == (9.0, 1, 3)
    injector._report_newest()
    injector._report_newest()
    assert lines == ["kill trainer-0 at step 3, next new step after 9.0 s, 1 restarts"]


def test_a_fault_waits_for_a_process_of_its_role_and_is_reported_if_it_is_not_permitted(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    lines: list[str] = []
    injector, follow = make_injector(monkeypatch, [("", ""), ("trainer-0", ""), ("", "not permitted")], lines)
    injector._inject(FAULT)
    assert injector.done[0].victim == "trainer-0"
    follow(4, 0)
    injector._inject(FAULT)
    injector._report_newest()
    assert injector.done[1].victim == ""
    assert follow(4, 0)
    assert lines == ["kill trainer: not permitted at step 4"]


def test_one_of_the_processes_of_a_role_is_chosen_by_a_number():
    processes = [
        ("run/rollout-0", 1, "node", ("rollout",)),
        ("run/rollout-1", 2, "node", ("rollout",)),
        ("run/trainer-0", 3, "node", ("trainer", "embedding")),
    ]
    assert [select_process(processes, "rollout", draw) for draw in (4, 5)] == processes[:2]
    assert select_process(processes, "embedding", 5) == processes[2]
    assert select_process(processes, "evaluator", 5) is None


def test_a_node_that_is_lost_before_it_is_killed_is_no_victim_and_ends_no_thread(
    monkeypatch: pytest.MonkeyPatch,
):
    class Agents(FaultAgents):
        """Agents of nodes that have been lost."""

        def begin(self, node: str, method: str, *arguments: Any) -> None:
            raise LookupError(node)

    monkeypatch.setattr(
        injector_module, "list_processes", lambda *_: [("run/trainer-0", 1, "n1", ("trainer",))]
    )
    fault = Fault("node", "kill", "step", 3, 0.0, 0.0)
    injector = FaultInjector(
        RunFolder(Path("run")), [fault], Agents(), print, choose_node=lambda nodes: nodes[0]
    )
    assert injector._apply(fault, {"groups": {}}) == ("", "")


def test_an_error_of_the_thread_is_raised_when_the_run_has_ended(monkeypatch: pytest.MonkeyPatch):
    injector = FaultInjector(RunFolder(Path("run")), [FAULT], FaultAgents(), print)

    def fail(*_: object) -> None:
        raise KeyError("groups")

    monkeypatch.setattr(injector, "_read_progress", fail)
    with pytest.raises(KeyError, match="groups"), injector:
        injector._thread.join(60)


@pytest.mark.parametrize(("checkpoints", "n_faults"), [(["1"], 2), (["1", "2"], 3)])
def test_no_more_than_two_faults_hit_a_run_between_two_checkpoints(
    monkeypatch: pytest.MonkeyPatch, checkpoints: list[str], n_faults: int
):
    monkeypatch.setattr(injector_module, "_POLL_S", 0.0)
    injector = FaultInjector(RunFolder(Path("run")), [FAULT] * 3, FaultAgents(), lambda line: None)
    polls = iter([name for name in checkpoints for _ in range(20)])

    def read_progress(*_: object) -> dict[str, Any]:
        if (checkpoint := next(polls, "")) == "":
            injector._ended.set()
        applied = 3 + len(injector.done)
        return {"applied": applied, "checkpoint": checkpoint, "groups": {}, "losses": 0, "moment": "step"}

    monkeypatch.setattr(injector, "_read_progress", read_progress)
    monkeypatch.setattr(injector, "_apply", lambda *_: ("trainer-0", ""))
    injector._inject_all()
    assert len(injector.done) == n_faults
