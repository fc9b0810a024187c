"""Runs with MLflow and Weights & Biases. `pip install mlflow-skinny wandb` for these tests; the server is a stand-in."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from tests_ring import make_ring

from nonet.controller.record.tracking.kinds import Tracker
from nonet.controller.record.tracking.recorder import Recorder

# MLflow's own code uses deprecated parts of SQLAlchemy.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PROCESS = Path(__file__).parents[3] / "deploy" / "ring_process.py"


def run_ring(folder: Path, *changes: str) -> Path:
    """Run the ring in a process and a Ray of its own; return the folder of the run."""
    done = subprocess.run(
        [sys.executable, str(PROCESS), str(folder), "run", "{}", *changes],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"MLFLOW_ENABLE_WORKSPACES": "false"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "run"


def count_steps(run: Path) -> dict[str, int]:
    """Return the number of values of each metric of a run's file, by STAGE/NAME."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return dict(Counter(f"{record['stage']}/{record['name']}" for record in records))


def iterate_log_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, whose blocks have 32 KiB."""
    record, position = b"", 7  # after the header of W&B
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        _, size, part = struct.unpack("<IHB", content[position : position + 7])
        if left < 7 or part == 0:
            position += left
            continue
        record += content[position + 7 : position + 7 + size]
        position += 7 + size
        if part in (1, 4):  # the whole of a record, or its last part
            yield record
            record = b""


def read_wandb(run: Path) -> dict[str, list[float]]:
    """Return the values of each metric in the offline files of W&B, by STAGE/NAME, in their order."""
    protocol = import_module("wandb.proto.wandb_internal_pb2")
    values: dict[str, list[float]] = {}
    for file in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        for data in iterate_log_records(file.read_bytes()):
            record = protocol.Record()
            record.ParseFromString(data)
            for item in record.history.item:
                values.setdefault(item.key or item.nested_key[0], []).append(json.loads(item.value_json))
    return values


def test_an_offline_run_of_wandb_has_every_metric_of_a_run(no_ray, tmp_path):
    pytest.importorskip("wandb")
    make_ring(tmp_path)
    run = run_ring(tmp_path, "tracking={wandb: {mode: offline}}")
    values = read_wandb(run)
    counts = count_steps(run)
    assert counts["pretrain/loss"] >= 2
    assert {name: len(values[name]) for name in counts} == counts
    assert json.loads((run / "report.json").read_text())["tracking"]["wandb"]["unsent_bytes"] == 0


def test_wandb_gets_no_step_twice_when_a_run_is_resumed(tmp_path):
    pytest.importorskip("wandb")
    tracker = Tracker.model_validate({"use": "wandb", "mode": "offline"})
    for steps in ((1, 2, 3), (2, 3, 4)):
        recorder = Recorder(tmp_path, "shop-1", {"wandb": tracker})
        for step in steps:
            recorder.record_metrics("rl", step, {"loss": float(step)})
        recorder.close("failed")
        time.sleep(1.1)  # W&B names a folder by the second
    assert read_wandb(tmp_path)["rl/loss"] == [1.0, 2.0, 3.0, 4.0]


def test_an_mlflow_run_has_every_metric_of_a_run_once_and_its_parameters(no_ray, tmp_path):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    make_ring(tmp_path)
    address = f"sqlite:///{tmp_path}/mlflow.db"
    run = run_ring(tmp_path, f"tracking={{mlflow: {{address: '{address}'}}}}")
    tracker = Tracker.model_validate({"use": "mlflow", "address": address, "experiment": "ring"})
    resumed = Recorder(run, "run", {"mlflow": tracker})
    resumed.record_metrics("rl", 1, {"loss": -1.0})  # a step that the tracker has
    resumed.record_metrics("rl", 99, {"loss": 0.5})
    resumed.close("done")
    client = import_module("mlflow.tracking").MlflowClient(address)
    experiment = client.get_experiment_by_name("ring")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.tags["nonet.run"] == "run"
    assert found.data.params["seed"] == "5"
    history = [(point.step, point.value) for point in client.get_metric_history(found.info.run_id, "rl/loss")]
    assert len({step for step, _ in history}) == len(history) == count_steps(run)["rl/loss"] - 1
    assert history[-1] == (99, 0.5)
    assert all(value != -1.0 for _, value in history)


def test_a_run_whose_trackers_do_not_answer_ends_well_and_its_report_says_so(no_ray, tmp_path):
    pytest.importorskip("mlflow")
    make_ring(tmp_path)
    run = run_ring(tmp_path, "tracking={mlflow: {address: 'http://127.0.0.1:9'}}")
    state = json.loads((run / "report.json").read_text())["tracking"]["mlflow"]
    assert (state["sent"], state["unsent_bytes"] > 0) == (0, True)
    assert "The tracker mlflow lacks metrics of this run" in (run / "report.html").read_text()
