"""Whole runs on an `npu` device (a stand-in of torch's PrivateUse1 key), the ring's and the quickstart's: the bits of cpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests_ring import make_ring

HERE = Path(__file__).parents[1]
STANDIN = HERE.parent / "npu_standin"
SEVERAL = "roles={trainer: {workers: 2, pool: x}, rollout: {pool: x}, embedding: {workers: 1}, evaluator: {pool: x}}"
ONE = "roles={trainer: {pool: x}, rollout: {pool: x}, embedding: {workers: 1}, evaluator: {pool: x}}"

pytestmark = pytest.mark.slow


def run(
    folder: Path, name: str, pools: str, roles: str = SEVERAL, timeout_s: float = 800, **variables: str
) -> dict[str, dict[str, str]]:
    """Run the ring, or NONET_SCENARIO; the hashes of every commit's files, by commit."""
    (folder / f"{name}-wire").mkdir()
    done = subprocess.run(
        [sys.executable, str(HERE / "ring_process.py"), str(folder), name, '{"NPU": 4}', roles, pools],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        | {"NONET_ATTENTION": "reference"}  # else each device takes the kernel made for it
        | {"NONET_WIRE": str(folder / f"{name}-wire")}
        | variables,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    commits = sorted((folder / name / "checkpoints").glob("step-*/manifest.json"))
    return {path.parent.name: json.loads(path.read_text())["files"] for path in commits}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = make_ring(tmp_path_factory.mktemp("ring"))
    (folder / "counts").mkdir()
    path = f"{STANDIN}:${{PYTHONPATH}}"
    env = f"{{vars: {{PYTHONPATH: '{path}', NONET_NPU_COUNTS: {folder / 'counts'}}}}}"
    host = run(folder, "host", "pools={x: {}}")
    npu = run(folder, "npu", f"pools={{x: {{device: npu, env: {env}}}}}")
    return folder, host, npu


def test_every_commit_on_npu_has_the_files_of_the_run_on_cpu(both):
    _, host, npu = both
    assert len(host) >= 3
    assert npu == host


def test_every_metric_on_npu_is_that_on_cpu(both):
    folder, *_ = both
    for name in ("pretrain.json", "finetune.json", "rl.json", "comparison.json"):
        ours, theirs = ((folder / run / "results" / name).read_text() for run in ("host", "npu"))
        assert ours == theirs


def test_trainer_rollout_and_evaluator_did_their_sums_on_the_npu(both):
    folder, *_ = both
    counts = [Counter(json.loads(path.read_text())) for path in (folder / "counts").glob("*.json")]
    assert len(counts) == 4  # two trainers, a rollout, an evaluator
    backward = [count for count in counts if count["aten::native_layer_norm_backward"]]
    assert len(backward) == 2  # the trainers'
    assert all(count["hccl::allreduce"] > 10 for count in backward)  # their gradients meet on the device
    for count in counts:
        assert count["aten::native_layer_norm"] > 10
        assert count["aten::mm"] + count["aten::addmm"] > 50
    plan = json.loads((folder / "npu" / "plan.json").read_text())
    on_npu = {role for group in plan["groups"] if group["device"] == "npu" for role in group["roles"]}
    assert on_npu == {"trainer", "rollout", "evaluator", "tokenise"}


@pytest.mark.timeout(2400)
def test_every_commit_of_the_quickstart_on_npu_has_the_files_of_the_run_on_cpu(tmp_path):
    env = f"{{vars: {{PYTHONPATH: '{STANDIN}:${{PYTHONPATH}}'}}}}"
    pools = {"host": "pools={x: {}}", "npu": f"pools={{x: {{device: npu, env: {env}}}}}"}
    found = {
        name: run(
            tmp_path, name, pool, ONE, 1200, NONET_SCENARIO="quickstart", NONET_ATTENTION="sdpa"
        )  # torch's CPU kernel: the reference takes three times as long
        for name, pool in pools.items()
    }
    assert len(found["host"]) == 6
    assert found["npu"] == found["host"]
