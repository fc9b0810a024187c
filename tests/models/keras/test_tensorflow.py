"""Keras models with TensorFlow, in an interpreter of its own. `make test-all` makes one; CI's fast tests have JAX alone.

The interpreter must have this one's packages, keras and TensorFlow, as `make .venv-tensorflow` makes it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("NONET_TENSORFLOW_PYTHON", str(ROOT / ".venv-tensorflow" / "bin" / "python"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]  # seven runs, beside another worker of xdist


def run(*words: str, **variables: str) -> None:
    """Run a command; its output is that of the test."""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(words, env=environment | variables, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@pytest.fixture(autouse=True)
def tensorflow():
    """Fail where there is no interpreter with TensorFlow."""
    assert Path(PYTHON).exists(), (
        f"there is no {PYTHON}: make .venv-tensorflow, or set NONET_TENSORFLOW_PYTHON"
    )


def test_rankers_do_with_tensorflow_what_they_do_with_jax():
    run(
        *(PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow"),
        *(f"tests/models/keras/{name}" for name in ("test_rankers.py", "test_fit.py", "test_refusals.py")),
        NONET_KERAS_BACKEND="tensorflow",
        PYTHONPATH=str(ROOT / "src"),
    )


def test_runs_train_with_tensorflow_in_an_interpreter_of_its_own():
    file = "tests/deploy/run/clicks/test_run_keras.py"
    run(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-m", "slow or not slow"),
        NONET_KERAS_PYTHON=PYTHON,
        PYTHONPATH=str(ROOT / "src"),
    )


@pytest.mark.parametrize("order", [("torch", "tensorflow"), ("triton", "tensorflow", "torch")])
def test_torch_and_tensorflow_work_in_one_process_in_both_orders(order):
    imports = "; ".join(f"import {name}" for name in order)
    program = f"{imports}; import torch._dynamo; import tensorflow as tf; print(float(torch.ones(2).sum() + tf.ones(2)[0]))"
    if order[0] == "torch":
        program = program.replace("import torch;", "import torch; import torch._dynamo;")
    run(PYTHON, "-c", program)
