"""Sums of gradients in buckets: when they begin, what they contain, and what they hold in memory.

A stand-in for the all-reduce doubles the values when it is waited for, as the sum of two equal ranks does.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from nonet.workers.engines import _gradient_buckets as gradient_buckets
from nonet.workers.engines import poison

WIDTH, LAYERS = 3, 4


class Link:
    """Records the order of gradients and sums."""

    def __init__(self):
        self.events, self.in_flight, self.most_in_flight = [], 0, 0

    def all_reduce(self, values, group, async_op):
        assert async_op
        self.events.append("sum")
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return Sum(self, values)


class Sum:
    def __init__(self, link, values):
        self.link, self.values = link, values

    def wait(self):
        self.link.in_flight -= 1
        self.values.mul_(2)


@pytest.fixture
def link(monkeypatch):
    link = Link()
    monkeypatch.setattr(torch.distributed, "all_reduce", link.all_reduce)
    monkeypatch.setattr(gradient_buckets, "BUCKET_ELEMENTS", WIDTH * WIDTH)  # A layer is a bucket.
    return link


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(dtype)


def make_buckets(model):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return gradient_buckets.GradientBuckets(list(model.parameters()), None, lambda parameter: parameter.grad)


def compute_loss(model, layers=LAYERS):
    state = torch.ones(2, WIDTH, dtype=model[0].weight.dtype)
    for layer in model[:layers]:
        state = torch.tanh(layer(state))
    return state.float().square().sum()


def compute_doubled(model, layers=LAYERS, passes=1):
    """Return twice the gradients of some equal passes, as autograd computes them."""
    plain = make_model(model[0].weight.dtype)
    plain.load_state_dict(model.state_dict())
    for _ in range(passes):
        compute_loss(plain, layers).backward()
    return [2 * (torch.zeros_like(p) if p.grad is None else p.grad.float()) for p in plain.parameters()]


def assert_doubled(model, layers=LAYERS, passes=1):
    for parameter, doubled in zip(model.parameters(), compute_doubled(model, layers, passes), strict=True):
        assert torch.equal(parameter.grad.float(), doubled.to(parameter.dtype).float())


def test_the_sum_of_a_layer_begins_before_the_gradient_of_the_layer_below_is_computed(link):
    model = make_model()
    buckets = make_buckets(model)
    for number, layer in enumerate(model):
        layer.weight.register_hook(lambda _, number=number: link.events.append(number))
    buckets.run_last_backward(compute_loss(model))
    assert link.events == [3, "sum", 2, "sum", 1, "sum", 0]
    buckets.finish()
    assert link.events[-1] == "sum"
    assert_doubled(model)


def test_earlier_passes_are_summed_with_the_last_one(link):
    model = make_model()
    buckets = make_buckets(model)
    compute_loss(model).backward()
    assert not link.events
    buckets.run_last_backward(compute_loss(model))
    buckets.finish()
    assert link.events.count("sum") == LAYERS
    assert_doubled(model, passes=2)


def test_a_layer_that_the_loss_does_not_use_holds_no_sum_back(link):
    model = make_model()
    buckets = make_buckets(model)
    model[0].weight.register_hook(lambda _: link.events.append("first layer"))
    buckets.run_last_backward(compute_loss(model, layers=3))
    assert link.events == ["sum", "sum", "sum", "first layer"]  # The unused one, then layers 2 and 1.
    buckets.finish()
    assert_doubled(model, layers=3)


def test_a_rank_without_a_pass_takes_part_in_all_sums_in_every_step(link):
    model = make_model()
    buckets = make_buckets(model)
    for _ in range(2):
        link.events.clear()
        buckets.finish()
        assert link.events == ["sum"] * LAYERS


def test_a_gradient_that_is_set_to_nan_after_the_last_pass_is_in_the_sum(link):
    model = make_model()
    buckets = make_buckets(model)
    buckets.run_last_backward(compute_loss(model))
    poison([parameter.grad for parameter in model.parameters()])
    sums_before = link.events.count("sum")
    buckets.finish()
    assert link.events.count("sum") == sums_before + 1
    assert math.isnan(float(model[0].weight.grad.view(-1)[0]))


def test_gradients_of_fp32_are_summed_in_place(link):
    model = make_model()
    buckets = make_buckets(model)
    before = [parameter.grad.data_ptr() for parameter in model.parameters()]
    buckets.run_last_backward(compute_loss(model))
    buckets.finish()
    assert [parameter.grad.data_ptr() for parameter in model.parameters()] == before


def test_gradients_of_bf16_are_summed_in_few_copies_of_fp32(link):
    model = make_model(torch.bfloat16)
    buckets = make_buckets(model)
    buckets.run_last_backward(compute_loss(model))
    buckets.finish()
    assert link.most_in_flight == 2
    assert_doubled(model)


def test_a_closed_reducer_begins_no_sums(link):
    model = make_model()
    make_buckets(model).close()
    compute_loss(model).backward()
    assert not link.events
