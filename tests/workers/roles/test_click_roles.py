"""A click model's trainer and evaluator in this process, without Ray: what is learned, on what, and against what."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from likes_world import make_likes

from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.setup.run_files import make_data_setup
from nonet.controller.setup.worker_setup import make_run_setup, make_stage_setups
from nonet.samples.sequences.sequences import TEST, TRAIN, VALID, Sequences
from nonet.workers.roles.artifacts import write_sequences
from nonet.workers.roles.click.evaluator import ClickEvaluator
from nonet.workers.roles.click.tokenizer import ClickTokeniser
from nonet.workers.roles.click.trainer import ClickTrainer
from nonet.workers.roles.embedding import EmbeddingShard
from nonet.workers.roles.evaluation import Evaluate
from nonet.workers.runtime.worker import Place

OPTIONS = Evaluate(metrics=["auc", "log_loss"], width=10)


class Likes:
    """The tables of test_run_ctr.py, tokenised, and a trainer over them."""

    def __init__(self, folder):
        scenario, beside = load_scenario(make_likes(folder) / "likes.yaml")
        self.facts = ClickTokeniser().prepare(make_data_setup(scenario, beside), str(folder))
        self.folders = {kind: artifact["path"] for kind, artifact in self.facts["artifacts"].items()}
        self.seq = Sequences.load(self.folders["sequences"])
        self.run = make_run_setup(scenario)
        data = self.facts["data"]
        self.stage = make_stage_setups(scenario, data["users"], data["trained_events"])["train"]

    def trainer(self, folders=None):
        shard, trainer = EmbeddingShard(self.run), ClickTrainer(self.run)
        trainer.place = Place(role="trainer", peers={"embedding": shard})
        trainer.open(folders or self.folders)
        trainer.begin(self.stage)
        return trainer, shard


@pytest.fixture(scope="module")
def likes(tmp_path_factory):
    return Likes(tmp_path_factory.mktemp("likes"))


@pytest.fixture
def evaluator(likes, tmp_path):
    def made(folders=likes.folders, name="results"):
        made = ClickEvaluator(likes.run, OPTIONS)
        made.open(folders, str(tmp_path / name))
        return made

    return made


def relabelled(likes, tmp_path, liked):
    """Write the artifacts with other labels: these events were liked."""
    folder = tmp_path / "relabelled"
    folder.mkdir()
    items = pq.read_table(f"{likes.folders['sequences']}/items.parquet")
    write_sequences(folder, replace(likes.seq, targets={"train": liked | likes.seq.targets["train"]}), items)
    return {"sequences": str(folder)}


def test_labels_of_held_out_events_teach_nothing(likes, tmp_path):
    held_out = relabelled(likes, tmp_path, likes.seq.split != TRAIN)
    losses = [
        [record["loss"] for record in likes.trainer(folders)[0].train(likes.stage, 0, 5)]
        for folders in (None, held_out)
    ]
    assert losses[0] == losses[1]


def test_a_step_is_rows_of_events_and_an_epoch_is_all_of_them(likes):
    stage, trained = likes.stage, int((likes.seq.split == TRAIN).sum())
    assert (stage.users, stage.steps) == (128, 4 * -(-trained // 128))
    trainer, _ = likes.trainer()
    records = trainer.train(stage, 0, stage.steps // 4)
    assert sum(record["events"] for record in records) == trained
    assert records[0]["loss"] == pytest.approx(
        np.log(2), abs=0.1
    )  # nats a row, of a model that knows nothing
    assert records[-1]["loss"] < records[0]["loss"]


def test_a_loss_is_given_the_rows_of_the_step_on_all_ranks(likes, monkeypatch):
    trainer, _ = likes.trainer()
    given, real = [], trainer.model.compute_loss

    def compute_loss(pooled, label, weight, step_rows):
        given.append((len(label), step_rows))
        return real(pooled, label, weight, step_rows)

    monkeypatch.setattr(trainer.model, "compute_loss", compute_loss)
    trainer.train(likes.stage, 0, 2)
    assert given == [(128, 128)] * 2


def test_mapped_pages_of_the_log_are_released_while_a_click_model_trains(likes, monkeypatch):
    trainer, _ = likes.trainer()
    released = []
    monkeypatch.setattr(Sequences, "release_pages", lambda self: released.append(self))
    assert len(trainer.train(likes.stage, 0, 10)) == 10
    assert not released
    longer = replace(likes.stage, steps=70)
    trainer.begin(longer)
    trainer.train(longer, 60, 70)
    assert len(released) == 1


def test_a_trained_model_tells_liked_events_from_others_and_its_baselines_cannot(likes, evaluator, tmp_path):
    trainer, shard = likes.trainer()
    trainer.train(likes.stage, 0, likes.stage.steps)
    trainer.save(str(tmp_path / "commit"))
    shard.save(str(tmp_path / "commit"))
    there = evaluator()
    found = {name: there.evaluate_baseline(name) for name in ("popularity", "logistic_regression")}
    found["model"] = there.evaluate("model", str(tmp_path / "commit"))
    auc = {name: each["detail"]["test"]["exhaustive"]["all"]["auc"] for name, each in found.items()}
    assert auc["model"] > 0.75 > 0.65 > max(auc["popularity"], auc["logistic_regression"])
    of_all, validated = (
        found["model"]["detail"]["valid"]["exhaustive"]["all"],
        there.validate("train", str(tmp_path / "commit")),
    )
    assert validated["metrics"] == of_all, "few users: all of them"
    assert validated["nats"] == of_all["log_loss"]
    assert validated["events"] == (likes.seq.split == VALID).sum()
    paired = there.compare([("model", "popularity"), ("popularity", "model")])
    assert paired["model-popularity"]["auc"]["low"] > 0
    assert paired["model-popularity"]["log_loss"]["high"] < 0
    assert paired["popularity-model"]["auc"]["high"] < 0


def test_chances_are_of_the_rows_of_their_split(likes, evaluator, tmp_path):
    there = evaluator()
    there.evaluate_baseline("popularity")
    chances = np.load(tmp_path / "results" / "popularity.npz")
    label, rows = likes.seq.targets["train"], likes.seq.split == TRAIN
    liked = np.bincount(likes.seq.item[rows], weights=label[rows])
    rate = (liked + 5 * label[rows].mean()) / (np.bincount(likes.seq.item[rows]) + 5)
    for name, split in (("valid", VALID), ("test", TEST)):
        np.testing.assert_allclose(chances[name], rate[likes.seq.item[likes.seq.split == split]], rtol=1e-5)


@pytest.mark.parametrize("name", ["popularity", "logistic_regression"])
def test_baselines_learn_nothing_from_labels_that_are_held_out(likes, evaluator, tmp_path, name):
    """Half of the users have other labels in the test: chances of the other half are what they were."""
    seq, half = likes.seq, likes.seq.user < len(likes.seq) // 2
    changed = relabelled(likes, tmp_path, half & (seq.split == TEST))
    found = []
    for which, folders in (("as it is", likes.folders), ("changed", changed)):
        evaluator(folders, which).evaluate_baseline(name)
        found.append(np.load(tmp_path / which / f"{name}.npz"))
    rest = ~half[seq.split == TEST]
    assert np.array_equal(found[0]["test"][rest], found[1]["test"][rest])
    assert np.array_equal(found[0]["valid"], found[1]["valid"])


def test_a_tenth_of_the_rows_learn_without_their_moment(likes):
    trainer, _ = likes.trainer()
    hours, rows = 0, 0
    for step in range(6):
        batch = trainer.get_learner(likes.stage).read_batch(step).batch
        hours, rows = hours + len(batch.bags["hour"].values), rows + len(batch.label)
    assert 0.05 < 1 - hours / rows < 0.15
