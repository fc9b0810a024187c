"""Starts of runs: what stays of a run whose controller does not start, and the wait for a controller that is gone."""

from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError

from nonet.controller.record import RunFolder, lock_run
from nonet.deadlines import Deadlines
from nonet.deploy.run import driver
from nonet.deploy.run.memory import PeakMemory
from nonet.errors import NonetError, WorkerLost


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Start a run, attached or detached, whose controller fails to start after `claim` was called with its folder."""
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(driver, "resolve_sources", lambda scenario: scenario)
    monkeypatch.setattr(driver.preflight, "check", lambda scenario, folder: ["a warning"])
    monkeypatch.setattr(driver.preflight, "check_free_space", lambda scenario, run: None)
    monkeypatch.setattr(driver, "_end_earlier_controller", lambda run, resume: None)
    monkeypatch.setattr(driver, "_prepare_records", lambda *arguments: None)

    def start_run(call, claim=lambda run: None):
        def fail(scenario, folder, run, resume, detached):
            claim(run)
            raise NonetError("the controller did not start")

        monkeypatch.setattr(driver, "_start_controller", fail)
        run = RunFolder(tmp_path / "run")
        with pytest.raises(NonetError, match="the controller did not start"):
            call(None, tmp_path, run)
        return run

    return start_run


@pytest.mark.parametrize("call", [driver.start, driver.start_detached])
def test_a_run_that_did_not_start_is_deleted(start, call):
    assert not start(call).path.exists()


@pytest.mark.parametrize("call", [driver.start, driver.start_detached])
def test_a_folder_that_existed_before_a_start_stays(start, call, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "note.txt").touch()
    assert start(call).path.exists()


def test_the_folder_of_a_detached_run_stays_if_its_controller_has_claimed_it(start):
    locks = []
    run = start(driver.start_detached, lambda run: locks.append(lock_run(run)))
    assert run.path.exists()
    locks[0].close()


def test_a_detached_start_returns_the_warnings_about_its_data_and_releases_the_folder(
    start, monkeypatch, tmp_path
):
    run = RunFolder(tmp_path / "run")
    monkeypatch.setattr(driver, "_start_controller", lambda *arguments: lock_run(run))
    assert driver.start_detached(None, tmp_path, run) == ["a warning"]


@pytest.mark.parametrize(
    ("error", "suggestion"),
    [
        (
            GetTimeoutError("no answer"),
            r"\(no answer\); raise deadlines\.start if this is slow and healthy; if it has",
        ),
        (ActorDiedError(), r"\); if it has a checkpoint, continue with: nonet resume run"),
    ],
)
def test_the_wait_for_a_controller_that_is_gone_is_the_deadline_of_starts(
    tmp_path, monkeypatch, error, suggestion
):
    def fail(reference, timeout):
        assert timeout == 7.0
        raise error

    monkeypatch.setattr(ray, "get", fail)
    folder = RunFolder(tmp_path / "run")
    controller = SimpleNamespace(poll=SimpleNamespace(remote=lambda number: None))
    start_s = Deadlines(start=7.0).start
    run = driver.DriverRun(
        folder, controller, PeakMemory().__enter__(), 60.0, lock_run(folder), start_timeout_s=start_s
    )
    close = run.close
    monkeypatch.setattr(run, "close", lambda: None)
    with pytest.raises(WorkerLost, match=suggestion):
        run.wait()
    run._controller = None
    close()
