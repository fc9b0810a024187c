"""What one training step does to the weights, without Ray: signs, weights, masks, rates, and what must not move."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from ring_world import Ring, scores_of

from nonet.errors import CheckpointError, ConfigError
from nonet.models.generation.exhaustive import score_items
from nonet.models.generation.logprob import log_prob
from nonet.models.spec import build_model
from nonet.samples import batches
from nonet.samples.batches.steps import select_step_rows
from nonet.samples.sequences.sequences import RL, TRAIN
from nonet.workers import load_model
from nonet.workers.roles import Schedule

# Shapes: U prompts, W beams, I items, L levels.
FAST = "stages.rl.lr=3e-3"  # the ring's policy moves in one step


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring"))


@pytest.fixture(scope="module")
def taught(ring, tmp_path_factory):
    """Make a checkpoint of a model that has seen the ring for an epoch."""
    world = ring.world()
    world.train("pretrain", 0, 6)
    return world.save(tmp_path_factory.mktemp("taught"))


@pytest.fixture
def world(ring, taught):
    """Make a world at the start of RL; changes of the scenario are its arguments."""

    def made(*changes: str):
        made = ring.world(FAST, *changes)
        made.load(taught)
        made.trainer.begin(made.stages["rl"])
        return made

    return made


def one_beam(beams, place: int, value: float = 1.0):
    """`value` for one beam of each prompt, 0 for the others."""
    scores = np.zeros(beams["valid"].shape, np.float32)
    scores[:, place] = value
    return scores


def logp(world, beams):
    """Return the current policy's log-probability of each of these beams [U, W], nats."""
    asked = world.rollout._recommender
    batch = asked.batch(beams["user"], beams["position"])
    world.trainer.model.eval()
    with torch.no_grad():
        found = log_prob(
            world.trainer.model,
            batch,
            asked.read_rows(batch),
            torch.from_numpy(beams["sid"]),
            asked.corpus.trie,
        )
    return found.sum(-1).numpy()


def gained(world, scores, **stage):
    """How much log-probability each beam's place gained in an update on these scores of `hit` alone, [W], mean over prompts."""
    beams = world.beams()
    given = scores(beams)
    before = logp(world, beams)
    told = replace(world.stages["rl"], **({"weights": dict.fromkeys(given, 1.0)} | stage))
    world.update(beams, given, stage=told)
    return (logp(world, beams) - before).mean(0)


@pytest.mark.parametrize("normalise", ["group", "gdpo"])
def test_the_beam_that_was_rewarded_gains_probability_and_the_others_lose(world, normalise):
    small = {"algorithm": {"use": "grpo", "kl": 0.01, "clip": 0.2, "normalise": normalise}}
    gain = gained(world(), lambda beams: {"hit": one_beam(beams, 2)}, **small)
    assert gain[2] > 0.01
    assert gain[[0, 1, 3]].max() < 0


def test_the_beam_that_was_punished_loses_probability_and_more_than_the_others(world):
    gain = gained(world(), lambda beams: {"hit": one_beam(beams, 0, -1.0)})
    assert gain[0] < -0.01
    assert gain[1:].mean() > gain[0] + 0.01  # what it loses may go to items outside the beams too


@pytest.mark.parametrize("normalise", ["group", "gdpo"])
def test_of_two_rewards_that_disagree_the_heavier_one_wins(world, normalise):
    def against(beams):
        return {"hit": one_beam(beams, 0), "own": one_beam(beams, 3)}

    how = {"algorithm": {"use": "grpo", "kl": 0.01, "clip": 0.2, "normalise": normalise}}
    gain = gained(world(), against, weights={"hit": 1.0, "own": 0.1}, **how)
    assert gain[0] > 0.01 > 0 > gain[3]
    gain = gained(world(), against, weights={"hit": 0.1, "own": 1.0}, **how)
    assert gain[3] > 0.01 > 0 > gain[0]


