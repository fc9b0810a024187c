"""The ring on a real CUDA device, where there is one: it repeats its bits and agrees with cpu within the limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests_ring import make_ring

HERE = Path(__file__).parents[1]
SEVERAL = "roles={trainer: {pool: x}, rollout: {workers: 1}, evaluator: {workers: 1}}"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def process(script: str, *arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        capture_output=True,
        text=True,
        timeout=800,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_ring(tmp_path_factory.mktemp("ring"))


def test_a_trainer_on_cuda_gives_the_same_bits_twice(folder):
    for name in ("first", "second"):
        process("ring_process.py", str(folder), name, "{}", SEVERAL, "pools={x: {device: cuda}}")
    files = [
        json.loads(path.read_text())["files"]
        for name in ("first", "second")
        for path in [max((folder / name / "checkpoints").glob("step-*/manifest.json"))]
    ]
    assert files[0] == files[1]


def test_cuda_agrees_with_cpu_within_the_limits_of_fp32(folder):
    told = json.loads(process("parity_process.py", str(folder), "cpu,cuda"))
    assert told["cpu,cuda"]["beyond"] == []
    assert [side["device"] for side in told["cpu,cuda"]["sides"]] == ["cpu", "cuda:0"]
