"""A click model from tables to report on real Ray actors; interrupted and resumed; its commit as a reward."""

from __future__ import annotations

import io
import shutil

import numpy as np
import pytest
import torch
from likes_world import make_likes

import nonet
from nonet.controller.record.checkpoint import Checkpoints
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.scenario.scenario import load_scenario
from nonet.deploy.report.summaries import format_summary
from nonet.deploy.run import api
from nonet.deploy.run.panel import Panel
from nonet.errors import CheckpointError, ConfigError
from nonet.models.clicks.model import ClickModel
from nonet.rl.rewards.api import load_reward
from nonet.rl.rewards.checks import score_checked
from nonet.samples.batches.clicks import ClickRows
from nonet.samples.sequences.sequences import TEST, Sequences
from nonet.samples.tokenised import read_items
from nonet.stored_tensors import StoredTensors
from nonet.types import Jagged, Rollouts
from nonet.workers import SavedTensors, TensorFiles
from nonet.workers.engines.division import PartLayout


def run(folder, name, *changes):
    scenario = api.scenario(folder / "likes.yaml", list(changes))
    return api.run(scenario, run_dir=folder / name, panel=Panel(io.StringIO(), live=False))


@pytest.fixture(scope="module")
def whole(ray_local, tmp_path_factory):
    folder = make_likes(tmp_path_factory.mktemp("likes"))
    return folder, run(folder, "whole")


def newest(finished):
    return Checkpoints(finished.folder.checkpoints).find_newest()[0]


def test_a_click_model_learns_what_a_sum_of_weights_cannot(whole):
    _, finished = whole
    report = finished.report
    assert finished.state == "done"
    assert set(report["baselines"]) == {"popularity", "logistic_regression"}
    assert report["rows"]["train"] == 4 * 80 * 24
    # Chance that a like is noise: 0.1, so the best possible AUC is about 0.9; sums of weights stay near 0.5.
    assert report["stages"]["train"]["auc"] > 0.75
    assert report["baselines"]["logistic_regression"]["auc"] < 0.65
    paired = report["paired"]["train-logistic_regression"]
    assert paired["auc"]["low"] > 0 > paired["log_loss"]["high"]
    assert "Every test event scored" in (finished.folder.path / "report.html").read_text()
    assert "full ranking" not in format_summary(report)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_two_trainers_of_deepspeed_learn_a_click_model_with_a_single_number(whole, zero):
    """The model has a bias that is a single number, which DeepSpeed does not broadcast."""
    pytest.importorskip("deepspeed")
    folder, _ = whole
    adamw = "stages.train.optimizer=adamw"
    engines = {"ddp": "{use: ddp}", "zero": f"{{use: deepspeed, zero: {zero}}}"}
    finished = [
        run(folder, f"{name}-{zero}", adamw, f"roles.trainer={{workers: 2, engine: {engine}}}")
        for name, engine in engines.items()
    ]
    expected, found = (each.report["stages"]["train"]["auc"] for each in finished)
    assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_bits(whole):
    folder, finished = whole
    with nonet.Session(
        load_scenario(folder / "likes.yaml")[0], folder=folder, run=stopped(folder)
    ) as session:
        stage = session.stages["train"]
        session.begin("train")
        session.trainer.train(stage, 0, 20)
        for step in range(20):
            session.commit(step)
        run_folder = session.run
    resumed = api.resume(run_folder.path, panel=Panel(io.StringIO(), live=False))
    assert resumed.report["stages"] == finished.report["stages"]
    assert resumed.report["detail"] == finished.report["detail"]


def stopped(folder):
    return RunFolder(folder / "stopped")


@pytest.mark.slow
def test_two_trainers_learn_what_one_does(whole):
    folder, finished = whole
    pair = run(folder, "pair", "roles={trainer: {workers: 2}}")
    one, two = (r.report["stages"]["train"] for r in (finished, pair))
    # Dropout is drawn a rank, so the two differ by more than rounding.
    assert two["auc"] == pytest.approx(one["auc"], abs=0.05)
    assert pair.report["rows"] == finished.report["rows"]


def rollouts(finished, users, items, history):
    count = len(users)
    offsets = np.concatenate([[0], np.cumsum([len(past) for past in history])])
    item_id = np.asarray(items)
    return Rollouts(
        uid=np.array([str(u) for u in users]), user_id=np.asarray(users), item_id=item_id,
        item=np.zeros(item_id.shape, np.int64), sid=np.zeros((*item_id.shape, 1), np.int32),
        logp=np.zeros((*item_id.shape, 1), np.float32), valid=item_id >= 0,
        target=Jagged(np.zeros(count, np.int64), np.arange(count + 1)),
        history=Jagged(np.concatenate([np.asarray(past, np.int64) for past in history]), offsets),
        scene=np.zeros(count, np.int64), weights_version=1, catalogue_version="", step=0,
    )  # fmt: skip


