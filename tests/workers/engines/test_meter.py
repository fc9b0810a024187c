"""Counted operations beside torch's own counter, and what a frozen copy, a rollout and a recomputed block count."""

from __future__ import annotations

import copy

import pytest
import torch
from ring_world import Ring
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nonet.models.sid_decoder.blocks import AttentionBlock, compute_rotary
from nonet.workers.engines import StepMeter, measure_matmul_rate
from nonet.workers.engines._blocks import find_blocks


class Stack(nn.Module):
    def __init__(self, width=32, layers=2):
        super().__init__()
        self.blocks = nn.ModuleList(AttentionBlock(width, 4, 0.0) for _ in range(layers))
        self.out = nn.Linear(width, 7)

    def forward(self, x, cuts):
        place = torch.cat([torch.arange(n) for n in cuts.diff().tolist()])
        for block in self.blocks:
            x = block(x, cuts, compute_rotary(place, 8))
        return self.out(x)


def counted(model, lengths, width=32):
    cuts = torch.tensor([0, *lengths]).cumsum(0)
    model(torch.randn(int(cuts[-1]), width, requires_grad=True), cuts).sum().backward()


def test_layers_and_visible_attention_are_counted():
    model, meter = Stack(), StepMeter()
    meter.watch(model)
    counted(model, [5, 3])
    layers = 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128) + 32 * 7
    pairs = 5 * 6 / 2 + 3 * 4 / 2
    assert meter.take_counts() == {"flops": 6.0 * 8 * layers + 2 * 12 * pairs * 32, "positions": 8.0}
    assert meter.take_counts() == {"flops": 0.0, "positions": 0.0}


def test_the_layers_are_what_torch_counts():
    """One long sequence's attention aside: torch counts what its kernel does, which is not what is visible."""
    model, meter = Stack(), StepMeter()
    meter.watch(model)
    with FlopCounterMode(display=False) as counter:
        counted(model, [1] * 64)
    attention = 2 * 12 * 64 * 32
    by_torch = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    assert meter.take_counts()["flops"] - attention == pytest.approx(by_torch, rel=0.02)


def test_what_keeps_no_gradients_counts_nothing():
    model, meter = Stack(), StepMeter()
    meter.watch(model)
    frozen = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():
        cuts = torch.tensor([0, 4])
        frozen(torch.randn(4, 32), cuts)
        model(torch.randn(4, 32), cuts)
    assert meter.take_counts()["flops"] == 0.0


def test_recomputed_blocks_count_once_and_a_step_says_where_its_seconds_went(tmp_path):
    ring = Ring(tmp_path)
    found = []
    for engine in ("{use: ddp}", "{use: ddp, recompute: true}"):
        world = ring.world(f"roles.trainer={{engine: {engine}}}")
        world.trainer.begin(world.stages["pretrain"])
        found.append(world.trainer.train(world.stages["pretrain"], 0, 3))
    for plain, again in zip(*found, strict=True):
        assert plain["flops"] == again["flops"] > 0
        assert plain["positions"] == again["positions"] > 0
    parts = ("waited", "sparse", "dense", "communication", "optimizer")
    for record in found[0]:
        assert all(record[part] >= 0 for part in parts)
        assert sum(record[part] for part in parts) <= record["seconds"] * 1.001
        assert record["flops"] / record["seconds"] < record["peak"]
    assert measure_matmul_rate("cpu") == measure_matmul_rate("cpu") > 1e8


def test_the_measured_product_is_no_larger_than_the_device_needs(monkeypatch):
    sizes = []

    def time_matmul(size, device, precision):
        sizes.append(size)
        return size / 100_000

    monkeypatch.setattr("nonet.workers.engines._meter._time_matmul", time_matmul)
    assert measure_matmul_rate.__wrapped__("cpu") == 2.0 * 1024**3 / 0.01024
    assert sizes == [512, 1024]


def test_measuring_the_device_leaves_the_random_numbers_of_the_run_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert measure_matmul_rate.__wrapped__("cpu", "bf16") > 1e8
    assert torch.equal(torch.get_rng_state(), before)


def test_layers_of_a_model_that_names_no_blocks_are_found(tmp_path):
    class Backbone(nn.Module):
        """Layers as Hugging Face's models have them, among other lists."""

        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))
            self.model = nn.Module()
            self.model.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3))

    model = Backbone()
    assert find_blocks(model) == list(model.model.layers)
    assert find_blocks(nn.Linear(2, 2)) == []


def backbone_counts(lengths, **options):
    from backbones import batch_of, catalogue, recommender

    sids, _ = catalogue()
    model, meter = recommender(**options), StepMeter()
    model.train()
    meter.watch(model)
    batch, rows = batch_of(sids, lengths=lengths)
    model.states(batch, rows)
    counts = meter.take_counts()
    return model, counts["positions"], counts["flops"]


def test_padding_is_no_work():
    """Events of eight users, evenly and unevenly: the same positions and products, and attention over what is visible."""
    pytest.importorskip("transformers")
    even, uneven = (8,) * 8, (57, *(1,) * 7)
    model, positions, flops = backbone_counts(even)
    _, same, others = backbone_counts(uneven)
    expected = sum(int(model.layout.count_positions(n)) for n in even)
    assert positions == same == expected
    pairs = [
        sum(
            int(model.layout.count_positions(n)) * (int(model.layout.count_positions(n)) + 1) / 2
            for n in all_
        )
        for all_ in (even, uneven)
    ]
    assert others - flops == pytest.approx(2 * 12 * 32 * (pairs[1] - pairs[0]))


def test_lora_counts_what_it_trains_and_a_frozen_base_what_gradients_pass_through():
    pytest.importorskip("transformers")
    plain, positions, flops = backbone_counts((8,) * 8)
    lora, _, less = backbone_counts((8,) * 8, lora={"rank": 4, "alpha": 8.0})
    base = sum(
        m.weight.numel() for block in find_blocks(plain) for m in block.modules() if isinstance(m, nn.Linear)
    )
    trained = sum(p.numel() for name, p in lora.named_parameters() if name.endswith((".a", ".b")))
    assert trained > 0
    assert flops - less == pytest.approx(positions * (2 * base - 6 * trained))


def test_conv1d_layers_of_gpt2_are_counted():
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4}
    _, positions, flops = backbone_counts((8,) * 8, config=config)
    assert flops > 6.0 * positions * 2 * 12 * 32 * 32
