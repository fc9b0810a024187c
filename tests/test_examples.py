"""The shipped examples run as scripts."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests_ring import make_ring

from nonet.controller.record.checkpoint import Checkpoints, read_manifest
from nonet.controller.scenario import check_scenario, load_scenario
from nonet.controller.setup import make_run_setup
from nonet.controller.setup.worker_setup import make_model_options
from nonet.deploy.run import api
from nonet.deploy.run.panel import Panel
from nonet.models import build_model

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_scenario_of_the_keras_examples_is_planned_and_each_model_builds():
    for name, sequences in (("build_deepfm", "[]"), ("build_din", "[liked, disliked]"), ("build_dlrm", "[]")):
        changes = [f"model.path=rankers.py:{name}", f"model.sequences={sequences}", "model.backend=jax"]
        scenario, _ = load_scenario(EXAMPLES / "keras" / "ctr.yaml", changes)
        check_scenario(scenario)
        ranker = build_model(make_model_options(scenario), (), make_run_setup(scenario).get_feature_dims(), 7)
        assert sum(weight.numel() for weight in ranker.parameters()) > 2000


def test_the_page_shows_the_example_with_attention_over_neighbours_and_it_builds():
    text = (EXAMPLES / "keras" / "neighbours.yaml").read_text()
    assert text.partition("\n")[2] in (EXAMPLES.parent / "docs" / "how-to" / "keras.md").read_text()
    scenario, _ = load_scenario(EXAMPLES / "keras" / "neighbours.yaml")
    check_scenario(scenario)
    ranker = build_model(make_model_options(scenario), (), make_run_setup(scenario).get_feature_dims(), 7)
    assert ranker.compiled.features[-1] == "together", "the sequence comes after pooled features"


@pytest.mark.slow
def test_own_worker_prints_what_it_says():
    done = subprocess.run(
        [sys.executable, EXAMPLES / "own_worker.py"], capture_output=True, text=True, timeout=800, check=True
    )
    assert done.stdout.splitlines() == ["[2, 4, 6, 8, 10]", "[2, 4]", "[4, 8, 12]"]


@pytest.mark.slow
def test_own_loop_starts_from_a_finished_run_and_commits_in_a_run_of_its_own(ray_local, tmp_path):
    folder = make_ring(tmp_path)
    scenario = api.scenario(folder / "ring.yaml", ["stages.rl.steps=2"])
    finished = api.run(scenario, run_dir=tmp_path / "first", panel=Panel(io.StringIO(), live=False))
    ended = Checkpoints(finished.folder.checkpoints).find_stage_end("finetune")
    done = subprocess.run(
        [sys.executable, EXAMPLES / "own_loop.py", folder / "ring.yaml", finished.folder.path],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        cwd=tmp_path,
    )
    assert re.findall(r"^step (\d+): loss -?\d\.\d{4}, kl \d\.\d{5}$", done.stdout, re.M) == list("0123")
    (own,) = (tmp_path / "runs").iterdir()
    start = json.loads((own / "results" / "tokenise.json").read_text())["init"]
    assert (start["stage"], Path(start["commit"])) == ("finetune", ended)
    path, _ = Checkpoints(own / "checkpoints").find_newest()
    assert (read_manifest(path).stage, read_manifest(path).last) == ("rl", True)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("objectives", {"reward.fresh", "multiplier.fresh", "weight.cheap", "reward.spread"}),
        (
            "scenes",
            {"scene.5.reward", "scene.others.no_hit", "mismatch/kl.cpu", "staleness", "reward.novelty"},
        ),
    ],
)
def test_scenarios_of_rewards_run_to_their_report(ray_local, tmp_path, name, shown):
    """Two objectives, a floor and a worker between; scenes, staleness and a rollout in bf16."""
    scenario = api.scenario(
        EXAMPLES / "rewards" / f"{name}.yaml",
        ["stages.pretrain={use: supervised, steps: 20}", "stages.rl.steps=4"],
    )
    finished = api.run(scenario, run_dir=tmp_path / name, panel=Panel(io.StringIO(), live=False))
    assert finished.state == "done"
    metrics = [json.loads(line) for line in finished.folder.metrics.read_text().splitlines()]
    assert shown <= {each["name"] for each in metrics if each["stage"] == "rl"}
    report = json.loads(finished.folder.report.read_text())
    assert "rl_control" in report["baselines"]
    assert "rl-rl_control" in report["paired"]
    assert report["validation"]["rl"]["metric"] == "reward"
