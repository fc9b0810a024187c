"""`nonet bench placement`: what fits after small jobs, how fast an impossible request is refused, how long large plans take.

The cluster is `ray.cluster_utils.Cluster`: 4 nodes of 4 fake GPUs, with real Ray scheduling and real worker processes. A gang
is a job that needs all GPUs of one node. The baseline is plain Ray: a placement group for each job, with the strategy PACK for
jobs of one GPU, and STRICT_PACK for gangs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nonet.bench.timing import LapTimer
from nonet.controller.cluster import ClusterView, DeviceFacts, Node
from nonet.controller.plan import plan
from nonet.controller.scenario import Scenario, make_scenario
from nonet.errors import PlacementError
from nonet.workers.roles.kinds import RoleKind
from nonet.workers.runtime import DistributeWorker

NODES, GPUS, SMALL, GANGS = 4, 4, 4, 3  # nodes, GPUs per node, jobs of one GPU, and gangs
FILLER = RoleKind("nonet.workers.runtime:DistributeWorker")
"""The kind of roles that only use up devices."""
_ROUNDS = 2
_WAIT_S = 3.0  # after which a gang of plain Ray counts as not started


class Idle(DistributeWorker):
    """A worker that holds its device and does nothing, without torch."""


def bench_placement(rounds: int = _ROUNDS) -> dict[str, Any]:
    """Return gangs that start after four small groups, for both sides, and seconds to a refusal and to a large plan."""
    rows: list[dict[str, Any]] = []
    with _start_cluster():
        for number in range(rounds):
            rows.append(
                {"round": number, "who": "plain Ray", "gangs started": _place_with_plain_ray(), "of": GANGS}
            )
            rows.append({"round": number, "who": "nonet", "gangs started": _place_with_nonet(), "of": GANGS})
        rows += [_measure_refusal("at plan time"), _measure_refusal("at bind time")]
    rows.append(_measure_large_plan())
    refused = [row for row in rows if "refused" in row]
    return {
        "rows": rows,
        "ratio": {
            "gangs of 3, ours, the fewest": min(_list_gang_counts(rows, "nonet")),
            "gangs of 3, plain Ray, the most": max(_list_gang_counts(rows, "plain Ray")),
            "seconds to refuse, the longest": max(row["seconds"] for row in refused),
            "placement groups left after refusals": float(sum(row["groups left"] for row in refused)),
            "seconds to plan 1000 x 8, 51 groups": rows[-1]["median_s"],
            "different plans of the same input": float(rows[-1]["different plans"] - 1),
        },
    }


def make_job(workers: int, name: str = "job") -> Scenario:
    """Make a scenario with one group of `workers` GPUs, which has all roles."""
    roles = {"trainer": {"pool": "gpu", "workers": workers}, "evaluator": {"fuse": "trainer"}}
    return make_scenario(
        {
            "name": name,
            "data": {"interactions": "none.parquet"},
            "pools": {"gpu": {"device": "cuda"}},
            "roles": roles,
            "stages": {"pretrain": {"epochs": 1}},
        }
    )


def make_large_view(nodes: int = 1000) -> ClusterView:
    """Make a view of a cluster of `nodes` nodes with 8 GPUs each, with 8 nodes per rack and two zones."""
    total = {"CPU": 128.0, "GPU": 8.0, "memory": 2e12}
    facts = {"GPU": DeviceFacts(80 * 10**9, 8)}
    return ClusterView(
        tuple(
            Node(f"n{i:04}", total, dict(total), {"zone": "ab"[i // 8 % 2], "rack": f"r{i // 8}"}, facts)
            for i in range(nodes)
        )
    )


def make_large_scenario(workers: int = 2048) -> Scenario:
    """Make a scenario of 51 groups.

    It has a trainer, an elastic rollout, an evaluator, eight roles of 16 workers, and forty rewards of 1 to 40
    workers.
    """
    near = {"topology": {"prefer": ["host", "rack"]}}
    kind = f"{__name__}:FILLER"
    own = {f"own{i}": {"use": kind, "pool": "gpu", "workers": 16, **near} for i in range(8)}
    roles = {
        "trainer": {"pool": "gpu", "workers": workers, "topology": {"prefer": ["rack"]}},
        "rollout": {"pool": "gpu", "workers": {"min": 8, "max": 4096}},
        "evaluator": {"pool": "gpu", "workers": 2},
        **own,
    }
    rewards = {f"r{i}": {"use": "hit", "pool": "gpu", "workers": 1 + i * 3 % 40} for i in range(40)}
    return make_scenario(
        {
            "name": "large",
            "data": {"interactions": "none.parquet"},
            "pools": {"gpu": {"device": "cuda"}},
            "roles": roles,
            "stages": {
                "pretrain": {"epochs": 1, "batch": {"users": 4096}},
                "rl": {"steps": 10, "users": 8192, "rewards": rewards},
            },
        }
    )


def _list_gang_counts(rows: list[dict[str, Any]], who: str) -> list[float]:
    return [float(row["gangs started"]) for row in rows if row.get("who") == who]


@contextmanager
def _start_cluster() -> Iterator[None]:
    """Start the cluster for the duration of the context."""
    import os

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"num_cpus": 4, "num_gpus": GPUS, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(NODES - 1):
            cluster.add_node(**node)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, namespace="nonet", log_to_driver=False, logging_level=logging.ERROR)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def _place_with_plain_ray() -> int:
    """Create four one-GPU placement groups, then three whole-node gangs, and return how many gangs are ready."""
    from ray.util.placement_group import placement_group, remove_placement_group

    groups = []
    try:
        for _ in range(SMALL):
            groups.append(placement_group([{"GPU": 1}], strategy="PACK"))
            assert groups[-1].wait(10)
        gangs = [placement_group([{"GPU": 1}] * GPUS, strategy="STRICT_PACK") for _ in range(GANGS)]
        groups += gangs
        return sum(gang.wait(_WAIT_S) for gang in gangs)
    finally:
        for group in groups:
            remove_placement_group(group)
        _wait_until_free()


def _place_with_nonet() -> int:
    """Plan, bind and start the same groups as seven runs on free resources, and return how many gangs started."""
    from nonet.controller.groups import GroupBinding, plan_live
    from nonet.workers.runtime import GroupLifetime, RoleSpec

    specs = {role: RoleSpec(Idle) for role in ("trainer", "rollout", "embedding", "evaluator", "tokenise")}
    bindings, started_gangs = [], 0
    try:
        for number in range(SMALL + GANGS):
            is_gang = number >= SMALL
            try:
                group_plan = plan_live(make_job(GPUS if is_gang else 1))
                bindings.append(GroupBinding(group_plan, specs, GroupLifetime(run=f"job{number}")))
            except PlacementError:
                continue
            workers = bindings[-1].hosts["trainer"].wait_until_ready()
            started_gangs += is_gang and len({worker["node"] for worker in workers}) == 1
        return started_gangs
    finally:
        for binding in bindings:
            binding.stop()
        _wait_until_free()


def _measure_refusal(when: str) -> dict[str, Any]:
    """Measure the seconds until a job of all GPUs is refused, since another job uses one, and the placement groups left behind.

    `when` is "at plan time", or "at bind time" if the other job starts after the plan was made.
    """
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    from nonet.controller.groups import GroupBinding, plan_live
    from nonet.workers.runtime import RoleSpec

    specs = {role: RoleSpec(Idle) for role in ("trainer", "rollout", "embedding", "evaluator", "tokenise")}
    early_plan = plan_live(make_job(NODES * GPUS))
    other_job = placement_group([{"GPU": 1}], name="somebody else")
    assert other_job.wait(10)
    message = "nothing"
    with LapTimer() as timer:
        try:
            used_plan = early_plan if when == "at bind time" else plan_live(make_job(NODES * GPUS))
            GroupBinding(used_plan, specs).stop()
        except PlacementError as error:
            message = str(error)
    groups_left = sum(
        group["state"] != "REMOVED" and group["name"] != "somebody else"
        for group in placement_group_table().values()
    )
    remove_placement_group(other_job)
    _wait_until_free()
    return {"refused": when, "seconds": timer.last_s, "groups left": groups_left, "message": message}


def _measure_large_plan() -> dict[str, Any]:
    """Time the plan of a large scenario, and count different plans of the same input."""
    scenario, view = make_large_scenario(), make_large_view()
    timer, plans = LapTimer(), set()
    for _ in range(5):
        with timer:
            large_plan = plan(scenario, view)
        plans.add(hashlib.sha256(json.dumps(large_plan.as_dict()).encode()).hexdigest())
    workers = sum(group.workers for group in large_plan.groups)
    return {
        "plan": f"{len(view.nodes)} nodes x 8 devices, {len(large_plan.groups)} groups, {workers} workers",
        "median_s": timer.compute_median_s(),
        "max_s": max(timer.wall_s),
        "different plans": len(plans),
    }


def _wait_until_free(timeout_s: float = 10.0) -> None:
    """Wait until all GPUs of the cluster are free, at most `timeout_s` seconds."""
    import ray

    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and ray.available_resources().get("GPU", 0.0) < NODES * GPUS:
        time.sleep(0.05)
