"""Starts of runs: what stays of a run whose controller does not start, and the wait for a controller that is gone."""

from contextlib import nullcontext
from threading import Timer
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from nonet.controller.record import RunFolder, lock_run
from nonet.controller.setup import write_start
from nonet.controller.single_controller import SingleController
from nonet.deadlines import Deadlines
from nonet.deploy.run import driver
from nonet.deploy.run.memory import PeakMemory
from nonet.errors import ConfigError, NonetError, WorkerFailed, WorkerLost
from tests.controller.stand_ins import replace_globals

NO_START = NonetError("the controller did not start")


@pytest.fixture
def cluster(monkeypatch):
    """A cluster with the controllers of `actors`, the job of each by its name; `killed` are those that were ended."""
    cluster = SimpleNamespace(actors={}, killed=[])

    def get_actor(name, namespace):
        if name not in cluster.actors:
            raise ValueError(name)
        job = cluster.actors[name]
        return SimpleNamespace(
            name=name,
            _actor_id=SimpleNamespace(job_id=SimpleNamespace(hex=lambda: job)),
            get_folder=SimpleNamespace(remote=lambda: None),
        )

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "own job"))
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: cluster.killed.append(actor.name))
    monkeypatch.setattr(driver, "reap_run", lambda run: 0)
    monkeypatch.setattr(driver, "ensure_ray", lambda: None)
    return cluster


@pytest.fixture
def start(cluster, monkeypatch, tmp_path):
    """Start a run, attached or detached, whose controller fails to start after `claim` was called with its folder."""
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(driver, "resolve_sources", lambda scenario: scenario)
    monkeypatch.setattr(driver.preflight, "check", lambda scenario, folder: ["a warning"])
    monkeypatch.setattr(driver.preflight, "check_free_space", lambda scenario, run: None)
    monkeypatch.setattr(driver, "_end_earlier_controller", lambda run, resume: None)
    monkeypatch.setattr(driver, "_prepare_records", lambda *arguments, **options: None)

    def start_run(call, error=NO_START):
        def fail(scenario, folder, run, resume, detached):
            with pytest.raises(ConfigError, match="being run by another process"):
                lock_run(run)  # until the controller exists
            (run.path / "command.json").touch()
            raise error

        monkeypatch.setattr(driver, "_start_controller", fail)
        run = RunFolder(tmp_path / "run")
        with pytest.raises(type(error)):
            call(None, tmp_path, run)
        if run.path.exists():
            lock_run(run).close()
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


@pytest.mark.parametrize("call", [driver.start, driver.start_detached])
def test_a_start_whose_name_is_taken_deletes_and_ends_nothing(start, call, cluster):
    cluster.actors["run/controller"] = "own job"
    run = start(call, driver._NameTakenError("the controller did not start"))
    assert (run.path / "command.json").exists()
    assert not cluster.killed


@pytest.mark.parametrize("job", ["own job", "job of another driver"])
@pytest.mark.parametrize("call", [driver.start, driver.start_detached])
def test_an_interrupted_start_ends_its_own_controller_and_deletes_only_what_no_other_uses(
    start, call, cluster, job
):
    cluster.actors["run/controller"] = job
    run = start(call, KeyboardInterrupt())
    is_own = job == "own job"
    assert (run.path.exists(), cluster.killed) == (not is_own, ["run/controller"] if is_own else [])


def test_a_name_that_is_taken_is_an_error_of_its_own(monkeypatch, tmp_path):
    from nonet import controller

    def fail(task):
        raise ValueError("the name run/controller is already taken")

    options = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=fail))
    monkeypatch.setattr(controller, "SingleController", options)
    monkeypatch.setattr(driver, "ensure_ray", lambda: None)
    monkeypatch.setattr(driver, "reap_orphaned_runs", lambda: None)
    with pytest.raises(driver._NameTakenError, match="already taken"):
        driver._start_controller(None, tmp_path, RunFolder(tmp_path), False, True)


def test_a_start_does_not_end_a_detached_controller_that_has_not_locked_the_folder_yet(
    cluster, monkeypatch, tmp_path
):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    run = RunFolder(tmp_path / "run")
    cluster.actors["run/controller"] = "job of another driver"
    monkeypatch.setattr(ray, "get", lambda reference, timeout: str(run.path))
    write_start(run, tmp_path, "", detached=True)
    with pytest.raises(ConfigError, match="is being run by a detached controller; stop it first"):
        driver._end_earlier_controller(run, resume=False)
    assert not cluster.killed
    write_start(run, tmp_path, "")
    driver._end_earlier_controller(run, resume=False)
    assert cluster.killed == ["run/controller"]