def test_a_commit_is_a_reward_that_scores_every_beam(whole):
    folder, finished = whole
    reward = load_reward("ctr", folder, {"model": str(newest(finished))}, name="click")
    reward.setup()
    asked = rollouts(
        finished, [100, 101, 999], [[1000, 1001, 7], [1000, 1001, -1], [1000, 1001, 1002]], [[1004], [], []]
    )
    score = score_checked(reward, "click", asked)
    assert score.shape == (3, 3)
    assert score.dtype == np.float32
    assert score[0, 0] > score[0, 1]  # user 100 likes even items, user 101 odd ones
    assert score[1, 1] > score[1, 0]
    assert score[0, 2] == pytest.approx(reward.click_model.known.rates[0])  # an item it never saw
    assert score[1, 2] == 0  # no beam
    assert np.isfinite(score).all()


def test_the_reward_says_what_the_model_says_of_the_same_question(whole):
    _, finished = whole
    artifacts = finished.folder.read_facts()["artifacts"]
    folders = {"sequences": artifacts["sequences"]["path"]}
    seq, model = Sequences.load(folders["sequences"]), ClickModel(newest(finished))
    rows = ClickRows.from_labels(
        seq, read_items(folders), seq.targets["train"], list(model.setup.features), model.setup.history
    )
    first = rows.find_rows(TEST)[::4]  # the history of a user's first test row ends in two validation events
    first = first - 2  # the first validation row: all its history was trained on
    expected = model.predict(rows.batch(first, without_moment=np.ones(len(first), bool)))[:, 0]
    item_id = model.known.item_id
    history = [item_id[seq.item[seq.offsets[seq.user[at]] : at]] for at in first]
    reward = load_reward("ctr", ".", {"model": str(finished.folder.path)}, name="click")
    reward.setup()
    users = seq.user_id[seq.user[first]]
    score = reward.score(rollouts(finished, users, item_id[seq.item[first]][:, None], history))
    np.testing.assert_allclose(score[:, 0], expected, rtol=1e-5, atol=1e-6)


def test_a_click_model_is_read_from_the_slices_that_several_trainers_write(whole, tmp_path):
    _, finished = whole
    folder = shutil.copytree(newest(finished), tmp_path / "checkpoint")
    path = folder / "dense" / "model.safetensors"
    weights = {name: weight.clone() for name, weight in StoredTensors(path).items()}
    path.unlink()
    layouts = {
        name: PartLayout(tuple(weight.shape), (2,), ((0, 0),) if weight.ndim else ())
        for name, weight in weights.items()
    }
    halves = [
        [
            part
            for turn, (name, layout) in enumerate(layouts.items())
            for _, part in layout.list_written(name, rank, turn)
        ]
        for rank in range(2)
    ]
    files = TensorFiles.from_slices("model", weights, halves, max_bytes=1 << 20)
    own = {part.key: part.select_from(weights[part.name]) for half in halves for part in half}
    for rank in range(2):
        SavedTensors(files, own).make_writer(rank, copy=False)(path.parent)
    read, written = ClickModel(folder), ClickModel(newest(finished))
    for name, weight in written.model.state_dict().items():
        assert torch.equal(read.model.state_dict()[name], weight)


def test_a_folder_without_a_click_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^reward 'click': .* holds no click model"):
        load_reward("ctr", tmp_path, {"model": str(tmp_path)}, name="click")
    (tmp_path / "mine/checkpoints/step-000001/clicks").mkdir(parents=True)
    (tmp_path / "mine/checkpoints/step-000001/clicks/model.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=f"there is no run '{tmp_path}/mini'; the newest .*: {tmp_path}/mine$"
    ):
        load_reward("ctr", tmp_path, {"model": str(tmp_path / "mini")}, name="click")
    with pytest.raises(CheckpointError, match="holds no click model"):
        ClickModel(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("stages.train={epochs: 1, batch: {tokens: 9}}", r"stages.train: deepfm needs target"),
        ('stages.train={epochs: 1, target: "rating >= 4"}', r"stages.train: deepfm needs batch"),
        ("evaluate.metrics=[recall@5]", "recall@5.*auc, log_loss"),
        ("sparse.tables.user={dim: 4}", r"one dim .* \[4, 8\]"),
        ("stages.rl={steps: 1, rewards: {hit: {}}}", "makes no lists"),
    ],
)
def test_what_a_click_model_cannot_do_is_said_before_anything_starts(tmp_path, change, says):
    folder = make_likes(tmp_path, users=20, events=10)
    with pytest.raises(ConfigError, match=says):
        run(folder, "wrong", change)
    assert not (folder / "wrong").exists()
