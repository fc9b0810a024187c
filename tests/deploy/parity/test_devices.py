"""The promises of whole runs and of `nonet parity` on devices, in one process: the small form of the slow tests beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests_ring import make_ring

HERE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = make_ring(tmp_path_factory.mktemp("ring"))
    path = [str(HERE.parent / "npu_standin"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(HERE / "roles_on_devices.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": ":".join(path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_commit_trained_on_the_npu_stand_in_has_the_files_of_one_trained_on_cpu(told):
    assert any("dense" in name for name in told["files"])
    assert any("item" in name for name in told["files"])
    assert told["different"] == []


def test_the_npu_did_the_sums_of_the_trainer(told):
    assert told["counts"]["aten::native_layer_norm_backward"] >= 4
    assert told["counts"]["aten::mm"] + told["counts"]["aten::addmm"] > 50


def test_parity_of_cpu_and_npu_is_bit_for_bit(told):
    assert told["npu"]["same_bits"]
    assert (told["npu"]["first_different"], told["npu"]["beyond"]) == (None, [])
    assert told["npu"]["kl"] == {"mean": 0.0, "most": 0.0}
    assert [side["device"] for side in told["npu"]["sides"]] == ["cpu", "npu:0"]
    assert len(told["npu"]["modules"]) > 20


def test_parity_finds_where_half_precision_parts_and_that_it_stays_within_its_limits(told):
    half = told["half"]
    assert not half["same_bits"]
    assert half["first_different"] == "row.of_item#0"  # the first matrix product; embeddings are only read
    assert half["beyond"] == []
    assert 0 < half["kl"]["mean"] < half["limits"]["kl"]
