"""`nonet status`, `logs`, `why` and `runs` for runs in a folder of this machine."""

from __future__ import annotations

import json
import re
import time

import pytest

from nonet.controller.record import RunFolder, lock_run


@pytest.fixture
def run(tmp_path, monkeypatch) -> RunFolder:
    """Make the folder of a run whose controller has written a status and whose workers have written logs."""
    monkeypatch.setenv("NONET_RUNS", str(tmp_path))
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    folder, logs = RunFolder(tmp_path / "mine"), tmp_path / "session_1" / "logs"
    folder.path.mkdir()
    logs.mkdir(parents=True)
    folder.scenario.write_text("name: x")
    for name, text in {
        "aa-01-7.out": "events\n",
        "bb-01-8.out": "rank 0\n",
        "cc-01-9.out": "rank 1\n",
    }.items():
        (logs / f"worker-{name}").write_text(text)
        (logs / f"worker-{name}").with_suffix(".err").write_text(f"warned: {text}")
    groups = {"trainer": {"roles": ["trainer", "rollout"], "workers": 2, "pids": [8, 9]}}
    status = {
        "run": "mine",
        "state": "running",
        "stage": "rl",
        "step": 3,
        "steps": 40,
        "started": 1_700_000_000.0,
    }
    status |= {
        "at": time.time(),
        "quiet_s": 1.0,
        "pid": 7,
        "host": "here",
        "log": str(logs / "worker-aa-01-7.out"),
    }
    folder.write_json(
        "status.json", status | {"groups": groups, "phase": "", "metrics": {"reward": 0.5}, "waits": []}
    )
    return folder


def change(run: RunFolder, **fields) -> None:
    """Change fields of the status in a run's folder."""
    run.write_json("status.json", run.read_json("status.json") | fields)


def test_a_run_in_progress_shows_stage_step_and_workers(run, command):
    with lock_run(run):
        code, out, err = command("status")
        assert code == 0, err
        lines = dict(line.split(maxsplit=1) for line in out.splitlines())
        assert lines["run"] == "mine: running"
        assert lines["stage"] == "rl 3/40  reward 0.5"
        assert lines["workers"] == "trainer x2"
        assert "waits" not in lines
        assert "storage" not in lines
        change(
            run, storage="nothing could be stored for 70 s, and is tried again: the server does not answer"
        )
        shown = dict(line.split(maxsplit=1) for line in command("status")[1].splitlines())
        assert shown["storage"].startswith("nothing could be stored for 70 s")
        assert command("why")[1].splitlines()[1].startswith("  waits for nothing: its last progress was")
        row = json.loads(command("runs", "--json")[1])[0]
        assert (row["state"], row["stage"], row["step"]) == ("running", "rl", "3/40")


def test_a_run_without_a_process_is_interrupted_whatever_its_last_status_says(run, command):
    assert json.loads(command("status", "mine", "--json")[1])["state"] == "interrupted"
    code, _, err = command("why", "mine")
    assert (code, err) == (2, "nonet: mine is not in progress (interrupted), so it waits for nothing\n")
    change(run, state="stopped")
    assert json.loads(command("status", "mine", "--json")[1])["state"] == "stopped"
    with lock_run(run):  # it has been resumed
        assert json.loads(command("status", "mine", "--json")[1])["state"] == "starting"
    run.report.write_text("{}")
    assert json.loads(command("status", "mine", "--json")[1])["state"] == "done"


def test_why_says_what_the_controller_wrote_and_that_it_has_fallen_silent(run, command):
    change(run, at=time.time() - 100, waits=["trainer.update: rank 1 of 2 has not answered for 9 s"])
    with lock_run(run):
        out = command("why", "mine")[1].splitlines()
    assert out[0] == "mine: running (rl 3/40  reward 0.5)"
    assert re.match(r"  the controller \(pid 7 on here\) has written no status for 1\d\d s", out[1])
    assert out[2] == "  trainer.update: rank 1 of 2 has not answered for 9 s"


def test_a_controller_whose_clock_is_ahead_made_its_progress_in_the_past(run, command):
    change(run, at=time.time() + 500, quiet_s=4.0)
    with lock_run(run):
        out = command("why", "mine")[1].splitlines()
    assert out[1] == "  waits for nothing: its last progress was 4 s ago"


def test_the_log_of_a_role_and_rank_is_found_by_the_worker_s_process(run, command):
    assert command("logs", "mine") == (0, "events\nwarned: events\n", "")
    assert command("logs", "mine", "--role", "rollout", "--rank", "1") == (0, "rank 1\nwarned: rank 1\n", "")
    for words, text in (
        (["--role", "rollout", "--rank", "2"], "has no rank 2 of rollout; it has 2 started workers"),
        (["--role", "nothing"], "has no role 'nothing'; roles: controller, trainer, rollout"),
    ):
        code, _, err = command("logs", "mine", *words)
        assert (code, text in err) == (2, True)
    (run.path.parent / "session_1" / "logs" / "worker-cc-01-9.out").unlink()
    code, _, err = command("logs", "mine", "--role", "rollout", "--rank", "1")
    assert (code, "the log of process 9 is not in" in err) == (2, True)


