"""Tensor parallelism: ranks of a tensor group compute the same samples, each with a part of the heads of every block."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_roles import played
from ring_world import Ring
from torch.testing._internal.distributed.fake_pg import FakeStore

from nonet.models import build_model
from nonet.stored_tensors import StoredTensors
from nonet.workers.engines import OptimizerOptions
from nonet.workers.engines._fsdp2 import Fsdp2
from nonet.workers.engines.division import ShardedModel, build_mesh
from nonet.workers.roles.learners.policy_update import PolicyUpdate
from nonet.workers.runtime import Membership

MESHES = {"1x1x2": ("tensor: 2", 2), "1x2x2": ("tensor: 2", 4), "2x2x2": ("tensor: 2, replicate: 2", 8)}
"""By mesh of replicate, shard and tensor, the options of the engine and the number of trainers."""

BACKBONE = (
    "model={{use: hf, precision: {}, config: {{model_type: {}, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, head_dim: 8, intermediate_size: 64}}}}"
)
FIFTY_STEPS = [
    *((mesh, optimizer, "decoder") for mesh in MESHES for optimizer in ("muon", "adamw")),
    ("1x1x2", "adamw", "qwen3"),
    ("1x2x2", "muon", "qwen3"),
    ("2x2x2", "muon", "qwen3"),
]
UNEQUAL = ["stages.pretrain.batch.users=7", "stages.pretrain.chunk={tokens: 20}"]
KINDS = {
    "attention over the history": ["model.depth=attention", "model.dropout=0.1"],
    "recompute": ["model.dropout=0.1", "roles.trainer.engine.recompute=true"],
    "common norm of weights and rows": ["stages.pretrain.optimizer={use: muon, clip_rows: true, clip: 0.1}"],
    "bf16": ["stages.pretrain.precision={use: bf16}"],
    "qwen3 in bf16": [BACKBONE.format("bf16", "qwen3")],
    "llama": [BACKBONE.format("fp32", "llama")],
    "shards apart": [],
}


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring"))


def take_steps(ring, folder, acts, trainers, *changes, data=None, shards=0):
    """Return the records of the first rank, and the counts of the sparse tables summed over ranks."""
    changes = ["stages.pretrain.epochs=60", *changes]
    ranks = played(ring.scenario, folder, acts, changes=changes, trainers=trainers, data=data, shards=shards)
    return ranks[0]["records"]


def losses(records):
    return [record["loss"] for record in records]


@pytest.fixture
def fake_world():
    """Returns a function that makes this process a rank of a world whose collectives do nothing."""

    def join(rank, world, tensor):
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        member = Membership(rank, world, trainers=torch.distributed.group.WORLD, n_trainers=world)
        member.trainers_backend, member.tensor = "fake", tensor
        first = rank - rank % tensor
        member.tensor_group = member.make_subgroup(list(range(first, first + tensor)))
        return member

    yield join
    torch.distributed.destroy_process_group()


def test_the_parts_of_a_mesh_are_the_whole_weights_of_every_replica(fake_world):
    def build():
        return build_model({"width": 16, "heads": 4, "layers": 1}, (8, 8), {}, seed=0)

    whole = dict(build().named_parameters())
    rows: dict[tuple[str, int], list[torch.Tensor]] = {}
    for rank in range(4):
        member = fake_world(rank, 4, tensor=2)
        assert (member.data_rank, member.data_world, member.leads_tensor_group) == (
            rank // 2,
            2,
            rank % 2 == 0,
        )
        sharded = ShardedModel(build(), build_mesh(member, "cpu", 1), torch.device("cpu"))
        for name, part in zip(whole, sharded.parts, strict=True):
            rows.setdefault((name, rank % 2), []).append(part.detach())
        holders = {name: sharded.count_holders(index) for index, name in enumerate(whole)}
    assert holders["blocks.0.qkv.weight"] == holders["blocks.0.merge.weight"] == 1
    assert holders["blocks.0.merge.bias"] == holders["norm.weight"] == 2
    parts = {key: torch.cat(pieces) for key, pieces in rows.items()}
    q, k, v = whole["blocks.0.qkv.weight"].chunk(3)
    assert torch.equal(parts["blocks.0.qkv.weight", 0], torch.cat([q[:8], k[:8], v[:8]]))
    assert torch.equal(parts["blocks.0.qkv.weight", 1], torch.cat([q[8:], k[8:], v[8:]]))
    assert torch.equal(parts["blocks.0.narrow.weight", 1], whole["blocks.0.narrow.weight"][:, 32:])
    assert torch.equal(parts["norm.weight", 1], whole["norm.weight"])


class Words(torch.nn.Module):
    """Frozen rows, as those of a backbone's words."""

    frozen_weights = ("weight",)

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.ones(6, 4), persistent=False)


class Backbone(torch.nn.Module):
    """Frozen words before a block with one matrix."""

    def __init__(self):
        super().__init__()
        self.words, self.scale = Words(), torch.nn.Parameter(torch.ones(3))
        self.blocks = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))])

    def hidden_matrices(self):
        return list(self.blocks.parameters())


