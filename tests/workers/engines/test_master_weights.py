"""Models of reduced precision: the optimizer moves fp32 copies, which checkpoints keep; and steps that are not finite."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nonet.workers import SaveOptions
from nonet.workers.engines import are_all_finite, list_gradients, make_engine, skip_step
from nonet.workers.engines.base import OptimizerOptions
from nonet.workers.runtime import Membership

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Small(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(32, 32, bias=False)
        nn.init.normal_(self.layer.weight, std=0.02)
        self.layer.to(dtype)
        self.scale = nn.Parameter(torch.ones(32))  # fp32, as what is added to a backbone

    def hidden_matrices(self):
        return [self.layer.weight]

    def forward(self, x):
        return self.layer(x.to(self.layer.weight.dtype)).float() * self.scale


def engine_of(dtype, use="ddp", optimizer="adamw"):
    learning = OptimizerOptions(use=optimizer, weight_decay=0.0)
    engine = make_engine({"use": use}, Small(dtype), Membership(0, 1), learning)
    engine.restart()
    return engine


def train(engine, steps, lr, start=0):
    for step in range(start, start + steps):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        y = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 + step))
        engine.backward(((engine.model(x) - y) ** 2).mean())
        engine.clip()
        engine.step(lr)


def master_of(engine):
    """Return the fp32 copy of the layer's weight."""
    names = [name for name, _ in engine.model.named_parameters()]
    return engine.masters[names.index("layer.weight")].detach()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("precision", DTYPES)
def test_fifty_small_steps_move_like_fp32(precision, optimizer):
    """At lr 1e-5 bf16 alone rounds nearly every step away, and fp16's AdamW divides by an epsilon of zero."""
    reference, engine = (
        engine_of(torch.float32, optimizer=optimizer),
        engine_of(DTYPES[precision], optimizer=optimizer),
    )
    with torch.no_grad():  # the same start: what the reduced precision holds
        reference.model.layer.weight.copy_(engine.model.layer.weight)
        before = reference.model.layer.weight.clone()
    for each in (reference, engine):
        train(each, 50, 1e-5)
    expected, got = reference.model.layer.weight - before, master_of(engine) - before
    assert torch.isfinite(engine.model.layer.weight).all()
    assert torch.cosine_similarity(expected.flatten(), got.flatten(), 0) >= 0.99
    assert float(got.norm() / expected.detach().norm()) == pytest.approx(1.0, abs=0.05)
    assert torch.equal(engine.model.layer.weight, master_of(engine).to(DTYPES[precision]))


@pytest.mark.parametrize("use", ["ddp", "fsdp2"])
def test_masters_are_saved_beside_the_optimizer_and_a_run_goes_on_from_them_to_the_bit(tmp_path, use):
    whole, first = engine_of(torch.bfloat16, use), engine_of(torch.bfloat16, use)
    train(whole, 20, 1e-5)
    train(first, 12, 1e-5)
    first.snapshot(SaveOptions())(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["layer.weight"].dtype == torch.bfloat16, "the model keeps its own precision"
    assert load_file(tmp_path / "master.safetensors")["layer.weight"].dtype == torch.float32
    again = engine_of(torch.bfloat16, use)
    again.load(tmp_path, optimizer=True)
    train(again, 8, 1e-5, start=12)
    assert torch.equal(master_of(again), master_of(whole))
    other = engine_of(torch.bfloat16)
    other.load(tmp_path, optimizer=False)
    assert torch.equal(master_of(other), saved["layer.weight"].float()), "another stage starts from the model"


def test_a_checkpoint_without_masters_is_read_and_fp32_models_have_none(tmp_path):
    engine = engine_of(torch.bfloat16)
    train(engine, 3, 1e-3)
    engine.snapshot(SaveOptions())(tmp_path)
    (tmp_path / "master.safetensors").unlink()
    again = engine_of(torch.bfloat16)
    again.load(tmp_path, optimizer=True)
    assert torch.equal(master_of(again), engine.model.layer.weight.float())
    plain, folder = engine_of(torch.float32), tmp_path / "plain"
    plain.snapshot(SaveOptions())(folder)
    assert {path.name for path in folder.iterdir()} == {
        "model.safetensors",
        "optimizer.safetensors",
        "optimizer.json",
    }
    assert all(
        master is parameter for master, parameter in zip(plain.masters, plain.model.parameters(), strict=True)
    )


def test_gradients_of_reduced_precision_are_scaled_in_fp32():
    """1e-6 over a scale of 65536 is no fp16 number."""
    engine = engine_of(torch.float16)
    engine.model.layer.weight.grad.fill_(1e-6 * 65536)
    gradients = list_gradients(engine)
    torch._foreach_mul_(gradients, 1 / 65536)
    assert float(list_gradients(engine)[1][0, 0]) == pytest.approx(1e-6, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_step_leaves_weights_and_optimizer_as_they_were(dtype):
    engine = engine_of(dtype)
    train(engine, 2, 1e-3)
    before = copy.deepcopy((engine.model.state_dict(), engine.optimizer.state_dict()))
    engine.model.layer.weight.grad.fill_(float("nan"))
    norm = engine.clip()
    assert not torch.isfinite(torch.tensor(norm))
    skip_step(engine)
    assert not any(gradient.any() for gradient in list_gradients(engine))
    after = engine.model.state_dict(), engine.optimizer.state_dict()
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    for place, slots in before[1]["state"].items():
        assert all(torch.equal(value, after[1]["state"][place][name]) for name, value in slots.items())
    train(engine, 1, 1e-3)
    assert are_all_finite(engine.model.parameters())
