"""Two trainers as two threads whose all-reduce is a sum over both: what one does on all rows, they do on halves."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ring_world import Ring, scores_of

from nonet.workers.roles import RolloutRequest
from nonet.workers.roles.rollout import Rollout
from nonet.workers.runtime.rendezvous import Membership

WAIT_S = 60.0


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring"))


@pytest.fixture
def both(monkeypatch):
    """Run a function of the rank on two threads; what they hand to all_reduce is summed. Results by rank."""

    def run(work):
        barrier, given, lock = threading.Barrier(2, timeout=WAIT_S), {}, threading.Lock()

        def all_reduce(tensor, group=None, async_op=False):
            with lock:
                given[threading.get_ident()] = tensor.clone()
            barrier.wait()
            first, second = given.values()
            assert first.shape == second.shape
            barrier.wait()
            tensor.copy_(first + second)
            return SimpleNamespace(wait=lambda: None)

        monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
        results, errors = {}, []

        def one(rank):
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        if errors:
            raise errors[0]
        return results

    return run


def as_rank(world, rank):
    """Make this world's trainer one of two; its rows stay its own."""
    world.trainer.place = replace(world.trainer.place, rank=rank, world=2)
    world.trainer._member = Membership(rank, 2, n_trainers=2)
    world.trainer.dense.change_process_group(world.trainer._member)
    if world.trainer._learner is not None:
        world.trainer._learner.context = world.trainer._make_context()
    return world


def assert_moved_alike(world, alone, before):
    """Up to the order of sums, which Adam makes visible in the few weights whose gradient is all but 0."""
    assert (world.weights() - alone.weights()).norm() < 1e-3 * (alone.weights() - before).norm()


@pytest.mark.parametrize("bucket", [1 << 24, 1000], ids=["one bucket", "many buckets"])
def test_a_supervised_step_on_halves_of_the_rows_is_the_step_on_all_of_them(ring, both, monkeypatch, bucket):
    monkeypatch.setattr("nonet.workers.engines._gradient_buckets.BUCKET_ELEMENTS", bucket)
    alone = ring.world("stages.pretrain.batch.users=11")
    before = alone.weights()
    record = alone.train("pretrain", 0, 1)[0]
    worlds = [as_rank(ring.world("stages.pretrain.batch.users=11"), rank) for rank in range(2)]
    records = both(lambda rank: worlds[rank].train("pretrain", 0, 1)[0])
    for rank in range(2):
        assert records[rank]["events"] == record["events"]
        assert records[rank]["loss"] == pytest.approx(record["loss"], rel=1e-6)
        assert_moved_alike(worlds[rank], alone, before)
    assert torch.equal(worlds[0].weights(), worlds[1].weights())


def test_ranks_draw_dropout_of_their_own(ring):
    """On the same rows their losses differ by their masks alone. One after the other: torch has one generator a process."""

    def losses(*changes):
        found = []
        for rank in range(2):
            world = ring.world(*changes)
            stage = world.stages["pretrain"]
            world.trainer.place = replace(world.trainer.place, rank=rank)
            world.trainer.begin(stage)
            samples = world.trainer.get_learner(stage).samples
            makes = samples.batch(0, 0, 1)
            samples.batch = lambda *which, makes=makes: makes
            world.trainer.begin = lambda stage: None
            found.append(world.train("pretrain", 0, 1)[0]["loss"])
        return found

    assert len(set(losses("model.dropout=0.0"))) == 1
    one, two = losses("model.dropout=0.3")
    assert abs(one - two) > 1e-4 * one


@pytest.mark.parametrize("normalise", ["group", "gdpo"])
def test_an_rl_step_on_shares_of_the_prompts_is_the_step_on_all_of_them(ring, both, normalise):
    changes = (f"stages.rl.algorithm.normalise={normalise}", "stages.rl.lr=3e-3")
    alone = ring.world(*changes)
    worlds = [ring.world(*changes) for _ in range(2)]
    for world in (alone, *worlds):
        world.trainer.begin(world.stages["rl"])
    beams = alone.beams()
    scores, before = scores_of(beams), alone.weights()
    record = alone.update(beams, scores)
    shares = [slice(0, 3), slice(3, 8)]  # of unequal size: a mean over ranks would not do

    def update(rank):
        as_rank(worlds[rank], rank)
        some = {name: beams[name][shares[rank]] for name in ("sid", "valid", "logp", "user", "position")}
        return worlds[rank].update(some, {name: score[shares[rank]] for name, score in scores.items()})

    records = both(update)
    assert records[0] == records[1]
    assert records[0] == pytest.approx(record, rel=1e-4, abs=1e-6)
    assert record["prompts"] == 8
    for world in worlds:
        assert_moved_alike(world, alone, before)


def test_the_weights_and_commits_come_from_rank_0(ring, tmp_path):
    world = ring.world()
    assert len(world.trainer.export_weights(0))
    as_rank(world, 1)
    assert not len(world.trainer.export_weights(0))
    world.trainer.save(str(tmp_path / "commit"))
    assert not (tmp_path / "commit").exists()


def test_a_rollout_apart_answers_with_the_weights_and_rows_it_was_sent(ring):
    world = ring.world("weights={bucket: 10000}")
    assert len(world.trainer._outgoing.buckets) > 3
    apart = Rollout(world.run)
    apart.open(ring.folders)
    for steps in ((0, 3), (3, 6)):
        world.train("pretrain", *steps)
        fused = world.beams()
        for number in range(len(world.trainer._outgoing.buckets)):
            apart.receive(7, world.trainer.export_weights(number))
        apart.apply(7, dense=True, sparse=world.shard.export(7))
        asked = {"stage": "rl", "step": 0, "width": fused["valid"].shape[1], "version": 7}
        found = apart.generate(fused["user"], fused["position"], RolloutRequest(**asked))
        for name in ("item", "sid", "valid"):
            assert np.array_equal(found[name], fused[name])
        np.testing.assert_allclose(found["logp"], fused["logp"], rtol=1e-6)


def test_steps_of_tables_count_over_the_whole_run(ring):
    world = ring.world()
    world.train("pretrain", 0, 18)
    assert world.shard.sparse.tables["item"].step == 18
    world.train("finetune", 0, 2)
    assert world.shard.sparse.tables["item"].step == 20
