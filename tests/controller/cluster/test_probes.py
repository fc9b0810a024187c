"""Probes of a cluster of three nodes: one with a broken disk, one with a broken device, both of which heal."""

from __future__ import annotations

import io
import json
import shutil
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from tests_ring import make_ring

from nonet.controller.cluster import Env, Pool, health, probes, read_isolations, read_live_view
from nonet.controller.cluster.live import leave_out_nodes
from nonet.controller.cluster.probes import ClusterProbes
from nonet.controller.record import RunFolder
from nonet.deploy.run import api
from nonet.deploy.run.panel import Panel
from nonet.deploy.run.status import describe_folder, format_status
from nonet.errors import PlacementError
from nonet.workers.devices.vendors import get_device

HERE = Path(__file__).parent
WAIT_S = 60.0  # far more than any machine needs
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(no_ray, tmp_path_factory):
    """Start a head, a node `disk` whose cache is a file, and a node `device` with three devices; the folder of their files."""
    folder = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NONET_DEVICES", "faulty_vendor")
        patch.setenv("FAULTY", str(folder / "faulty"))
        patch.setenv("PYTHONPATH", f"{HERE}:{Path(probes.__file__).parents[3]}")
        patch.syspath_prepend(str(HERE))
        made = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100_000_000}
        )
        made.add_node(num_cpus=1, labels={"kind": "disk"}, env_vars={"NONET_CACHE": str(folder / "cache")})
        made.add_node(num_cpus=1, labels={"kind": "device"}, resources={"NPU": 3})
        ray.init(address=made.address, namespace="nonet", log_to_driver=False)
        assert get_device("fake").resource == "NPU"
        yield folder
        ray.shutdown()
        made.shutdown()
        sys.modules.pop("faulty_vendor", None)


@pytest.fixture(autouse=True)
def broken(cluster):
    """Break the disk and the device."""
    shutil.rmtree(cluster / "cache", ignore_errors=True)
    (cluster / "cache").touch()
    (cluster / "faulty").write_text("1")
    yield
    leave_out_nodes(())


def find_node(kind: str) -> str:
    return next(
        node["NodeID"] for node in ray.nodes() if node["Labels"].get("kind") == kind and node["Alive"]
    )


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_broken_disk_and_a_broken_device_are_isolated_and_used_again_when_they_have_healed(
    cluster, tmp_path, monkeypatch
):
    monkeypatch.setattr(health, "_FIRST_PAUSE_S", 0.2)
    monkeypatch.setattr(probes, "_LOOK_EVERY_S", 0.1)
    notes: list[str] = []
    made = ClusterProbes(tmp_path, {"gpu": Pool(device="fake")}, WAIT_S, notes.append)
    made.check()
    disk, device = find_node("disk"), find_node("device")
    found = {(entry.node, entry.device): entry.why for entry in made.list_isolated()}
    assert found == {
        (disk, ""): f"{cluster}/cache cannot be written: File exists",
        (device, "fake 1"): "a link is down",
    }
    assert disk not in [node.id for node in read_live_view().nodes]
    wait_until(lambda: read_live_view().get_node(device).free["NPU"] == 2)
    holders = [held.by for held in read_live_view().held if held.node == device]
    assert len(holders) == 1
    assert "DeviceHolder" in holders[0]
    assert len(notes) == 2
    assert all("is isolated" in note for note in notes)
    explained = made.explain(PlacementError("no room"))
    assert str(explained).startswith("no room; ")
    assert "a link is down" in str(explained)

    (cluster / "cache").unlink()
    (cluster / "faulty").write_text("")
    wait_until(lambda: not made.list_isolated())
    assert {node.id for node in read_live_view().nodes} >= {disk, device}
    wait_until(lambda: read_live_view().get_node(device).free["NPU"] == 3)
    assert len(notes) == 4
    assert all("has passed a probe and is used again" in note for note in notes[2:])
    assert all(entry.until for entry in read_isolations(tmp_path))
    made.close()


def test_a_probe_that_does_not_end_isolates_its_node(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "probe_cache", import_module("faulty_vendor").hang_elsewhere)
    made = ClusterProbes(tmp_path, {}, 1.0, lambda text: None)
    made.check()
    made.close()
    own = ray.get_runtime_context().get_node_id()
    assert {entry.node for entry in made.list_isolated()} == {find_node("disk"), find_node("device")} - {own}
    assert {entry.why for entry in made.list_isolated()} == {"a probe did not end within 1 s"}
    assert [node.id for node in read_live_view().nodes] == [own]


@pytest.mark.parametrize(
    "env", [Env(python="/no/such/python"), Env(image="registry/nonet:1"), Env(pip=["torch"])]
)
def test_devices_are_not_blamed_for_an_environment_that_does_not_start_at_once(cluster, tmp_path, env):
    made = ClusterProbes(tmp_path, {"gpu": Pool(device="fake", env=env)}, WAIT_S, lambda text: None)
    made.check()
    made.close()
    assert [entry.node for entry in made.list_isolated()] == [find_node("disk")]


def test_a_run_leaves_out_an_isolated_node_and_its_status_and_report_say_so(cluster, tmp_path):
    folder = make_ring(tmp_path)
    made = api.scenario(folder / "ring.yaml", ["roles={rollout: {workers: 2}}", "deadlines.probe=60"])
    finished = api.run(made, run_dir=folder / "run", panel=Panel(io.StringIO(), live=False))
    assert finished.state == "done"
    disk = find_node("disk")
    plan = json.loads((folder / "run" / "plan.json").read_text())
    assert disk not in {node for group in plan["groups"] for node in group["nodes"]}
    assert finished.report["isolated"][0]["node"] == disk
    assert "cannot be written: File exists" in (folder / "run" / "report.html").read_text()
    clause = f"node {disk[:8]} is isolated: {cluster}/cache cannot be written: File exists"
    status = describe_folder(RunFolder(folder / "run"))
    assert status["isolated"] == [clause]
    assert clause in format_status(status)
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["text"] for event in events if "isolated" in event.get("text", "")] == [
        f"warning: {clause}; it is probed again"
    ]