def test_a_detached_controller_waits_until_its_driver_has_released_the_folder(tmp_path, monkeypatch):
    conductor = SingleController.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    replace_globals(monkeypatch, conductor._claim_folder, _CLAIM_POLL_S=0.01)
    run = RunFolder(tmp_path / "run")
    lock = lock_run(run)
    timer = Timer(0.1, lock.close)
    timer.start()
    conductor._claim_folder(SimpleNamespace(_run=run)).close()
    timer.join()
    replace_globals(monkeypatch, conductor._claim_folder, _CLAIM_PATIENCE_S=0.05)
    with lock_run(run), pytest.raises(ConfigError, match="being run by another process"):
        conductor._claim_folder(SimpleNamespace(_run=run))


@pytest.mark.parametrize("state", ["done", "failed"])
def test_the_folder_is_locked_until_its_report_is_complete_or_it_is_deleted(tmp_path, monkeypatch, state):
    run, checked = RunFolder(tmp_path / "run"), []
    driver_run = driver.DriverRun(run, None, PeakMemory().__enter__(), 60.0, lock_run(run))

    def check(*_):
        with pytest.raises(ConfigError, match="being run by another process"):
            lock_run(run)
        checked.append(True)

    monkeypatch.setattr(driver_run, "_complete_report", check)
    monkeypatch.setattr(driver, "delete_folder", check)
    with nullcontext() if state == "done" else pytest.raises(WorkerFailed, match="wrong"):
        driver_run._finish({"state": state, "exit_code": 2, "error": "wrong"})
    assert checked
    lock_run(run).close()


@pytest.fixture
def polled(tmp_path, monkeypatch):
    """Return a run whose controller gives these answers to polls, or raises them, and the timeouts of the polls."""
    opened = []

    def open_run(answers, start_s):
        answers, timeouts = iter(answers), []

        def get(reference, timeout):
            timeouts.append(timeout)
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(ray, "get", get)
        folder = RunFolder(tmp_path / "run")
        controller = SimpleNamespace(poll=SimpleNamespace(remote=lambda number: None))
        limit_s = Deadlines(start=start_s).start
        run = driver.DriverRun(
            folder, controller, PeakMemory().__enter__(), 60.0, lock_run(folder), start_timeout_s=limit_s
        )
        opened.append((run, run.close))
        monkeypatch.setattr(run, "close", lambda: None)
        return run, timeouts

    yield open_run
    for run, close in opened:
        run._controller = None
        close()


def test_a_detached_start_returns_the_warnings_about_its_data_and_releases_the_folder(
    start, monkeypatch, tmp_path
):
    run = RunFolder(tmp_path / "run")
    monkeypatch.setattr(driver, "_start_controller", lambda *arguments: None)
    assert driver.start_detached(None, tmp_path, run) == ["a warning"]
    lock_run(run).close()


HINT = r"; raise deadlines\.start if this is slow and healthy"


@pytest.mark.parametrize(
    ("has_answered", "start_s", "patience_s", "hint"),
    [
        (False, 7.0, 120.0, HINT),
        (False, 300.0, 300.0, HINT),
        (True, 7.0, 120.0, ""),
        (True, 300.0, 120.0, ""),
    ],
)
def test_a_poll_has_a_patience_and_the_first_one_the_deadline_of_starts(
    polled, has_answered, start_s, patience_s, hint
):
    answers = [{"pid": 1, "events": [], "outcome": None}] * 2 * has_answered
    run, timeouts = polled([*answers, GetTimeoutError("no answer")], start_s)
    with pytest.raises(WorkerLost, match=rf"\(no answer\){hint}; if it has"):
        run.wait()
    assert timeouts[-1] == patience_s
    assert len(timeouts) == len(answers) + 1, "a poll without an answer is not repeated"


@pytest.mark.parametrize(
    ("error", "start_s", "polls", "hint"),
    [(ActorDiedError(), 7.0, 1, ""), (ActorUnavailableError("restarts", None), 0.05, 2, HINT)],
)
def test_the_wait_for_a_controller_that_is_gone_is_the_deadline_of_starts(
    polled, error, start_s, polls, hint
):
    run, timeouts = polled([error] * 9, start_s)
    with pytest.raises(
        WorkerLost, match=rf"\){hint}; if it has a checkpoint, continue with: nonet resume run"
    ):
        run.wait()
    assert len(timeouts) == polls


def test_a_resume_that_is_to_be_detached_is_refused(command):
    code, out, err = command("run", "quickstart", "--resume", "--detach", "--run-dir", "somewhere")
    assert (code, out) == (2, "")
    assert err.startswith("nonet: --detach starts a new run; omit --resume, or omit --detach")
