"""Submitting to, listing and stopping runs on a stand-in for a cluster: what is sent, what is refused, and in which words."""

from __future__ import annotations

import json
import socket

import pytest

from nonet.deploy.run.jobs import runs
from nonet.deploy.run.jobs.client import ClusterClient


@pytest.fixture
def submit(ring, command, dashboard, monkeypatch):
    """Submit the ring scenario to the stand-in: (exit code, stdout, stderr)."""
    monkeypatch.chdir(ring)

    def call(*words: str) -> tuple[int, str, str]:
        return command("submit", "ring.yaml", "--address", dashboard.address, *words)

    return call


def test_a_submitted_job_has_a_stable_name_and_the_next_commands_are_printed(submit, dashboard):
    code, out, _ = submit("--name", "mine", "--detach")
    assert code == 0
    job = dashboard.jobs["mine"]
    assert job["entrypoint"] == "nonet job mine"
    assert job["metadata"] == {"nonet_run": "mine", "nonet_scenario": "ring"}
    assert f"nonet logs mine -f --address {dashboard.address}" in out
    assert len(dashboard.packages) == 1


def test_the_address_given_is_used_whatever_ray_s_variables_say(submit, dashboard, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert submit("--name", "mine", "--detach")[0] == 0
    assert "mine" in dashboard.jobs


def test_no_value_of_this_shell_or_of_a_change_is_in_what_ray_shows_of_the_job(
    submit, dashboard, monkeypatch
):
    monkeypatch.setenv("MY_TOKEN", "secret-1")
    change = "pools={cpu: {device: cpu, env: {vars: {KEY: secret-2}}}}"
    code, _, err = submit("--name", "mine", "--detach", "--env", "MY_TOKEN", "--set", change)
    assert code == 0, err
    sent = dashboard.jobs["mine"]["sent"]
    assert json.loads(sent)["runtime_env"].keys() == {"working_dir"}
    assert "secret" not in sent


def test_a_value_for_a_variable_is_refused_and_not_repeated(submit, dashboard):
    code, _, err = submit("--env", "TOKEN=secret")
    assert code == 2
    assert "--env takes the name of a variable that the cluster has, got 'TOKEN=...'" in err
    assert "secret" not in err
    assert err.count("\n") == 1
    assert not dashboard.jobs


@pytest.mark.parametrize("name", ["last", "", "a/b", "-x", "x" * 101])
def test_a_name_that_is_no_folder_is_refused(submit, dashboard, name):
    code, _, err = submit(f"--name={name}")
    assert (code, err.count("\n")) == (2, 1)
    assert "--name is" in err
    assert not dashboard.jobs


@pytest.mark.parametrize(
    ("key", "version", "named"), [("rayVersion", "2.9.0", "Ray"), ("pythonVersion", "3.9.1", "Python")]
)
def test_another_ray_or_python_is_named_with_both_versions(submit, dashboard, key, version, named):
    own = dashboard.versions[key]
    dashboard.versions[key] = version
    code, _, err = submit()
    assert (code, err.count("\n")) == (2, 1)
    cut = "3.9" if named == "Python" else version
    assert f"this machine has {named} {own.rpartition('.')[0] if named == 'Python' else own}" in err
    assert f"has {named} {cut}" in err
    assert not dashboard.jobs
    assert not dashboard.packages


def test_another_patch_of_python_is_accepted(submit, dashboard):
    dashboard.versions["pythonVersion"] = dashboard.versions["pythonVersion"].rpartition(".")[0] + ".99"
    assert submit("--detach")[0] == 0


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:8265", "ray://127.0.0.1:10001", "http://127.0.0.1:1", "http://nowhere.invalid:8265"],
)
def test_an_address_without_a_dashboard_is_one_line(ring, command, dashboard, monkeypatch, address):
    monkeypatch.chdir(ring)
    code, _, err = command("submit", "ring.yaml", "--address", address)
    assert (code, err.count("\n")) == (2, 1)
    assert address in err
    assert "such as http://127.0.0.1:8265" in err


def test_a_server_that_is_no_dashboard_is_one_line(command, dashboard):
    for verb in ("runs", "status", "logs", "why"):
        code, _, err = command(verb, "--address", f"{dashboard.address}/elsewhere")
        assert (code, err.count("\n")) == (2, 1)
        assert "is not the dashboard of a Ray cluster" in err


