"""Compare the kernels in Triton's interpreter with the float64 reference.

kernels/test_forward_pass.py runs this file in a process of its own, because TRITON_INTERPRET must be in the environment before
Triton is imported. Bars: float32 within 2e-6 forward and 1e-5 in gradients; bfloat16 and float16 at most twice the error that
the dense reference makes in the same dtype (flash attention's own rule).
"""

import dataclasses
import os

import pytest
import quick_interpreter
import torch

from nonet.attention.calls.bias import RelativeBias
from nonet.attention.kernels.backward_pass import backward
from nonet.attention.kernels.forward_pass import forward
from nonet.attention.kernels.launch import KernelOptions
from nonet.attention.plans.tile_configs import KernelTile, TileConfig
from nonet.attention.plans.tile_plan import make_plans
from nonet.bench.attention import masks
from nonet.bench.attention.dense_reference import attend_reference
from nonet.errors import ConfigError
from nonet.random import rng

assert os.environ.get("TRITON_INTERPRET") == "1"
quick_interpreter.install()
FORWARD, GRADIENT = 2e-6, 1e-5
LENGTHS = [70, 1, 0, 33]
FEATURES = {
    "soft cap": {"soft_cap": 3.0},
    "sink": {"sink": True},
    "scale": {"scale": 0.7},
    "SiLU": {"activation": "silu", "scaling_length": 50.0},
    "bias": {"bias": 2},
    "bias that heads share": {"bias": 1},
    "SiLU, cap and bias": {"activation": "silu", "scaling_length": 9.0, "soft_cap": 4.0, "bias": 2},
    "sink, cap and bias": {"sink": True, "soft_cap": 4.0, "bias": 2},
}


def normal(*shape, word):
    return torch.from_numpy(rng(11, *word).standard_normal(shape))


def inputs(table, heads, key_heads, width, values, dtype):
    queries, keys = int(table.cu_q[-1]), int(table.cu_k[-1])
    shapes = [
        (queries, heads, width),
        (keys, key_heads, width),
        (keys, key_heads, values),
        (queries, heads, values),
    ]
    return [normal(*shape, word=("x", i)).to(dtype) for i, shape in enumerate(shapes)]


def tables_of_bias(table, rows, dtype=torch.float32):
    """Reach of 30 positions and 20 buckets: pairs of the test's sequences fall past both ends."""
    times = [
        torch.cat(
            [
                torch.from_numpy(rng(5, "time", n).integers(0, 90_000, n)).sort().values
                for n in cuts.diff().tolist()
            ]
        )
        for cuts in (table.cu_q, table.cu_k)
    ]
    return RelativeBias(
        position=normal(rows, 59, word=("position",)).to(dtype) * 0.5,
        time=normal(rows, 20, word=("buckets",)).to(dtype) * 0.5,
        time_q=times[0].int(),
        time_k=times[1].int(),
        steps=1.1,
    )


def config_of(block_q, block_k):
    """Return tile sizes, swapped for dK and dV so that no two kernels have the same blocks."""
    return TileConfig(
        KernelTile(block_q, block_k, 4, 2),
        KernelTile(block_q, block_k, 4, 2),
        KernelTile(block_k, block_q, 4, 2),
    )


def kernels(table, leaves, grad, blocks, features, grad_lse=None):
    """Return outputs, log-sum-exp and gradients of the kernels by name."""
    config, options = config_of(*blocks), KernelOptions(**features)
    made = make_plans(table, config)
    out, lse = forward(*leaves, table, made, options, config)
    grads = backward(grad, *leaves, out, lse, table, made, options, config, grad_lse)
    found = {"out": out, "lse": lse}
    found |= {
        name: value
        for name in ("q", "k", "v", "sink", "position", "time")
        if (value := getattr(grads, name)) is not None
    }
    return found


def dense(table, leaves, grad, features, dtype, grad_lse=None):
    """Return the same quantities from the dense reference, in `dtype`."""
    leaves = {n: x.detach().to(dtype).requires_grad_() for n, x in zip("qkv", leaves, strict=True)}
    options, more = dict(features), {}
    if "sink" in features:
        options["sink"] = more["sink"] = features["sink"].to(dtype).requires_grad_()
    if "bias" in features:
        more |= {n: getattr(features["bias"], n).to(dtype).requires_grad_() for n in ("position", "time")}
        options["bias"] = dataclasses.replace(features["bias"], **{n: more[n] for n in ("position", "time")})
    out, lse = attend_reference(*leaves.values(), table, **options)
    loss = (out * grad.to(dtype)).sum()
    if grad_lse is not None:
        loss = loss + torch.where(torch.isfinite(lse), lse * grad_lse, 0.0).sum()
    leaves |= more
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, grads, strict=True))}


