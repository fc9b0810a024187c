"""The Triton backend behind uni_attention, interpreted on the CPU in a process of its own: equal to the CPU path."""

import importlib.util
import os
import subprocess
import sys

import pytest

# Lengths of a few tiles at most: the interpreter does about 200 tile steps a second.
_PROGRAM = """
import torch
torch.set_num_threads(1)
from nonet.attention.attention import uni_attention
from nonet.attention.calls.bias import RelativeBias
from nonet.attention.masks.mask import UniMask

lengths = [40, 0, 50, 5]
cut, tokens = torch.tensor([0, *lengths]).cumsum(0), sum(lengths)
targets, words = torch.tensor([9, 0, 30, 5]), torch.arange(tokens) % 3 + 1
time = torch.arange(tokens).int() * 7

def run(backend, mask, sink=False, bias=False, **options):
    draw = torch.Generator().manual_seed(0)
    rand = lambda *size: torch.randn(*size, generator=draw, requires_grad=True)
    leaves = [rand(tokens, 4, 16), rand(tokens, 2, 16), rand(tokens, 2, 8)]
    if sink:
        options["sink"] = rand(4)
        leaves.append(options["sink"])
    if bias:
        position, by_time = rand(4, 21), rand(1, 9)
        leaves += [position, by_time]
        options["bias"] = RelativeBias(position, by_time, time, time)
    out, lse = uni_attention(*leaves[:3], mask=mask, cu_seqlens_q=cut, backend=backend, return_lse=True, **options)
    out.backward(torch.randn(out.shape, generator=draw))
    return [out.detach(), lse, *(x.grad for x in leaves)]

cases = [
    (UniMask.causal(), {}),
    (UniMask.full(), {}),
    (UniMask.hstu(targets, max_attn_len=20, contextual=3), {"sink": True}),
    (UniMask.bos_interval(4) & UniMask.classes(words, words.flip(0)), {}),
    (UniMask.hstu(targets), {"activation": "silu", "scaling_length": 64.0, "bias": True}),
    (UniMask.causal(), {"soft_cap": 3.0, "bias": True}),
]
for mask, options in cases:
    for mine, theirs in zip(run("auto", mask, **options), run("triton", mask, **options), strict=True):
        # float32 on both sides: sums of at most 50 products; tables' gradients sum over 5,000 pairs.
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=0)
print("equal")
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("nonet.attention.kernels.forward_pass") is None
    or importlib.util.find_spec("triton") is None,
    reason="the Triton kernels are not here",
)
def test_interpreted_kernels_equal_the_cpu_path_through_uni_attention():
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "equal"
