"""What a run's groups are told by plan and scenario: chunks, deadlines, and who watches them. No Ray: hosts are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from views import RL, gpu_nodes, scenario

from nonet.controller.groups import run_groups as crews
from nonet.controller.plan.planner import plan
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.session.session import Session
from nonet.workers.runtime.worker import DistributeWorker

GB = 10**9
ASKED = scenario(
    stages={"pretrain": {"epochs": 1}, "rl": {**RL, "users": 4096, "rollout": {"use": "beam", "width": 64}}},
    roles={"trainer": {"pool": "gpu"}},
    deadlines={"step": "7s", "open": "9s"},
)


class Binding:
    """Groups of a plan that nobody started."""

    def __init__(self, plan, specs, life, envs, *, stage, deadlines):
        self.groups, self.deadlines = plan.groups_at(stage), deadlines
        role = SimpleNamespace(cls=DistributeWorker)
        self.hosts = {
            group.name: SimpleNamespace(
                name=group.name, world=group.workers, specs=dict.fromkeys(group.roles, role)
            )
            for group in self.groups
        }


@pytest.fixture
def crew(monkeypatch, tmp_path):
    monkeypatch.setattr(crews, "Binding", Binding)
    monkeypatch.setattr(crews.Crew, "_check_shared", lambda *_: None)  # asks Ray, which would start
    made = plan(ASKED, gpu_nodes(1, memory_bytes=2 * GB))
    crew = crews.Crew(ASKED, RunFolder(tmp_path), made, 0.0, None, "pretrain")  # type: ignore[arg-type]
    crew._ttl_steps = {}
    crew._open({}, ())
    return crew


def test_rollouts_compute_the_chunk_that_the_plan_names(crew, monkeypatch):
    chunk = crew.plan.chunk("rl", "rollout")
    assert 1 <= chunk < 4096
    told = []
    crew.rollout.group.__dict__["generate"] = lambda *args, **kwargs: told.append(kwargs["chunk"])
    monkeypatch.setattr(crew.rollout, "here", lambda stage: None)
    crew.rollout.generate(SimpleNamespace(stage="rl", step=0, users=[], positions=[]))
    assert told == [chunk]


def test_every_wait_of_a_run_has_the_scenarios_deadlines(crew):
    players = (crew.trainer, crew.rollout, *crew.rewards.values())
    assert {(player.deadlines.step, player.deadlines.open) for player in players} == {(7.0, 9.0)}
    assert crew.binding.deadlines.step == crew.moves._deadlines.step == 7.0


def test_every_group_of_a_run_is_watched_and_stacks_go_to_its_folder(crew, tmp_path):
    assert {hosts.watchdog for hosts in crew.hosts.values()} == {crew._watchdog}
    assert crew._watchdog._write([]).parent == tmp_path


def test_stages_are_told_the_chunk_that_the_plan_names(crew):
    session = Session.__new__(Session)
    session.scenario, session.plan = ASKED, crew.plan
    session.facts = {"artifacts": {}, "data": {"users": 100, "trained_events": 1000}}
    session.crew = SimpleNamespace(open=lambda *_: None)  # type: ignore[assignment]
    session.open()
    chunks = {name: setup.chunk for name, setup in session.stages.items()}
    assert chunks == {name: crew.plan.chunk(name, "trainer") for name in ASKED.stages}
    assert chunks["pretrain"] < 1 << 14, "the device has little room"
