"""A click model in Keras from tables to report on real Ray actors; resumed, on two trainers, and as a reward.

The backend is JAX. `test_tensorflow.py` runs this file with TensorFlow in an interpreter of its own (`NONET_KERAS_PYTHON`).
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from likes_world import make_likes

import nonet
from nonet.controller.record.checkpoint import Checkpoints
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.scenario import load_scenario
from nonet.deploy.run import api
from nonet.deploy.run.panel import Panel
from nonet.models.clicks.model import ClickModel

RANKERS = Path(__file__).parents[4] / "examples" / "keras" / "rankers.py"
PYTHON = os.environ.get("NONET_KERAS_PYTHON", "")
CHANGES = [
    "model={use: keras, path: 'rankers.py:build_din', backend: jax, sequences: [liked]}",
    *(
        [
            "model.backend=tensorflow",
            f"pools={{keras: {{env: {{python: {PYTHON}}}}}}}",
            "roles={trainer: {pool: keras}, evaluator: {pool: keras}}",
        ]
        if PYTHON
        else []
    ),
]


def run(folder, name, *changes):
    scenario = api.scenario(folder / "likes.yaml", [*CHANGES, *changes])
    return api.run(scenario, run_dir=folder / name, panel=Panel(io.StringIO(), live=False))


@pytest.fixture(scope="module")
def whole(ray_local, tmp_path_factory):
    folder = make_likes(tmp_path_factory.mktemp("likes"))
    shutil.copy(RANKERS, folder)
    return folder, run(folder, "whole")


def hash_files(run_folder: RunFolder) -> dict[str, dict[str, str]]:
    """Return the hashes of the files of every checkpoint."""
    manifests = run_folder.checkpoints.glob("step-*/manifest.json")
    return {path.parent.name: json.loads(path.read_text())["files"] for path in manifests}


def test_a_keras_model_learns_what_a_sum_of_weights_cannot(whole):
    _, finished = whole
    assert finished.state == "done"
    assert finished.report["stages"]["train"]["auc"] > 0.75
    assert finished.report["baselines"]["logistic_regression"]["auc"] < 0.65


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_bits(whole):
    folder, finished = whole
    scenario = load_scenario(folder / "likes.yaml", CHANGES)[0]
    with nonet.Session(scenario, folder=folder, run=RunFolder(folder / "stopped")) as session:
        stage = session.stages["train"]
        session.begin("train")
        session.trainer.train(stage, 0, 20)
        for step in range(20):
            session.commit(step)
    resumed = api.resume(folder / "stopped", panel=Panel(io.StringIO(), live=False))
    assert resumed.report["detail"] == finished.report["detail"]
    hashes = hash_files(finished.folder)
    assert hash_files(resumed.folder)[max(hashes)] == hashes[max(hashes)]


@pytest.mark.slow
def test_a_killed_trainer_changes_no_bit(whole):
    folder, _ = whole
    command = [sys.executable, "-c", "from nonet.deploy.cli import main; main()", "chaos", "likes.yaml"]
    sets = [word for change in [*CHANGES, "checkpoint.every=5"] for word in ("--set", change)]
    done = subprocess.run(
        [*command, "--kill", "trainer", "--times", "2", "--seed", "2", "--run-dir", "chaos", "--json", *sets],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        env={key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["lost"] == []
    assert any(fault["victim"] for fault in result["faults"])


@pytest.mark.slow
def test_two_trainers_learn_what_one_does(whole):
    folder, finished = whole
    roles = "roles.trainer.workers=2" if PYTHON else "roles={trainer: {workers: 2}}"
    one, two = (each.report["stages"]["train"]["auc"] for each in (finished, run(folder, "pair", roles)))
    assert two == pytest.approx(one, abs=0.05)  # dropout is drawn a rank
    again = run(folder, "pair-again", roles)
    assert hash_files(RunFolder(folder / "pair")) == hash_files(again.folder)


@pytest.mark.skipif(bool(PYTHON), reason="this process has another backend than the run")
def test_a_checkpoint_predicts_the_stored_probabilities(whole):
    _, finished = whole
    model = ClickModel(Checkpoints(finished.folder.checkpoints).find_newest()[0])
    assert model.setup.sequences == {"liked": 8}
    with np.load(finished.folder.results / "train.npz") as stored:
        assert stored["test"].std() > 0.05