def test_a_server_that_never_answers_is_given_up(dashboard, monkeypatch):
    monkeypatch.setattr("nonet.deploy.run.jobs.client._ANSWER_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(runs.ConfigError, match="does not answer"),
    ):
        ClusterClient(f"http://127.0.0.1:{silent.getsockname()[1]}")


def test_a_missing_or_wrong_token_is_one_line(command, dashboard, monkeypatch):
    dashboard.token = "right"
    headers = "ray.dashboard.modules.dashboard_sdk.get_auth_headers_if_auth_enabled"
    monkeypatch.setattr(
        headers, lambda _: {}
    )  # Ray would send the token of an earlier cluster of this process.
    code, _, err = command("runs", "--address", dashboard.address)
    assert (code, err.count("\n")) == (2, 1)
    assert "wants a token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN" in err
    monkeypatch.setattr(headers, lambda _: {"Authorization": "Bearer wrong"})
    code, _, err = command("runs", "--address", dashboard.address)
    assert (code, err.count("\n")) == (2, 1)
    assert "refuses the token" in err


def test_a_run_that_is_in_progress_or_has_finished_is_not_submitted_again(submit, dashboard):
    job = dashboard.add_job("mine")
    dashboard.add_controller("mine")
    code, _, err = submit("--name", "mine")
    assert (code, err.count("\n")) == (2, 1)
    assert "mine is in progress" in err
    assert "nonet logs mine -f" in err
    job["status"] = "SUCCEEDED"
    dashboard.actors[0]["state"] = "DEAD"
    code, _, err = submit("--name", "mine")
    assert (code, err.count("\n")) == (2, 1)
    assert "run mine has finished" in err
    assert list(dashboard.jobs) == ["mine"]


@pytest.mark.parametrize("state", ["DEAD", "ALIVE"])
def test_a_run_whose_job_failed_is_continued_by_another_job(submit, dashboard, state):
    dashboard.add_job("mine", status="FAILED", driver_exit_code=-9)
    dashboard.add_controller("mine", state)
    code, out, _ = submit("--name", "mine", "--detach")
    assert code == 0
    assert "continued if it has a checkpoint" in out
    assert list(dashboard.jobs) == ["mine", "mine-2"]
    assert dashboard.jobs["mine-2"]["entrypoint"] == "nonet job mine"


def test_an_id_that_a_job_without_a_run_has_is_not_used_again(submit, dashboard):
    dashboard.add_job("", "mine", "FAILED", metadata=None)
    code, _, err = submit("--name", "mine", "--detach")
    assert code == 0, err
    assert dashboard.jobs["mine-2"]["entrypoint"] == "nonet job mine"


def test_a_removed_job_that_ray_lists_again_is_removed_again(dashboard):
    dashboard.add_job("mine", status="FAILED")
    dashboard.listed_again = True
    ClusterClient(dashboard.address).remove_job("mine")
    assert not dashboard.jobs


def test_runs_of_a_cluster_are_listed_with_stage_step_and_job(command, dashboard):
    dashboard.add_job("done-1", status="SUCCEEDED")
    dashboard.add_job("more-1", "more-1-2")
    dashboard.add_controller("more-1", state="running", stage="rl", step=3, steps=40)
    dashboard.add_job("waits-1", status="PENDING", message="no room")
    dashboard.add_controller("detached-1", state="running", stage="pretrain", step=1, steps=2)
    code, out, err = command("runs", "--address", dashboard.address, "--json")
    assert code == 0, err
    rows = {row["run"]: row for row in json.loads(out)}
    assert {run: row["state"] for run, row in rows.items()} == {
        "done-1": "done",
        "more-1": "running",
        "waits-1": "pending",
        "detached-1": "running",
    }
    assert (rows["more-1"]["stage"], rows["more-1"]["step"], rows["more-1"]["job"]) == (
        "rl",
        "3/40",
        "more-1-2",
    )
    code, out, _ = command("runs", "--address", dashboard.address)
    assert out.splitlines()[0].split() == ["run", "state", "started", "stage", "step", "job"]


