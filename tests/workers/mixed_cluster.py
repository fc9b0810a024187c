"""A job on GPUs, NPUs and CPUs at once, on a simulated cluster; prints what every worker saw as JSON.

A process of its own: one process holds one Ray, and this one wants a cluster of four nodes.
"""

from __future__ import annotations

import json
import logging
import os

import ray
from ray.cluster_utils import Cluster

import nonet
from nonet.controller.groups.binding import GroupBinding, read_live_view
from nonet.controller.plan.planner import plan
from nonet.controller.scenario.scenario import make_scenario
from nonet.workers.devices.vendors import get_device
from nonet.workers.runtime.group import WorkerGroup
from nonet.workers.runtime.worker import RoleSpec

SCENARIO = {
    "name": "mixed",
    "data": {"interactions": "interactions.parquet"},
    "sparse": {"tables": {"item": {"dim": 8}}},
    "pools": {
        "gpu": {"device": "cuda"},
        "npu": {"device": "npu", "env": {"vars": {"NONET_POOL": "npu"}}},
        "host": {"labels": {"kind": "host"}},
    },
    "roles": {
        "trainer": {"pool": "gpu", "workers": 3},
        "rollout": {"pool": "npu", "workers": 4},
        "evaluator": {"pool": "host"},
    },
    "stages": {
        "rl": {"steps": 1, "users": 8, "rewards": {"hit": {"weight": 1.0, "pool": "host", "workers": 2}}}
    },
}


class Witness(nonet.DistributeWorker):
    """Stands in for every role and tells where it is."""

    @nonet.method(collect="list")
    def tell(self):
        kind, context = get_device(self.device), ray.get_runtime_context()
        return {
            "role": self.place.role,
            "rank": self.rank,
            "device": self.device,
            "backend": kind.backend,
            "collectives": kind.get_collective_backends(),
            "resources": context.get_assigned_resources(),
            "ids": context.get_accelerator_ids(),
            "visible": {name: list(get_device(name).read_visible_ids()) for name in ("cuda", "npu")},
            "vars": {name: os.environ.get(name, "") for name in ("NONET_POOL", "CUBLAS_WORKSPACE_CONFIG")},
            "node": context.get_node_id(),
            "why_not": kind.explain_unavailable() if kind.name != "cpu" else "",
        }


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for given in (
        {"num_gpus": 8, "labels": {"kind": "gpu"}},
        {"resources": {"NPU": 8}, "labels": {"kind": "npu"}},
        {"labels": {"kind": "host"}},
    ):
        cluster.add_node(num_cpus=2, **given)
    ray.init(cluster.address, namespace="nonet", log_to_driver=False, logging_level=logging.ERROR)
    scenario = make_scenario(SCENARIO, "mixed")
    made = plan(scenario, read_live_view())
    envs = {name: pool.env.model_dump() for name, pool in scenario.pools.items() if pool.env}
    binding = GroupBinding(
        made, {role: RoleSpec(Witness) for group in made.groups for role in group.roles}, envs=envs
    )
    told = [
        answer
        for group in made.groups
        for role in group.roles
        for answer in WorkerGroup.from_actors(binding.hosts[group.name], role).tell().get(120)
    ]
    kinds = {node["NodeID"]: node["Labels"].get("kind") for node in ray.nodes()}
    binding.stop()
    print(json.dumps([answer | {"kind": kinds[answer["node"]]} for answer in told]))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
