"""uni_attention against a dense float64 reference, forward and backward, over masks and ragged lengths."""

import pytest
import torch

from nonet.attention.attention import uni_attention
from nonet.attention.masks.mask import UniMask
from nonet.errors import ConfigError

HEADS, WIDTH, VALUE = 2, 8, 6


def cuts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def packed(lengths_q, lengths_k, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = [(sum(lengths_q), HEADS, WIDTH), (sum(lengths_k), HEADS, WIDTH), (sum(lengths_k), HEADS, VALUE)]
    return [torch.randn(*size, dtype=dtype, generator=generator).requires_grad_() for size in sizes]


def reference(q, k, v, visible, lengths_q, lengths_k, scale=None):
    """One sequence and one head at a time; visible(sequence, query, key) -> bool."""
    scale = WIDTH**-0.5 if scale is None else scale
    out, at_q, at_k = [], 0, 0
    for b, (n_q, n_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        for i in range(n_q):
            keys = [j for j in range(n_k) if visible(b, i, j)]
            if not keys:
                out.append(q.new_zeros(HEADS, VALUE))
                continue
            index = at_k + torch.tensor(keys)
            weights = (torch.einsum("hd,jhd->hj", q[at_q + i], k[index]) * scale).softmax(-1)
            out.append(torch.einsum("hj,jhe->he", weights, v[index]))
        at_q, at_k = at_q + n_q, at_k + n_k
    return torch.stack(out)


def assert_like_reference(
    mask, visible, lengths_q, lengths_k=None, scale=None, dtype=torch.float64, atol=1e-12
):
    lengths_k = lengths_q if lengths_k is None else lengths_k
    inputs = packed(lengths_q, lengths_k, dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    own_k = {} if lengths_k is lengths_q else {"cu_seqlens_k": cuts(lengths_k)}
    out = uni_attention(*inputs, mask=mask, cu_seqlens_q=cuts(lengths_q), scale=scale, **own_k)
    want = reference(*wide, visible, lengths_q, lengths_k, scale)
    grad = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out.backward(grad.to(dtype))
    want.backward(grad)
    torch.testing.assert_close(out.double(), want, atol=atol, rtol=0)
    for x, y in zip(inputs, wide, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, atol=10 * atol, rtol=0)


@pytest.mark.parametrize("lengths", [[5], [3, 1, 7], [0, 4, 0, 2, 0], [9, 8, 8, 9, 7, 2, 1, 2, 1, 1, 3, 0]])
def test_causal_equals_the_dense_reference_with_gradients(lengths):
    assert_like_reference(UniMask.causal(), lambda b, i, j: j <= i, lengths)


def test_causal_window_sees_only_the_newest_keys():
    assert_like_reference(UniMask.causal(window=3), lambda b, i, j: i - 3 < j <= i, [7, 2, 0, 5])


def test_full_attention_over_other_keys_than_queries():
    assert_like_reference(UniMask.full(), lambda b, i, j: True, [3, 0, 2, 4], [5, 2, 0, 1])


def test_causal_of_fewer_queries_than_keys_is_aligned_at_the_newest_token():
    lengths_q, lengths_k = [1, 2, 3], [6, 2, 5]
    offset = [k - q for q, k in zip(lengths_q, lengths_k, strict=True)]
    assert_like_reference(UniMask.causal(), lambda b, i, j: j <= i + offset[b], lengths_q, lengths_k)


def test_causal_of_more_queries_than_keys_leaves_the_oldest_queries_blind():
    assert_like_reference(UniMask.causal(), lambda b, i, j: j <= i - 2, [5], [3])


def test_explicit_intervals_of_two_runs_a_row_and_blind_rows():
    lengths = [6, 3]
    start = torch.tensor([[0, i] for n in lengths for i in range(n)])
    stop = torch.tensor([[min(2, i), i + 1] for n in lengths for i in range(n)])
    stop[4] = 0
    visible = {}
    token = 0
    for b, n in enumerate(lengths):
        for i in range(n):
            visible[b, i] = {j for s, e in zip(start[token], stop[token], strict=True) for j in range(s, e)}
            token += 1
    assert not visible[0, 4]
    assert_like_reference(UniMask.intervals(start, stop), lambda b, i, j: j in visible[b, i], lengths)


def test_intervals_hold_when_sequences_fall_into_several_buckets():
    lengths = [2, 40, 3, 41, 1, 39, 2, 40, 2]
    start = torch.cat([(torch.arange(n) - 5).clamp_min(0) for n in lengths])[:, None]
    stop = torch.cat([torch.arange(n) + 1 for n in lengths])[:, None]
    assert_like_reference(UniMask.intervals(start, stop), lambda b, i, j: i - 5 <= j <= i, lengths)


def test_float32_stays_near_float64_and_a_scale_is_used():
    # float32 sums of 9 products of unit normals: errors of a few 1e-7.
    assert_like_reference(
        UniMask.causal(), lambda b, i, j: j <= i, [9, 4], scale=0.5, dtype=torch.float32, atol=2e-6
    )


def test_a_batch_of_empty_sequences_gives_an_empty_result():
    q, k, v = packed([0, 0], [0, 0])
    assert uni_attention(q, k, v, mask=UniMask.causal(), cu_seqlens_q=cuts([0, 0])).shape == (0, HEADS, VALUE)


def test_a_mask_that_cannot_be_expressed_is_refused():
    q, k, v = packed([2], [2])
    for mask in (lambda i, j: j <= i, torch.ones(2, 2, dtype=torch.bool), "causal", None):
        with pytest.raises(ConfigError, match="cannot express"):
            uni_attention(q, k, v, mask=mask, cu_seqlens_q=cuts([2]))


def test_wrong_cuts_and_shapes_are_refused():
    q, k, v = packed([4], [4])
    with pytest.raises(ConfigError, match="must rise from 0 to the 4 tokens"):
        uni_attention(q, k, v, mask=UniMask.causal(), cu_seqlens_q=cuts([3]))
    with pytest.raises(ConfigError, match="2 query sequences but cu_seqlens_k 1"):
        uni_attention(q, k, v, mask=UniMask.full(), cu_seqlens_q=cuts([3, 1]), cu_seqlens_k=cuts([4]))
    with pytest.raises(ConfigError, match="pack them"):
        uni_attention(q[None], k, v, mask=UniMask.causal(), cu_seqlens_q=cuts([4]))
    short = UniMask.intervals(torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1, dtype=torch.long))
    with pytest.raises(ConfigError, match="intervals for 3 queries"):
        uni_attention(q, k, v, mask=short, cu_seqlens_q=cuts([4]))
