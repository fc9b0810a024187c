"""The same cluster and the same jobs, placed by us and by plain Ray: 4 nodes x 4 fake GPUs, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from nonet.controller.cluster.view import ClusterView, DeviceFacts, Node

CODE = "import json; from nonet.bench.cluster.placement import bench_placement; print(json.dumps(bench_placement(1)))"


@pytest.mark.slow  # four nodes and sixteen worker processes on two cores
def test_after_four_small_groups_three_whole_node_gangs_start_where_plain_ray_starts_none():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    started = {row["who"]: row["gangs started"] for row in found["rows"] if "who" in row}
    assert started == {"nonet": 3, "plain Ray": 0}
    assert found["ratio"]["placement groups left after refusals"] == 0
    messages = [row["message"] for row in found["rows"] if "refused" in row]
    assert all("Held by somebody else 1" in text and "'trainer'" in text for text in messages)


def test_the_same_jobs_fit_on_paper_too():
    from nonet.bench.cluster.placement import GANGS, GPUS, NODES, SMALL, make_job
    from nonet.controller.plan.planner import plan

    free = {f"n{i}": float(GPUS) for i in range(NODES)}
    facts = {"GPU": DeviceFacts()}
    started = 0
    for number in range(SMALL + GANGS):
        nodes = [Node(name, {"GPU": float(GPUS)}, {"GPU": left}, {}, facts) for name, left in free.items()]
        group = plan(make_job(1 if number < SMALL else GPUS), ClusterView(tuple(nodes))).groups[0]
        for name, count in group.count_by_node().items():
            free[name] -= count
        started += number >= SMALL and len(group.count_by_node()) == 1
    assert started == GANGS
