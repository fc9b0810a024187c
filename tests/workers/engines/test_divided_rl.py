"""RL of models that trainers divide: steps, also of unequal shares, give the records of ranks with the whole model.

The ranks of a tensor group take the steps, and choose the beams, of one rank that has all weights.
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from forked_roles import played
from likes_world import make_likes
from ring_world import Ring

from nonet.rl.algorithms import ALGORITHMS as SHIPPED

QWEN3 = (
    "model={{use: hf, config: {{model_type: qwen3, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, head_dim: 8, intermediate_size: 64}}{}}}"
)
MODELS = {
    "decoder": ["model.layers=2"],
    "attention over the history": ["model.layers=2", "model.depth=attention"],
    "hstu": ["model.layers=2", "model.block=hstu"],
    "qwen3": [QWEN3.format("")],
    "qwen3 with lora": [QWEN3.format(", lora: {rank: 4, alpha: 8.0}")],
    "without a cache": [
        "model={use: hf, memory: {}, config: {model_type: mpt, d_model: 32, n_layers: 2, n_heads: 4}}",
        "stages.rl.chunk={tokens: 60}",
    ],
    "recompute": ["model.layers=3", "roles.trainer={engine: {recompute: true}}"],
}
"""Changes of the ring's scenario by kind of model."""

ALGORITHMS = {
    "grpo": "use: grpo, kl: 0.1, minibatches: 2",
    "grpo with a moving reference": "use: grpo, kl: 0.1, reference: {ema: 0.9}",
    "grpo with a renewed reference": "use: grpo, kl: 0.1, reference: {every: 2}",
    "dpo": "use: dpo",
    "ppo": "use: ppo, kl: 0.1, epochs: 2",
    "rloo": "use: rloo",
}
NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
# Shares of both ranks and chunks of them are unequal.
FSDP2 = ["roles.trainer.engine.use=fsdp2"]
ZERO_3 = ["roles.trainer.engine.use=deepspeed", "roles.trainer.engine.zero=3"]
ENGINES = [FSDP2, pytest.param(ZERO_3, marks=NEEDS_DEEPSPEED)]
UNEQUAL = [
    "stages.pretrain.batch.users=7",
    "stages.pretrain.chunk={tokens: 20}",
    "stages.pretrain.epochs=60",
    "stages.rl.users=7",
    "stages.rl.chunk={tokens: 90}",
]


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring"))


def compare(scenario, folder, acts, changes, rel=1e-5, trainers=2, engine=FSDP2, shares=None):
    """Check that the records of ranks that divide the model are those of ranks with the whole model.

    `engine` has the changes of the scenario for the ranks that divide it, and `shares` is the number of the others if it differs.
    """
    adamw = [f"stages.{stage}.optimizer={{use: adamw}}" for stage in ("pretrain", "rl")]
    records = {}
    for name, ranks, more in (
        ("whole", shares or trainers, ["roles.trainer.engine.use=ddp"]),
        ("divided", trainers, engine),
    ):
        own = [*changes, *(adamw if engine == ZERO_3 else ()), *more]
        records[name] = played(scenario, folder / name, acts, changes=own, trainers=ranks)[0]["records"]
    assert records["divided"]
    for divided, whole in zip(records["divided"], records["whole"], strict=True):
        assert divided == pytest.approx(whole, rel=rel, abs=1e-6)


RL_ACTS = [
    ["begin", "pretrain"],
    ["train", "pretrain", 0, 3],
    ["fit_memory"],
    ["begin", "rl"],
    ["update", "rl", 0, 3],
    ["save", "half"],
    ["update", "rl", 3, 4],
    ["load", "half", "rl"],
    ["update", "rl", 3, 4],
    ["evaluate", "half"],
]


