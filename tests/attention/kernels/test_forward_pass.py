"""Runs the kernels' checks (interpreter_*.py) with Triton's interpreter, on CPU tensors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels are Triton's; its Linux wheel also runs without a GPU")
HERE = Path(__file__).parents[1]
CHECKS = [str(HERE / name) for name in ("interpreter_kernels.py", "interpreter_plans.py")]


def run(marker):
    command = [sys.executable, "-m", "pytest", *CHECKS, "-m", marker, "--timeout=800", "-x"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.timeout(600)
def test_the_kernels_match_float64_in_the_interpreter():
    run("not slow")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_kernels_match_float64_in_every_tile_shape_feature_and_dtype():
    run("slow")
