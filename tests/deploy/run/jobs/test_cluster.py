"""Submitting to a real cluster, by its dashboard alone: a whole run, its logs, a stop, a resumption, a token."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from tests_ring import make_ring

SHORT = [f"--set=stages.{stage}.epochs=1" for stage in ("pretrain", "finetune")]
LONG = ["--set=stages.pretrain.epochs=4000"]


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    """Make a folder with a scenario that .gitignore would leave without its tables and its reward."""
    folder = make_ring(tmp_path_factory.mktemp("ring"))
    (folder / ".gitignore").write_text("*.parquet\nrewards/\n")
    return folder


def wait_for_step(head, ring: Path, run: str, state: str = "running") -> dict:
    """Wait until a run has made a step, and return its status."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        code, out, err = head.run("status", run, "--json", cwd=ring)
        assert code == 0, err
        status = json.loads(out)
        if status["state"] == state and status.get("step"):
            return status
        time.sleep(0.5)
    raise AssertionError(f"{run} did not get to a step: {status}")


@pytest.mark.timeout(300)
def test_a_variable_that_the_cluster_lacks_ends_the_job_in_one_line_and_leaves_nothing(head, ring):
    code, out, err = head.run(
        "submit", "ring.yaml", "--name", "poor", "--env", "ABSENT", cwd=ring, ABSENT="here"
    )
    assert code == 2, out + err
    assert "nonet: the job's environment lacks ABSENT (--env)" in out
    assert "Traceback" not in out + err
    assert not (head.home / "nonet-runs").exists()
    code, out, _ = head.run("runs", cwd=ring)
    assert (code, out) == (0, "no runs yet: nonet submit quickstart\n")
    # The job's id is free again: Ray does not list the job as one without an entrypoint.
    code, out, err = head.run("submit", "ring.yaml", "--name", "poor", "--env", "ABSENT", cwd=ring)
    assert (code, "job        poor\n" in out) == (2, True), out + err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_submitted_run_ends_with_its_report_and_is_found_by_every_verb(head, ring):
    from ray_head import CuttingProxy

    proxy = CuttingProxy(head.ports["dashboard-port"])
    submit = ["submit", "ring.yaml", "--name", "whole", *SHORT, "--address", proxy.address]
    code, out, err = head.run(*submit, cwd=ring)
    proxy.close()
    assert code == 0, out[-3000:] + err[-2000:]
    assert proxy.cuts > 5
    run = head.home / "nonet-runs" / "whole"
    assert json.loads((run / "report.json").read_text())["run"] == "whole"
    assert out.count(f"this run's folder: {run} on ") == 2
    end = [line.split(maxsplit=1) for line in out.splitlines()[-4:]]
    assert [name for name, _ in end] == ["run", "report", "next", "exit"]
    assert end[1][1].startswith(f"{run}/report.html on ")
    assert json.loads(head.run("runs", "--json", cwd=ring)[1])[-1] | {"started": ""} == {
        "run": "whole",
        "state": "done",
        "started": "",
        "stage": "evaluate",
        "job": "whole",
    }
    log = head.run("logs", "whole", cwd=ring)[1]
    assert log in out
    assert "rl done: 4 steps" in log
    assert ":actor_name:trainer-0" in head.run("logs", "whole", "--role", "rollout", cwd=ring)[1]
    for verb, text in (("stop", "nothing to stop"), ("why", "waits for nothing")):
        code, _, err = head.run(verb, "whole", cwd=ring)
        assert (code, text in err) == (2, True)
    code, _, err = head.run("submit", "ring.yaml", "--name", "whole", cwd=ring)
    assert (code, "run whole has finished" in err) == (2, True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_is_stopped_or_whose_job_is_killed_continues_when_it_is_submitted_again(head, ring):
    submit = ["submit", "ring.yaml", "--name", "long", *LONG, "--detach"]
    assert head.run(*submit, cwd=ring)[0] == 0
    first = wait_for_step(head, ring, "long")
    code, _, err = head.run(*submit, cwd=ring)
    assert (code, "long is in progress" in err) == (2, True)
    assert head.run("stop", "lon", cwd=ring) == (0, "stopped long\n", "")
    assert json.loads(head.run("status", "long", "--json", cwd=ring)[1])["state"] == "stopped"
    assert head.run(*submit, cwd=ring)[0] == 0
    second = wait_for_step(head, ring, "long")
    assert second["step"] > first["step"]
    (driver,) = [
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if _read_words(folder)[1:3] == [f"{_find_bin()}/nonet", "job"] and _read_words(folder)[3] == "long"
    ]
    os.kill(driver, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while json.loads(head.run("status", "long", "--json", cwd=ring)[1])["state"] != "stopping":
        assert time.monotonic() < deadline
    # The controller of the killed job still has its lease; the new job stops it and continues from its checkpoint.
    assert head.run(*submit, cwd=ring)[0] == 0
    third = wait_for_step(head, ring, "long")
    assert third["step"] > second["step"]
    assert third["job"] == "long-3"
    assert head.run("stop", "long", cwd=ring)[0] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_why_names_the_worker_that_a_run_waits_for_and_its_deadline(head, ring):
    submit = ["submit", "ring.yaml", "--name", "held", *LONG, "--detach"]
    assert head.run(*submit, cwd=ring)[0] == 0
    status = wait_for_step(head, ring, "held")
    assert "waits for nothing" in head.run("why", "held", cwd=ring)[1]
    (trainer,) = status["groups"]["trainer"]["pids"]
    os.kill(trainer, signal.SIGSTOP)
    try:
        deadline, waits = time.monotonic() + 120, []
        while not any("trainer" in wait for wait in waits):
            assert time.monotonic() < deadline, waits
            waits = json.loads(head.run("why", "held", "--json", cwd=ring)[1])["waits"]
        assert any(
            re.match(r"trainer\.\w+: rank 0 of 1 has not answered for \d+ s; the deadline ends in", wait)
            for wait in waits
        )
        assert "trainer-0 does not answer" in waits
        # The same from the run's folder, on a machine that shares it.
        folder = str(head.home / "nonet-runs" / "held")
        assert "trainer-0 does not answer" in head.run("why", folder, cwd=ring, RAY_API_SERVER_ADDRESS="")[1]
    finally:
        os.kill(trainer, signal.SIGCONT)
    assert wait_for_step(head, ring, "held")["step"] >= status["step"]
    assert head.run("stop", "held", cwd=ring)[0] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_with_a_token_takes_the_right_one_only(tmp_path, ring):
    from ray_head import RayHead

    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef0123456789abcdef"}
    with RayHead(tmp_path, **token) as head:
        for variables, text in (
            ({"RAY_AUTH_MODE": "disabled"}, "wants a token"),
            ({"RAY_AUTH_TOKEN": "f" * 32}, "refuses the token"),
        ):
            for words in (["submit", "ring.yaml"], ["runs"], ["status", "x"], ["logs", "x"], ["stop", "x"]):
                code, _, err = head.run(*words, cwd=ring, **variables)
                assert (code, err.count("\n")) == (2, 1), err
                assert text in err
        code, _, err = head.run("submit", "ring.yaml", "--name", "safe", *LONG, "--detach", cwd=ring)
        assert code == 0, err
        wait_for_step(head, ring, "safe")
        assert ":actor_name:trainer-0" in head.run("logs", "safe", "--role", "trainer", cwd=ring)[1]
        assert head.run("stop", "safe", cwd=ring)[:2] == (0, "stopped safe\n")
        assert token["RAY_AUTH_TOKEN"] not in head.run("status", "safe", "--json", cwd=ring)[1]


def _read_words(folder: Path) -> list[str]:
    """Return the command line of a process, padded to four words."""
    try:
        words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        words = []
    return [*words, "", "", "", ""]


def _find_bin() -> Path:
    from ray_head import BIN

    return BIN
