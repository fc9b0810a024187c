"""A click model in Keras from tables to report on real Ray actors; resumed, on two trainers, and as a scorer.

It has attention over liked items and over neighbours in a graph. The backend is JAX: `test_tensorflow.py` runs this file with
TensorFlow in an interpreter of its own (`NONET_KERAS_PYTHON`).
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
from likes_world import (
    HOUR,
    hash_files,
    load_scorer,
    make_likes,
    make_request,
    make_requests,
    open_click_data,
)

import nonet
from nonet.controller.record.checkpoint import Checkpoints
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.scenario import load_scenario
from nonet.deploy.run import api
from nonet.deploy.run.panel import Panel
from nonet.samples.sequences.sequences import TEST

RANKERS = Path(__file__).parents[4] / "examples" / "keras" / "rankers.py"
PYTHON = os.environ.get("NONET_KERAS_PYTHON", "")
CHANGES = [
    "model={use: keras, path: 'rankers.py:build_din', backend: jax, sequences: [liked, near]}",
    "data.graph={near: {edges: item-item, window: 3, k: 4}}",
    "sparse.tables.near={}",
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
    """Without dropout, which each rank draws by itself: within 60 steps it moves AUC by 0.1 between two draws."""
    folder, _ = whole
    (folder / "plain.py").write_text(RANKERS.read_text().replace("dropout=0.3", "dropout=0.0"))
    plain = "model.path=plain.py:build_din"
    roles = "roles.trainer.workers=2" if PYTHON else "roles={trainer: {workers: 2}}"
    one, two = run(folder, "one", plain), run(folder, "pair", plain, roles)
    assert two.report["stages"]["train"]["auc"] == pytest.approx(
        one.report["stages"]["train"]["auc"], abs=1e-3
    )
    again = run(folder, "pair-again", plain, roles)
    assert hash_files(two.folder) == hash_files(again.folder)


def test_a_checkpoint_predicts_the_stored_probabilities_and_sees_neighbours_of_posted_events(whole):
    """In the interpreter that has the backend, because a process imports Keras with one backend."""
    _, finished = whole
    if not PYTHON:
        check_scorer(finished.folder.path)
        return
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    program = f"import sys; sys.path += {folders}; from test_run_keras import check_scorer; check_scorer(sys.argv[1])"
    words = [PYTHON, "-c", program, str(finished.folder.path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]


def check_scorer(path: str | Path) -> None:
    """Check a scorer of the newest checkpoint of a run: stored probabilities, and neighbours of newer events."""
    run = RunFolder(Path(path))
    scorer = load_scorer(Checkpoints(run.checkpoints).find_newest()[0])
    assert scorer.model.setup.sequences == {"liked": 8, "near": 8}
    clicks = open_click_data(run).label_events("train")
    answers = scorer.score(make_requests(scorer, clicks, clicks.find_rows(TEST)))
    with np.load(run.results / "train.npz") as stored:
        expected = stored["test"]
    assert expected.std() > 0.05
    np.testing.assert_allclose([each[0] for each in answers], expected, atol=1e-6)

    def score(time: int, *events: dict) -> list[float]:
        request = make_request(
            scorer, 777, [1001, 1002], time=time, history=list(events), values={"age": 3.0}
        )
        return list(scorer.score([request])[0])

    # Without a label and of an unknown user, so that events are neither liked nor disliked, but edges of the graph.
    new = [{"item": 1001, "time": 40 * HOUR}, {"item": 1003, "time": 41 * HOUR}]
    without, with_events = score(42 * HOUR), score(42 * HOUR, *new)
    assert with_events[0] != pytest.approx(without[0], abs=1e-6), "1003 is a neighbour of 1001 now"
    assert with_events[1] == pytest.approx(without[1], abs=1e-6), "1002 has the neighbours that it had"
    assert score(41 * HOUR, *new) == pytest.approx(score(41 * HOUR, new[0]), abs=1e-6), (
        "not at its own second"
    )
