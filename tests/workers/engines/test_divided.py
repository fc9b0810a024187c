"""Engines that divide the optimizer among two ranks: the steps of one process, commits that any engine reads."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch
from backbones import folder_of
from forked_roles import played
from ring_world import Ring

from nonet.controller.scenario import check_scenario
from nonet.controller.scenario.scenario import load_scenario
from nonet.errors import ConfigError
from nonet.stored_tensors import StoredTensors
from nonet.workers.engines.division import ShardedModel

NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
WAYS = [
    ("fsdp2", "muon"),
    ("fsdp2", "adamw"),
    pytest.param("deepspeed, zero: 1", "adamw", marks=NEEDS_DEEPSPEED),
    pytest.param("deepspeed, zero: 2", "adamw", marks=NEEDS_DEEPSPEED),
    pytest.param("deepspeed, zero: 3", "adamw", marks=NEEDS_DEEPSPEED),
    # a plan refuses it on cpu; DeepSpeed's own way of it runs all the same
    pytest.param("deepspeed, zero: 2, offload: optimizer", "adamw", marks=NEEDS_DEEPSPEED),
    pytest.param("deepspeed, zero: 3, offload: optimizer", "adamw", marks=NEEDS_DEEPSPEED),
]


QWEN3 = (
    "model={{use: hf, precision: {}, config: {{model_type: qwen3, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, head_dim: 8, intermediate_size: 64}}}}"
)
BACKBONES = [
    ("ddp", "fp32"),
    ("fsdp2", "fp32"),
    pytest.param("deepspeed, zero: 2", "fp32", marks=NEEDS_DEEPSPEED),
    ("fsdp2", "bf16"),
    pytest.param("deepspeed, zero: 3", "bf16", marks=NEEDS_DEEPSPEED),
]


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring"))


def ran(ring, folder, engine, optimizer, trainers, acts, data=None, more=()):
    changes = [
        *more,
        f"roles.trainer={{engine: {{use: {engine}}}}}",
        f"stages.pretrain.optimizer={{use: {optimizer}}}",
        "stages.pretrain.epochs=60",
    ]
    ranks = played(ring.scenario, folder, acts, changes=changes, trainers=trainers, data=data)
    return [record["loss"] for record in ranks[0]["records"]]


@pytest.mark.slow  # test_divided_rl.py has a case of each kind of step, and the shards of a checkpoint below another
def test_two_ranks_of_fsdp2_take_the_steps_of_one_process(ring, tmp_path):
    acts = [["begin", "pretrain"], ["train", "pretrain", 0, 4]]
    alone = ran(ring, tmp_path / "alone", "ddp", "muon", 1, acts)
    assert ran(ring, tmp_path / "two", "fsdp2", "muon", 2, acts) == pytest.approx(alone, rel=1e-5)


@NEEDS_DEEPSPEED
def test_a_commit_of_two_ranks_of_zero_3_goes_on_in_one_process(ring, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    acts = [["begin", "pretrain"], ["train", "pretrain", 0, 3], ["save", "half"], ["train", "pretrain", 3, 5]]
    optimizer = "adamw, clip: 3.0"
    two = ran(ring, tmp_path / "two", "deepspeed, zero: 3", optimizer, 2, acts)
    alone = ring.world(f"stages.pretrain.optimizer={{use: {optimizer}}}", "stages.pretrain.epochs=60")
    assert two[:3] == pytest.approx([r["loss"] for r in alone.train("pretrain", 0, 3)], rel=1e-5)
    alone.load(tmp_path / "two" / "half", "pretrain")
    assert two[3:] == pytest.approx([r["loss"] for r in alone.train("pretrain", 3, 5)], rel=1e-5)
    assert not (tmp_path / "extensions").exists(), "DeepSpeed compiles nothing"


@NEEDS_DEEPSPEED
@pytest.mark.slow
def test_zero_3_waits_for_no_shard_that_is_apart(ring, tmp_path):
    acts = [["begin", "pretrain"], ["train", "pretrain", 0, 4]]
    changes = [
        "roles.trainer={engine: {use: deepspeed, zero: 3}}",
        "stages.pretrain.optimizer={use: adamw}",
    ]
    apart = played(ring.scenario, tmp_path, acts, changes=changes, trainers=2, shards=1)
    losses = [record["loss"] for record in apart[0]["records"]]
    alone = ring.world(changes[1]).train("pretrain", 0, 4)
    assert losses == pytest.approx([record["loss"] for record in alone], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["decoder", "qwen3"])
@pytest.mark.parametrize(("engine", "optimizer"), WAYS)
def test_fifty_steps_of_two_ranks_are_those_of_one_process(ring, tmp_path, engine, optimizer, model):
    acts = [["begin", "pretrain"], ["train", "pretrain", 0, 50], ["save", "end"]]
    more = [QWEN3.format("fp32")] if model == "qwen3" else []
    alone = ran(ring, tmp_path / "alone", "ddp", optimizer, 1, acts, more=more)
    two = ran(ring, tmp_path / "two", engine, optimizer, 2, acts, more=more)
    assert two == pytest.approx(alone, rel=1e-5)
    # Its tables around the backbone begin with zeros and so have little but the rounding of AdamW, on two ranks of ddp too.
    check_weights(tmp_path / "alone", tmp_path / "two", "backbone." if model == "qwen3" else "")


def check_weights(alone, divided, prefix=""):
    """Check that the weights that were saved at the end differ by no more than 1e-5 by norm."""
    expected, found = (
        StoredTensors(folder / "end" / "dense" / "model.safetensors") for folder in (alone, divided)
    )
    names = [name for name in expected if name.startswith(prefix)]
    assert names
    for name in names:
        assert (expected[name] - found[name]).norm() <= 1e-5 * expected[name].norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_fifty_steps_on_a_mesh_are_those_of_one_process(ring, tmp_path, optimizer):
    """What one process and another mesh load afterwards are the weights and moments that the ranks ended with."""
    acts = [["begin", "pretrain"], ["train", "pretrain", 0, 50], ["save", "end"]]
    alone = ran(ring, tmp_path / "alone", "ddp", optimizer, 1, acts)
    assert ran(ring, tmp_path / "mesh", "fsdp2, replicate: 2", optimizer, 4, acts) == pytest.approx(
        alone, rel=1e-5
    )
    check_weights(tmp_path / "alone", tmp_path / "mesh")
    read = [["rejoin", 1], ["load", "end", "pretrain"], ["train", "pretrain", 50, 54]]
    rest = ran(ring, tmp_path / "rest", "ddp", optimizer, 1, read, data=tmp_path / "alone")
    for engine, trainers in (("ddp", 1), ("fsdp2, replicate: 2", 2), ("fsdp2, replicate: 2", 4)):
        again = ran(ring, tmp_path / f"{trainers}", engine, optimizer, trainers, read, data=tmp_path / "mesh")
        assert again == pytest.approx(rest, rel=1e-5), engine


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "optimizer"), WAYS)
def test_a_commit_of_two_ranks_goes_on_under_every_engine_and_world(ring, tmp_path, engine, optimizer):
    """One fork plays both halves and commits between them; the commit is then read by other engines and numbers of ranks."""
    begun = [["begin", "pretrain"], ["train", "pretrain", 0, 4], ["save", "half"]]
    rest = ran(ring, tmp_path / "two", engine, optimizer, 2, [*begun, ["train", "pretrain", 4, 8]])[4:]
    read = [["load", "half", "pretrain"], ["train", "pretrain", 4, 8]]
    for name, trainers in (("ddp", 1), ("fsdp2", 3), (engine, 2)):
        again = ran(ring, tmp_path / f"{name}-again", name, optimizer, trainers, read, data=tmp_path / "two")
        assert again == pytest.approx(rest, rel=1e-5), name
    names = StoredTensors(tmp_path / "two" / "half" / "dense" / "optimizer.safetensors")
    plain = ring.world(f"stages.pretrain.optimizer={{use: {optimizer}}}")
    plain.train("pretrain", 0, 1)
    kept = plain.trainer.dense.optimizer.state_dict()["state"]
    shapes = {f"{at}.{slot}": value.shape for at, slots in kept.items() for slot, value in slots.items()}
    assert {name: value.shape for name, value in names.items()} == shapes


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "precision"), BACKBONES)
def test_two_ranks_step_a_hugging_face_backbone_and_go_on_from_its_commit(ring, tmp_path, engine, precision):
    """A bf16 backbone rounds every sum, so it is only near one process. A commit holds all of it, so what follows is equal."""
    go_on = [["load", "half", "pretrain"], ["train", "pretrain", 4, 7]]
    begun = [["begin", "pretrain"], ["train", "pretrain", 0, 4], ["save", "half"]]
    qwen3 = [QWEN3.format(precision)]
    alone = ran(ring, tmp_path / "alone", "ddp", "adamw", 1, begun[:2], more=qwen3)
    acts = [*begun, ["train", "pretrain", 4, 7], *go_on]
    two = ran(ring, tmp_path / "two", engine, "adamw", 2, acts, more=qwen3)
    assert two[:4] == pytest.approx(alone, rel=1e-5 if precision == "fp32" else 1e-2)
    assert two[7:] == two[4:7]


LORA = QWEN3.format("fp32")[:-1] + ", lora: {rank: 4, alpha: 8.0}}"


@pytest.mark.slow
def test_frozen_weights_are_divided_and_read_again_when_the_number_of_ranks_changes(ring, tmp_path):
    """With LoRA nearly all weights are frozen, and no checkpoint has them."""
    lora = [LORA.replace("hidden_size: 32", "hidden_size: 64, vocab_size: 4000")]
    acts = [["begin", "pretrain"], ["train", "pretrain", 0, 4], ["save", "half"]]
    alone = ran(ring, tmp_path / "alone", "ddp", "adamw", 1, acts, more=lora)
    two = ran(ring, tmp_path / "two", "fsdp2", "adamw", 2, acts, more=lora)
    assert two == pytest.approx(alone, rel=1e-5)
    go_on = [["load", "half", "pretrain"], ["train", "pretrain", 4, 6]]
    again = [*acts, ["rejoin", 1], *go_on]
    joined = ran(ring, tmp_path / "joined", "fsdp2", "adamw", 2, again, more=lora)
    three = ran(ring, tmp_path / "three", "fsdp2", "adamw", 3, go_on, data=tmp_path / "two", more=lora)
    one = ran(ring, tmp_path / "one", "ddp", "adamw", 1, go_on, data=tmp_path / "two", more=lora)
    assert three == pytest.approx(one, rel=1e-5)
    assert joined[4:] == pytest.approx(one, rel=1e-5)
    held = {
        name: json.loads((tmp_path / name / "0.json").read_text())["held"]
        for name in ("alone", "two", "three")
    }
    assert held["two"] < 0.6 * held["alone"]
    assert held["three"] < 0.45 * held["alone"]


def test_a_version_of_torch_without_what_division_needs_is_refused_in_one_line(monkeypatch):
    monkeypatch.delattr("torch.distributed.fsdp.FSDPModule.set_reduce_scatter_unused_params")
    with pytest.raises(ConfigError, match=r"fsdp2 on several workers needs torch 2.13; this is"):
        ShardedModel(torch.nn.Linear(2, 2), None, torch.device("cpu"))


def test_muon_and_deepspeed_do_not_go_together(ring):
    deepspeed = "roles.trainer={engine: {use: deepspeed}}"
    scenario, _ = load_scenario(ring.scenario, [deepspeed, "stages.pretrain.optimizer=muon"])
    with pytest.raises(
        ConfigError,
        match=r"stages.pretrain.optimizer: muon with engine deepspeed \(set optimizer: {use: adamw}",
    ):
        check_scenario(scenario)
    with pytest.raises(ConfigError, match=r"no key 'fp17' to pass"):
        load_scenario(ring.scenario, ["roles.trainer={engine: {use: deepspeed, deepspeed: {fp17: {}}}}"])
    change = "roles.trainer={engine: {use: deepspeed, deepspeed: {zero_optimization: {stage: 3}}}}"
    with pytest.raises(ConfigError, match=r"zero_optimization: there is no key 'stage' to pass"):
        load_scenario(ring.scenario, [change])


@pytest.mark.parametrize("engine", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_ranks_write_shards_in_turn_and_one_process_reads_them(ring, tmp_path, engine):
    """Weights and moments in files of 4 KiB: what a rank alone goes on with is what both went on with."""
    shards, acts = (
        ["weights={shard: 4096}"],
        [["begin", "pretrain"], ["train", "pretrain", 0, 4], ["save", "half"]],
    )
    go_on = [["load", "half", "pretrain"], ["train", "pretrain", 4, 6]]
    both = ran(ring, tmp_path / "two", engine, "adamw", 2, [*acts, *go_on[1:]], more=shards)[4:]
    alone = ran(ring, tmp_path / "one", "ddp", "adamw", 1, go_on, data=tmp_path / "two", more=shards)
    assert alone == pytest.approx(both, rel=1e-5)
    files = {path.name for path in (tmp_path / "two" / "half" / "dense").iterdir()}
    assert {"model.safetensors.index.json", "optimizer.safetensors.index.json", "optimizer.json"} < files
    assert len([name for name in files if name.startswith("model-0000")]) > 3
    whole = ring.world().trainer.model.state_dict()
    read = StoredTensors(tmp_path / "two" / "half" / "dense" / "model.safetensors")
    assert {name: value.shape for name, value in read.items()} == {
        name: value.shape for name, value in whole.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_two_ranks_align_words_and_codes_as_one_process(ring, tmp_path, engine):
    """In one of the steps a rank has no items; under fsdp2 it takes part in the pass of the other."""
    changes = [
        f"model={{use: hf, path: {folder_of(tmp_path / 'base')}}}",
        "stages.pretrain={use: align, epochs: 2, batch: {users: 10}, lr: 3e-3, items: 1}",
    ]
    acts = [["begin", "pretrain"], ["train", "pretrain", 0, 4]]
    alone, two = (
        played(
            ring.scenario,
            tmp_path / f"{trainers}",
            acts,
            changes=[*changes, f"roles.trainer={{engine: {{use: {engine}}}}}"],
            trainers=trainers,
        )[0]["records"]
        for trainers in (1, 2)
    )
    for name in ("loss", "align_loss", "norm"):
        assert [r[name] for r in two] == pytest.approx([r[name] for r in alone], rel=1e-5), name
