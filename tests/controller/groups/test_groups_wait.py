"""What a run's groups are told by plan and scenario: chunks, deadlines, and who watches them. No Ray: hosts are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from stand_ins import Group
from views import RL, gpu_nodes, scenario

from nonet.controller.groups import PromptRequest, group_processes
from nonet.controller.groups import run_groups as run_groups_module
from nonet.controller.plan.planner import plan
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.session.artifacts import make_run_stages
from nonet.workers.runtime import WorkerGroup
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
        self.groups, self.deadlines = plan.list_groups(stage), deadlines
        role = SimpleNamespace(cls=DistributeWorker)
        self.hosts = {
            group.name: SimpleNamespace(
                name=group.name,
                world=group.workers,
                specs=dict.fromkeys(group.roles, role),
                wait_until_ready=lambda: None,
            )
            for group in self.groups
        }


@pytest.fixture
def run_groups(monkeypatch, tmp_path):
    processes_class = group_processes.GroupProcesses
    monkeypatch.setattr(group_processes, "GroupBinding", Binding)
    monkeypatch.setattr(processes_class, "_check_shared", lambda *_: None)  # asks Ray, which would start
    monkeypatch.setattr(
        WorkerGroup,
        "from_actors",
        lambda hosts, role, ranks: Group([], role, 1, hosts, open=[{"parameters": 5, "buckets": 3}]),
    )
    made = plan(ASKED, gpu_nodes(1, memory_bytes=2 * GB))
    processes = processes_class(ASKED, RunFolder(tmp_path), made, 0.0, None, "pretrain")  # type: ignore[arg-type]
    return run_groups_module.RunGroups(processes, {}, {})


def test_rollouts_compute_the_chunk_that_the_plan_names(run_groups, monkeypatch):
    chunk = run_groups.processes.plan.find_chunk("rl", "rollout")
    assert 1 <= chunk < 4096
    told = []
    run_groups.rollout.group.__dict__["generate"] = lambda users, positions, request: told.append(
        request.chunk
    )
    monkeypatch.setattr(run_groups.rollout, "ensure_on_device", lambda stage: None)
    prompts = PromptRequest("rl", 0, users=np.empty(0, int), positions=np.empty(0, int))
    run_groups.rollout.generate(prompts, 0)
    assert told == [chunk]


def test_every_wait_of_a_run_has_the_scenarios_deadlines(run_groups):
    handles = (run_groups.trainer, run_groups.rollout, *run_groups.rewards.values())
    assert {(handle.deadlines.step, handle.deadlines.open) for handle in handles} == {(7.0, 9.0)}
    assert run_groups.binding.deadlines.step == run_groups.offloader._deadlines.step == 7.0


def test_every_group_of_a_run_is_watched_and_stacks_go_to_its_folder(run_groups, tmp_path):
    assert {hosts.watchdog for hosts in run_groups.hosts.values()} == {run_groups.processes._watchdog}
    assert run_groups.processes._watchdog._write([]).parent == tmp_path


def test_stages_are_told_the_chunk_that_the_plan_names(run_groups):
    plan = run_groups.processes.plan
    stages = make_run_stages(ASKED, {"data": {"users": 100, "trained_events": 1000}}, plan)
    chunks = {name: setup.chunk for name, setup in stages.items()}
    assert chunks == {name: plan.find_chunk(name, "trainer") for name in ASKED.stages}
    assert chunks["pretrain"] < 1 << 14, "the device has little room"