def test_steps_of_rl_with_a_reference_are_those_of_whole_models(ring, tmp_path):
    changes = [*UNEQUAL, *MODELS["decoder"], f"stages.rl.algorithm={{{ALGORITHMS['grpo']}}}"]
    compare(ring.scenario, tmp_path, RL_ACTS[:5], changes)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_click_model_with_a_single_number_takes_the_steps_of_whole_models(tmp_path, optimizer):
    scenario = make_likes(tmp_path) / "likes.yaml"
    begun = [["begin", "train"], ["train", "train", 0, 4], ["save", "half"], ["train", "train", 4, 6]]
    changes = ["model.dropout=0.0", f"stages.train.optimizer={{use: {optimizer}}}"]
    compare(scenario, tmp_path, [*begun, ["load", "half", "train"], ["train", "train", 4, 6]], changes)


REPLICATED = [*FSDP2, "roles.trainer.engine.replicate=2"]


@pytest.mark.slow
def test_steps_of_rl_on_a_mesh_are_those_of_whole_models(ring, tmp_path):
    changes = [*UNEQUAL, *MODELS["decoder"], f"stages.rl.algorithm={{{ALGORITHMS['grpo']}}}"]
    compare(ring.scenario, tmp_path, RL_ACTS, changes, rel=1e-4, trainers=4, engine=REPLICATED)


@pytest.mark.slow
def test_a_click_model_with_a_single_number_takes_the_steps_of_whole_models_on_a_mesh(tmp_path):
    scenario = make_likes(tmp_path) / "likes.yaml"
    acts = [["begin", "train"], ["train", "train", 0, 4]]
    compare(scenario, tmp_path, acts, ["model.dropout=0.0"], trainers=4, engine=REPLICATED)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_new_process_group_of_the_same_ranks_keeps_the_weights(ring, tmp_path, engine):
    begun = [["begin", "pretrain"], ["train", "pretrain", 0, 2], ["generate", "rl", 0]]
    again = [
        ["rejoin", 1],
        ["begin", "pretrain"],
        ["train", "pretrain", 2, 4],
        ["begin", "rl"],
        ["update", "rl", 1, 3],
    ]
    compare(ring.scenario, tmp_path, [*begun, *again], [*UNEQUAL, *MODELS["decoder"]], engine=engine)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_model_takes_the_steps_of_whole_models(ring, tmp_path, model, engine):
    changes = [*UNEQUAL, *MODELS[model], f"stages.rl.algorithm={{{ALGORITHMS['grpo']}}}"]
    compare(ring.scenario, tmp_path, RL_ACTS, changes, rel=1e-4, engine=engine)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_takes_the_steps_of_whole_models(ring, tmp_path, algorithm, engine):
    changes = [*UNEQUAL, *MODELS["decoder"], f"stages.rl.algorithm={{{ALGORITHMS[algorithm]}}}"]
    compare(ring.scenario, tmp_path, RL_ACTS, changes, rel=1e-4, engine=engine)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", ["decoder", "qwen3"])
