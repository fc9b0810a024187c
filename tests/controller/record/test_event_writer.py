import subprocess
import sys

import pytest

from nonet.controller.record.event_writer import EventWriter


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(point.step, point.value, point.wall_time) for point in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_reads_back_every_scalar_with_its_step_and_time(tmp_path):
    with EventWriter(tmp_path / "tensorboard") as writer:
        for step in range(5):
            writer.scalar("pretrain/loss", 4.0 - step / 2, step, wall_time=1000.0 + step)
        writer.scalar("rl/kl", 0.25, 7, wall_time=2000.0)
    assert read(tmp_path / "tensorboard") == {
        "pretrain/loss": [(step, 4.0 - step / 2, 1000.0 + step) for step in range(5)],
        "rl/kl": [(7, 0.25, 2000.0)],
    }


def test_what_was_flushed_is_readable_while_the_run_goes_on(tmp_path):
    writer = EventWriter(tmp_path)
    writer.scalar("loss", 1.5, 1, wall_time=1.0)
    writer.flush()
    assert read(tmp_path) == {"loss": [(1, 1.5, 1.0)]}
    writer.close()
    writer.close()


def test_a_resumed_run_replaces_the_steps_after_its_commit(tmp_path):
    with EventWriter(tmp_path) as writer:
        for step in range(1, 7):
            writer.scalar("loss", 10.0 + step, step, wall_time=float(step))
    with EventWriter(tmp_path, replace_from=4) as writer:
        for step in (4, 5):
            writer.scalar("loss", 20.0 + step, step, wall_time=100.0 + step)
    assert [(step, value) for step, value, _ in read(tmp_path)["loss"]] == [
        (1, 11.0),
        (2, 12.0),
        (3, 13.0),
        (4, 24.0),
        (5, 25.0),
    ]


def test_a_time_is_put_in_when_none_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.0)
    with EventWriter(tmp_path) as writer:
        writer.scalar("loss", 1.0, 1)
    assert read(tmp_path)["loss"][0][2] == pytest.approx(1_700_000_000.0)


def test_writing_events_imports_neither_torch_nor_tensorflow(tmp_path):
    code = (
        "import sys; from nonet.controller.record.event_writer import EventWriter\n"
        "assert 'tensorboard' not in sys.modules\n"
        f"with EventWriter({str(tmp_path)!r}) as w: w.scalar('loss', 1.0, 1)\n"
        "print(sorted({'torch', 'tensorflow', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
