"""Changes of workers that follow from the nodes of a real Ray cluster: room for an elastic role, and nodes that are drained."""

from __future__ import annotations

from pathlib import Path

import pytest

from nonet.controller.pipeline import Pipeline
from nonet.controller.record import CommandQueue, Recorder
from nonet.controller.record.journal import read_journal
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.session import Session, scaling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CHANGES = (
    "pools={cpu: {labels: {kind: slow}}, fast: {labels: {kind: fast}}}",
    "roles={rollout: {workers: {min: 1, max: 3}, pool: fast}, embedding: {fuse: trainer}}",
    "stages.rl.control=false",
    "stages.rl.steps=6",
)


@pytest.fixture
def cluster(no_ray):
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 3, "labels": {"kind": "slow"}, "object_store_memory": 200_000_000}
    made = Cluster(initialize_head=True, head_node_args=head)
    made.add_node(num_cpus=1, labels={"kind": "fast"}, object_store_memory=100_000_000)
    ray.init(address=made.address, namespace="nonet", log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def drain(node_id: str) -> None:
    """Announce that a node will be taken away, as a cloud provider does."""
    import ray
    from ray.core.generated import autoscaler_pb2

    client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    preemption = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, reason = client.drain_node(node_id, preemption, "spot instance", 0)
    assert accepted, reason


def test_rollouts_grow_onto_free_cpus_leave_a_drained_node_and_stay_if_there_is_no_other(
    cluster, tmp_path: Path, monkeypatch
):
    import ray
    from tests_ring import make_ring

    @ray.remote(num_cpus=0.75, label_selector={"kind": "fast"})
    class Tenant:
        def ping(self) -> None:
            pass

    monkeypatch.setattr(scaling, "_LOOK_EVERY_S", 0.0)
    tenant = Tenant.remote()
    ray.get(tenant.ping.remote())
    folder, run = make_ring(tmp_path), RunFolder(tmp_path / "run")
    run.path.mkdir()
    session = Session(folder / "ring.yaml", folder=folder, run=run, changes=list(CHANGES), life_s=60)
    places: list[tuple[str, int]] = []
    rollout_nodes: list[tuple[str, ...]] = []

    def find_rollouts() -> tuple[str, ...]:
        return next(group.nodes for group in session.groups.binding.groups if "rollout" in group.roles)

    def poll() -> bool:
        place = (session.stage.name, session.applied_steps)
        if place in places:
            return False
        places.append(place)
        rollout_nodes.append(find_rollouts())
        if place == ("rl", 1):  # its process stays when a drained node has no room
            reward = {"use": "hit", "weight": 0.5}
            CommandQueue(run).ask(
                verb="attach", name="extra", stage=None, options=reward, original="hit", sha256=""
            )
        if place == ("pretrain", 3):
            ray.kill(tenant)
        if place == ("rl", 2):
            cluster.add_node(num_cpus=1, labels={"kind": "fast"}, object_store_memory=100_000_000)
            drain(find_rollouts()[0])
        if place == ("rl", 4):
            drain(find_rollouts()[0])
        return False

    recorder = Recorder(run.path, run.id)
    assert Pipeline(session, recorder, poll).run()
    notes = [event["text"] for event in recorder.list_since(0) if event.get("text")]
    changes = [text for text in notes if "room for" in text or "is drained" in text]
    assert [text.partition(",")[0].partition(": ")[2] for text in changes[:2]] == [
        "rollout to 3",
        "moved its workers",
    ]
    assert "wrote a checkpoint; its workers stay until it ends" in changes[2]
    assert len(changes) == 3
    assert [len(nodes) for nodes in (rollout_nodes[0], rollout_nodes[-1])] == [1, 3]
    assert set(rollout_nodes[0]).isdisjoint(rollout_nodes[-1])
    rebound = [record for record in read_journal(run.journal) if "rebound" in record]
    assert [record["starts"] for record in rebound] == [{"rollout": 3}, {"rollout": 3}]
    steps = [record["applied"] for record in read_journal(run.journal) if "applied" in record]
    assert steps == list(range(len(steps)))
