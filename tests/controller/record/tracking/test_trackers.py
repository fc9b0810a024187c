"""Trackers: what remote ones receive, when they fail, after a resume, and what the local ones export."""

import json
import threading
import time

import pytest

from nonet.controller.record.tracking import follower
from nonet.controller.record.tracking.kinds import TrackedRun, Tracker, TrackerSink, prometheus
from nonet.controller.record.tracking.kinds.mlflow import _clean_name
from nonet.controller.record.tracking.recorder import Recorder
from nonet.controller.scenario import load_scenario
from nonet.errors import ConfigError

WAIT_S = 30.0  # far more than any machine needs

SERVER = """
import json
from pathlib import Path
from nonet.plug import StrictModel, TrackerKind, TrackerSink

class Options(StrictModel):
    file: str
    down: str

class Server(TrackerSink):
    def __init__(self, run, file, down):
        self.file, self.down = Path(file), Path(down)
        if self.down.exists():
            raise ConnectionError("nobody answers\\nat the address")

    def write(self, points):
        if self.down.exists():
            raise ConnectionError("the connection was lost")
        with self.file.open("a") as file:
            file.writelines(f"{p.stage} {p.step} {p.name} {p.value}\\n" for p in points)

    def close(self, state):
        with self.file.open("a") as file:
            file.write(f"{state}\\n")

SPEC = TrackerKind(Server, Options)
"""


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Make a tracker that writes what it receives into a file, and fails while the file `down` exists."""
    monkeypatch.setattr(follower, "_POLL_S", 0.01)
    monkeypatch.setattr(follower, "_MAX_PAUSE_S", 0.02)
    module = tmp_path / "server.py"
    module.write_text(SERVER)
    files = {"file": str(tmp_path / "received"), "down": str(tmp_path / "down")}
    return Tracker(use=f"{module}:SPEC", **files)


def read_received(tmp_path):
    path = tmp_path / "received"
    return path.read_text().splitlines() if path.exists() else []


def wait_for(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_tracker_receives_every_value_once_and_the_end_of_the_run(tmp_path, server):
    recorder = Recorder(tmp_path, "shop-1", {"server": server})
    for step in (1, 2):
        recorder.record_metrics("rl", step, {"loss": 4.0 - step})
    recorder.flush_trackers()
    assert read_received(tmp_path) == ["rl 1 loss 3.0", "rl 2 loss 2.0"]
    assert recorder.get_tracking() == {"server": {"sent": 2, "unsent_bytes": 0, "error": ""}}
    recorder.close("stopped")
    assert read_received(tmp_path)[-1] == "stopped"


def test_steps_that_a_resumed_run_repeats_are_not_sent_twice(tmp_path, server):
    first = Recorder(tmp_path, "shop-1", {"server": server})
    for step in (1, 2, 3):
        first.record_metrics("rl", step, {"loss": float(step)})
    first.close("failed")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"t": 1, "cut off by a ki')
    second = Recorder(tmp_path, "shop-1", {"server": server})
    second.record_metrics("rl", 2, {"loss": -1.0})  # on the damaged line
    for step in (2, 3, 4):
        second.record_metrics("rl", step, {"loss": float(step)})
    second.close("done")
    steps = [line for line in read_received(tmp_path) if line.startswith("rl")]
    assert steps == ["rl 1 loss 1.0", "rl 2 loss 2.0", "rl 3 loss 3.0", "rl 4 loss 4.0"]


def test_steps_that_were_repeated_before_the_tracker_answered_are_sent_once(tmp_path, server):
    (tmp_path / "down").touch()
    recorder = Recorder(tmp_path, "shop-1", {"server": server})
    for step in (1, 2, 1, 2, 3):
        recorder.record_metrics("rl", step, {"loss": float(step)})
    recorder.flush_trackers()
    assert read_received(tmp_path) == []
    (tmp_path / "down").unlink()
    wait_for(lambda: len(read_received(tmp_path)) == 3)
    recorder.close()


def test_a_tracker_that_does_not_answer_is_one_warning_and_never_makes_the_run_wait(tmp_path, server):
    (tmp_path / "down").touch()
    recorder = Recorder(tmp_path, "shop-1", {"server": server})
    recorder.record_metrics("rl", 1, {"loss": 1.0})
    for _ in range(3):
        recorder.flush_trackers()
    notes = [event["text"] for event in recorder.list_since(0)]
    assert notes == [
        "warning: the tracker server cannot be used: ConnectionError: nobody answers at the address; metrics are in "
        "metrics.jsonl, and are sent when it works again"
    ]
    state = recorder.get_tracking()["server"]
    assert state["sent"] == 0
    assert state["unsent_bytes"] == (tmp_path / "metrics.jsonl").stat().st_size
    assert "nobody answers" in state["error"]
    recorder.close()


def test_a_tracker_that_hangs_is_left_behind_when_the_run_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("nonet.controller.record.tracking.recorder._FLUSH_PATIENCE_S", 0.05)
    released = threading.Event()

    class Hanging(TrackerSink):
        def write(self, points):
            released.wait(WAIT_S)

    made = follower.MetricsFollower("hanging", tmp_path / "metrics.jsonl", Hanging, lambda text: None)
    (tmp_path / "metrics.jsonl").write_text(
        '{"stage": "rl", "step": 1, "role": "trainer", "name": "loss", "value": 1, "t": 1}\n'
    )
    made.flush(0.05)
    made.close("done", 0.05)
    assert made._thread.is_alive(), "the run ended before its tracker"
    released.set()
    made._thread.join(WAIT_S)


def test_a_run_that_starts_again_without_a_checkpoint_is_followed_from_the_start(tmp_path, server):
    first = Recorder(tmp_path, "shop-1", {"server": server})
    for step in range(1, 9):
        first.record_metrics("rl", step, {"loss": float(step)})
    first.close("failed")
    (tmp_path / "metrics.jsonl").unlink()
    second = Recorder(tmp_path, "shop-1", {"server": server})
    second.record_metrics("rl", 9, {"loss": 9.0})
    second.close("done")
    assert read_received(tmp_path)[-2:] == ["rl 9 loss 9.0", "done"]


class FakeMetric:
    values: dict = {}

    def __init__(self, name, description, tag_keys):
        self.name, self.keys = name, tag_keys

    def set(self, value, tags):
        assert tuple(tags) == self.keys
        self.values[self.name, *tags.values()] = value

    def inc(self, amount, tags):
        assert amount > 0
        self.set(self.values.get((self.name, *tags.values()), 0) + amount, tags)


@pytest.fixture
def exported(monkeypatch):
    """Collect what a run exports: by name and labels, its value."""
    monkeypatch.setattr(FakeMetric, "values", {})
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.util.metrics.Gauge", FakeMetric)
    monkeypatch.setattr("ray.util.metrics.Counter", FakeMetric)
    return FakeMetric.values


def test_prometheus_gets_steps_rows_losses_rewards_phases_and_checkpoints_with_units(tmp_path, exported):
    recorder = Recorder(tmp_path, "shop-1")
    recorder.begin("rl", 40, 0)
    for step in (1, 2):
        metrics = {"loss": 3.0 - step, "prompts": 64.0, "rows/s": 100.0, "reward.hit": 0.5, "kl": 0.01}
        recorder.record_step("rl", step, metrics)
        recorder.record_metrics(
            "rl", step, {"machine seconds": 2.0, "machine dense": 1.5, "machine flops": 1e9}
        )
    recorder.record_metrics("rl", 2, {"checkpoint seconds": 0.5, "checkpoint bytes": 1e6}, role="controller")
    values = {key: value for key, value in exported.items() if "timestamp" not in key[0]}
    assert values == {
        ("nonet_train_steps", "shop-1", "rl"): 40,
        ("nonet_train_step", "shop-1", "rl"): 2,
        ("nonet_train_loss_nats", "shop-1", "rl"): 1.0,
        ("nonet_train_rows_total", "shop-1", "rl"): 128.0,
        ("nonet_train_rows_per_second", "shop-1", "rl"): 100.0,
        ("nonet_train_reward", "shop-1", "rl", "hit"): 0.5,
        ("nonet_train_metric", "shop-1", "rl", "trainer", "kl"): 0.01,
        ("nonet_train_phase_seconds_total", "shop-1", "rl", "all"): 4.0,
        ("nonet_train_phase_seconds_total", "shop-1", "rl", "dense"): 3.0,
        ("nonet_checkpoint_seconds", "shop-1"): 0.5,
        ("nonet_checkpoint_bytes", "shop-1"): 1e6,
        ("nonet_checkpoints_total", "shop-1"): 1,
    }
    recorder.close()


def test_prometheus_gets_the_state_of_a_run_and_counters_grow_by_what_was_added(exported):
    sink = prometheus.PrometheusSink(TrackedRun("shop-1", None))  # pyright: ignore[reportArgumentType]
    status = {"state": "running", "groups": {"trainer": {"workers": 2}}, "restarts": 1, "waits": ["x"]}
    status |= {"storage": {"write": {"requests": 3, "failures": 0, "seconds": 0.5}}, "silent_workers": 1}
    sink.set_status(status)
    sink.set_status(status | {"storage": {"write": {"requests": 5, "failures": 1, "seconds": 0.75}}})
    assert exported["nonet_run_active", "shop-1"] == 1
    assert exported["nonet_run_workers", "shop-1", "trainer"] == 2
    assert exported["nonet_run_silent_workers", "shop-1"] == 1
    assert exported["nonet_run_restarts", "shop-1"] == 1
    assert exported["nonet_storage_requests_total", "shop-1", "write"] == 5
    assert exported["nonet_storage_failures_total", "shop-1", "write"] == 1
    assert exported["nonet_storage_seconds_total", "shop-1", "write"] == 0.75
    sink.set_status(status | {"restarts": 3, "isolated": ["node"], "storage": {"write": {"requests": 2}}})
    sink.set_status(status | {"restarts": 3, "isolated": ["node"], "storage": {"write": {"requests": 6}}})
    assert exported["nonet_storage_requests_total", "shop-1", "write"] == 6, "a smaller total adds nothing"
    sink.close("failed")
    assert exported["nonet_run_active", "shop-1"] == 0
    assert exported["nonet_run_failed", "shop-1"] == 1
    assert exported["nonet_run_workers", "shop-1", "trainer"] == 0, "groups that ended have no workers"
    assert exported["nonet_run_silent_workers", "shop-1"] == exported["nonet_run_waits", "shop-1"] == 0
    assert exported["nonet_run_restarts", "shop-1"] == 3, "the run had recoveries after its end too"
    assert exported["nonet_run_isolated_nodes", "shop-1"] == 1


def test_prometheus_gets_the_time_at_which_training_began_once_for_all_stages(monkeypatch, exported):
    now = [100.0]
    monkeypatch.setattr(prometheus.time, "time", lambda: now[0])
    sink = prometheus.PrometheusSink(TrackedRun("shop-1", None))  # pyright: ignore[reportArgumentType]
    sink.begin("pretrain", 10, 0)
    now[0] = 200.0
    sink.begin("finetune", 10, 0)
    assert exported["nonet_train_start_timestamp_seconds", "shop-1"] == 100.0


def test_a_status_renews_all_gauges_which_ray_forgets_after_some_time(exported):
    sink = prometheus.PrometheusSink(TrackedRun("shop-1", None))  # pyright: ignore[reportArgumentType]
    sink.begin("pretrain", 10, 0)
    before = dict(exported)
    exported.clear()
    sink.set_status({"state": "running"})
    assert before.items() <= exported.items()


def test_mlflow_gets_names_that_it_allows():
    assert _clean_name("evaluate/beam/rl/recall@10") == "evaluate/beam/rl/recall_at_10"
    assert _clean_name("rl/mismatch/ratio.gpu+npu") == "rl/mismatch/ratio.gpu_npu"


def test_a_scenario_names_trackers_and_wrong_keys_are_refused():
    scenario, _ = load_scenario("quickstart", ["tracking={mlflow: {address: http://tracker:5000}, wandb: }"])
    assert scenario.tracking is not None
    assert scenario.tracking["mlflow"].get_options() == {"address": "http://tracker:5000", "experiment": None}
    assert scenario.tracking["wandb"].get_options()["mode"] == "online"
    for change, message in (
        ("tracking={mlfow: }", r"tracking\.mlfow: use: .*mlflow"),
        ("tracking={mlflow: {adress: x}}", r"tracking\.mlflow\.adress: unknown key"),
        ("tracking={wandb: {mode: none}}", r"tracking\.wandb\.mode: .*online"),
        ("tracking=mlflow", r"tracking: "),
    ):
        with pytest.raises(ConfigError, match=message) as raised:
            load_scenario("quickstart", [change])
        assert "\n" not in str(raised.value)


def test_the_file_of_metrics_stays_readable_for_a_tracker_with_values_that_are_not_finite(tmp_path, server):
    recorder = Recorder(tmp_path, "shop-1", {"server": server})
    recorder.record_metrics("rl", 1, {"loss": float("nan")})
    recorder.close()
    assert read_received(tmp_path)[0] == "rl 1 loss nan"
    assert json.loads((tmp_path / "tracking" / "server.json").read_text())["sent"] == 1
