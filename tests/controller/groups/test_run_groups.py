"""What a run's groups are made of and told, over groups that answer at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError
from stand_ins import Group, Trace

from nonet.controller.groups import group_processes
from nonet.controller.groups.group_processes import GroupProcesses
from nonet.controller.groups.run_groups import RunGroups
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.scenario.scenario import make_scenario
from nonet.controller.setup.own_files import keep_copies
from nonet.controller.setup.run_files import make_data_setup
from nonet.errors import DeadlineExceeded, WorkerLost
from nonet.storage import MountedRun, RunCopy
from tests.storage.memory_storage import MemoryStorage

BODY = {
    "name": "groups",
    "seed": 9,
    "data": {
        "interactions": "events.parquet",
        "items": "/tables/items.parquet",
        "columns": {"user_id": "visitor"},
        "keep": {"item_events": 3, "user_events": 2},
        "where": "rating > 0",
        "history": 7,
        "split": {"use": "leave_last_out", "test": 1, "valid": 2, "rl": 3},
    },
    "tokenizer": {"use": "rq_kmeans", "levels": 2, "codes": 8},
    "sparse": {"tables": {"item": {"dim": 8}}},
    "stages": {
        "pretrain": {"epochs": 1},
        "liked": {"epochs": 1, "target": "rating >= 4"},
        "rl": {
            "steps": 2,
            "users": 2,
            "rollout": {"use": "beam", "width": 12},
            "rewards": {
                "hit": {"weight": 1.0, "timeout_s": 7},
                "own": {"use": "rewards/own.py", "weight": 0.5, "timeout_s": 90, "ceiling": 20},
            },
        },
    },
    "evaluate": {"metrics": ["recall@5", "ndcg@5"], "width": 30},
}
SCENARIO = make_scenario(BODY)
PLACES = {
    "trainer": ("trainer", "rollout", "embedding"),
    "cpu": ("evaluator", "tokenise"),
    "rl.reward.hit": ("rl.reward.hit",),
    "rl.reward.own": ("rl.reward.own",),
}


class Made:
    """What a run asked to be bound: specs of every role; its groups note their calls."""

    def __init__(self, plan, specs, life, envs, *, stage, deadlines):
        self.specs, self.groups = (
            specs,
            [SimpleNamespace(name=name, roles=roles, nodes=("n1",)) for name, roles in PLACES.items()],
        )
        self.hosts = {
            name: SimpleNamespace(name=name, specs=dict.fromkeys(roles), wait_until_ready=lambda: None)
            for name, roles in PLACES.items()
        }


@pytest.fixture
def processes(tmp_path, monkeypatch):
    calls: list = []
    monkeypatch.setattr(group_processes, "GroupBinding", Made)
    monkeypatch.setattr(
        group_processes,
        "Offloader",
        lambda *_: SimpleNamespace(enter=lambda *phase: None, stages=frozenset()),
    )
    monkeypatch.setattr(
        group_processes.WorkerGroup,
        "from_actors",
        lambda hosts, role, ranks_per_share: Group(
            calls, role, 1, hosts, open=[{"parameters": 5, "buckets": 3}]
        ),
    )
    monkeypatch.setattr(GroupProcesses, "_check_shared", lambda *_: None)  # asks Ray, which would start
    run = RunFolder(tmp_path)
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "own.py").write_text("")
    keep_copies(SCENARIO, tmp_path, run)
    plan = SimpleNamespace(ledger=None, list_groups=lambda stage: [], find_chunk=lambda stage, role: 64)
    processes = GroupProcesses(SCENARIO, run, plan, 0.0, Trace(), "pretrain")
    processes.calls = calls
    return processes


def test_roles_are_told_what_the_scenario_says(processes, tmp_path):
    specs = processes.binding.specs
    setup, options = specs["evaluator"].args
    assert (options.metrics, options.width, setup.target) == (["recall@5", "ndcg@5"], 30, "liked")
    assert specs["rl.reward.own"].args == (
        "own",
        str(tmp_path / "sources" / "rewards" / "own.py"),
        str(tmp_path / "sources"),
        {"ceiling": 20},
        {},
        90.0,
    )
    assert specs["rl.reward.hit"].args == ("hit", "hit", str(tmp_path / "sources"), {}, {}, 7.0)
    runs = [specs[role].args[0] for role in ("trainer", "rollout", "embedding", "evaluator")]
    assert all(run == runs[0] for run in runs)
    assert (runs[0].seed, runs[0].history) == (9, 7)


def test_groups_open_the_artifacts_the_trainer_before_the_rollout_that_shares_its_model(processes, tmp_path):
    run_groups = RunGroups(processes, {"sids": "folder"}, {})
    opened = [name for name, *_ in processes.calls if name.endswith(".open")]
    assert set(opened) == {
        f"{role}.open" for role in ("trainer", "rollout", "evaluator", "rl.reward.hit", "rl.reward.own")
    }
    assert opened.index("trainer.open") < opened.index("rollout.open")
    (evaluator,) = [arguments for name, arguments, _ in processes.calls if name == "evaluator.open"]
    assert evaluator == ({"sids": "folder"}, str(tmp_path / "results"))
    assert run_groups.parameters == 5
    assert run_groups.trainer.buckets == 3


def test_the_gang_meets_before_the_model_is_built(processes, monkeypatch):
    monkeypatch.setattr(RunGroups, "_join_process_group", lambda *_: processes.calls.append(("join", (), {})))
    RunGroups(processes, {}, {"item": 40})
    order = [name for name, *_ in processes.calls]
    assert order.index("trainer.set_ttl_steps") < order.index("join") < order.index("trainer.open")


def test_every_reward_has_its_own_time_out(processes):
    run_groups = RunGroups(processes, {}, {})
    assert run_groups.rewards["rl"]._timeouts_s == {"hit": 7.0, "own": 90.0}


def test_times_to_live_are_told_before_the_gang_meets(processes):
    RunGroups(processes, {}, {"item": 40})
    assert [arguments for name, arguments, _ in processes.calls if name.endswith("set_ttl_steps")] == [
        ({"item": 40},)
    ] * 2


def test_trainers_of_a_tensor_group_and_rollouts_in_their_processes_compute_the_same_rows(
    processes, monkeypatch
):
    trainer = {"workers": 4, "engine": {"use": "fsdp2", "tensor": 2}}
    processes.scenario = make_scenario({**BODY, "roles": {"trainer": trainer}})
    monkeypatch.setattr(
        group_processes.WorkerGroup, "from_actors", lambda hosts, role, ranks_per_share: ranks_per_share
    )
    roles = ("trainer", "rollout", "embedding", "evaluator", "rl.reward.hit")
    assert [processes.group(role) for role in roles] == [2, 2, 1, 1, 1]
    processes.binding.groups[0].roles = ("trainer", "embedding")
    processes.binding.groups[1].roles = ("evaluator", "rollout")
    assert [processes.group(role) for role in ("trainer", "rollout")] == [2, 1]


def test_a_commit_is_loaded_by_trainers_and_shards(processes):
    RunGroups(processes, {}, {}).load(Path("commit"), None)
    loads = {name: arguments for name, arguments, _ in processes.calls if name.endswith(".load")}
    assert loads == {"trainer.load": ("commit", None), "embedding.load": ("commit",)}


def test_workers_are_told_that_results_were_deleted(processes, monkeypatch):
    stored = RunCopy(MountedRun("s3://runs/a", str(processes.run.path), 1, 7), MemoryStorage())
    monkeypatch.setattr(group_processes, "find_copy", lambda path: stored)
    monkeypatch.setattr(GroupProcesses, "_list_remote_actors", lambda *_, **options: [])
    monkeypatch.setattr(group_processes.ray, "get", lambda calls, timeout: calls)  # which would start Ray
    told = []
    for hosts in processes.hosts.values():
        hosts.begin_generation = lambda *arguments: told.append(arguments)
    processes.refresh_copies()
    assert told == [(str(processes.run.path), 8)] * len(processes.hosts)
    stored.release()


def make_remote(processes, monkeypatch, answers: list) -> None:
    """Let the run have workers on other nodes, whose calls have these answers, errors among them; None for no answer."""
    actors = [type("Remote", (), {"answer": answer})() for answer in answers]
    processes.asked = []
    for actor in actors:
        call = SimpleNamespace(remote=lambda *_, actor=actor: processes.asked.append(actor) or actor)
        actor.list_put = actor.refresh_copy = call
    first = next(iter(processes.hosts.values()))
    for hosts in processes.hosts.values():
        hosts.begin_generation = lambda *_: None
        hosts.list_ready_actors = lambda hosts=hosts: [("other", a) for a in actors] if hosts is first else []

    def get(calls, timeout=None):
        found = [call.answer for call in (calls if isinstance(calls, list) else [calls])]
        if errors := [answer for answer in found if isinstance(answer, Exception)]:
            raise errors[0]
        assert timeout is not None or not isinstance(calls, list)
        return found if isinstance(calls, list) else found[0]

    def wait(calls, num_returns, timeout):
        assert timeout <= 10
        return [call for call in calls if call.answer is not None], []

    context = SimpleNamespace(get_node_id=lambda: "this")
    fake = SimpleNamespace(get=get, wait=wait, get_runtime_context=lambda: context)
    monkeypatch.setattr(group_processes, "ray", fake)
    processes.actors = actors


def test_a_worker_that_does_not_answer_is_not_waited_for_and_what_it_says_later_is_not_lost(
    processes, monkeypatch
):
    make_remote(processes, monkeypatch, [["a", "b"], None, ActorDiedError()])
    assert processes.collect_files() == ["a", "b"]
    processes.actors[0].answer = []
    assert processes.collect_files() == []
    processes.actors[1].answer = ["c"]
    assert processes.collect_files() == ["c"]
    assert processes.asked.count(processes.actors[1]) == 1
    assert processes._collected_counts == {processes.actors[0]: 2, processes.actors[1]: 1}


@pytest.mark.parametrize(
    ("answer", "error"), [(ActorDiedError(), WorkerLost), (GetTimeoutError(), DeadlineExceeded)]
)
def test_a_worker_that_dies_or_hangs_while_it_fetches_the_files_is_told(
    processes, monkeypatch, answer, error
):
    make_remote(processes, monkeypatch, [[], answer])
    with pytest.raises(error):
        processes.refresh_copies()


def test_the_tokenise_stage_is_told_all_of_the_data(tmp_path):
    told = make_data_setup(SCENARIO, tmp_path)
    assert told.options.interactions == str(tmp_path / "events.parquet")
    assert told.options.items == "/tables/items.parquet"
    assert dict(told.options.columns) == {"user_id": "visitor"}
    assert dict(told.options.keep) == {"item_events": 3, "user_events": 2}
    assert told.options.where == "rating > 0"
    split = {"use": "leave_last_out", "test": 1, "valid": 2, "rl": 3, "cold_items": None}
    assert dict(told.options.split) == split
    assert dict(told.options.targets) == {"liked": "rating >= 4"}
    assert {name: told.tokenizer[name] for name in ("use", "levels", "codes")} == {
        "use": "rq_kmeans",
        "levels": 2,
        "codes": 8,
    }
    assert (told.folder, told.seed) == (str(tmp_path), 9)