def test_unknown_and_ambiguous_runs_are_one_line_for_every_verb(command, dashboard):
    dashboard.add_job("more-1")
    dashboard.add_job("more-2")
    for verb in ("status", "logs", "why", "stop"):
        code, _, err = command(verb, "mo", "--address", dashboard.address)
        assert (code, err.count("\n")) == (2, 1)
        assert "2 runs start with 'mo'" in err
        assert "they are: more-1, more-2" in err
        code, _, err = command(verb, "none", "--address", dashboard.address)
        assert (code, err.count("\n")) == (2, 1)
        assert "there is no run 'none'" in err


def test_an_id_that_begins_like_another_is_not_ambiguous(command, dashboard):
    dashboard.add_job("more")
    dashboard.add_job("more-2", status="SUCCEEDED")
    assert json.loads(command("status", "more", "--address", dashboard.address, "--json")[1])["run"] == "more"
    assert (
        json.loads(command("status", "last", "--address", dashboard.address, "--json")[1])["run"] == "more-2"
    )


def test_a_finished_run_is_neither_stopped_nor_explained(command, dashboard):
    dashboard.add_job("over", status="SUCCEEDED")
    for verb, text in (("stop", "there is nothing to stop"), ("why", "it waits for nothing")):
        code, _, err = command(verb, "over", "--address", dashboard.address)
        assert (code, err.count("\n")) == (2, 1)
        assert text in err


def test_why_says_what_ray_has_not_started_and_what_the_controller_waits_for(command, dashboard):
    dashboard.add_job("early", status="PENDING", message="the runtime environment is being set up")
    _, out, _ = command("why", "early", "--address", dashboard.address)
    assert "Ray has not started the job early: the runtime environment is being set up" in out
    dashboard.add_job("busy")
    dashboard.add_controller("busy", waits=["trainer.update: rank 1 of 2 has not answered for 9 s"])
    dashboard.placement_groups.append(
        {"name": "busy/rollout", "state": "PENDING", "bundles": [{"unit_resources": {"NPU": 1}}] * 2}
    )
    lost = {"name": "busy/rollout-1", "state": "PENDING_CREATION", "required_resources": {"NPU": 1.0}}
    dashboard.actors.append(
        {"actor_id": "x", "job_id": "01", "ray_namespace": "nonet", "class_name": "W"} | lost
    )
    _, out, _ = command("why", "busy", "--address", dashboard.address)
    assert "trainer.update: rank 1 of 2 has not answered for 9 s" in out
    assert "placement group busy/rollout is not placed: 2 x {'NPU': 1}" in out
    assert "busy/rollout-1 has no process: Ray reports PENDING_CREATION, it asks for {'NPU': 1.0}" in out


def test_a_controller_that_writes_no_status_is_named(command, dashboard):
    dashboard.add_controller("hung", at=1_700_000_000.0, pid=7, host="node-3")
    _, out, _ = command("why", "hung", "--address", dashboard.address)
    assert "the controller (pid 7 on node-3) has written no status for" in out


def test_the_log_of_a_rank_is_that_of_the_worker_which_has_the_role(command, dashboard):
    groups = {"trainer": {"roles": ["trainer", "rollout"], "workers": 2}}
    dashboard.add_controller("mine", groups=groups)
    dashboard.actors.append(
        {
            "actor_id": "w1",
            "name": "mine/trainer-1",
            "state": "ALIVE",
            "job_id": "1",
            "ray_namespace": "nonet",
        }
    )
    dashboard.logs |= {"w1.out": b"said by rank 1\n", "w1.err": b"warned by rank 1\n"}
    code, out, _ = command("logs", "mine", "--role", "rollout", "--rank", "1", "--address", dashboard.address)
    assert (code, out) == (0, "said by rank 1\nwarned by rank 1\n")
    code, _, err = command("logs", "mine", "--role", "rollout", "--rank", "5", "--address", dashboard.address)
    assert (code, "has no rank 5 of rollout; its ranks are 0 to 1" in err) == (2, True)
    code, _, err = command("logs", "mine", "--role", "nothing", "--address", dashboard.address)
    assert (code, "has no role 'nothing'; roles: controller, trainer, rollout" in err) == (2, True)
    code, _, err = command("logs", "mine", "--rank", "1", "--address", dashboard.address)
    assert (code, "--rank needs --role" in err) == (2, True)
