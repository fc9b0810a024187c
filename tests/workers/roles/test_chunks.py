"""A step in chunks of bounded size equals the whole step, and no forward pass is larger, whatever comes. No Ray."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests_ring import make_ring

from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.setup.run_files import make_data_setup
from nonet.controller.setup.worker_setup import make_run_setup, make_stage_setups
from nonet.samples.batches.chunks import split_by_size
from nonet.workers.roles import RolloutRequest, UpdateRequest
from nonet.workers.roles.artifacts.tokenizer import Tokeniser
from nonet.workers.roles.embedding import EmbeddingShard
from nonet.workers.roles.rollout import Rollout
from nonet.workers.roles.trainer import Trainer
from nonet.workers.runtime.worker import Place

BOT = 5000  # events of one user
ALL = 1 << 30


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    """Make the ring with a bot among its users."""
    folder = make_ring(tmp_path_factory.mktemp("ring"))
    table = pq.read_table(folder / "interactions.parquet")
    at = np.arange(BOT)
    bot = {
        "user_id": np.full(BOT, 99),
        "item_id": 1000 + at * 7 % 40,
        "timestamp": at * 60,
        "rating": np.where(at % 3, 5.0, 3.0).astype(np.float32),
    }
    pq.write_table(pa.concat_tables([table, pa.table(bot)]), folder / "interactions.parquet")
    scenario, beside = load_scenario(folder / "ring.yaml")
    facts = Tokeniser().prepare(make_data_setup(scenario, beside), str(folder))
    folders = {kind: artifact["path"] for kind, artifact in facts["artifacts"].items()}
    return SimpleNamespace(folder=folder, folders=folders, facts=facts["data"])


class World:
    """A trainer with its shard and a rollout in this process; `sizes`: positions of every forward pass."""

    def __init__(self, ring, *changes):
        scenario, _ = load_scenario(ring.folder / "ring.yaml", list(changes))
        run = make_run_setup(scenario)
        self.stages = make_stage_setups(scenario, ring.facts["users"], ring.facts["trained_events"])
        self.shard, self.trainer, self.rollout = EmbeddingShard(run), Trainer(run), Rollout(run)
        peers = {"trainer": self.trainer, "embedding": self.shard}
        self.trainer.place = Place(role="trainer", peers=peers)
        self.rollout.place = Place(role="rollout", peers=peers)
        self.trainer.open(ring.folders)
        self.rollout.open(ring.folders)
        self.rollout.apply(1)
        self.sizes: list[int] = []
        states = self.trainer.model.states

        def counted(batch, rows):
            self.sizes.append(len(batch.item.values) + len(batch.item))
            return states(batch, rows)

        self.trainer.model.states = counted

    def begin(self, name, **changes):
        stage = replace(self.stages[name], **changes)
        self.trainer.begin(stage)
        return stage

    def state(self):
        """Dense weights, then keys and rows of every table in the order of keys."""
        found = {name: value.clone() for name, value in self.trainer.model.state_dict().items()}
        for name, table in self.trainer.sparse.tables.items():
            rows = pa.concat_tables(table.export(range(1 << 16), None)).sort_by("key")
            found[name] = torch.tensor(rows["row"].to_pylist(), dtype=torch.float64)
        return found

    def generate(self, chunk=None, width=4):
        users, positions = self.rollout.draw_held_out_prompts()
        return self.rollout.generate(users, positions, RolloutRequest("rl", 0, width, 1, chunk))


def close(one, other, what, atol=2e-6):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(
            other[name].numpy(), value.numpy(), atol=atol, rtol=0, err_msg=f"{what}: {name}"
        )


@pytest.mark.parametrize("name", ["pretrain", "finetune"])
def test_a_supervised_step_in_chunks_equals_the_whole_step(ring, name):
    whole, cut = World(ring), World(ring)
    ends = [
        world.trainer.train(world.begin(name, chunk=chunk), 0, 2)
        for world, chunk in ((whole, ALL), (cut, 64))
    ]
    assert len(whole.sizes) == 2 < len(cut.sizes)
    assert max(cut.sizes) <= 64
    assert sum(cut.sizes) == sum(whole.sizes)
    for one, other in zip(*ends, strict=True):
        assert one["events"] == other["events"]
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-6)
        assert other["norm"] == pytest.approx(one["norm"], abs=1e-5)
    close(whole.state(), cut.state(), name)


def test_the_gradient_of_a_step_in_chunks_is_that_of_the_whole_step(ring, monkeypatch):
    found = {}
    for chunk in (ALL, 64):
        world = World(ring)
        stage = world.begin("pretrain", chunk=chunk)
        trainer, dense = world.trainer, world.trainer.dense
        taken: dict = found.setdefault(chunk, {})

        def clip(dense=dense, taken=taken):
            taken.update({name: p.grad.clone() for name, p in dense.model.named_parameters()})
            return 0.0

        monkeypatch.setattr(dense, "clip", clip)
        read = trainer.get_learner(stage).read_batch(0)
        rows = {table: trainer.sparse.pull(table, keys) for table, keys in read.keys.items()}
        grads, _ = trainer.get_learner(stage).take_step(0, read, rows)
        taken.update({f"rows of {table}": grad for table, grad in grads.items()})
    close(found[ALL], found[64], "gradient", atol=1e-6)
    assert found[64]["rows of item"].abs().max() > 1e-3


def test_a_bot_of_any_length_makes_no_forward_larger_than_a_chunk(ring):
    world = World(ring)
    stage = world.begin("pretrain", chunk=100)
    world.trainer.train(stage, 0, 7)  # an epoch: every user once
    assert max(world.sizes) <= 100
    assert sum(world.sizes) > BOT


def test_only_the_first_chunk_has_the_dropout_of_an_uncut_step(ring, monkeypatch):
    seeds: dict[int, list[int]] = {}
    for chunk in (ALL, 64):
        world = World(ring)
        stage = world.begin("pretrain", chunk=chunk)
        drawn = seeds.setdefault(chunk, [])
        monkeypatch.setattr(
            "nonet.workers.roles.learners.supervised.get_device",
            lambda name, drawn=drawn: SimpleNamespace(seed=drawn.append),
        )
        world.trainer.train(stage, 0, 1)
    assert seeds[ALL] == seeds[64][:1]
    assert len(set(seeds[64])) == len(seeds[64]) > 1


def test_beams_in_chunks_are_those_of_one_batch(ring):
    world = World(ring)
    world.trainer.train(world.begin("pretrain"), 0, 7)
    world.sizes.clear()
    whole = world.generate()
    most = max(world.sizes)
    world.sizes.clear()
    parts = world.generate(chunk=3)
    assert len(world.sizes) == -(-len(whole["user"]) // 3)
    assert sum(world.sizes) == most
    assert max(world.sizes) <= 3 * 9  # a history of 8 and its start
    assert whole.keys() == parts.keys()
    for name, value in whole.items():
        if hasattr(value, "offsets"):
            np.testing.assert_array_equal(parts[name].offsets, value.offsets, err_msg=name)
            value, parts[name] = value.values, parts[name].values
        if name == "logp":
            np.testing.assert_allclose(parts[name], value, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(parts[name], value, err_msg=name)


@pytest.mark.parametrize("normalise", ["group", "gdpo"])
def test_an_rl_step_in_chunks_equals_the_whole_step(ring, normalise):
    ends, records, worlds = [], [], []
    for chunk in (ALL, 5):
        world = World(ring, f"stages.rl.algorithm={{use: grpo, normalise: {normalise}, kl: 0.1}}")
        world.trainer.train(world.begin("pretrain"), 0, 7)
        stage = world.begin("rl", chunk=chunk)
        beams = world.generate()
        draw = np.random.default_rng(3)
        scores = {name: draw.random(beams["item"].shape).astype(np.float32) for name in stage.weights}
        world.sizes.clear()
        records.append([world.trainer.update(UpdateRequest(stage, step), beams, scores) for step in range(2)])
        ends.append(world.state())
        worlds.append(world)
    assert max(worlds[1].sizes) <= 5 * 9 < max(worlds[0].sizes)
    for one, other in zip(*records, strict=True):
        for name in ("loss", "kl", "clipped", "ratio", "flat_groups", "prompts", "norm"):
            assert other[name] == pytest.approx(one[name], abs=1e-5), name
    close(ends[0], ends[1], normalise)


def test_parts_are_bounded_in_order_and_as_few_as_that_takes():
    def ranges(sizes, most):
        return [(part.start, part.stop) for part in split_by_size(np.array(sizes, np.int64), most)]

    assert ranges([3, 3, 3, 1], 6) == [(0, 2), (2, 4)]
    assert ranges([3, 3, 3, 1], 10) == [(0, 4)]
    assert ranges([9, 1, 1], 2) == [(0, 1), (1, 3)], "one that is larger stands alone"
    assert ranges([], 5) == [(0, 0)]
    draw = np.random.default_rng(0)
    for _ in range(200):
        sizes, most = draw.integers(1, 12, draw.integers(0, 40)), int(draw.integers(1, 30))
        parts = split_by_size(sizes, most)
        assert [i for part in parts for i in range(part.start, part.stop)] == list(range(len(sizes)))
        assert all(sizes[part].sum() <= most or part.stop - part.start == 1 for part in parts)
        for one, other in pairwise(parts):
            assert sizes[one].sum() + sizes[other.start] > most, "no part could be longer"


def test_two_trainers_with_chunks_of_their_own_equal_one_that_cuts_nothing(ring, tmp_path):
    from forked_roles import played

    acts = [["begin", "pretrain"], ["train", "pretrain", 0, 3]]
    ask = {"scenario": ring.folder / "ring.yaml", "acts": acts}
    (whole,) = played(folder=tmp_path / "one", **ask)
    cut = played(
        folder=tmp_path / "two",
        trainers=2,
        changes=["stages.pretrain.chunk={tokens: 60}"],
        data=tmp_path / "one",
        **ask,
    )
    for rank in cut:
        for one, other in zip(whole["records"], rank["records"], strict=True):
            assert other["events"] == one["events"]
            assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
            assert other["norm"] == pytest.approx(one["norm"], abs=1e-4)