def test_a_log_is_followed_until_the_run_has_ended_and_nothing_is_printed_twice(run, command, monkeypatch):
    held, log = lock_run(run), run.path.parent / "session_1" / "logs" / "worker-aa-01-7.out"
    pauses = []

    def write_and_end(_: float) -> None:
        pauses.append(0)
        with log.open("a") as file:
            file.write(f"more {len(pauses)}\n")
        if len(pauses) == 3:
            held.close()

    monkeypatch.setattr("nonet.deploy.run.status.time.sleep", write_and_end)
    assert command("logs", "mine", "-f")[1] == "events\nwarned: events\nmore 1\nmore 2\nmore 3\n"


def test_a_log_has_no_statuses_and_a_line_that_is_being_written_is_printed_once_and_whole(
    run, command, monkeypatch
):
    held, log = lock_run(run), run.path.parent / "session_1" / "logs" / "worker-aa-01-7.out"
    parts = ['{"format": 1, "run": ', '"mine", "state": "running"}\nha', "lf\n", "end"]

    def write_and_end(_: float) -> None:
        with log.open("a") as file:
            file.write(parts.pop(0))
        if not parts:
            held.close()

    monkeypatch.setattr("nonet.deploy.run.status.time.sleep", write_and_end)
    assert command("logs", "mine", "-f")[1] == "events\nwarned: events\nhalf\nend"


def test_watching_prints_a_line_per_change_and_ends_with_the_run(run, command, monkeypatch):
    held, pauses = lock_run(run), []

    def go_on(_: float) -> None:
        pauses.append(0)
        if len(pauses) == 3:
            change(run, step=4)
        change(run, waits=[f"trainer.save: rank 0 of 1 has not answered for {len(pauses)} s"])
        if len(pauses) == 4:
            run.report.write_text("{}")

    monkeypatch.setattr("nonet.deploy.verbs.watching.time.sleep", go_on)
    code, out, _ = command("status", "mine", "--watch")
    held.close()
    assert code == 0
    assert [line.split(maxsplit=1)[1] for line in out.splitlines()] == [
        "running  rl 3/40  reward 0.5",
        "running  rl 3/40  reward 0.5  waits: trainer.save: rank 0 of 1 has not answered for 1 s",
        "running  rl 4/40  reward 0.5  waits: trainer.save: rank 0 of 1 has not answered for 3 s",
        "done  rl 4/40  reward 0.5",
    ]


@pytest.mark.parametrize("place", ["elsewhere/x", "session_1/elsewhere/x", "session_2/logs/x"])
@pytest.mark.parametrize("pid", [7, "*", None])
def test_logs_prints_files_of_ray_alone_whatever_a_status_says(run, command, place, pid):
    secret = run.path.parent / "elsewhere" / "worker-aa-7.out"
    for folder in (secret.parent, run.path.parent / "session_1" / "elsewhere", run.path.parent / "session_2"):
        folder.mkdir()
    secret.write_text("secret")
    (run.path.parent / "session_1" / "elsewhere" / "worker-aa-7.out").write_text("secret")
    (run.path.parent / "session_2" / "logs").symlink_to(secret.parent)
    change(run, log=str(run.path.parent / place), pid=pid)
    code, out, err = command("logs", "mine")
    assert (code, out) == (2, "")
    assert "is none of Ray's" in err


@pytest.mark.parametrize("fields", [{"pid": "*"}, {}])
def test_logs_follows_no_link_and_no_pattern_within_ray_s_folder(run, command, fields):
    log = run.path.parent / "session_1" / "logs" / "worker-aa-01-7.out"
    (run.path.parent / "secret").write_text("secret")
    for file in (log, log.with_suffix(".err")):
        file.unlink()
        file.symlink_to(run.path.parent / "secret")
    change(run, **fields)
    code, out, _ = command("logs", "mine")
    assert (code, out) == (2, "")


def test_texts_of_a_run_do_not_steer_the_terminal(run, command):
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202ered"
    change(run, state="failed", error=evil, host=evil, stage=evil, storage=evil, message=evil)
    shown = [command("status")[1], command("runs")[1]]
    change(run, state="running", waits=[evil])
    with lock_run(run):
        shown += [command(verb)[1] for verb in ("why", "status", "runs")]
    for out in shown:
        assert "]0;owned[2J31mred" in out
        assert all(mark.isprintable() for mark in out.replace("\n", ""))


@pytest.mark.parametrize(
    "content",
    [
        "[" * 200_000,
        "[1]",
        '{"started": "now"}',
        '{"started": 1e300}',
        '{"steps": 3}',
        '{"metrics": {"x": "y"}, "stage": "rl"}',
    ],
)
def test_a_damaged_status_is_one_line_and_hides_no_other_run(run, command, content):
    run.status.write_text(content)
    with lock_run(run):
        code, out, err = command("status", "mine") if "steps" not in content else command("runs")
        assert "damaged" in (err if code else out)
        assert (code, err.count("\n")) in ((2, 1), (0, 0))
        rows = json.loads(command("runs", "--json")[1])
    assert [row["run"] for row in rows] == ["mine"]