@pytest.mark.parametrize("normalise", ["group", "gdpo"])
def test_a_reward_of_weight_0_changes_no_bit_and_any_other_weight_does(world, normalise):
    how = [f"stages.rl.algorithm.normalise={normalise}"]

    def after(weights):
        there = world(*how)
        beams = there.beams()
        scores = {name: score for name, score in scores_of(beams).items() if name in weights}
        there.update(beams, scores, stage=replace(there.stages["rl"], weights=weights))
        return there.weights()

    alone = after({"hit": 1.0})
    assert torch.equal(after({"hit": 1.0, "own": 0.0}), alone)
    assert not torch.equal(after({"hit": 1.0, "own": 0.5}), alone)


def level_logp(model, world, beams):
    """Constrained log-probabilities [U, W, L] of beams without `log_prob`: sums over the items below each prefix."""
    asked = world.rollout._recommender
    batch = asked.batch(beams["user"], beams["position"])
    sids_IL = torch.from_numpy(asked.corpus.sids).long()
    sid_UWL = torch.from_numpy(beams["sid"]).long()
    model.eval()
    with torch.no_grad():
        every_UI = score_items(
            model, model.prefill(batch, asked.read_rows(batch)), asked.corpus.trie
        ).double()
    below = [torch.zeros(sid_UWL.shape[:2], dtype=torch.float64)]
    for level in range(1, sid_UWL.shape[2] + 1):
        same_UWI = (sids_IL[None, None, :, :level] == sid_UWL[:, :, None, :level]).all(-1)
        below.append(every_UI[:, None].masked_fill(~same_UWI, -torch.inf).logsumexp(-1))
    return torch.stack([after - before for before, after in pairwise(below)], -1)


def moved(world, steps: int = 3):
    """RL steps on made-up rewards, so that policy and reference differ."""
    for step in range(steps):
        beams = world.beams(step)
        world.update(beams, scores_of(beams, step), step)


def test_kl_is_that_of_the_policy_against_the_reference_that_was_saved(world, tmp_path):
    there = world()
    before = there.weights()
    moved(there)
    there.save(tmp_path)
    reference = build_model(
        there.run.model, there.trainer.corpus.codes, there.run.get_feature_dims(), seed=99
    )
    load_model(reference, tmp_path / "reference")
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in reference.parameters()]), before)
    beams = there.beams(3)
    d = level_logp(reference, there, beams) - level_logp(there.trainer.model, there, beams)
    k3 = (d.exp() - 1 - d)[torch.from_numpy(beams["valid"])]
    record = there.update(beams, scores_of(beams, 3), 3)
    assert record["kl"] > 1e-3
    assert record["kl"] == pytest.approx(
        float(k3.mean()), rel=1e-3
    )  # float32 log-probabilities, differences of 0.1


def test_where_rewards_say_nothing_the_kl_term_pulls_the_policy_back_to_its_reference(world):
    there = world()
    moved(there)
    beams = there.beams(3)
    flat = {"hit": np.ones(beams["valid"].shape, np.float32)}
    pull = replace(
        there.stages["rl"],
        weights={"hit": 1.0},
        algorithm={"use": "grpo", "kl": 1.0, "clip": 0.2, "normalise": "group"},
    )
    there.trainer.dense.restart()  # without the momentum of the steps before
    kl = [there.update(beams, flat, 1, pull)["kl"] for _ in range(3)]
    assert kl[0] > kl[1] > kl[2]
    assert there.update(beams, flat, 1, pull)["flat_groups"] == len(beams["user"])
    alone = replace(pull, algorithm={**pull.algorithm, "kl": 0.0})
    assert there.update(beams, flat, 1, alone)["norm"] == 0.0


def test_a_record_has_each_rewards_mean_and_their_weighted_sum_and_nothing_but_numbers(world):
    there = world()
    beams = there.beams()
    scores = scores_of(beams)
    record = there.update(beams, scores)
    means = {name: float(score.mean()) for name, score in scores.items()}
    assert {name: record[f"reward.{name}"] for name in scores} == pytest.approx(means)
    assert record["reward"] == pytest.approx(means["hit"] + 0.5 * means["own"])
    assert all(isinstance(value, float) for value in record.values())