def test_muon_steps_the_hidden_matrices_of_a_model_with_frozen_words(fake_world):
    member = fake_world(0, 2, tensor=1)
    engine = Fsdp2.build({}, Backbone, torch.device("cpu"), OptimizerOptions(use="muon"), member)
    (group,) = [group for group in engine.optimizer.param_groups if group["muon"]]
    assert [tuple(part.shape) for part in group["params"]] == [(2, 4)]
    assert not any(name.startswith("words") for name in engine.describe_weights())


def test_a_tensor_group_counts_once_in_sums_and_its_leader_alone_pulls_rows(ring):
    leader, follower = (Membership(rank, 2, tensor=2) for rank in (0, 1))
    assert (leader.sum_over_trainers(3.0), follower.sum_over_trainers(3.0)) == ([3.0], [0.0])
    assert (leader.sum_over_ranks(3.0), follower.sum_over_ranks(3.0)) == ([3.0], [3.0])
    world = ring.world()
    world.train("pretrain", 0, 1)
    trainer, stage = world.trainer, world.stages["pretrain"]
    counts = []
    for member in (leader, follower):
        trainer._member, trainer.place = member, replace(trainer.place, rank=member.rank, world=2)
        learner = trainer._make_learner(stage)
        batch = learner.read_batch(0)
        counts.append({table: len(keys) for table, keys in learner._get_pulled_keys(batch).items()})
    assert all(counts[0].values())
    assert not any(counts[1].values())


def test_the_gradient_of_the_value_head_counts_once_for_a_tensor_group():
    for rank, expected in ((0, 3.0), (1, 0.0)):
        context: Any = SimpleNamespace(member=Membership(rank, 2, tensor=2))
        update = PolicyUpdate(context, *[None] * 4, {})  # type: ignore[arg-type]
        assert update._sum_gradient(torch.full((2,), 3.0)).tolist() == [expected] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "optimizer", "model"), FIFTY_STEPS)
def test_fifty_steps_of_a_mesh_are_those_of_one_process(ring, tmp_path, mesh, optimizer, model):
    """What one process and another mesh load afterwards are the weights and moments that the ranks ended with."""
    engine, trainers = MESHES[mesh]
    use = [f"stages.pretrain.optimizer={{use: {optimizer}}}"]
    use += [BACKBONE.format("fp32", model)] if model != "decoder" else []
    alone, divided = (
        "roles.trainer={engine: {use: ddp}}",
        f"roles.trainer={{engine: {{use: fsdp2, {engine}}}}}",
    )
    acts = [["begin", "pretrain"], ["train", "pretrain", 0, 50], ["save", "end"]]
    expected = take_steps(ring, tmp_path / "alone", acts, 1, alone, *use)
    found = take_steps(ring, tmp_path / "mesh", acts, trainers, divided, *use)
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
    assert [record["events"] for record in found] == [record["events"] for record in expected]
    whole, gathered = (
        StoredTensors(tmp_path / name / "end" / "dense" / "model.safetensors") for name in ("alone", "mesh")
    )
    # Weights of Qwen3 whose gradients are near zero drift by the order of sums; those of two ranks of ddp by 3e-5.
    tolerance = 1e-5 if model == "decoder" else 1e-4
    for name, weight in whole.items():
        assert (weight - gathered[name]).norm() <= tolerance * weight.norm(), name
    read = [["rejoin", 1], ["load", "end", "pretrain"], ["train", "pretrain", 50, 54]]
    rest = take_steps(ring, tmp_path / "rest", read, 1, alone, *use, data=tmp_path / "alone")
    for name, change, ranks in (("one", alone, 1), ("again", divided, trainers)):
        again = take_steps(ring, tmp_path / name, read, ranks, change, *use, data=tmp_path / "mesh")
        assert losses(again) == pytest.approx(losses(rest), rel=tolerance), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_tensor_groups_take_the_steps_of_two_ranks(ring, tmp_path, kind):
    """Shares and chunks of the groups are unequal, and dropout draws the same numbers; so the records are equal."""
    shards = 1 if kind == "shards apart" else 0
    fit = [] if shards else [["fit_memory"]]
    acts = [["begin", "pretrain"], ["train", "pretrain", 0, 4], *fit, ["train", "pretrain", 4, 6]]
    changes = [*UNEQUAL, *KINDS[kind]]
    records = {}
    for engine, trainers in (("ddp", 2), ("fsdp2, tensor: 2", 4)):
        use = f"roles.trainer={{engine: {{use: {engine}}}}}"
        folder = tmp_path / str(trainers)
        records[trainers] = take_steps(ring, folder, acts, trainers, use, *changes, shards=shards)
    if "bf16" in kind:  # Each rank rounds its part of a sum.
        assert losses(records[4]) == pytest.approx(losses(records[2]), rel=1e-2)
        return
    for divided, whole in zip(records[4], records[2], strict=True):
        assert divided == pytest.approx(whole, rel=1e-5)
