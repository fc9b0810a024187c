"""The stand-in for an NPU (tests/npu_standin): the CPU's bits on a device of its own, and an NPU's refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STANDIN = Path(__file__).parents[2] / "npu_standin"
OPERATIONS = (
    *(
        "layer_norm",
        "attention_causal",
        "attention_masked",
        "gather",
        "index",
        "boolean",
        "transposed",
        "unique",
    ),
    *("written_view", "cat_softmax", "foreach", "topk", "nonzero", "dropout", "autocast", "trained"),
)


@pytest.fixture(scope="module")
def told():
    path = ":".join([str(STANDIN), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(STANDIN / "operations.py")],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_and_its_gradient_are_the_bits_of_the_cpu(told, operation):
    assert told["same"][operation]


def test_every_operation_is_listed_here(told):
    assert set(told["same"]) == set(OPERATIONS)
    assert told["claimed"] == "npu:0"
    assert told["asked"] >= 40  # different operations


def test_what_an_npu_refuses_is_refused(told):
    said = told["refused"]
    assert "same device" in said["add"]
    assert "same device" in said["product"]
    assert "TypeError: can't convert npu:0" in said["numpy"]
    assert "one device" in said["other"]