def test_ratios_are_to_the_probabilities_the_beams_were_made_with(world):
    there = world()
    beams = there.beams()
    scores = {"hit": one_beam(beams, 1), "own": one_beam(beams, 1)}
    record = there.update(beams | {"logp": beams["logp"] - np.float32(np.log(2))}, scores)
    assert record["ratio"] == pytest.approx(2.0, rel=1e-5)
    assert record["clipped"] == pytest.approx(
        1 / 4
    )  # a good beam that is likelier by far: held back; bad ones are not
    assert record["prompts"] == len(beams["user"])


def test_a_place_without_a_beam_changes_nothing(world):
    whole, cut = world(), world()
    beams = whole.beams()
    beams["valid"][:, 3] = False
    nothing = {name: values.copy() for name, values in beams.items() if name in ("sid", "valid", "logp")}
    nothing["sid"][:, 3], nothing["logp"][:, 3] = -1, 0.0
    scores = scores_of(beams)
    assert whole.update(beams | nothing, scores) == cut.update(
        beams | nothing,
        {name: np.where(beams["valid"], score, 7.0).astype(np.float32) for name, score in scores.items()},
    )
    assert torch.equal(whole.weights(), cut.weights())


def test_rl_moves_the_dense_policy_alone_and_its_reference_stays(world, tmp_path):
    there = world()
    states, weights = there.states(), there.weights()
    there.save(tmp_path / "before")
    moved(there, 2)
    there.save(tmp_path / "after")
    assert there.states() == states
    assert not torch.equal(there.weights(), weights)
    files = [tmp_path / when / "reference" / "model.safetensors" for when in ("before", "after")]
    assert files[0].read_bytes() == files[1].read_bytes()
    dense = [tmp_path / when / "dense" / "model.safetensors" for when in ("before", "after")]
    assert dense[0].read_bytes() != dense[1].read_bytes()


def test_rl_makes_no_rows_for_those_it_meets_first(ring):
    there = ring.world(FAST)
    there.trainer.begin(there.stages["rl"])
    moved(there, 1)
    assert there.shard.count_rows() == {"item": 0, "user": 0}


def test_rl_that_goes_on_from_a_commit_ends_in_the_bits_of_one_that_never_stopped(ring, world, tmp_path):
    there = world("stages.rl.steps=8")
    moved(there, 3)
    there.save(tmp_path)
    again = ring.world(FAST, "stages.rl.steps=8")
    again.load(tmp_path, "rl")
    for step in range(3, 6):
        beams, same = there.beams(step), again.beams(step)
        assert np.array_equal(beams["logp"], same["logp"])
        record = there.update(beams, scores_of(beams, step), step)
        assert record == again.update(same, scores_of(same, step), step)
        assert record["kl"] > 0
    assert torch.equal(there.weights(), again.weights())
    assert there.states() == again.states()


def test_users_left_out_for_the_probe_are_never_leased_and_all_others_are(world):
    there = world()
    seq = there.trainer.corpus.seq
    users, positions = there.rollout.draw_held_out_prompts()
    probed = set(users.tolist())
    assert len(users) == 2 * len(probed)  # both of a user's events that are held out for RL
    assert (seq.split[seq.offsets[users] + positions] == RL).all()
    leased = {
        user for step in range(30) for user in there.rollout.lease("rl", step, 8)[0].tolist()
    }  # two epochs
    with_rl = set(seq.user[seq.split == RL].tolist())
    assert len(probed) == len(with_rl) // 5
    assert leased == with_rl - probed


