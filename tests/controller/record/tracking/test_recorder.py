import json
import subprocess
import sys

import pytest

from nonet.controller.record.tracking.recorder import Recorder


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(point.step, point.value, point.wall_time) for point in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Record losses by step as a run does that goes on after `done` steps, at a time of 100 seconds a step."""

    def recorded(losses, done=0):
        recorder = Recorder(tmp_path, "shop-1")
        recorder.begin("pretrain", 10, done)
        for step, loss in losses.items():
            monkeypatch.setattr("time.time", lambda at=100.0 * step: at)
            recorder.record_step("pretrain", step, {"loss": loss})
        return recorder

    return recorded


def test_tensorboard_and_the_lines_have_every_value_with_its_step_and_time_while_the_run_goes_on(
    record, tmp_path
):
    recorder = record({step: 4.0 - step / 2 for step in range(1, 5)})
    assert read(tmp_path / "tensorboard" / "pretrain") == {
        "loss": [(step, 4.0 - step / 2, 100.0 * step) for step in range(1, 5)]
    }
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["value"], line["t"], line["unit"]) for line in lines] == [
        (step, 4.0 - step / 2, 100.0 * step, "nats") for step in range(1, 5)
    ]
    recorder.close()
    recorder.close()


def test_a_resumed_run_replaces_the_steps_after_its_commit(record, tmp_path):
    record({step: 10.0 + step for step in range(1, 7)}).close()
    record({step: 20.0 + step for step in (4, 5)}, done=3).close()
    curve = [(step, value) for step, value, _ in read(tmp_path / "tensorboard" / "pretrain")["loss"]]
    assert curve == [(1, 11.0), (2, 12.0), (3, 13.0), (4, 24.0), (5, 25.0)]


def test_a_recorder_imports_neither_torch_nor_tensorflow_before_it_draws_a_curve():
    code = (
        "import sys; from nonet.controller.record import Recorder\n"
        "print(sorted({'torch', 'tensorflow', 'tensorboard', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_events_are_lines_of_json_with_stable_names_and_without_steps(tmp_path):
    recorder = Recorder(tmp_path, "shop-1")
    recorder.begin("rl", 40, 3)
    recorder.record_step("rl", 4, {"loss": 1.0})
    recorder.add_event("note", text="the controller was restarted")
    recorder.add_event("result", name="rl", metrics={"recall@5": 0.5}, shown=[], users=[], baseline=False)
    recorder.close("stopped")
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert all(line.pop("run") == "shop-1" and line.pop("t") > 0 for line in lines)
    assert lines == [
        {"event": "stage", "stage": "rl", "steps": 40, "done": 3},
        {"event": "note", "text": "the controller was restarted"},
        {"event": "result", "name": "rl", "metrics": {"recall@5": 0.5}},
        {"event": "end", "state": "stopped"},
    ]
    recorder.add_event("note", text="a tracker failed after the end")
