"""The status that a controller writes: what the run does, and what it waits for when nothing happens."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import pytest

from nonet.controller.groups import run_status
from nonet.controller.groups.run_status import SessionView, StatusReporter, list_waits
from nonet.controller.record import RunFolder
from nonet.controller.record.tracking.feed import EventFeed
from nonet.workers import WorkerActivity
from nonet.workers.runtime import future as futures
from nonet.workers.runtime.future import GroupFuture, list_pending_waits

WAIT_S = 30.0  # far more than any machine needs


@pytest.fixture
def quick(monkeypatch):
    """Let the reporter look often, and take any pause for a wait."""
    monkeypatch.setattr(run_status, "_EVERY_S", 0.01)
    monkeypatch.setattr(run_status, "_QUIET_PATIENCE_S", 0.05)
    monkeypatch.setattr(run_status, "placement_group_table", dict)


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "mine")
    folder.path.mkdir()
    return folder


def wait_for(run: RunFolder, condition) -> dict:
    """Wait until the status in a run's folder meets a condition, and return the status."""
    deadline = time.monotonic() + WAIT_S
    while not condition(status := run.read_json("status.json") or {}):
        assert time.monotonic() < deadline, status
        time.sleep(0.01)
    return status


def test_a_status_follows_phase_stage_and_step_and_ends_with_the_outcome(run, quick, capfd):
    feed, view = EventFeed(), [SessionView("tokenise", activity=lambda s: "the controller is in tokenise")]
    reporter = StatusReporter(run, feed.list_since, lambda: view[0], detached=False)
    status = wait_for(run, lambda status: status.get("waits"))
    assert (status["state"], status["phase"]) == ("starting", "tokenise")
    assert status["waits"] == ["the controller is in tokenise"]
    hosts = SimpleNamespace(world=2, list_pids=lambda: [3, 4], describe_activities=list)
    view[0] = SessionView("", {"trainer": ("trainer", "rollout")}, {"trainer": hosts})  # pyright: ignore
    feed.add("stage", stage="rl", steps=40, done=2)
    feed.add("step", stage="rl", step=3, metrics={"reward": 0.123456789})
    status = wait_for(run, lambda status: status.get("step") == 3)
    assert (status["state"], status["stage"], status["steps"]) == ("running", "rl", 40)
    assert status["metrics"] == {"reward": 0.123457}
    assert status["groups"] == {"trainer": {"roles": ["trainer", "rollout"], "workers": 2, "pids": [3, 4]}}
    attached = SimpleNamespace(world=1, list_pids=lambda: [5], describe_activities=list)
    hosts_by_group = {"rl.reward.fresh": attached, "trainer": hosts}
    view[0] = SessionView("", {"trainer": ("trainer", "rollout")}, hosts_by_group)  # pyright: ignore
    status = wait_for(run, lambda status: len(status.get("groups", ())) == 2)
    assert list(status["groups"]) == ["trainer", "rl.reward.fresh"], "a reward that was attached comes last"
    assert status["groups"]["rl.reward.fresh"] == {"roles": ["rl.reward.fresh"], "workers": 1, "pids": [5]}
    feed.add("step", stage="rl", step=4, metrics={})
    reporter.finish({"state": "failed", "error": "rollout-1 died:\nlost"})
    status = run.read_json("status.json")
    assert (status["state"], status["error"], status["step"]) == ("failed", "rollout-1 died: lost", 4)
    lines = capfd.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == status, "the log of the process has the same"
    assert all(line.startswith('{"format": ') for line in lines), "by which `nonet logs` leaves them out"


def test_a_status_is_not_written_when_nothing_has_changed(run, quick, monkeypatch, capfd):
    monkeypatch.setattr(run_status, "_QUIET_PATIENCE_S", 1e9)
    looks = []
    reporter = StatusReporter(run, lambda number: looks.append(0) or [], SessionView, detached=True)
    deadline = time.monotonic() + WAIT_S
    while len(looks) < 30 and time.monotonic() < deadline:
        time.sleep(0.01)
    reporter.finish({"state": "done", "error": None})
    assert len(capfd.readouterr().out.splitlines()) == 2, "the first and the last"


def test_waits_name_the_call_its_late_ranks_its_deadline_and_what_the_workers_do(monkeypatch):
    late = threading.Event()
    future = GroupFuture(["first", "second"], SimpleNamespace(actors=[0, 1]), "trainer", "update", "list")  # pyright: ignore
    monkeypatch.setattr(futures.ray, "get", lambda refs, timeout: late.wait(WAIT_S) and refs)
    monkeypatch.setattr(futures.ray, "wait", lambda refs, **_: (["first"], ["second"]))
    thread = threading.Thread(target=future.get, args=(300.0,))
    thread.start()
    deadline = time.monotonic() + WAIT_S
    while not list_pending_waits() and time.monotonic() < deadline:
        time.sleep(0.01)
    monkeypatch.setattr(
        run_status,
        "placement_group_table",
        lambda: {
            "a": {"name": "mine/rollout", "state": "PENDING", "bundles": {0: {"NPU": 1.0}, 1: {"NPU": 1.0}}}
            | {"stats": {"scheduling_state": "INFEASIBLE"}},
            "b": {"name": "other/rollout", "state": "PENDING", "bundles": {}, "stats": {}},
        },
    )
    monkeypatch.setattr(run_status.ray, "available_resources", lambda: {"CPU": 3.0, "node:1": 1.0})
    activities = [
        WorkerActivity("trainer-0", "trainer.update", 9.0, at="a.py:3 f", waits=True),
        WorkerActivity("trainer-1", "trainer.update", 9.0, at="b.py:4 g"),
        WorkerActivity("trainer-2"),
    ]
    view = SessionView("", {}, {"trainer": SimpleNamespace(describe_activities=lambda: activities)})  # pyright: ignore
    waits = list_waits("mine", view, 9.0)
    late.set()
    thread.join()
    assert waits == [
        "trainer.update: rank 1 of 2 has not answered for 0 s; the deadline ends in 300 s",
        "placement group mine/rollout is not placed (INFEASIBLE): 2 x {'NPU': 1.0}; free are {'CPU': 3.0}",
        "trainer-0 is in trainer.update for 9 s at a.py:3 f, where it waits for other ranks",
        "trainer-1 is in trainer.update for 9 s at b.py:4 g",
    ]
    assert not list_pending_waits(), "the wait is over"
