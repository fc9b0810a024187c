"""`nonet bench gpu` run small on a CPU: every cell is there, what fails says why and the rest is measured."""

import json
import os
import subprocess
import sys

import pytest

from nonet.bench.attention.gpu import GpuRun, bench_gpu
from nonet.errors import ConfigError

pytest.importorskip("triton", reason="the kernels are Triton's; its Linux wheel also runs without a GPU")


def test_a_failing_cell_leaves_its_error_and_the_next_one_runs(tmp_path, capsys):
    run = GpuRun(tmp_path / "out.json", budget_s=100.0)
    assert run.run_cell("bad", lambda: 1 / 0) == {"error": "ZeroDivisionError: division by zero"}
    run.results["good"] = run.run_cell("good", lambda: {"ms": 1.0})
    run.save()
    assert json.loads(run.path.read_text()) == {"good": {"ms": 1.0}}
    late = GpuRun(None, budget_s=-1.0)
    assert "not begun" in late.run_cell("late", lambda: pytest.fail("no cell begins after the budget"))
    assert '"good"' in capsys.readouterr().out


ON_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def test_without_a_gpu_nothing_is_measured_and_the_error_says_so(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="there is no GPU here"):
        bench_gpu(only="x")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dry_run_goes_through_every_row_on_a_cpu(tmp_path):
    out = tmp_path / "dry.json"
    command = [sys.executable, "-c", "from nonet.deploy.cli import main; main()", "bench", "gpu"]
    for change in ("dry=true", "widths=[16]", "budget_s=1200"):
        command += ["--set", change]
    command += ["--json", str(out)]
    done = subprocess.run(command, env={**os.environ, **ON_CPU}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["checks"]["causal"]["plan equals the host's"] is True
    assert found["checks"]["gradients equal over runs"] is True
    assert len(found["rows"]) == 9
    for row in found["rows"]:
        assert row["ours forward ms"] > 0, row
        assert row["flex forward ms"] > 0, row
        assert "error" not in row
        assert ("flex backward error" in row) != row["name"].startswith("beam"), "it has none on a CPU"