def test_a_rank_without_prompts_takes_part_in_the_steps_of_a_model_with_a_memory(
    ring, tmp_path, model, engine
):
    changes = [*MODELS[model], "model.memory=on", "stages.rl.users=1"]
    acts = [*RL_ACTS[:4], ["update", "rl", 0, 2]]
    compare(
        ring.scenario,
        tmp_path,
        acts,
        [*changes, f"stages.rl.algorithm={{{ALGORITHMS['grpo']}}}"],
        engine=engine,
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_mismatch_is_measured_with_the_versions_that_generated_the_beams(ring, tmp_path, engine):
    changes = [*UNEQUAL, *MODELS["decoder"], "stages.rl.mismatch={correct: token_clip}"]
    compare(ring.scenario, tmp_path, RL_ACTS, changes, rel=1e-4, engine=engine)


TENSOR = [*FSDP2, "roles.trainer.engine.tensor=2"]
MESHES = {"1x1x2": (2, 1), "1x2x2": (4, 2)}
"""By mesh of replicate, shard and tensor, the number of trainers and that of tensor groups."""

KINDS = {
    "attention over the history": MODELS["attention over the history"],
    "qwen3": MODELS["qwen3"],
    "recompute": MODELS["recompute"],
    "memory and a rank without prompts": ["model.memory=on", "stages.rl.users=1"],
    "corrected mismatch": ["stages.rl.mismatch={correct: token_clip}"],
    "trained rows": ["stages.rl.sparse_lr=1e-3", f"stages.rl.algorithm={{{ALGORITHMS['grpo']}}}"],
}
DRAWS = {
    "beams": {},
    "gumbel": {"use": "gumbel", "with_target": True},
    "sample": {"use": "sample", "temperature": 1.5, "top_p": 0.9},
    "beams and draws": {"use": "beam", "tail": 2},
}
"""Ways of drawing beams; of each, those of two RL steps are compared."""
PRETRAIN = [["begin", "pretrain"], ["train", "pretrain", 0, 3], ["fit_memory"]]


def draw_beams(ring, folder, acts, changes, engine, trainers):
    """Return what each rank draws after some acts, by field, that of all acts and prompts one after the other."""
    acts = [*acts, *(["beams", "rl", step, draw] for step in (0, 1) for draw in DRAWS.values())]
    changes = [*UNEQUAL, *changes, f"roles.trainer.engine={{{engine}}}"]
    ranks = played(ring.scenario, folder, acts, changes=changes, trainers=trainers)
    return [[beams for beams in rank["records"] if "item" in beams] for rank in ranks]


def join(parts, name):
    """Join the beams of several shares, by act."""
    return [
        np.concatenate([part[name] for part in parts_of_act]) for parts_of_act in zip(*parts, strict=True)
    ]


def test_two_ranks_of_a_tensor_group_take_the_steps_of_one(ring, tmp_path):
    changes = [*UNEQUAL, *MODELS["decoder"], f"stages.rl.algorithm={{{ALGORITHMS['ppo']}}}"]
    acts = [["begin", "rl"], ["update", "rl", 0, 1]]
    compare(ring.scenario, tmp_path, acts, changes, engine=TENSOR, shares=1)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", {**dict.fromkeys(SHIPPED.list_shipped()), **ALGORITHMS})
def test_every_algorithm_takes_the_steps_of_whole_models_in_tensor_groups(ring, tmp_path, algorithm):
    options = ALGORITHMS.get(algorithm, f"use: {algorithm}")
    changes = [*UNEQUAL, *MODELS["decoder"], f"stages.rl.algorithm={{{options}}}"]
    compare(ring.scenario, tmp_path, RL_ACTS, changes, trainers=4, engine=TENSOR, shares=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_step_in_tensor_groups_is_that_of_whole_models(ring, tmp_path, kind):
    changes = [*UNEQUAL, *KINDS[kind]]
    compare(ring.scenario, tmp_path, RL_ACTS, changes, trainers=4, engine=TENSOR, shares=2)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["decoder", "qwen3"])
def test_two_tensor_groups_take_the_steps_of_one_process(ring, tmp_path, model):
    """A chunk has all prompts of a rank, so that the exact metrics are those of the same prompts."""
    changes = [*MODELS[model], "stages.rl.users=7"]
    changes += [f"stages.rl.algorithm={{{ALGORITHMS['grpo with a moving reference']}}}"]
    compare(ring.scenario, tmp_path, RL_ACTS, changes, trainers=4, engine=TENSOR, shares=1)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", ["decoder", "qwen3"])
def test_beams_are_those_of_one_process(ring, tmp_path, model, mesh):
    changes, trainers = [*MODELS[model], "model.memory=on"], MESHES[mesh][0]
    (alone,) = draw_beams(ring, tmp_path / "alone", PRETRAIN, changes, "use: ddp", 1)
    ranks = draw_beams(ring, tmp_path / "mesh", PRETRAIN, changes, "use: fsdp2, tensor: 2", trainers)
    assert ranks[::2] == ranks[1::2]  # to the bit
    for name in ("user", "item"):
        for found, expected in zip(join(ranks[::2], name), join([alone], name), strict=True):
            assert np.array_equal(found, expected)
    for found, expected in zip(join(ranks[::2], "logp"), join([alone], "logp"), strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["decoder", "qwen3"])
def test_ranks_whose_logits_differ_choose_the_beams_of_the_first(ring, tmp_path, model):
    changes, acts = [*MODELS[model], "model.memory=on"], [*PRETRAIN, ["disturb"]]
    leader, follower = draw_beams(ring, tmp_path, acts, changes, "use: fsdp2, tensor: 2", 2)
    assert leader == follower
