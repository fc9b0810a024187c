"""What a rank of a divided model holds at most, counted, beside the bar, the plan, and `ddp`."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from forked_roles import played
from ring_world import Ring

from nonet.controller.plan.memory import estimate_worker_memory
from nonet.controller.plan.resolved import resolve_run
from nonet.controller.scenario import load_scenario
from nonet.stored_tensors import StoredTensors

NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
CHANGES = [
    "model.layers=24",
    "model.width=192",
    "model.memory=off",
    "stages.pretrain.batch.users=16",
    "stages.pretrain.chunk={tokens: 20}",
]


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring"))


def count_and_plan(ring, folder, ranks, engine, optimizer):
    """Return what a rank holds at most, counted and planned, in units of the whole fp32 weights."""
    engine = f"roles.trainer={{engine: {{use: {engine}, recompute: true}}}}"
    changes = [*CHANGES, engine, f"stages.pretrain.optimizer={{use: {optimizer}}}"]
    acts = [["begin", "pretrain"], ["train", "pretrain", 0, 2]]
    found = played(ring.scenario, folder, acts, changes=changes, trainers=ranks, counts_bytes=True)
    peak = max(rank["peak"] for rank in found)
    scenario, _ = load_scenario(ring.scenario, changes)
    run = resolve_run(scenario)
    memory = estimate_worker_memory(run, "pretrain", ("trainer",), ranks, 0.0)
    planned = (sum(memory.fixed.values()) + sum(memory.working.values())) / (run.size.learned * 4)
    print(f"{optimizer}, {ranks} ranks, {engine}: {peak:.3f} counted, {planned:.3f} planned")
    return peak, planned


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "bar"), [(2, 2.6), (4, 1.5), (8, 0.95)])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_rank_holds_its_part_and_a_few_blocks(ring, tmp_path, ranks, bar, optimizer):
    """The bar is that of AdamW; of both the plan is within a tenth."""
    peak, planned = count_and_plan(ring, tmp_path, ranks, "fsdp2", optimizer)
    assert planned == pytest.approx(peak, rel=0.1)
    if optimizer == "adamw":
        assert peak <= bar


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("zero", [1, 2, 3])
@NEEDS_DEEPSPEED
def test_a_rank_of_deepspeed_holds_what_is_planned(ring, tmp_path, zero, ranks):
    """At two ranks ZeRO 3 holds half of what is divided, and a third less than ZeRO 2."""
    peak, planned = count_and_plan(ring, tmp_path, ranks, f"deepspeed, zero: {zero}", "adamw")
    assert planned == pytest.approx(peak, rel=0.1)
    assert peak < {1: 4.1, 2: 4.1, 3: 2.9}[zero]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mesh"), [(4, "replicate: 2"), (2, "tensor: 2"), (4, "tensor: 2")])
def test_a_rank_of_a_mesh_holds_what_is_planned(ring, tmp_path, ranks, mesh):
    peak, planned = count_and_plan(ring, tmp_path, ranks, f"fsdp2, {mesh}", "adamw")
    assert planned == pytest.approx(peak, rel=0.1)


def play_below_the_whole_weights(ring, folder, acts, changes):
    """Do acts on 8 ranks, none of which may have tensors of as many bytes as the whole fp32 weights; return these bytes."""
    scenario, _ = load_scenario(ring.scenario, changes)
    weights = resolve_run(scenario).size.learned * 4
    found = played(ring.scenario, folder, acts, changes=changes, trainers=8, counts_bytes=True, limit=weights)
    print(f"{max(rank['peak'] for rank in found):.3f} of the whole weights")
    return weights


LIFE = [
    ["begin", "pretrain"],
    ["train", "pretrain", 0, 2],
    ["save", "pretrained"],
    ["begin", "finetune"],
    ["train", "finetune", 0, 2],
    ["begin", "rl"],
    ["update", "rl", 0, 2],
    ["save", "half"],
    ["load", "half", "rl"],
    ["update", "rl", 2, 3],
    ["evaluate", "half"],
    ["publish", "half"],
]


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_model_whose_training_state_is_four_times_what_a_rank_may_hold_goes_through_a_run(
    ring, tmp_path, tensor
):
    """The state of AdamW has 16 bytes per parameter; no rank may ever have tensors of more than 4."""
    changes = [
        *CHANGES,
        f"roles.trainer={{engine: {{use: fsdp2, recompute: true, tensor: {tensor}}}}}",
        *(f"stages.{stage}.optimizer={{use: adamw}}" for stage in ("pretrain", "finetune", "rl")),
        "weights={bucket: 1000000}",
        "stages.finetune.batch.users=16",
        "stages.finetune.chunk={tokens: 20}",
        "stages.rl.chunk={tokens: 20}",
    ]
    weights = play_below_the_whole_weights(ring, tmp_path, LIFE, changes)
    published = StoredTensors(tmp_path / "exported.safetensors")
    saved = StoredTensors(tmp_path / "half" / "dense" / "model.safetensors")
    assert published.keys() == saved.keys()
    assert all(torch.equal(published[name], saved[name]) for name in saved)
    assert sum(tensor.nbytes for tensor in published.values()) >= weights


QWEN3 = (
    "model={use: hf, config: {model_type: qwen3, hidden_size: 128, num_hidden_layers: 16, num_attention_heads: 4, "
    "num_key_value_heads: 2, head_dim: 32, intermediate_size: 512}}"
)


@pytest.mark.slow
def test_no_rank_has_the_whole_weights_of_a_backbone_while_it_is_built_and_trained(ring, tmp_path):
    """An eighth of the training state of AdamW is 2 bytes per parameter; no rank may ever have tensors of 4."""
    changes = [
        QWEN3,
        "roles.trainer={engine: {use: fsdp2, recompute: true}}",
        "stages.pretrain.optimizer={use: adamw}",
        "stages.pretrain.batch.users=16",
        "stages.pretrain.chunk={tokens: 20}",
    ]
    acts = [
        ["begin", "pretrain"],
        ["train", "pretrain", 0, 2],
        ["save", "half"],
        ["load", "half", "pretrain"],
    ]
    play_below_the_whole_weights(ring, tmp_path, acts, changes)
