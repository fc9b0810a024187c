"""Check plans made by the device's kernels, the soft cap's tanh and the GPU bench's checks in Triton's interpreter.

kernels/test_forward_pass.py runs this file in a process of its own, as it does interpreter_kernels.py.
"""

import os

import pytest
import quick_interpreter
import torch
import triton
import triton.language as tl

from nonet.attention.kernels.triton_score import tanh
from nonet.attention.plans.on_device import plan_on_device
from nonet.attention.plans.tile_plan import make_plan
from nonet.bench.attention import checks as attention_checks
from nonet.bench.attention import masks
from nonet.random import rng

assert os.environ.get("TRITON_INTERPRET") == "1"
quick_interpreter.install()


def _real(side):
    keep = side.place[:, 0] >= 0
    assert not side.spans[~keep].any()
    return side.place[keep], side.spans[keep]


@pytest.mark.parametrize("name", ["HSTU", "classes", "BOS columns", "cross", "random"])
def test_a_plan_made_on_the_device_equals_the_hosts(name):
    assert_same_plan(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(masks.CHECKED) - {"HSTU", "classes", "BOS columns"}))
def test_a_plan_made_on_the_device_equals_the_hosts_for_every_other_mask(name):
    assert_same_plan(name)


def assert_same_plan(name):
    if name == "random":
        draw = rng(3, "plan")
        pairs = [torch.from_numpy(draw.integers(0, 140, (2, 260))) for _ in range(4)]
        table = masks.build_table([(a, b) for a, b in pairs], [130, 0, 1, 129])
    else:
        table = (
            masks.build_cross([70, 3, 0], [130, 0, 9])
            if name == "cross"
            else masks.CHECKED[name]([130, 1, 0, 37])
        )
    for blocks in ((16, 32), (64, 16)):
        host, device = make_plan(table, *blocks), plan_on_device(table, *blocks)
        for side in ("query", "key"):
            for want, found in zip(_real(getattr(host, side)), _real(getattr(device, side)), strict=True):
                assert torch.equal(want, found)


def test_the_gpu_benchs_checks_hold_here_too():
    table = masks.build_candidates([33, 1, 0, 20], 7)
    errors = attention_checks._measure_errors(table, torch.float32, 16, "cpu")
    assert set(errors) == {"out", "q", "k", "v"}
    assert max(errors.values()) <= 1e-5
    assert max(attention_checks._compare_with_dense_bf16(table, 16, "cpu").values()) <= 2
    assert attention_checks._has_same_plan(table, "cpu")


@triton.jit
def _tanh_kernel(X, Y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(Y + at, tanh(tl.load(X + at)))


def test_tanh_is_within_5e_7_of_the_truth_relatively():
    size = torch.logspace(-6, 1.3, 4096)
    x = torch.cat([size, -size])
    y = torch.empty_like(x)
    _tanh_kernel[(1,)](x, y, N=8192)
    truth = x.double().tanh()
    assert float(((y - truth) / truth).abs().max()) <= 5e-7
