"""Ddp: clipping, moves, what a commit holds and what a stage begins with."""

from __future__ import annotations

import copy

import pytest
import torch

from nonet.errors import CheckpointError
from nonet.workers.engines import Ddp, OptimizerOptions
from nonet.workers.runtime.rendezvous import Membership


class Small(torch.nn.Module):
    """A hidden matrix, another matrix and a vector: one parameter of each kind that Muon tells apart."""

    def __init__(self, seed: int = 0):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.hidden = torch.nn.Parameter(torch.randn(4, 6, generator=draw))
        self.table = torch.nn.Parameter(torch.randn(5, 3, generator=draw))
        self.bias = torch.nn.Parameter(torch.randn(7, generator=draw))

    def hidden_matrices(self):
        return [self.hidden]


def dense_of(seed: int = 0, **learning) -> Ddp:
    return Ddp({}, Small(seed), OptimizerOptions(**learning), Membership(0, 1))


def moved(dense: Ddp, lr: float) -> float:
    """Take a step; the norm before it."""
    norm = dense.clip()
    dense.step(lr)
    return norm


def give(dense: Ddp, scale: float = 1.0, seed: int = 1) -> torch.Tensor:
    """Set the same random gradient every time, scaled; return its norm."""
    draw = torch.Generator().manual_seed(seed)
    for p in dense.model.parameters():
        p.grad.copy_(scale * torch.randn(p.shape, generator=draw))
    return torch.cat([p.grad.reshape(-1) for p in dense.model.parameters()]).norm()


def weights(dense: Ddp) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in dense.model.parameters()])


# --- a step ---------------------------------------------------------------------------------------------------------


def test_a_long_gradient_is_clipped_and_its_norm_is_told_as_it_was():
    long, clipped, free = dense_of(), dense_of(), dense_of(clip=1e9)
    norm = give(long, 5.0)
    told = moved(long, 1e-2)
    assert told == pytest.approx(float(norm), rel=1e-6)
    assert told > 5
    give(clipped, 5.0 / told)  # what is left of it at the default norm of 1
    assert moved(clipped, 1e-2) == pytest.approx(1.0, rel=1e-5)
    first = [long.optimizer.state[p]["first"] for p in (long.model.table, long.model.bias)]
    same = [clipped.optimizer.state[p]["first"] for p in (clipped.model.table, clipped.model.bias)]
    for one, other in zip(first, same, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(weights(long), weights(clipped), rtol=1e-5, atol=1e-6)
    give(free, 5.0)
    moved(free, 1e-2)
    assert free.optimizer.state[free.model.bias]["first"].norm() > 2 * first[1].norm()


def test_a_short_gradient_is_taken_as_it_is():
    dense, free = dense_of(), dense_of(clip=1e9)
    norm = give(dense, 0.01)
    give(free, 0.01)
    assert moved(dense, 1e-2) == moved(free, 1e-2) == pytest.approx(float(norm))
    assert torch.equal(weights(dense), weights(free))


def test_a_step_moves_against_the_gradient_by_the_rate_and_leaves_gradients_at_zero():
    dense = dense_of(weight_decay=0.0)
    before = dense.model.bias.detach().clone()
    give(dense)
    sign = dense.model.bias.grad.sign().clone()
    moved(dense, 1e-2)
    torch.testing.assert_close(dense.model.bias.detach() - before, -1e-2 * sign, rtol=1e-3, atol=1e-5)
    assert all(not p.grad.any() for p in dense.model.parameters())
    assert {group["lr"] for group in dense.optimizer.param_groups} == {1e-2}


def test_weights_decay_and_vectors_do_not():
    dense, never = dense_of(), dense_of(weight_decay=0.0)
    for each in (dense, never):
        give(each)
        moved(each, 1e-2)
    assert torch.equal(dense.model.bias, never.model.bias)
    for name in ("hidden", "table"):
        assert getattr(dense.model, name).norm() < getattr(never.model, name).norm()


def test_on_one_rank_sums_are_the_values():
    assert Membership(0, 1).sum_over_trainers(1.5, 2.0) == [1.5, 2.0]


# --- commits and stages ---------------------------------------------------------------------------------------------


def stepped(dense: Ddp, steps: range) -> torch.Tensor:
    for step in steps:
        give(dense, seed=step)
        moved(dense, 1e-2)
    return weights(dense)


def test_a_loaded_commit_goes_on_in_the_same_bits(tmp_path):
    whole, half = dense_of(), dense_of()
    expected = stepped(whole, range(6))
    stepped(half, range(3))
    half.snapshot()(tmp_path / "dense")
    again = dense_of(seed=9)
    again.load(tmp_path / "dense", optimizer=True)
    assert torch.equal(stepped(again, range(3, 6)), expected)


def test_a_commit_loaded_for_another_stage_brings_weights_and_no_moments(tmp_path):
    dense = dense_of()
    stepped(dense, range(3))
    dense.snapshot()(tmp_path / "dense")
    other = dense_of(seed=9)
    other.load(tmp_path / "dense", optimizer=False)
    assert torch.equal(weights(other), weights(dense))
    assert not other.optimizer.state


def test_a_stage_begins_with_a_fresh_optimizer():
    dense = dense_of()
    stepped(dense, range(3))
    fresh = Ddp({}, copy.deepcopy(dense.model), OptimizerOptions(), Membership(0, 1))
    dense.restart()
    assert not dense.optimizer.state
    assert torch.equal(stepped(dense, range(3, 5)), stepped(fresh, range(3, 5)))


def test_weights_of_another_model_are_refused(tmp_path):
    dense_of().snapshot()(tmp_path / "dense")
    wider = dense_of()
    wider.model.bias = torch.nn.Parameter(torch.zeros(8))
    with pytest.raises(CheckpointError, match="the weights do not fit this model"):
        wider.load(tmp_path / "dense", optimizer=False)
