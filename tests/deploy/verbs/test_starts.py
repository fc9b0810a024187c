"""Starts of runs: what stays of a run whose controller does not start."""

import pytest

from nonet.controller.record import RunFolder, lock_run
from nonet.deploy.run import driver
from nonet.errors import NonetError


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
