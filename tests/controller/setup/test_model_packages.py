"""A package that a model needs and that is not installed is named before a run, with the extra that installs it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from likes_world import make_likes

from nonet.controller.scenario import check_scenario, load_scenario
from nonet.controller.setup import preflight
from nonet.errors import ConfigError

RANKERS = Path(__file__).parents[3] / "examples" / "keras" / "rankers.py"


def test_a_weight_decay_that_a_scenario_sets_is_checked_against_the_optimizer_of_the_model(
    tmp_path, monkeypatch
):
    folder = make_likes(tmp_path, users=20, events=10)
    shutil.copy(RANKERS, folder)
    given = []
    monkeypatch.setattr(
        "nonet.models.keras.check.check_ranker", lambda *arguments: given.append(arguments[3])
    )
    model = "model={use: keras, path: 'rankers.py:build_deepfm', backend: jax, from_logits: false}"
    for changes in ([], ["stages.train.optimizer={weight_decay: 0.3}"]):
        scenario, _ = load_scenario(folder / "likes.yaml", [model, *changes])
        scenario.model.spec.check_files(scenario)
    assert given == [{}, {"stages.train.optimizer.weight_decay": 0.3}]


@pytest.mark.parametrize(("backend", "extra"), [("jax", "keras-jax"), ("tensorflow", "keras")])
def test_the_extra_is_that_of_the_backend_and_a_pool_of_its_own_needs_no_package_here(
    tmp_path, monkeypatch, backend, extra
):
    folder = make_likes(tmp_path, users=20, events=10)
    shutil.copy(RANKERS, folder)
    model = f"model={{use: keras, path: 'rankers.py:build_deepfm', backend: {backend}}}"
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    monkeypatch.setattr("nonet.models.keras.check.check_ranker", lambda *_: 0)
    scenario, _ = load_scenario(folder / "likes.yaml", [model])
    with pytest.raises(ConfigError, match=rf"keras is not installed for the trainer: .*'nonet\[{extra}\]'"):
        preflight.check_files(scenario, folder)
    pool = "pools={k: {env: {python: /bin/true}}}"
    apart, _ = load_scenario(
        folder / "likes.yaml", [model, pool, "roles={trainer: {pool: k}, evaluator: {pool: k}}"]
    )
    preflight.check_files(apart, folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            ["pools={g: {device: cuda}}", "roles={trainer: {pool: g}}"],
            "roles.trainer.pool: .* computed on cpu",
        ),
        (
            ["pools={g: {device: npu}}", "roles={evaluator: {pool: g}}"],
            "roles.evaluator.pool: .* computed on cpu",
        ),
        (
            ["roles={trainer: {engine: {use: fsdp2}}}"],
            "roles.trainer.engine: a Keras model is trained by ddp",
        ),
        (["stages.train.precision={use: bf16}"], "stages.train.precision: a Keras model is trained in fp32"),
    ],
)
def test_a_keras_model_is_trained_on_cpus_in_fp32_by_ddp_alone(tmp_path, changes, said):
    folder = make_likes(tmp_path, users=20, events=10)
    shutil.copy(RANKERS, folder)
    model = "model={use: keras, path: 'rankers.py:build_deepfm', backend: jax}"
    with pytest.raises(ConfigError, match=said):
        check_scenario(load_scenario(folder / "likes.yaml", [model, *changes])[0])
    check_scenario(load_scenario(folder / "likes.yaml", [model])[0])
