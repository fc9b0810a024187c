"""`nonet status`, `runs` and `stop` for a run in object storage that another machine works on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from nonet.controller.record import CommandQueue, RunFolder, find_run
from nonet.deploy.run import driver
from nonet.errors import ConfigError, StorageError
from nonet.storage import (
    MountedRun,
    ObjectStorage,
    RunCopy,
    RunWriter,
    make_local_folder,
    mounts,
    open_storage,
)
from nonet.storage.objects import read_clock
from tests.s3 import BUCKET, serve_s3


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with serve_s3() as variables:
        yield variables


@pytest.fixture
def commit_status(
    s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., str]]:
    """Return a function that stores a status, as another machine does, and returns the address of the run."""
    monkeypatch.setenv("NONET_CACHE", str(tmp_path / "here"))
    monkeypatch.setenv("NONET_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    address = f"{BUCKET}/{tmp_path.name}/mine"
    copy = RunCopy(MountedRun(address, str(tmp_path / "there")), open_storage(address))
    writer = RunWriter(copy)

    def commit(**status: object) -> str:
        copy.path.mkdir(exist_ok=True)
        (copy.path / "scenario.yaml").write_text("name: x")
        document = {"run": "mine", "stage": "rl", "step": 3, "steps": 40, "started": 1_700_000_000.0}
        (copy.path / "status.json").write_text(
            json.dumps(document | {"at": time.time(), "pid": 7, "host": "there"} | status)
        )
        writer.commit()
        return address

    yield commit
    writer.close()
    mounts._copies.clear()


def test_a_run_that_another_machine_works_on_is_in_progress_for_all_verbs(commit_status, command, dashboard):
    address = commit_status(state="running")
    place = address.rpartition("/")[0]
    for words in ([address], ["mine"], [address, "--address", dashboard.address]):
        code, out, err = command("status", *words, "--json")
        assert code == 0, err
        assert json.loads(out)["state"] == "running"
    assert json.loads(command("runs", place, "--json")[1])[0]["state"] == "running"
    code, _, err = command("stop", address)
    assert (code, "stop it on its cluster: nonet stop mine --address URL" in err) == (2, True)


def test_the_status_of_a_stored_run_is_read_again_while_it_is_watched(commit_status, command, monkeypatch):
    from nonet.deploy.verbs import watching

    address = commit_status(state="running")
    later = [{"state": "running", "step": 5}, {"state": "stopped", "step": 5}]
    # The module's `time` alone: other threads sleep too.
    clock = SimpleNamespace(
        time=time.time, strftime=time.strftime, sleep=lambda _: commit_status(**later.pop(0))
    )
    monkeypatch.setattr(watching, "time", clock)
    code, out, err = command("status", address, "--watch")
    assert [line.split()[1:4] for line in out.splitlines()] == [
        ["running", "rl", "3/40"],
        ["running", "rl", "5/40"],
        ["stopped", "rl", "5/40"],
    ], err
    assert code == 1


def test_a_run_whose_head_is_old_by_the_clock_of_the_storage_is_interrupted(
    commit_status, command, monkeypatch
):
    address = commit_status(state="running")
    monkeypatch.setattr(mounts, "read_clock", lambda storage: read_clock(storage) + 61)
    assert json.loads(command("status", address, "--json")[1])["state"] == "interrupted"
    code, _, err = command("stop", address)
    assert (code, "mine is not in progress; continue it with: nonet resume mine" in err) == (2, True)


@pytest.mark.parametrize("skew_s", [-3600, 3600])
def test_the_clock_of_the_machine_that_works_on_a_run_decides_nothing(
    commit_status, command, monkeypatch, skew_s
):
    address = commit_status(state="running", at=time.time() + skew_s, address=f"{BUCKET}/mine")
    status = json.loads(command("status", address, "--json")[1])
    assert status["state"] == "running"
    assert "has written no status" not in command("status", address)[1]


def test_a_process_that_may_not_write_to_the_storage_looks_at_the_head_until_it_changes(
    commit_status, command, monkeypatch
):
    address = commit_status(state="running")

    def refuse(_: object) -> float:
        raise StorageError("access is denied")

    monkeypatch.setattr(mounts, "read_clock", refuse)
    monkeypatch.setattr(mounts, "_LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(mounts, "_ALIVE_S", 0.05)
    assert json.loads(command("status", address, "--json")[1])["state"] == "interrupted"
    ticks = iter(range(1, 100))
    monkeypatch.setattr(mounts, "_sleep", lambda _: commit_status(state="running", step=next(ticks)))
    assert json.loads(command("status", address, "--json")[1])["state"] == "running"


def test_a_start_under_the_name_of_a_run_in_progress_is_refused_after_a_look_of_at_most_a_minute(
    commit_status, monkeypatch
):
    address, looks = commit_status(state="running"), []
    monkeypatch.setattr(mounts, "_sleep", lambda _: commit_status(state="running", step=4))
    with pytest.raises(
        ConfigError, match=r"mine is in progress: process .* works on it; choose another name"
    ):
        driver._check_storage(address, resume=False, single_writer=False)
    monkeypatch.setattr(mounts, "_sleep", looks.append)  # the process that worked on it was killed
    monkeypatch.setattr(mounts, "read_clock", lambda storage: read_clock(storage) + sum(looks))
    driver._check_storage(address, resume=True, single_writer=False)
    assert looks == []
    driver._check_storage(address, resume=False, single_writer=False)
    assert 0 < sum(looks) <= 61


@pytest.mark.parametrize("resume", [False, True])  # a bucket may have been moved
def test_a_storage_that_ignores_conditions_is_accepted_for_a_single_writer_alone(
    commit_status, monkeypatch, resume
):
    def ignore(_: object) -> None:
        raise ConfigError("ignores the condition If-None-Match")

    monkeypatch.setattr(ObjectStorage, "check_conditions", ignore)
    address = commit_status(state="running").replace("/mine", "/new")
    with pytest.raises(ConfigError, match="ignores the condition"):
        driver._check_storage(address, resume=resume, single_writer=False)
    driver._check_storage(address, resume=resume, single_writer=True)


def test_a_command_on_the_node_of_a_stored_run_is_answered_once_its_record_is_stored(
    s3, tmp_path, monkeypatch
):
    monkeypatch.setenv("NONET_CACHE", str(tmp_path))
    address = f"{BUCKET}/{tmp_path.name}/mine"
    folder = make_local_folder(*address.rsplit("/", 1))
    copy = RunCopy(MountedRun(address, str(folder)), open_storage(address))
    writer, run = RunWriter(copy), RunFolder(folder)
    run.scenario.write_text("name: x")
    writer.commit()
    user = CommandQueue(find_run(folder))
    command_id = user.ask(verb="set", name="hit.weight", value=2)
    assert writer.commit_in_background()
    controller = CommandQueue(run)
    controller.take(controller.list_waiting()[0], "rl", 5, "set hit.weight to 2")
    assert controller.read_answer(command_id)
    assert user.read_answer(command_id) is None
    assert writer.commit_in_background()
    assert "commands.jsonl" in copy.read_tree().files
    assert user.read_answer(command_id) == {"state": "taken", "text": "set hit.weight to 2"}
    writer.close()
    mounts._copies.clear()


def test_the_place_of_a_run_names_it_on_its_cluster(command, dashboard):
    dashboard.add_job("over", status="SUCCEEDED")
    for verb, text in (("stop", "there is nothing to stop"), ("why", "it waits for nothing")):
        code, _, err = command(verb, f"{BUCKET}/feed/over", "--address", dashboard.address)
        assert (code, text in err) == (2, True), err
