"""The Ascend backend against the chunked reference, over a stand-in of torch_npu written from its documentation.

Nothing here says that it runs on Ascend: that was never tried.
"""

import sys
import types

import pytest
import torch

from nonet.attention.calls.call import AttentionCall
from nonet.attention.masks.mask import UniMask
from nonet.attention.torch_backends import chunked as chunks
from nonet.attention.torch_backends import npu
from nonet.errors import ConfigError

CUT = torch.tensor([0, 6, 6, 17])


def npu_fusion_attention(q, k, v, head_num, input_layout, *, scale, atten_mask=None, sparse_mode=0):
    """torch_npu's, for what is asked of it: BNSD, a set bit hides, mode 3 is causal at the newest key."""
    assert input_layout == "BNSD"
    assert head_num == q.shape[1]
    k, v = (x.repeat_interleave(head_num // x.shape[1], 1) for x in (k, v))
    score = q @ k.mT * scale
    if sparse_mode == 3:
        assert atten_mask.shape == (2048, 2048)
        atten_mask = torch.ones(score.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
    if atten_mask is not None:
        score = score.masked_fill(atten_mask, -torch.inf)
    most = score.amax(-1, keepdim=True)
    weight = (score - most).exp()
    total = weight.sum(-1, keepdim=True)
    wide = (most.expand(*most.shape[:-1], 8), total.expand(*total.shape[:-1], 8))
    return (weight / total @ v, *wide, None, 0, 0, 0)


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "torch_npu", types.SimpleNamespace(npu_fusion_attention=npu_fusion_attention)
    )


@pytest.mark.parametrize("form", ["full", "causal", "hstu", "blind rows"])
def test_sequences_by_the_fused_kernel_equal_the_reference(stand_in, form):
    draw = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(17, h, 8, dtype=torch.float64, generator=draw) for h in (4, 2, 2, 4))
    tables = {
        "hstu": lambda: UniMask.hstu(torch.tensor([2, 0, 4])).build_table(CUT),
        "blind rows": lambda: UniMask.intervals(
            torch.arange(17)[:, None] % 3, torch.ones(17, 1).long()
        ).build_table(CUT),
    }
    table = tables[form]() if form in tables else None
    call = AttentionCall(CUT, CUT, "table" if table is not None else form, table, scale=0.3)
    for mine, theirs in zip(npu.forward(q, k, v, call), chunks.forward(q, k, v, call), strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=1e-6, rtol=0)
    for mine, theirs in zip(
        npu.backward(grad, q, k, v, call)[:3], chunks.backward(grad, q, k, v, call)[:3], strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


def test_without_torch_npu_the_error_says_what_to_install():
    if "torch_npu" in sys.modules:
        pytest.skip("torch_npu is here")
    q = torch.zeros(17, 2, 8)
    with pytest.raises(ConfigError, match=r"nonet\[npu\]"):
        npu.forward(q, q, q, AttentionCall(CUT, CUT, "full", None, scale=1.0))
