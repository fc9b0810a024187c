"""The CPU path against a dense float64 computation: every mask cut into pieces, every feature, forward and backward."""

import pytest
import torch

from nonet.attention.attention import uni_attention
from nonet.attention.calls.bias import RelativeBias
from nonet.attention.masks.mask import UniMask
from nonet.attention.torch_backends.tiles import split_mask

LENGTHS = [300, 41, 0, 430, 7]
TARGETS = torch.tensor([90, 5, 0, 200, 7])


def cuts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def draw(*sizes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*size, dtype=dtype, generator=generator) for size in sizes]


def dense(q, k, v, seen, *, scale=None, activation="softmax", length=1.0, cap=None, sink=None, added=None):
    """[T, H, E] and log-sum-exp [H, T], written out over the whole batch."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    score = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    score = score if cap is None else cap * (score / cap).tanh()
    score = score if added is None else score + added
    if activation == "silu":
        weight = (score * score.sigmoid() / length).masked_fill(~seen, 0.0)
        return torch.einsum("hqk,khe->qhe", weight, v), None
    weight = score.clamp_max(700).exp().masked_fill(~seen, 0.0)
    total = weight.sum(-1) if sink is None else weight.sum(-1) + sink[:, None].exp()
    weight = torch.where(total[..., None] > 0, weight / total[..., None].clamp_min(1e-300), 0.0)
    return torch.einsum("hqk,khe->qhe", weight, v), total.log()


def check(mask, lengths_q, lengths_k=None, *, heads=(2, 2), widths=(8, 8), atol=1e-11, **options):
    """Forward, log-sum-exp and all gradients equal the dense computation in float64."""
    lengths_k = lengths_q if lengths_k is None else lengths_k
    cu_q, cu_k = cuts(lengths_q), cuts(lengths_k)
    inputs = draw(
        (sum(lengths_q), heads[0], widths[0]),
        (sum(lengths_k), heads[1], widths[0]),
        (sum(lengths_k), heads[1], widths[1]),
    )
    sink = options.pop("sink", None)
    bias, added_of = options.pop("bias", None), options.pop("added", None)
    cap, length, activation = (
        options.get("soft_cap"),
        options.get("scaling_length"),
        options.get("activation", "softmax"),
    )
    extra = [x for x in (sink, *((bias.position, bias.time) if bias else ())) if x is not None]
    leaves = [x.clone().requires_grad_() for x in (*inputs, *extra)]
    twins = [x.clone().requires_grad_() for x in (*inputs, *extra)]

    def split(all_of):
        rest = iter(all_of[3:])
        own_sink = None if sink is None else next(rest)
        if bias is None:
            return own_sink, None
        position = None if bias.position is None else next(rest)
        time = None if bias.time is None else next(rest)
        return own_sink, RelativeBias(position, time, bias.time_q, bias.time_k, bias.steps)

    own_sink, own_bias = split(leaves)
    same = {} if lengths_k is lengths_q else {"cu_seqlens_k": cu_k}
    out, lse = uni_attention(
        *leaves[:3],
        mask=mask,
        cu_seqlens_q=cu_q,
        sink=own_sink,
        bias=own_bias,
        return_lse=True,
        **same,
        **options,
    )
    seen = mask.to_dense(cu_q, cu_k)
    twin_sink, twin_bias = split(twins)
    added = None if twin_bias is None else added_of(twin_bias)
    want, want_lse = dense(
        *twins[:3],
        seen,
        scale=options.get("scale"),
        activation=activation,
        length=length or 1.0,
        cap=cap,
        sink=twin_sink,
        added=added,
    )
    torch.testing.assert_close(out, want, atol=atol, rtol=0)
    if want_lse is not None:
        torch.testing.assert_close(lse, want_lse.detach(), atol=atol, rtol=0)
    grad = draw(tuple(want.shape), seed=1)[0]
    out.backward(grad)
    want.backward(grad)
    for mine, theirs in zip(leaves, twins, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=100 * atol, rtol=0)


def tree():
    """300, 41, ... tokens as a history and three levels of two beams."""
    parents_of = torch.Generator().manual_seed(3)
    history = torch.tensor([max(n - 6, 0) for n in LENGTHS])
    return UniMask.beam_tree(history, torch.randint(0, 2, (len(LENGTHS), 2, 2), generator=parents_of))


def masks():
    tokens = sum(LENGTHS)
    ends = cuts(LENGTHS)
    inner = torch.cat([ends, ends[:-1] + torch.tensor([100, 20, 0, 333, 3])]).sort().values
    word = torch.arange(tokens) % 3 + 1
    start = torch.randint(0, 300, (tokens, 3), generator=torch.Generator().manual_seed(4))
    return {
        "full": UniMask.full(),
        "causal": UniMask.causal(),
        "prefix_lm": UniMask.prefix_lm(TARGETS),
        "window": UniMask.window(70, 12),
        "causal_window": UniMask.causal(window=130),
        "two_sided_window": UniMask.window(100, 90),
        "narrow_window": UniMask.causal(window=3),
        "sinks_window": UniMask.sinks_window(9, 64, sinks_see_all=True),
        "document": UniMask.document(inner),
        "session": UniMask.session(inner, prefix=10),
        "candidates": UniMask.hstu(TARGETS),
        "hstu": UniMask.hstu(TARGETS, contextual=5, max_attn_len=60, min_full_attn_len=20),
        "target_groups": UniMask.target_groups(TARGETS, 4),
        "large_target_groups": UniMask.target_groups(TARGETS, 50),
        "semi_local": UniMask.semi_local(50, 30),
        "beam_tree": tree(),
        "classes": UniMask.classes(word, word.flip(0)) & UniMask.causal(),
        "bos_interval": UniMask.bos_interval(4),
        "random_intervals": UniMask.intervals(start, start + 40),
        "composed": UniMask.hstu(TARGETS) & UniMask.sinks_window(20, 100),
    }  # fmt: skip


@pytest.mark.parametrize("name", masks())
def test_every_mask_in_pieces_equals_the_dense_computation(name):
    check(masks()[name], LENGTHS)


def test_queries_of_other_lengths_than_keys():
    check(UniMask.causal(), [40, 300, 0, 5], [300, 310, 8, 2])
    check(UniMask.full(), [40, 3, 0, 5], [300, 310, 8, 0])
    time_q, time_k = torch.arange(48) * 7.0, torch.cat([torch.arange(300) * 1.0, torch.arange(310) * 0.5])
    check(UniMask.cross(time_q, time_k), [40, 8], [300, 310])


def test_grouped_heads_other_value_widths_and_a_scale():
    for mask in (UniMask.causal(), UniMask.hstu(TARGETS)):
        check(mask, LENGTHS, heads=(4, 2), widths=(8, 5), scale=0.7)
        check(mask, LENGTHS, heads=(4, 1), widths=(3, 8))


def test_sinks_take_weight_and_have_gradients():
    sink = torch.tensor([0.5, -2.0], dtype=torch.float64)
    for mask in (
        UniMask.causal(),
        UniMask.hstu(TARGETS),
        UniMask.intervals(torch.ones(778, 1).long(), torch.zeros(778, 1).long()),
    ):
        check(mask, LENGTHS, sink=sink)
        check(mask, LENGTHS, sink=sink, backend="reference")


def test_soft_cap_and_silu_equal_the_dense_computation():
    for mask in (UniMask.causal(), UniMask.hstu(TARGETS, max_attn_len=50), tree(), UniMask.bos_interval(5)):
        check(mask, LENGTHS, soft_cap=2.0)
        check(mask, LENGTHS, activation="silu", scaling_length=512.0)
        check(mask, LENGTHS, heads=(4, 2), widths=(8, 5), activation="silu", scaling_length=512.0)
        check(mask, LENGTHS, backend="reference")


def test_bias_tables_and_their_gradients_equal_a_dense_bias():
    tokens = sum(LENGTHS)
    time = torch.randint(0, 5000, (tokens,), generator=torch.Generator().manual_seed(2)).int()
    position, by_time = draw((2, 2 * 50 - 1), (1, 13), seed=8)
    place = torch.cat([torch.arange(n) for n in LENGTHS])

    def added(bias):
        apart = (place - place[:, None]).clamp(-49, 49) + 49
        seconds = (time[:, None].long() - time.long()).abs().clamp_min(1).double()
        power = seconds.log2().add(1e-12).floor()  # log2 with straight lines between powers of two
        bucket = (2 * (power + seconds / 2**power - 1)).floor().long().clamp_max(12)
        return (bias.position[:, apart] if bias.position is not None else 0) + bias.time[:, bucket]

    whole, times = RelativeBias(position, by_time, time, time), RelativeBias(None, by_time, time, time)
    check(UniMask.hstu(TARGETS), LENGTHS, bias=whole, added=added, activation="silu", scaling_length=100.0)
    check(UniMask.causal(), LENGTHS, bias=times, added=added)
    check(UniMask.causal(), LENGTHS, bias=whole, added=added, sink=torch.zeros(2, dtype=torch.float64))


def test_dense_layout_equals_packed():
    q, k, v = draw((3, 4, 50, 8), (3, 2, 50, 8), (3, 2, 50, 6))
    mask = UniMask.hstu(torch.tensor([5, 0, 50]))
    out, lse = uni_attention(q, k, v, mask=mask, return_lse=True)
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    want, want_lse = uni_attention(*packed, mask=mask, cu_seqlens_q=cuts([50] * 3), return_lse=True)
    assert out.shape == (3, 4, 50, 6)
    assert lse.shape == (3, 4, 50)
    assert torch.equal(out.transpose(1, 2).flatten(0, 1), want)
    assert torch.equal(lse.transpose(0, 1).flatten(1), want_lse)
    short = uni_attention(q[:, :, -3:], k, v, mask=UniMask.causal())
    torch.testing.assert_close(
        short, uni_attention(q, k, v, mask=UniMask.causal())[:, :, -3:], atol=1e-12, rtol=0
    )


@pytest.mark.parametrize(
    ("dtype", "activation"),
    [(torch.bfloat16, "softmax"), (torch.float16, "softmax"), (torch.bfloat16, "silu")],
)
def test_half_precision_errs_at_most_twice_as_much_as_torch_in_that_type(dtype, activation):
    """FlashAttention's rule: the error of a same-type computation is what the type costs."""
    options = {"activation": activation} | ({"scaling_length": 64.0} if activation == "silu" else {})
    mask, cut = UniMask.hstu(TARGETS, max_attn_len=100), cuts(LENGTHS)
    q, k, v = draw(*[(sum(LENGTHS), 2, 16)] * 3)
    seen = mask.to_dense(cut)
    truth, _ = dense(q, k, v, seen, activation=activation, length=64.0)
    low = [x.to(dtype) for x in (q, k, v)]
    same, _ = dense(*low, seen, activation=activation, length=64.0)
    got = uni_attention(*low, mask=mask, cu_seqlens_q=cut, **options)
    assert got.dtype == dtype
    assert (got.double() - truth).abs().max() <= 2 * (same.double() - truth).abs().max()


