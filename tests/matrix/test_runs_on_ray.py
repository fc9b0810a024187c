"""Verbs that start or steer a run, on Ray, and one server in a process of its own, for every kind of model."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from covering import ROWS
from finished import make_run
from redis_server import RedisServer
from stranger import CLICKS, MODEL_USES, Shop

from nonet import yaml
from nonet.controller.record import Checkpoints, RunFolder
from nonet.deploy.run import api
from nonet.deploy.run.panel import Panel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
_ONLY_ON_RAY = ("wall.json", "joins.json", "rewards.", "rl_", "unselected", "preparing.json")
"""Parts of names of results that need a session: seconds, counts of workers, probes of rewards, controls."""

_REPORTED_ON_RAY = {"receipt", "stage_rewards", "rewards", "rewards_on", "rerank", "stability", "tracking"}
"""Parts of report.json that need a session: probes of rewards, controls, what workers measured, and trackers."""


class RayRuns:
    """One run of every kind on Ray, each made when it is first used.

    Args:
        root: An empty folder.
        command: Runs the command line.
    """

    def __init__(self, root: Path):
        self._root, self._made = root, {}

    def open(self, kind: str, command) -> tuple[Shop, RunFolder, Path]:
        """Return the shop, the folder and the scenario of the kind's run, of which a model for lists has an RL stage."""
        if kind not in self._made:
            (self._root / kind).mkdir()
            shop = Shop(self._root / kind)
            scenario = shop.write_scenario(kind, () if kind in CLICKS else ("rl",))
            code, _, err = command("run", scenario, "--run-dir", shop.folder / "runs" / "first")
            assert code == 0, err
            self._made[kind] = shop, RunFolder(shop.folder / "runs" / "first"), scenario
        return self._made[kind]


@pytest.fixture(scope="module")
def ray_runs(ray_local, tmp_path_factory):
    return RayRuns(tmp_path_factory.mktemp("ray"))


every_kind = pytest.mark.parametrize("kind", MODEL_USES)
every_kind_of_lists = pytest.mark.parametrize("kind", [kind for kind in MODEL_USES if kind not in CLICKS])


