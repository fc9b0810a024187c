"""Items nearest to a user's state learn beside the semantic ids and vote in rollouts, updates and rankings alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ring_world import Ring, scores_of

from nonet.controller.scenario import check_tables, load_scenario
from nonet.errors import ConfigError
from nonet.models.generation import get_signal_weights, set_signal_weights
from nonet.models.tokenizer import compute_signals
from nonet.samples.batches import list_prompts, make_training_batch
from nonet.samples.sequences import TEST, TRAIN
from nonet.workers.roles.evaluation.evaluator import Evaluator
from nonet.workers.roles.evaluation.model_of_commit import load_recommender
from nonet.workers.roles.evaluation.options import Evaluate

BOTH = "model.memory={voters: [transitions, nearest], width: 6}"


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring"))


@pytest.fixture(scope="module")
def trained(ring):
    world = ring.world(BOTH)
    world.records = world.train("pretrain")
    return world


def test_nearness_is_learnt_beside_the_semantic_ids(trained):
    losses = [record["nearest_loss"] for record in trained.records]
    assert min(losses[-3:]) < losses[0] - 0.05
    assert trained.records[-1]["loss"] < trained.records[0]["loss"]


def test_the_fit_gives_the_voter_a_share_and_a_commit_answers_as_the_live_model(trained, ring, tmp_path):
    trained.trainer.fit_memory()
    assert len(trained.trainer.model.memory) == 4
    trained.trainer.model.memory[3] = 0.5
    commit = trained.save(tmp_path / "commit")
    trained.beams()  # the rollout moves to the newest version
    users, positions = list_prompts(trained.trainer.corpus.seq, TEST)
    live = trained.rollout._recommender
    again = load_recommender(trained.run, ring.corpus(), commit)
    mine, theirs = (r.score_catalogue(r.batch(users, positions), users, positions) for r in (live, again))
    assert mine.tolist() == theirs.tolist()
    again.model.memory[3] = 0.0
    assert again.score_catalogue(again.batch(users, positions), users, positions).tolist() != theirs.tolist()


def test_an_update_scores_beams_as_the_rollout_did(trained):
    trained.trainer.begin(trained.stages["rl"])
    trained.trainer.model.memory.copy_(trained.trainer.model.memory.new_tensor([0.4, 0.5, 1.0, 0.5]))
    beams = trained.beams()
    record = trained.update(beams, scores_of(beams))
    assert record["ratio"] == pytest.approx(1.0, abs=1e-6)


@pytest.fixture(scope="module")
def alike(tmp_path_factory):
    """A world whose memory compares the kinds of items."""
    ring = Ring(tmp_path_factory.mktemp("alike"))
    compute_signals(ring.corpus().items, ["categories"]).save(ring.folders["transitions"])
    world = ring.world("model.memory={voters: [transitions, nearest], width: 3, signals: [categories]}")
    world.train("pretrain")
    world.ring = ring
    return world


def test_similarity_counts_alike_in_the_live_model_and_in_its_commit(alike, tmp_path):
    model = alike.trainer.model
    assert get_signal_weights(model) == [0.5]
    alike.trainer.fit_memory()
    assert get_signal_weights(model) != [0.5]
    model.memory.copy_(model.memory.new_tensor([0.6, 0.2, 1.0, 0.5]))
    set_signal_weights(model, [4.0])
    commit = alike.save(tmp_path / "commit")
    alike.beams()
    users, positions = list_prompts(alike.trainer.corpus.seq, TEST)
    live, again = alike.rollout._recommender, load_recommender(alike.run, alike.ring.corpus(), commit)
    assert get_signal_weights(again.model) == [4.0]
    mine, theirs = (r.score_catalogue(r.batch(users, positions), users, positions) for r in (live, again))
    assert mine.tolist() == theirs.tolist()
    set_signal_weights(again.model, [0.0])
    assert again.score_catalogue(again.batch(users, positions), users, positions).tolist() != theirs.tolist()


def test_an_evaluation_also_ranks_without_each_part_of_the_memory(alike, tmp_path):
    model = alike.trainer.model
    model.memory.copy_(model.memory.new_tensor([0.6, 0.2, 1.0, 0.5]))
    set_signal_weights(model, [4.0])
    commit = alike.save(tmp_path / "commit")
    evaluator = Evaluator(alike.run, Evaluate(metrics=["recall@2", "ndcg@5"], width=4))
    evaluator.open(alike.ring.folders, str(tmp_path / "results"))
    whole = evaluator.corpus.seq
    no_validation = replace(whole, split=np.where(whole.split == TEST, TEST, TRAIN).astype(np.int8))
    evaluator.set_events(no_validation)  # The rows of items are read with the test events.
    assert evaluator.evaluate("pretrain", str(commit))["memory"]["parts"]
    evaluator.set_events(whole)
    result = evaluator.evaluate("pretrain", str(commit))
    without = ["without similarity", "without nearest items"]
    test = result["detail"]["test"]
    assert list(test) == ["exhaustive", "model alone", *without, "beam"]
    for way in without:
        for metric, gain in result["memory"]["parts"][way].items():
            assert gain["diff"] == pytest.approx(test["exhaustive"]["all"][metric] - test[way]["all"][metric])
    # A part without weight counts for nothing, so it is the part left out.
    weights, signal_weights = model.memory.clone(), get_signal_weights(model)
    for way, share, g in ((without[0], 0.5, 0.0), (without[1], 0.0, 4.0)):
        model.memory[3] = share
        set_signal_weights(model, [g])
        same = evaluator.evaluate("same", str(alike.save(tmp_path / f"{share}")))
        assert same["detail"]["test"]["exhaustive"]["all"]["ndcg@5"] == test[way]["all"]["ndcg@5"]
    model.memory.copy_(weights)
    set_signal_weights(model, signal_weights)


def test_leaves_of_both_voters_have_their_similarity(alike):
    users, positions = list_prompts(alike.trainer.corpus.seq, TEST)
    recommender = alike.rollout._recommender
    votes = recommender.compute_votes(users, positions)
    state = recommender.prefill(recommender.batch(users, positions)).state
    merged, _ = votes.merge_voters(recommender.model, state)
    assert merged.leaf.shape[1] > votes.leaf.shape[1]
    assert merged.similarity.tolist() == votes.compare(merged.leaf).tolist()
    assert (merged.similarity[merged.leaf >= 0] > 0).float().mean() > 0.05


def test_an_update_selects_leaves_by_similarity_as_the_rollout_did(alike):
    alike.trainer.begin(alike.stages["rl"])
    model = alike.trainer.model
    model.memory.copy_(model.memory.new_tensor([0.6, 0.2, 1.0, 0.3]))
    set_signal_weights(model, [4.0])
    beams = alike.beams()
    record = alike.update(beams, scores_of(beams))
    assert record["ratio"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["sparse.tables={user: {dim: 8}}"], "no table has them; add sparse.tables.item"),
        (["sparse.tables.item.evict={ttl_steps: 9}"], "refuses or evicts some"),
        (
            ["model.memory={voters: [nearest]}"],
            "voters must be transitions, alone or with cooccurrence, nearest and cold",
        ),
    ],
)
def test_a_voter_without_rows_of_all_items_is_refused_at_once(ring, changes, says):
    with pytest.raises(ConfigError, match=says):
        check_tables(load_scenario(ring.scenario, [BOTH, *changes])[0])


def test_kinds_of_events_count_as_the_stage_says_and_one_on_average(ring):
    world = ring.world()
    trainer, stage = world.trainer, world.stages["pretrain"]
    seq = trainer.corpus.seq
    kind = (np.arange(len(seq.item)) % 4 == 0).astype(np.int32)
    trainer.corpus.__dict__["seq"] = replace(seq, event=kind, event_names=("view", "buy"))
    stage = replace(stage, weight={"buy": 5.0})
    trainer.begin(stage)
    update = trainer.get_learner(stage).loss
    of_view, of_buy = (update._weight_by_kind / update._mean_weight).tolist()
    assert of_buy == pytest.approx(5 * of_view)
    taught = kind[seq.split == TRAIN]
    assert np.array([of_view, of_buy])[taught].mean() == pytest.approx(1.0, abs=1e-5)


def test_targets_count_the_inverse_of_their_propensity_and_one_on_average(ring):
    world = ring.world()
    trainer, stage = world.trainer, world.stages["pretrain"]
    seq = trainer.corpus.seq
    chance = np.resize(np.array([1.0, 0.5, 0.01, np.nan], np.float32), len(seq.item))
    trainer.corpus.__dict__["seq"] = replace(seq, columns={**seq.columns, "shown": chance})
    stage = replace(stage, propensity={"column": "shown", "most": 10.0})
    trainer.begin(stage)
    update = trainer.get_learner(stage).loss
    by_hand = np.resize(np.array([1.0, 2.0, 10.0, 1.0]), len(seq.item))
    mean = by_hand[seq.split == TRAIN].mean()
    assert update._mean_weight == pytest.approx(mean)
    batch = make_training_batch(
        update.context.corpus.seq,
        trainer.corpus.sids,
        np.arange(4),
        history=8,
        stage="pretrain",
        epoch=0,
        seed=7,
        target=None,
    )
    taught = batch.loss_mask.values
    shown = batch.context["shown"].values[taught]
    expected = np.select([shown == 1, shown == 0.5, shown > 0], [1.0, 2.0, 10.0], 1.0) / mean
    np.testing.assert_allclose(update._compute_target_weights(batch).numpy(), expected, rtol=1e-5)
    assert len(np.unique(expected)) == 3
