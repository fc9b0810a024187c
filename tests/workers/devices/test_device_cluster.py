"""One job on simulated GPU, NPU and CPU nodes: what Ray gave to each worker, asserted worker by worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WANTED = {  # role -> kind of node, resource, variable, torch device, backend
    "trainer": ("gpu", "GPU", "cuda", "cuda:0", "nccl"),
    "embedding": ("gpu", "GPU", "cuda", "cuda:0", "nccl"),
    "rollout": ("npu", "NPU", "npu", "npu:0", "hccl"),
    "evaluator": ("host", "CPU", "", "cpu", "gloo"),
    "tokenise": ("host", "CPU", "", "cpu", "gloo"),
    "rl.reward.hit": ("host", "CPU", "", "cpu", "gloo"),
}


@pytest.fixture(scope="module")
def told():
    script = Path(__file__).parents[1] / "mixed_cluster.py"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_ADDRESS")}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=800, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_role_is_on_its_own_kind_of_node_and_device(told):
    assert {answer["role"] for answer in told} == set(WANTED)
    for answer in told:
        kind, resource, _, torch_device, backend = WANTED[answer["role"]]
        assert (answer["kind"], answer["device"], answer["backend"]) == (kind, torch_device, backend), answer
        assert resource in answer["resources"], answer


@pytest.mark.slow
def test_each_worker_sees_its_own_device_and_no_other(told):
    for answer in told:
        _, _, variable, _, _ = WANTED[answer["role"]]
        for name in ("cuda", "npu"):
            seen = answer["visible"][name]
            assert len(seen) == (1 if name == variable else 0), answer
            resource = {"cuda": "GPU", "npu": "NPU"}[name]
            assert answer["ids"][resource] == seen, answer
    for role, variable in (("trainer", "cuda"), ("rollout", "npu")):
        ids = [answer["visible"][variable][0] for answer in told if answer["role"] == role]
        assert len(set(ids)) == len(ids) == {"trainer": 3, "rollout": 4}[role]


@pytest.mark.slow
def test_an_npu_worker_asks_for_no_gpu(told):
    for answer in told:
        if answer["kind"] != "gpu":
            assert "GPU" not in answer["resources"]
    npus = [answer["resources"]["NPU"] for answer in told if answer["role"] == "rollout"]
    assert npus == [1.0] * 4


@pytest.mark.slow
def test_each_pool_brings_its_own_variables(told):
    for answer in told:
        assert answer["vars"]["NONET_POOL"] == ("npu" if answer["kind"] == "npu" else "")
        assert answer["vars"]["CUBLAS_WORKSPACE_CONFIG"] == (":4096:8" if answer["kind"] == "gpu" else "")


@pytest.mark.slow
def test_a_fused_role_is_in_the_same_process_with_the_same_device(told):
    by_role = {role: {a["rank"]: a["visible"]["cuda"] for a in told if a["role"] == role} for role in WANTED}
    assert by_role["trainer"] == by_role["embedding"]


@pytest.mark.slow
def test_what_is_missing_for_the_device_is_said_where_it_is_missing(told):
    reasons = {a["role"]: a["why_not"] for a in told}
    assert "needs the package torch_npu" in reasons["rollout"]
    assert reasons["evaluator"] == ""