def supervised(world, stage="pretrain", **changes):
    """Take the stage's first step; return its record, and how far every item row moved from its start, by key."""
    rested = {}
    for name, rate in (("still", 0.0), ("moving", None)):
        there = world()
        told = replace(there.stages[stage], **changes)
        if rate is not None:
            told = replace(told, lr=told.lr.model_copy(update={"peak": rate}))
        there.trainer.begin(told)
        record = there.trainer.train(told, 0, 1)[0]
        rested[name] = there.rows()
    assert np.array_equal(rested["still"][0], rested["moving"][0])
    return record, rested["moving"][1] - rested["still"][1]


def test_rates_of_the_tables_follow_the_dense_schedule(ring):
    warm = Schedule(peak=3e-3, warmup=0.5)  # 9 of 18 steps: the first is at a ninth
    record, full = supervised(ring.world, lr=Schedule(peak=3e-3, warmup=0.0))
    assert record["lr"] == 3e-3
    record, ninth = supervised(ring.world, lr=warm)
    assert record["lr"] == pytest.approx(3e-3 / 9)
    assert np.abs(full).max() > 1e-3
    np.testing.assert_allclose(ninth, full / 9, rtol=1e-3, atol=1e-7)  # float32 differences of rows
    lower = Schedule(peak=1e-3, warmup=0.0)  # against the first stage's peak: tables learn at a third
    np.testing.assert_allclose(supervised(ring.world, lr=lower)[1], full / 3, rtol=1e-3, atol=1e-7)


def test_a_stage_with_a_target_trains_on_the_events_it_holds_for_and_no_others(ring):
    there = ring.world()
    seq, stage = there.trainer.corpus.seq, there.stages["finetune"]
    records = there.train("finetune")
    liked = seq.columns["rating"][seq.split == TRAIN] >= 4
    assert sum(record["events"] for record in records) == liked.sum() < len(liked)
    there = ring.world()
    stage = replace(stage, target=None)
    there.trainer.begin(stage)
    everything = there.trainer.train(stage, 0, stage.steps)
    assert sum(record["events"] for record in everything) == len(liked)


@pytest.fixture
def losses(ring, monkeypatch):
    """Losses of steps that move nothing, all on the rows of step 0."""
    monkeypatch.setattr(batches, "select_step_rows", lambda *request: select_step_rows(*request[:-1], 0))

    def of(steps, *changes):
        there = ring.world("stages.pretrain.batch.users=60", *changes)
        still = replace(there.stages["pretrain"], lr=Schedule.model_construct(peak=0.0))
        return [loss_of(there, still, step) for step in steps]

    def loss_of(there, stage, step):
        there.trainer.begin(stage)  # a step is learned from once a stage
        return there.trainer.train(stage, step, step + 1)[0]["loss"]

    return of


def test_dropout_differs_from_step_to_step_and_not_from_run_to_run(losses):
    without = losses([0, 1, 2], "model.dropout=0.0")
    assert without == [without[0]] * 3
    first, again, other = losses([0, 0, 1], "model.dropout=0.3")
    assert first == again
    assert abs(other - first) > 1e-4 * first
    assert [first, other] == losses([0, 1], "model.dropout=0.3")


