"""Muon against torch's own optimizers and against its definition."""

import pytest
import torch

from nonet.muon import Muon, orthogonalise


def parameters(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in shapes]


def walk(optimizer, params, steps=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("shape", [(2, 8, 8), (3, 4, 12), (1, 12, 4)])
def test_orthogonal_brings_every_singular_value_near_one(shape):
    values = torch.linalg.svdvals(
        orthogonalise(torch.randn(*shape, generator=torch.Generator().manual_seed(0)))
    )
    assert values.min() > 0.3
    assert values.max() < 1.3


def test_other_parameters_move_as_under_adamw():
    ours, theirs = parameters([(5, 3), (7,)]), parameters([(5, 3), (7,)])
    walk(Muon([], ours, lr=0.01, weight_decay=0.1), ours)
    groups = [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}]
    walk(torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.98)), theirs)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)


def test_matrices_move_as_under_torch_muon():
    ours, theirs = parameters([(6, 4), (4, 6), (6, 4)]), parameters([(6, 4), (4, 6), (6, 4)])
    walk(Muon(ours, [], lr=0.01, speed=2.0, weight_decay=0.1), ours)
    walk(torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95), theirs)
    for p, q in zip(ours, theirs, strict=True):
        # torch iterates in bfloat16 (8 bits): five steps of 0.02 of values near 1, each off by up to 1e-2.
        torch.testing.assert_close(p, q, atol=2e-3, rtol=0)


def test_state_can_be_saved_and_goes_on_bit_for_bit():
    params, other = parameters([(6, 4), (5,)]), parameters([(6, 4), (5,)])
    one, two = Muon(params[:1], params[1:], lr=0.01), Muon(other[:1], other[1:], lr=0.01)
    walk(one, params)
    walk(two, other)
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in other]
    three = Muon(resumed[:1], resumed[1:], lr=0.01)
    three.load_state_dict(two.state_dict())
    walk(one, params, seed=2)
    walk(three, resumed, seed=2)
    assert all(torch.equal(p, q) for p, q in zip(params, resumed, strict=True))
    assert all(
        isinstance(v, torch.Tensor) for slots in three.state_dict()["state"].values() for v in slots.values()
    )


def test_parameters_without_a_gradient_stay():
    params = parameters([(4, 4), (3,)])
    before = [p.detach().clone() for p in params]
    Muon(params[:1], params[1:], lr=0.1).step()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
