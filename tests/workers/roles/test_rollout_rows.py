"""A rollout with copies and one that reads by key, of the same version, while the trainer goes on; without Ray."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.setup.run_files import make_data_setup
from nonet.controller.setup.worker_setup import make_run_setup, make_stage_setups
from nonet.embedding.reading.remote import RemoteReader
from nonet.errors import StaleVersion
from nonet.workers.roles import RolloutRequest, Weights
from nonet.workers.roles import rollout as rollouts
from nonet.workers.roles.artifacts.tokenizer import Tokeniser
from nonet.workers.roles.embedding import EmbeddingShard
from nonet.workers.roles.rollout import Rollout
from nonet.workers.roles.trainer import Trainer
from nonet.workers.runtime.payload import slice_rows
from nonet.workers.runtime.worker import Place

POLICY = ["sparse.tables.user={dim: 8, admit: {count: 2}, evict: {ttl_steps: 5}, default: 0.01}"]


JAGGED = ("target", "history")


class World:
    """A trainer with its shard, and two rollouts apart from them."""

    def __init__(self, folder):
        scenario, beside = load_scenario(folder / "ring.yaml", POLICY)
        facts = Tokeniser().prepare(make_data_setup(scenario, beside), str(folder))
        folders = {kind: artifact["path"] for kind, artifact in facts["artifacts"].items()}
        run, data = make_run_setup(scenario), facts["data"]
        self.stage = make_stage_setups(scenario, data["users"], data["trained_events"])["pretrain"]
        self.shard, self.trainer = EmbeddingShard(run), Trainer(run)
        self.trainer.place = Place(role="trainer", peers={"embedding": self.shard})
        self.copies, self.by_key = Rollout(run), Rollout(run)
        for role in (self.trainer, self.copies, self.by_key):
            role.open(folders)
        self.trainer.begin(self.stage)
        self.host = SimpleNamespace(read=SimpleNamespace(remote=lambda role, *asked: self.shard.read(*asked)))
        self.asked = self.copies.draw_held_out_prompts()

    def publish(self, version, have=None):
        self.send(self.copies, version)
        self.copies.apply(version, dense=True, sparse=self.shard.export(version, have))
        self.shard.publish(version)
        self.send(self.by_key, version)
        self.by_key.apply(version, dense=True, slices=self.shard.slice_map(), shards=[self.host])

    def send(self, rollout, version):
        for number in range(len(self.trainer._outgoing.buckets)):
            rollout.receive(version, self.trainer.export_weights(number))

    def beams(self, rollout, version):
        users, positions = self.asked
        return rollout.generate(users, positions, RolloutRequest("rl", 0, 4, version))


def same(one, other):
    return all(np.array_equal(one[name], other[name]) for name in ("item", "logp"))


@pytest.fixture
def world(tmp_path, monkeypatch):
    from tests_ring import make_ring

    monkeypatch.setattr(rollouts.ray, "get", lambda value, timeout=None: value)
    return World(make_ring(tmp_path))


def test_copies_and_reads_by_key_answer_with_the_published_rows_while_training_goes_on(world):
    world.trainer.train(world.stage, 0, 6)
    world.publish(1)
    before = world.beams(world.copies, 1)
    world.trainer.train(world.stage, 6, 12)  # the keys are first asked for after these steps
    assert same(before, world.beams(world.by_key, 1))
    assert isinstance(world.by_key._recommender.reader, RemoteReader)
    assert (
        world.copies._count_newly_absent() == world.by_key._count_newly_absent() > 0
    )  # users without a row yet read the default
    assert world.copies._count_newly_absent() == 0
    with pytest.raises(StaleVersion, match="version 2 is required"):
        world.beams(world.by_key, 2)
    world.publish(2, have=1)
    after = world.beams(world.copies, 2)
    assert same(after, world.beams(world.by_key, 2))
    assert not np.array_equal(before["logp"], after["logp"])
    assert world.shard.get_update_counts()["delta"]["updates"] == 1


def test_a_rollout_that_read_by_key_takes_copies_again_once_the_tables_are_small_enough(world):
    world.trainer.train(world.stage, 0, 6)
    world.publish(1)
    world.trainer.train(world.stage, 6, 12)
    every = world.shard.export(2, None)
    for rollout in (world.copies, world.by_key):
        world.send(rollout, 2)
        rollout.apply(2, dense=True, sparse=every)
    assert same(world.beams(world.copies, 2), world.beams(world.by_key, 2))
    assert world.by_key._recommender.reader.version == 2
    assert not [history for history in world.shard.sparse.histories.values() if history.snapshots]
    with pytest.raises(StaleVersion, match="has no published version"):
        world.host.read.remote("embedding", "item", np.arange(3), 1, "fp32")


def test_a_rollout_with_half_a_set_of_weights_stays_with_the_version_before(world):
    world.trainer.run = replace(world.trainer.run, weights=Weights(bucket=10_000))
    world.trainer._build_engine(lambda: world.trainer.model)
    world.publish(1)
    before = world.beams(world.copies, 1)
    world.trainer.train(world.stage, 0, 6)
    assert len(world.trainer._outgoing.buckets) > 3
    for number in range(len(world.trainer._outgoing.buckets) - 1):
        world.copies.receive(2, world.trainer.export_weights(number))
    with pytest.raises(StaleVersion, match="weights of version 2 are not whole"):
        world.copies.apply(2, dense=True, sparse=world.shard.export(2, 1))
    with pytest.raises(StaleVersion, match="has weights of version 1"):
        world.beams(world.copies, 2)
    assert same(world.beams(world.copies, 1), before)


def test_a_shard_loads_a_commit_while_a_version_is_published(world, tmp_path):
    world.trainer.train(world.stage, 0, 3)
    world.shard.save(str(tmp_path / "commit"))
    world.shard.publish(1)
    world.trainer.train(world.stage, 3, 6)
    world.shard.load(str(tmp_path / "commit"))
    assert not [history for history in world.shard.sparse.histories.values() if history.snapshots]
    world.trainer.train(world.stage, 6, 9)


@pytest.mark.parametrize("prompts", [1, 2, 3, 5])
def test_a_prompt_has_the_same_bits_whatever_prompts_its_rollout_computes_with_it(world, prompts):
    world.trainer.train(world.stage, 0, 6)
    world.publish(1)
    together, (users, positions) = world.beams(world.copies, 1), world.asked
    assert len(users) >= 5
    request = RolloutRequest("rl", 0, 4, 1)
    few = world.copies.generate(users[:prompts], positions[:prompts], request)
    for name, value in few.items():
        expected = slice_rows(together[name], 0, prompts)
        arrays = (
            ((value.values, expected.values), (value.offsets, expected.offsets))
            if name in JAGGED
            else ((value, expected),)
        )
        assert all(np.array_equal(found, wanted) for found, wanted in arrays), name
