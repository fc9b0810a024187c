"""The verbs that steer a run: stop, attach, detach and set, and the names and paths that they take."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from tests_ring import SCENARIO, make_ring

from nonet.controller.record.commands import CommandQueue
from nonet.controller.record.run_folder import RunFolder, lock_run
from nonet.controller.scenario import RewardOptions
from nonet.controller.session.objectives import SETTABLE, RewardObjectives
from nonet.controller.session.steering import RewardSteering
from nonet.deploy.run import steer
from nonet.deploy.run.driver import DriverRun
from nonet.deploy.run.memory import PeakMemory
from nonet.errors import ConfigError, WorkerFailed


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.scenario.write_text(SCENARIO)
    return folder


@pytest.fixture
def verb(monkeypatch, command):
    """Run a verb of the command line in this process: (exit code, what it printed)."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def call(*words: object) -> tuple[int, str]:
        code, out, err = command(*words)
        return code, out + err

    return call


def test_stop_asks_the_process_that_runs_a_run_and_waits_for_its_end(run, verb):
    held, asked = lock_run(run), []
    driver = SimpleNamespace(folder=run, stop=lambda: asked.append("stop"))

    def drive() -> None:
        requested = False
        while not asked and not requested:
            requested = run.stop_request.exists()
            DriverRun._take_stop_request(driver)  # pyright: ignore[reportArgumentType]
            time.sleep(0.01)
        held.close()

    thread = threading.Thread(target=drive)
    thread.start()
    assert verb("stop", run.path) == (0, "stopped run\n")
    thread.join()
    assert asked == ["stop"]
    assert not run.stop_request.exists()


def test_stop_refuses_a_run_that_is_over_or_that_nobody_runs(run, verb):
    code, said = verb("stop", run.path)
    assert (code, said) == (2, "nonet: run is not in progress; continue it with: nonet resume run\n")
    run.report.write_text("{}")
    assert verb("stop", run.path) == (2, "nonet: run has finished; there is nothing to stop\n")
    assert not run.stop_request.exists()


def test_a_request_to_stop_that_nobody_takes_is_withdrawn_and_names_the_way(run):
    with lock_run(run), pytest.raises(ConfigError, match="set RAY_ADDRESS to that cluster"):
        steer.stop(run.path, notice_s=0.05)
    assert not run.stop_request.exists()


def test_attach_and_detach_take_the_name_alike(run, verb, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text("import nonet\n@nonet.reward\ndef fresh(item): return item")
    ways = [["fresher"], ["--name", "fresher"], ["fresher", "--name", "fresher"]]
    with lock_run(run):
        for words in ways:
            assert verb("attach", run.path, "--reward", "my.py:fresh", *words, "--wait", 0)[0] == 0
            assert verb("detach", run.path, *words, "--wait", 0)[0] == 0
        code, said = verb("detach", run.path, "fresh", "--name", "fresher")
        assert (code, said) == (
            2,
            "nonet: two names are given, 'fresh' and --name 'fresher'; give one\n",
        )
        code, said = verb("detach", run.path)
        assert (code, "detach needs the name of a reward: nonet detach RUN NAME" in said) == (2, True)
        code, said = verb("attach", run.path, "--reward", "my.py:fresh", "3 x")
        assert (code, "the reward's name is '3 x'; it must consist of letters" in said) == (2, True)
    assert [each["name"] for each in CommandQueue(run).list_waiting()] == ["fresher"] * 6


@pytest.mark.parametrize("path", ["stages.rl.rewards.fresh.weight", "rewards.fresh.weight"])
def test_set_takes_the_path_that_attach_reports_and_the_short_one(run, path):
    objectives = RewardObjectives({"hit": RewardOptions()})
    session = SimpleNamespace(
        run=run,
        add_note=lambda text: None,
        get_rewards=lambda stage: SimpleNamespace(add=lambda *_: None),
        groups=SimpleNamespace(start_reward=lambda *_: None),
    )
    steering = RewardSteering(session, "rl", objectives)  # pyright: ignore[reportArgumentType]
    steering._rehearse = lambda *_: None
    asked = CommandQueue(run)
    options = {"use": "actor://x/fresh", "weight": 0.2}
    first = asked.ask(verb="attach", name="fresh", stage=None, options=options, original="x", sha256="")
    steering.apply_commands(0)
    said = asked.read_answer(first)
    assert said is not None
    assert "with stages.rl.rewards.fresh.weight=0.2" in said["text"]
    second = asked.ask(verb="set", name=path, stage=None, value=0.5)
    steering.apply_commands(1)
    assert (asked.read_answer(second) or {})["state"] == "taken"
    assert objectives.rewards["fresh"].weight == 0.5


def test_a_refusal_whose_answer_was_lost_is_answered_again_as_a_refusal(run):
    session = SimpleNamespace(run=run, add_note=lambda text: None)
    commands = CommandQueue(run)
    command = commands.ask(verb="set", name="nothing", stage=None, value=0.5)
    answers = []
    for _ in range(2):  # the second is the resumed run
        steering = RewardSteering(session, "rl", RewardObjectives({"hit": RewardOptions()}))  # pyright: ignore[reportArgumentType]
        steering.apply_commands(0)
        answers.append(commands.read_answer(command))
        for path in run.path.rglob(f"{command}.answer.json"):
            path.unlink()
    assert answers[0] == answers[1]
    assert answers[0]["state"] == "refused"
    assert "nothing" in answers[0]["text"]


def test_only_weights_and_floors_can_be_set():
    assert not SETTABLE.match("stages.rl.lr")
    assert not SETTABLE.match("rewards.fresh.use")
    assert not SETTABLE.match("stages.rewards.fresh.weight")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stop_ends_a_run_of_a_local_ray_after_a_commit(no_ray, tmp_path):
    folder, run = make_ring(tmp_path), RunFolder(tmp_path / "long")
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    nonet = [sys.executable, "-c", "from nonet.deploy.cli import main; main()"]
    long = ["--set", "stages.pretrain.epochs=4000", "--run-dir", str(run.path)]
    driver = subprocess.Popen([*nonet, "run", "ring.yaml", *long], cwd=folder, env=env)
    while not (run.metrics.exists() and run.metrics.read_text().count("\n") > 20):
        assert driver.poll() is None
        time.sleep(0.1)
    ended = subprocess.run([*nonet, "stop", str(run.path)], env=env, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "stopped long\n"), ended.stderr
    assert driver.wait(60) == 130
    assert list(run.checkpoints.glob("step-*/manifest.json"))


@pytest.mark.parametrize("resumes", [False, True])
def test_wrong_input_deletes_the_folder_of_a_new_run_alone(run, resumes):
    driver = DriverRun(run, None, PeakMemory().__enter__(), 60.0, lock_run(run), resumes=resumes)
    with pytest.raises(WorkerFailed, match="no price"):
        driver._finish({"state": "failed", "exit_code": 2, "error": "no price"})
    assert run.path.exists() == resumes