def compare(table, blocks=(32, 32), dtype=torch.float32, sizes=(2, 2, 16, 16), lse_too=False, **features):
    heads = sizes[0]
    features = dict(features)
    if features.pop("sink", False):
        features["sink"] = normal(heads, word=("sink",)).float()
    if features.get("bias"):
        features["bias"] = tables_of_bias(table, features["bias"])
    *leaves, grad = inputs(table, *sizes, dtype)
    grad_lse = normal(heads, len(leaves[0]), word=("lse",)).float() if lse_too else None
    found = kernels(table, leaves, grad, blocks, features, grad_lse)
    want = dense(table, leaves, grad, features, torch.float64, grad_lse)
    silu = features.get("activation") == "silu"
    if not silu:
        blind = torch.isinf(want["lse"])
        assert torch.equal(blind, found["lse"] == -torch.inf)
        assert not found["out"][blind.t()].any(), "a row that sees nothing gives 0"
        assert not found["q"][blind.t()].any()
        difference = (found["lse"] - want["lse"]).masked_fill(blind, 0.0)
        size = want["lse"].masked_fill(blind, 0.0).abs().clamp_min(1.0)
        assert float((difference / size).abs().max()) <= FORWARD, "relative: float32 is 1e-6 wide at 10"
    names = [name for name in found if name != "lse"]
    assert set(names) == set(want) - {"lse"}
    errors = {name: _error(name, found[name], want[name]) for name in names}
    if dtype == torch.float32:
        allowed = {name: FORWARD if name == "out" else GRADIENT for name in names}
    else:
        same = dense(table, leaves, grad, features, dtype, grad_lse)
        allowed = {name: 2 * _error(name, same[name], want[name]) for name in names}
    assert all(errors[name] <= allowed[name] for name in names), (errors, allowed)
    return found


def _error(name, found, want):
    """Return the largest error; for sinks, one number per head, the root mean square, because the maximum of so few varies."""
    assert found.shape == want.shape
    assert torch.isfinite(found).all()
    if not found.numel():
        return 0.0
    error = found.double() - want
    return float(error.square().mean().sqrt() if name == "sink" else error.abs().max())


@pytest.mark.parametrize("name", masks.CHECKED)
def test_every_mask_matches_float64_forward_and_backward(name):
    compare(masks.CHECKED[name]([130, 1, 0, 37] if name in ("causal", "HSTU") else LENGTHS))


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [(16, 16), (64, 16), (16, 64), (64, 64), (128, 32)], ids=str)
@pytest.mark.parametrize("name", masks.CHECKED)
def test_every_mask_matches_float64_in_every_tile_shape(name, blocks):
    compare(masks.CHECKED[name]([130, 1, 0, 64, 37]), blocks)


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_matches_float64_with_its_own_gradients(name):
    compare(masks.build_hstu([40, 1, 33], 9, 20, 3, 4), (32, 32), **FEATURES[name])


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "candidates", "BOS columns", "classes"])
@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_matches_float64_under_other_masks_and_rectangular_tiles(name, mask):
    compare(masks.CHECKED[mask](LENGTHS), (64, 32), **FEATURES[name])
    compare(masks.CHECKED[mask](LENGTHS), (16, 32), **FEATURES[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_errs_at_most_twice_as_much_as_dense_torch_in_the_same_dtype(dtype):
    compare(masks.build_causal([100, 3]), dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("feature", [None, "SiLU", "soft cap", "sink", "bias"])
@pytest.mark.parametrize("name", ["causal", "HSTU", "candidates", "beam tree"])
def test_half_precision_errs_at_most_twice_as_much_under_features_and_masks(name, feature, dtype):
    lengths, sizes = ([40, 1, 20], (16, 4, 16, 16)) if feature == "sink" else ([100, 1, 30], (2, 1, 32, 32))
    options = FEATURES[feature] if feature else {}
    compare(masks.CHECKED[name](lengths), dtype=dtype, sizes=sizes, **options)


@pytest.mark.parametrize("sizes", [(4, 2, 16, 16), (4, 1, 24, 40)], ids=str)
def test_shared_key_heads_and_odd_widths_match_float64(sizes):
    compare(masks.build_sinks_window([50, 1, 20], 3, 9), sizes=sizes)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1, 256, 16), (2, 1, 16, 128), (3, 3, 80, 96), (6, 2, 64, 64)], ids=str)