def test_evaluation_and_rl_are_without_dropout(ring):
    there = ring.world("model.dropout=0.5", FAST)
    there.train("pretrain", 0, 2)
    there.trainer.begin(there.stages["rl"])
    one, two = there.beams(0), there.beams(0)
    assert np.array_equal(one["logp"], two["logp"])
    record = there.update(one, scores_of(one))
    assert record["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert record["kl"] == pytest.approx(0.0, abs=1e-9)


def test_a_stage_begins_with_a_fresh_optimizer_and_the_reference_it_has_then(ring, taught, world):
    """What a trainer did before a stage is in its weights and nowhere else."""
    there, fresh = world(), ring.world(FAST)
    moved(there, 2)
    there.trainer.begin(there.stages["rl"])
    fresh.trainer.model.load_state_dict(there.trainer.model.state_dict())
    fresh.shard.load(str(taught))
    fresh.trainer.begin(fresh.stages["rl"])
    beams = there.beams(2)
    record = there.update(beams, scores_of(beams))
    assert record == fresh.update(beams, scores_of(beams))
    assert record["kl"] == pytest.approx(0.0, abs=1e-9)
    assert torch.equal(there.weights(), fresh.weights())


SPARSE = ("stages.rl.sparse_lr=0.5", "stages.rl.algorithm={use: grpo, kl: 0.01}")


def complete_kl(world, beams, before):
    """KL over the catalogue, mean over prompts, of the policy as it is now to log-probabilities [U, I] of an earlier one."""
    now = catalogue(world, beams)
    return float((now.exp() * (now - before)).sum(1).mean())


def catalogue(world, beams):
    """Log-probabilities [U, I] of the live policy, its live rows included."""
    asked = world.rollout._recommender
    batch = asked.batch(beams["user"], beams["position"])
    world.trainer.model.eval()
    with torch.no_grad():
        cache = world.trainer.model.prefill(batch, asked.read_rows(batch))
        return score_items(world.trainer.model, cache, asked.corpus.trie).double()


def test_the_kl_sees_sparse_rows_that_the_stage_has_moved(world):
    there = world(*SPARSE, "stages.rl.lr=1e-9")
    beams = there.beams()
    before = catalogue(there, beams)
    for step in range(3):
        there.update(beams, scores_of(beams), step)
    record = there.update(beams, scores_of(beams), 3)
    assert record["kl_exact"] > 1e-3  # before, policy and reference read the same rows and this was 0
    expected = complete_kl(there, {name: beams[name][:8] for name in ("user", "position")}, before[:8])
    last = there.update(beams, scores_of(beams), 4)["kl_exact"]
    assert last == pytest.approx(expected, rel=1e-4)


def test_a_reference_with_moved_rows_survives_a_resume_in_its_bits(ring, world, tmp_path):
    there = world(*SPARSE)
    beams = there.beams()
    for step in range(2):
        there.update(beams, scores_of(beams), step)
    folder = there.save(tmp_path / "commit")
    other = ring.world(FAST, *SPARSE)
    other.load(folder, "rl")
    records = [each.update(beams, scores_of(beams), 2) for each in (there, other)]
    assert records[0] == records[1]
    assert there.states() == other.states()


def test_a_checkpoint_that_lacks_the_moved_rows_is_refused_in_one_line(ring, world, tmp_path):
    there = world(*SPARSE)
    beams = there.beams()
    there.update(beams, scores_of(beams))
    folder = there.save(tmp_path / "commit")
    (folder / "reference" / "rows.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"sparse_lr.*start the run again"):
        ring.world(FAST, *SPARSE).load(folder, "rl")


def test_a_reference_that_follows_by_ema_moves_its_rows_too(world):
    there = world(
        "stages.rl.sparse_lr=0.5", "stages.rl.algorithm={use: grpo, kl: 0.01, reference: {ema: 0.75}}"
    )
    beams = there.beams()
    key, before = there.rows()
    there.update(beams, scores_of(beams))
    _, after = there.rows()
    stored = there.trainer._learner.reference.stored["item"]
    place = np.searchsorted(key, stored.keys.numpy())
    np.testing.assert_allclose(stored.rows, 0.75 * before[place] + 0.25 * after[place], atol=1e-6)


def test_a_stage_that_has_not_begun_is_refused_instead_of_trained_with_new_state(ring):
    there = ring.world()
    stage = there.stages["pretrain"]
    with pytest.raises(ConfigError, match=r"trainer-0 has not begun stage 'pretrain'.*call begin\(stage\)"):
        there.trainer.train(stage, 0, 1)
    there.trainer.begin(stage)
    there.trainer.train(stage, 0, 1)
    with pytest.raises(ConfigError, match="has not begun stage 'pretrain' with these settings"):
        there.trainer.train(replace(stage, chunk=7), 1, 2)
