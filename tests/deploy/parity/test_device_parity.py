"""`nonet parity` on the ring: cpu against itself, against bf16, against the npu stand-in, and against a broken kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests_ring import make_ring

from nonet.deploy.parity.device_parity import compare_pools
from nonet.deploy.run import api
from nonet.errors import ConfigError, PlacementError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = make_ring(tmp_path_factory.mktemp("ring"))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "parity_process.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=800,
        env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_pool_agrees_with_itself_bit_for_bit(told):
    same = told["same"]
    assert same["same_bits"]
    assert (same["first_different"], same["beyond"]) == (None, [])
    assert same["kl"] == {"mean": 0.0, "most": 0.0}
    assert len(same["modules"]) > 20
    assert any(gradient["name"] == "rows of item" for gradient in same["gradients"])


def test_the_npu_stand_in_agrees_bit_for_bit(told):
    assert told["npu"]["same_bits"]
    assert [side["device"] for side in told["npu"]["sides"]] == ["cpu", "npu:0"]


def test_half_precision_differs_and_stays_within_its_limits(told):
    half = told["half"]
    assert not half["same_bits"]
    assert half["first_different"] == "row.of_item#0"  # the first matrix product; embeddings are only read
    assert half["beyond"] == []
    assert 0 < half["kl"]["mean"] < half["limits"]["kl"]


def test_a_broken_kernel_is_found_at_the_first_module_that_uses_it(told):
    broken = told["broken"]
    assert broken["first_beyond"].startswith("blocks.0.")
    assert "norm" in broken["first_beyond"]
    assert broken["first_different"] == broken["first_beyond"]
    assert any(
        sentence.startswith(f"module {broken['first_beyond']} differs by 1.0")
        for sentence in broken["beyond"]
    )
    assert "BEYOND: module blocks.0." in broken["text"]


def test_a_limit_that_is_passed_is_a_sentence(told):
    assert [sentence for sentence in told["tight"]["beyond"] if "KL" in sentence]


def test_what_cannot_be_compared_is_said_before_anything_starts(tmp_path):
    made = api.scenario(make_ring(tmp_path) / "ring.yaml")
    for pools, precision, said in (
        ("cpu,moon", "fp32", "'moon' is neither a pool of ring .* nor a device"),
        ("a,b,c", "fp32", "give two"),
        ("cpu,cpu", "fp32,fp8", "--precision 'fp8' is not one of fp32, bf16, fp16"),
    ):
        with pytest.raises(ConfigError, match=said):
            compare_pools(made, pools, precision)


def test_a_device_that_the_cluster_lacks_is_said_before_anything_is_trained(ray_local, tmp_path):
    made = api.scenario(make_ring(tmp_path) / "ring.yaml")
    with pytest.raises(PlacementError, match="pool 'npu' needs 1 NPU, the cluster has 0: use a cluster"):
        compare_pools(made, "cpu,npu")