def list_names(folder: Path) -> set[str]:
    """Return the relative paths of the files of a run that both ways of making it write."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    kept = ("artifacts/", "results/", "scenario.yaml", "report.json")
    return {
        name for name in names if name.startswith(kept) and not any(part in name for part in _ONLY_ON_RAY)
    }


def compare_folders(on_ray: RunFolder, here: RunFolder, of_other_ranks: str = "") -> None:
    """Check that two folders of runs have the same files, checkpoints with the same files, and reports with the same keys.

    Files of the first run's checkpoint whose name matches `of_other_ranks` are left out.
    """
    assert {n for n in list_names(on_ray.path) if "valid" not in n} == list_names(here.path)
    found = [Checkpoints(run.checkpoints).find_newest_stage_end() for run in (on_ray, here)]
    (path, manifest), (other_path, other) = found
    shared = {name for name in manifest.files if not (of_other_ranks and re.search(of_other_ranks, name))}
    assert shared == set(other.files)
    assert (manifest.stage, manifest.last, manifest.format) == (other.stage, other.last, other.format)
    assert set(manifest.artifacts) == set(other.artifacts)
    documents = [json.loads((folder / "manifest.json").read_text()) for folder in (path, other_path)]
    assert set(documents[0]) == set(documents[1])
    reports = [run.read_json("report.json") for run in (on_ray, here)]
    assert set(reports[0]) - set(reports[1]) <= _REPORTED_ON_RAY
    facts = [run.read_facts() for run in (on_ray, here)]
    assert set(facts[0]) == set(facts[1])
    assert set(facts[0]["data"]) == set(facts[1]["data"])


@every_kind
def test_a_run_on_ray_has_the_files_of_a_run_made_in_this_process(ray_runs, kind, command):
    shop, run, scenario = ray_runs.open(kind, command)
    compare_folders(run, make_run(scenario, shop.folder / "runs" / "here"))


@pytest.mark.parametrize(
    ("kind", "variants"), ROWS, ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
def test_every_row_of_the_matrix_runs_on_ray_with_the_same_files(
    request, ray_local, tmp_path, kind, variants, command
):
    shop = Shop(tmp_path, "integers" not in variants)
    if "redis" in variants:
        server = RedisServer(tmp_path)
        request.addfinalizer(server.kill)
        shop.redis = server.address
    if "warm" in variants:
        earlier = tuple(variant for variant in variants if variant != "warm")
        shop.earlier_run = make_run(shop.write_scenario(kind, earlier), tmp_path / "runs" / "earlier").path
    scenario = shop.write_scenario(kind, variants)
    code, _, err = command("run", scenario, "--run-dir", tmp_path / "runs" / "ray")
    assert code == 0, err
    if "stored" in variants:  # both would write one store
        return
    compare_folders(RunFolder(tmp_path / "runs" / "ray"), make_run(scenario, tmp_path / "runs" / "here"))


def compare_two_trainers(command, scenario, tmp_path, engine):
    """Check that a run of two trainers with an engine writes the files of a run of one."""
    two = f"roles.trainer={{workers: 2, engine: {engine}}}"
    code, _, err = command("run", scenario, "--set", two, "--run-dir", tmp_path / "runs" / "two")
    assert code == 0, err
    two_run, one = RunFolder(tmp_path / "runs" / "two"), make_run(scenario, tmp_path / "runs" / "here")
    compare_folders(two_run, one, of_other_ranks=r"/1-0\.seg$|/notes-1\.json$")


@every_kind
def test_two_trainers_that_divide_the_model_write_the_files_of_one(ray_local, tmp_path, kind, command):
    shop = Shop(tmp_path)
    variants = () if kind in CLICKS else ("rl",)
    scenario = shop.write_scenario(kind, variants)
    compare_two_trainers(command, scenario, tmp_path, "{use: fsdp2}")


@pytest.mark.parametrize("axis", ["replicate", "tensor"])
@pytest.mark.parametrize(("kind", "variants"), [("decoder", ("rl",)), ("hf", ("rl", "align"))])
def test_two_trainers_of_a_mesh_write_the_files_of_one(ray_local, tmp_path, kind, variants, axis, command):
    shop = Shop(tmp_path)
    scenario = shop.write_scenario(kind, variants)
    compare_two_trainers(command, scenario, tmp_path, f"{{use: fsdp2, {axis}: 2}}")


@every_kind
def test_a_run_is_continued_by_resume_and_started_from_by_init(ray_runs, kind, command, tmp_path):
    shop, run, scenario = ray_runs.open(kind, command)
    code, _, err = command("resume", run.path)
    assert (code, err.count("\n")) == (2, 1)
    assert "is finished" in err
    (run.path / "report.json").rename(tmp_path / "report.json")
    code, out, err = command("resume", run.path, "--json")
    assert code == 0, err
    assert json.loads(out)["stages"] == json.loads((tmp_path / "report.json").read_text())["stages"]
    code, out, err = command(
        "run", scenario, "--set", f"init={{from: {run.path}}}", "--run-dir", tmp_path / "next", "--json"
    )
    assert code == 0, err
    assert RunFolder(tmp_path / "next").read_facts()["init"]["run"] == run.id
    assert shop.folder.exists()


@every_kind
def test_a_run_trains_on_what_is_new_since_another(ray_runs, kind, command, tmp_path):
    shop, run, scenario = ray_runs.open(kind, command)
    later = shop.write_later_log(tmp_path / "longer.parquet", events=2)
    words = ("--set", f"data.interactions={tmp_path / 'longer.parquet'}", "--json")
    code, out, err = command("run", scenario, "--continue", run.path, "--run-dir", tmp_path / "next", *words)
    assert code == 0, err
    report, new = json.loads(out), RunFolder(tmp_path / "next").read_facts()["data"]["new"]
    assert new["new"] == later
    assert "previous_run" in report["baselines"]
    assert any("previous_run" in json.dumps(pair) for pair in report["paired"])
    code, _, err = command(
        "run", scenario, "--continue", tmp_path / "next", "--run-dir", tmp_path / "third", *words
    )
    assert code == 2
    assert err.splitlines()[-1].startswith("nonet: init.train: new: run next has trained on all ")
    assert not (tmp_path / "third").exists()


@every_kind
def test_seeds_are_run_and_combined(ray_runs, kind, command, tmp_path):
    _, _, scenario = ray_runs.open(kind, command)
    code, out, err = command("run", scenario, "--seeds", "1,2", "--run-dir", tmp_path / "seeds", "--json")
    assert code == 0, err
    assert json.loads(out)["seeds"] == [1, 2]
    assert (tmp_path / "seeds" / "report.html").exists()


@every_kind
def test_a_key_is_tuned(ray_runs, kind, command, tmp_path):
    shop, _, scenario = ray_runs.open(kind, command)
    stage = "train" if kind in CLICKS else "pretrain"
    space = {f"stages.{stage}.lr": {"log": [1e-3, 1e-2]}, "metric": "auc" if kind in CLICKS else "ndcg@5"}
    (tmp_path / "space.yaml").write_text(yaml.dump(space))
    words = ("--space", tmp_path / "space.yaml", "--trials", 2, "--run-dir", tmp_path / "search", "--json")
    code, out, err = command("tune", scenario, *words)
    assert code == 0, err
    assert len(json.loads(out)["results"]) >= 2
    assert (tmp_path / "search" / "best.yaml").exists()
    assert shop.folder.exists()


@every_kind
def test_rewards_are_traded_off_or_that_is_refused(ray_runs, kind, command, tmp_path):
    _, run, _ = ray_runs.open(kind, command)
    sweep = "stages.rl.rewards.cheap.weight=0,1"
    code, out, err = command("tradeoff", run.path, sweep, "--run-dir", tmp_path / "sweep", "--json")
    if kind in CLICKS:
        assert code == 2
        assert err.count("\n") == 1
        assert "predicts clicks" in err
        return
    assert code == 0, err
    assert [point["value"] for point in json.loads(out)["points"]] == [0, 1]


@every_kind_of_lists
def test_a_run_in_progress_is_steered_stopped_and_resumed(ray_runs, kind, command, tmp_path):
    shop, _, scenario = ray_runs.open(kind, command)
    started = api.start(api.scenario(scenario, ["stages.rl.steps=400"]), run_dir=tmp_path / "run")
    waiter = threading.Thread(target=started.wait, args=(Panel(io.StringIO(), live=False),))
    waiter.start()
    while not started.folder.scenario.exists():
        time.sleep(0.05)
    reward = shop.folder / "rewards" / "cheap.py"
    for words in (
        ("set", started.folder.path, "stages.rl.rewards.cheap.weight=0.25"),
        ("attach", started.folder.path, "--reward", reward, "--name", "cheaper", "--set", "limit=2.0"),
        ("detach", started.folder.path, "cheaper"),
        ("scale", started.folder.path, "trainer=2"),
        ("stop", started.folder.path),
    ):
        code, out, err = command(*words)
        assert code == 0, err
        assert out
    waiter.join()
    assert started.state == "stopped"
    assert not (started.folder.path / "report.json").exists()


def test_a_checkpoint_of_clicks_is_a_reward_of_every_kind_of_lists(ray_runs, command, tmp_path):
    _, clicks, _ = ray_runs.open("click", command)
    shop, _, scenario = ray_runs.open("decoder", command)
    reward = f"stages.rl.rewards.click={{use: ctr, weight: 0.5, model: {clicks.path}}}"
    code, _, err = command("run", scenario, "--set", reward, "--run-dir", tmp_path / "run")
    assert code == 0, err
    assert "click" in json.dumps(RunFolder(tmp_path / "run").read_json("report.json"))
    assert shop.folder.exists()


def wait_for_server(port: int, process: subprocess.Popen) -> None:
    """Return when a server answers that it is ready."""
    until = time.monotonic() + 240
    while time.monotonic() < until:
        assert process.poll() is None, process.stderr.read()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
                if json.load(answer)["ready"]:
                    return
        except OSError:
            time.sleep(0.5)
    raise AssertionError("the server is not ready after four minutes")


@every_kind
def test_a_server_in_its_own_process_answers(no_ray, tmp_path, kind):
    shop = Shop(tmp_path)
    run = make_run(shop.write_scenario(kind, ()), tmp_path / "run")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from nonet.deploy.cli import main; main()",
            "serve",
            str(run.path),
            "--port",
            str(port),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "RAY_ADDRESS": ""},
    )
    try:
        wait_for_server(port, process)
        path, body = ("/score", {"items": shop.item_ids[:3]}) if kind in CLICKS else ("/recommend", {"k": 3})
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}",
            json.dumps({"user": shop.user_ids[0], **body}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            rows = json.load(answer)["items"]
        assert len(rows) == 3
        assert {row["item"] for row in rows} <= set(shop.item_ids)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
