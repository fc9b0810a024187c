"""`nonet chaos`: bad input, the result, and runs that lose nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import ray

from nonet.controller.record import RunFolder
from nonet.deploy.after.chaos import format_chaos, run_chaos
from nonet.deploy.after.chaos.faults import Fault
from nonet.deploy.after.chaos.page import render_chaos_page
from nonet.deploy.run import api
from nonet.errors import ConfigError
from tests.s3 import BUCKET, serve_s3

APART = "roles={rollout: {workers: 1}, embedding: {workers: 1}}"
FAULT = {
    "target": "trainer",
    "kind": "kill",
    "moment": "save",
    "step": 3,
    "delay_s": 0.1,
    "duration_s": 0.0,
    "victim": "run/<trainer>-0",
    "hit_step": 4,
    "recovery_s": 2.5,
    "restarts": 1,
}
RESULT = {
    "scenario": "ring",
    "seed": 7,
    "faults": [FAULT, FAULT | {"target": "node", "victim": "", "recovery_s": None, "restarts": 0}],
    "times": 3,
    "lost": [],
    "free_stages": ["rl"],
    "recovery_s": {"kill trainer": [2.5]},
    "runs": ["a", "b"],
    "page": "chaos.html",
}


def test_the_result_names_each_kind_of_fault_with_its_recovery_and_restarts():
    lines = format_chaos(RESULT).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["fault", "times", "restarts", "next", "step", "after"],
        ["kill", "node", "1", "0", "-"],
        ["kill", "trainer", "1", "1", "2.5", "s"],
    ]
    assert "the run ended before 1 of 3 faults" in lines
    assert "1 of 2 faults hit nothing" in lines
    assert "nothing was lost, doubled or computed otherwise" in lines
    assert "ranks of rl differ" in format_chaos(RESULT | {"lost": ["ranks of rl differ"]})


def test_the_page_has_each_fault_and_what_was_lost():
    page = render_chaos_page(RESULT)
    assert "Nothing was lost" in page
    assert "&lt;trainer&gt;-0" in page
    assert "The run ended before 1 of 3 faults." in page
    assert "1 of 2 faults found no process, node or permission." in page
    hit = render_chaos_page(RESULT | {"faults": [FAULT, FAULT, FAULT | {"victim": ""}]})
    assert "1 of 3 faults found no process, node or permission." in hit
    lost = render_chaos_page(RESULT | {"lost": ["ranks of rl differ"]})
    assert "ranks of rl differ" in lost
    assert "Nothing was lost" not in lost


def test_what_a_run_does_not_have_is_refused_before_anything_runs(
    ring: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    scenario_file = api.scenario(ring / "ring.yaml")
    with pytest.raises(ConfigError, match="--kill names router; of this scenario it takes"):
        run_chaos(scenario_file, targets=["router"], times=1, seed=7)
    text = (ring / "ring.yaml").read_text()
    (ring / "no_rl.yaml").write_text(f"{text.split('  rl:')[0]}evaluate:{text.split('evaluate:')[1]}")
    with pytest.raises(ConfigError, match="--kill names reward; of this scenario it takes rollout, trainer"):
        run_chaos(api.scenario(ring / "no_rl.yaml"), targets=["reward"], times=1, seed=7)
    with pytest.raises(ConfigError, match="--kill storage needs a run in object storage"):
        run_chaos(scenario_file, targets=["storage"], times=1, seed=7)
    with pytest.raises(ConfigError, match="--kill node needs a cluster of several nodes"):
        run_chaos(scenario_file, targets=["node"], times=1, seed=7)


def test_a_cluster_with_other_runs_is_refused_unless_it_may_be_shared(
    ring: Path, monkeypatch: pytest.MonkeyPatch
):
    class Started(Exception):
        """The first run would start."""

    def start(*_: object) -> None:
        raise Started

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr("nonet.workers.runtime.ensure_ray", lambda: None)
    monkeypatch.setattr("nonet.controller.groups.list_controlled_runs", lambda: {"feed-1"})
    monkeypatch.setattr("nonet.deploy.after.chaos.chaos._start", start)
    options = {"targets": ["trainer"], "times": 1, "seed": 7, "run_dir": ring / "chaos"}
    with pytest.raises(ConfigError, match=r"the cluster is used by feed-1; .* with --shared"):
        run_chaos(api.scenario(ring / "ring.yaml"), **options)
    assert not (ring / "chaos").exists()
    with pytest.raises(Started):
        run_chaos(api.scenario(ring / "ring.yaml"), **options, shares_cluster=True)


@pytest.mark.parametrize("victim", ["", "run/trainer-0"])
def test_equal_runs_of_which_no_fault_hit_anything_are_no_success(
    ring: Path, monkeypatch: pytest.MonkeyPatch, victim: str
):
    class Injector(nullcontext):
        """An injector whose one fault has hit the victim."""

        def __init__(self, *_: object, **__: object):
            super().__init__()
            self.done = [Fault("trainer", "kill", "step", 1, 0.0, 0.0, victim)]

    run = SimpleNamespace(folder=RunFolder(ring / "run"), wait=lambda panel: None)
    stand_ins = {
        "FaultInjector": Injector,
        "FaultAgents": nullcontext,
        "_start": lambda *_: run,
        "_draw_faults": lambda *_: [],
        "list_applied_steps": lambda run: [],
        "list_differences": lambda *_: [],
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(f"nonet.deploy.after.chaos.chaos.{name}", stand_in)
    result = run_chaos(api.scenario(ring / "ring.yaml"), times=1, seed=7, run_dir=ring / "chaos")
    nothing_was_hit = "no fault hit anything, so the runs do not show what a fault does"
    assert result["lost"] == ([] if victim else [nothing_was_hit])


def test_a_run_with_two_faults_has_the_bits_of_an_undisturbed_one(ring: Path, ray_local: ModuleType):
    file = ring / "ring.yaml"
    start, end = file.read_text().split("  finetune:")[0], file.read_text().split("evaluate:")[1]
    file.write_text(f"{start}evaluate:{end}")
    result = run_chaos(
        api.scenario(file, ["evaluate.baselines=[]", "stages.pretrain.epochs=6"]),
        targets=["trainer", "controller"],
        times=2,
        seed=36,
        run_dir=ring / "chaos",
    )
    assert result["lost"] == []
    assert {(fault["kind"], fault["target"]) for fault in result["faults"] if fault["victim"]} == {
        ("kill", "trainer"),
        ("slow", "controller"),
    }
    assert sum(fault["restarts"] for fault in result["faults"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("targets", "times", "restarts"), [((), 14, True), (("storage",), 6, False)])
def test_a_run_in_object_storage_has_the_bits_of_an_undisturbed_one_though_its_connections_are_cut(
    ring: Path, no_ray: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, targets, times, restarts
):
    monkeypatch.setenv("NONET_CACHE", str(tmp_path / "cache"))
    changes = ["checkpoint.every=2", "stages.rl.steps=40", APART, "deadlines.step=20", "deadlines.save=30"]
    with serve_s3():
        result = run_chaos(
            api.scenario(ring / "ring.yaml", [*changes, f"storage={BUCKET}/chaos"]),
            targets=targets,
            times=times,
            seed=7,
            run_dir=ring / "chaos",
        )
    assert result["lost"] == []
    assert {"slow storage", "cut storage"} <= result["recovery_s"].keys()
    assert any(fault["restarts"] for fault in result["faults"]) == restarts
    assert json.loads((ring / "chaos/chaos.json").read_text()) == result
    assert all(place.startswith(f"{BUCKET}/chaos/") for place in result["runs"])
    assert (ring / "chaos/chaos.html").exists()


@pytest.fixture
def spare_cluster(no_ray: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start a cluster of a head without room for the ring scenario, and two nodes with room for it each."""
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 4, "object_store_memory": 200_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=options | {"num_cpus": 0})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    for _ in range(2):
        cluster.add_node(**options)
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_a_run_that_loses_a_node_has_the_bits_of_an_undisturbed_one(ring: Path, spare_cluster: None):
    result = run_chaos(
        api.scenario(ring / "ring.yaml", ["checkpoint.every=2", "stages.rl.steps=20"]),
        targets=["node"],
        times=1,
        seed=7,
        run_dir=ring / "chaos",
    )
    assert result["lost"] == []
    (fault,) = result["faults"]
    assert fault["victim"].startswith("node ")
    assert fault["restarts"] > 0