def test_wide_heads_match_float64(sizes):
    compare(masks.build_causal([50, 1, 20]), sizes=sizes)


def test_a_gradient_through_the_log_sum_exp_is_added():
    compare(masks.build_causal([40, 1]), lse_too=True)
    compare(masks.build_candidates([40, 9], 4), lse_too=True, sink=True)


def test_queries_may_be_fewer_than_keys_and_positions_align_at_the_newest():
    compare(masks.build_cross([20, 3, 80], [60, 0, 10]), (128, 16), bias=2)


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_see_nothing_give_zero_and_no_nan_in_any_gradient(seed):
    draw = rng(seed, "intervals")
    lengths = [45, 0, 30]
    pairs = [
        torch.from_numpy(draw.integers(0, 60, (2, sum(lengths)))) for _ in range(2)
    ]  # half of them empty
    table = masks.build_table([(a, b) for a, b in pairs], lengths)
    assert bool((table.start >= table.stop).all(0).any())
    found = compare(table, (16, 16), sink=seed == 1)
    assert seed == 1 or bool(torch.isinf(found["lse"]).any())


def test_a_whole_batch_that_sees_nothing_gives_zeros():
    table = masks.build_table([(torch.zeros(20).long(), torch.zeros(20).long())], [20])
    found = compare(table)
    assert not any(found[name].any() for name in ("out", "q", "k", "v"))


def test_inputs_may_be_slices_of_one_projection():
    table = masks.build_causal([33, 8])
    joint = normal(41, 3, 2, 16, word=("joint",)).float()
    q, k, v = joint.unbind(1)
    config = config_of(32, 32)
    made = make_plans(table, config)
    out, _ = forward(q, k, v, table, made, config=config)
    again, _ = forward(q.contiguous(), k.contiguous(), v.contiguous(), table, made, config=config)
    assert torch.equal(out, again)


def test_a_row_has_the_same_bits_alone_and_in_a_batch_and_on_every_run():
    blocks = (32, 32)
    features = {"bias": tables_of_bias(masks.build_causal([50, 20]), 2)}
    table, alone = masks.build_causal([50, 20]), masks.build_causal([50])
    leaves = inputs(table, 2, 1, 16, 16, torch.float32)
    first = kernels(table, leaves[:3], leaves[3], blocks, features)
    again = kernels(table, leaves[:3], leaves[3], blocks, features)
    assert all(torch.equal(first[name], again[name]) for name in first)
    cut = [x[:50] for x in leaves]
    bias = features["bias"]
    features = {"bias": dataclasses.replace(bias, time_q=bias.time_q[:50], time_k=bias.time_k[:50])}
    single = kernels(alone, cut[:3], cut[3], blocks, features)
    assert all(torch.equal(first[name][:50], single[name]) for name in ("out", "q", "k", "v"))


def test_what_the_kernels_cannot_take_is_refused():
    table = masks.build_causal([20])
    q, k, v, _ = inputs(table, 2, 2, 16, 16, torch.float32)
    config = config_of(32, 32)
    made = make_plans(table, config)
    for arguments, options, message in (
        ((q, k.half(), v), {}, "must share float32"),
        ((q, k[:, :0], v[:, :0]), {}, "must be a multiple"),
        ((q[:9], k, v), {}, "made for 20 queries, but q has 9"),
        ((q, k[..., :8], v), {}, "attention takes q"),
        ((q, k, v), {"activation": "relu"}, "must be 'softmax' or 'silu'"),
        ((q, k, v), {"scale": -1.0}, "above 0"),
        ((q, k, v), {"sink": torch.zeros(3)}, "a logit per head"),
        ((q, k, v), {"bias": RelativeBias(position=torch.zeros(2, 4))}, "odd number"),
        ((q, k, v), {"bias": RelativeBias(time=torch.zeros(2, 4))}, "bias.time_q is None"),
    ):
        with pytest.raises(ConfigError, match=message):
            forward(*arguments, table, made, KernelOptions(**options), config)
    with pytest.raises(ConfigError, match="Make the plans with"):
        forward(q, k, v, table, make_plans(table, config_of(16, 16)), config=config)