def test_a_piece_is_a_whole_rectangle_a_square_or_a_diagonal_where_the_mask_is_one():
    cut = cuts([1000])
    kinds = lambda mask: sorted(p.kind for p in split_mask(mask.build_table(cut), [0]))  # noqa: E731
    assert kinds(UniMask.causal()) == ["causal"]
    assert kinds(UniMask.hstu(300)) == ["causal", "dense", "self"]
    assert kinds(UniMask.prefix_lm(400)) == ["causal", "dense", "dense"]
    assert kinds(UniMask.document(torch.tensor([0, 400, 1000]), causal=True)) == ["causal", "causal"]
    assert set(kinds(UniMask.causal(window=100))) == {"anti", "causal"}
    assert set(kinds(UniMask.window(200, 100))) == {"anti", "causal", "dense"}
    narrow = split_mask(UniMask.causal(window=20).build_table(cut), [0])
    wide = sum((p.q1 - p.q0) * (p.k1 - p.k0) for p in narrow if p.kind == "masked")
    assert wide < 1000 * 150, "a window of 20 is computed in blocks of 128 rows over 147 keys"


def test_the_same_inputs_give_the_same_bits():
    cut = cuts(LENGTHS)
    runs = []
    for _ in range(3):
        leaves = [x.requires_grad_() for x in draw(*[(sum(LENGTHS), 2, 16)] * 3, dtype=torch.float32)]
        out = uni_attention(*leaves, mask=masks()["hstu"], cu_seqlens_q=cut)
        out.square().sum().backward()
        runs.append([out.detach(), *(x.grad for x in leaves)])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_a_table_made_once_serves_every_layer_and_a_changed_one_is_seen():
    cut = cuts(LENGTHS)
    q, k, v = draw(*[(sum(LENGTHS), 2, 8)] * 3)
    table = UniMask.causal(window=40).build_table(cut)
    first = uni_attention(q, k, v, mask=table, cu_seqlens_q=cut)
    assert torch.equal(first, uni_attention(q, k, v, mask=table, cu_seqlens_q=cut))
    table.start.zero_()
    assert torch.equal(
        uni_attention(q, k, v, mask=table, cu_seqlens_q=cut),
        uni_attention(q, k, v, mask=UniMask.causal().build_table(cut), cu_seqlens_q=cut),
    )
