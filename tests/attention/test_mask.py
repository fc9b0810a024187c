"""Masks as data: nineteen of them, 200 random batches each, equal to predicates written from their definitions.

Predicates are loops over (query, key) or the publisher's own formula, and share no code with the masks.
"""

import random

import pytest
import torch

from nonet.attention.mask import UniMask
from nonet.attention.rules import disjoint
from nonet.errors import ConfigError

CASES = 200


def cuts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def block_diagonal(lengths_q, lengths_k, seen):
    """[T, S] from seen(b, row, key) -> bool."""
    out = torch.zeros(sum(lengths_q), sum(lengths_k), dtype=torch.bool)
    at_q = at_k = 0
    for b, (n_q, n_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        for i in range(n_q):
            for j in range(n_k):
                out[at_q + i, at_k + j] = bool(seen(b, i, j))
        at_q, at_k = at_q + n_q, at_k + n_k
    return out


def lengths_of(r):
    return [r.choice([0, 1, 2, 3, r.randint(0, 14), r.randint(0, 14)]) for _ in range(r.randint(1, 3))]


def targets_of(r, lengths):
    """Numbers of targets from 0 to n, the edges n and n - 1 often."""
    return [r.choice([0, n, max(n - 1, 0), r.randint(0, n)]) for n in lengths]


def either(r, numbers):
    """The numbers as a tensor; or, where they are one number, an int now and then."""
    return numbers[0] if len(set(numbers)) == 1 and r.random() < 0.5 else torch.tensor(numbers)


def cuts_within(r, lengths):
    """Packed cuts of random segments; every sequence's end is one, except where a segment spans two now and then."""
    out, at = {0}, 0
    for n in lengths:
        out |= {at + r.randint(0, n) for _ in range(r.randint(0, 3))}
        at += n
        if r.random() < 0.8:
            out.add(at)
    return torch.tensor(sorted(out | {at}))


def segment(cut, token):
    return sum(1 for c in cut.tolist()[1:] if c <= token)


def full(r):
    q, k = lengths_of(r), None
    k = [r.randint(0, 9) for _ in q]
    return UniMask.full(), q, k, lambda b, i, j: True


def causal(r):
    n = lengths_of(r)
    return UniMask.causal(), n, n, lambda b, i, j: j <= i


def causal_bottom_right(r):
    q = lengths_of(r)
    k = [r.randint(0, 14) for _ in q]
    return UniMask.causal_bottom_right(), q, k, lambda b, i, j: j <= i + (k[b] - q[b])


def prefix_lm(r):
    n = lengths_of(r)
    prefix = targets_of(r, n)
    return UniMask.prefix_lm(either(r, prefix)), n, n, lambda b, i, j: j < prefix[b] or j <= i


def window(r):
    n, left, right = lengths_of(r), r.randint(0, 6), r.choice([0, r.randint(0, 6)])
    return UniMask.window(left, right), n, n, lambda b, i, j: i - left <= j <= i + right


def causal_window(r):
    n, w = lengths_of(r), r.randint(1, 7)
    return UniMask.causal(window=w), n, n, lambda b, i, j: i - w < j <= i


def sinks_window(r):
    n, g, w, rows = lengths_of(r), r.randint(0, 5), r.randint(0, 6), r.random() < 0.5
    mask = UniMask.sinks_window(g, w, sinks_see_all=rows)
    return mask, n, n, lambda b, i, j: (j <= i and (j < g or i - w < j)) or (rows and i < g)


def document(r):
    n, causal = lengths_of(r), r.random() < 0.5
    cut, base = cuts_within(r, n), cuts(n)
    mask = UniMask.document(cut, causal=causal)
    same = lambda b, i, j: segment(cut, base[b] + i) == segment(cut, base[b] + j)  # noqa: E731
    return mask, n, n, lambda b, i, j: same(b, i, j) and (j <= i or not causal)


def candidates(r):
    n = lengths_of(r)
    t = targets_of(r, n)
    seen = lambda b, i, j: j == i or (j < n[b] - t[b] and (i >= n[b] - t[b] or j <= i))  # noqa: E731
    return UniMask.hstu(either(r, t)), n, n, seen


def target_groups(r):
    n, g = lengths_of(r), r.randint(1, 4)
    t = targets_of(r, n)

    def seen(b, i, j):
        h = n[b] - t[b]
        if i < h:
            return j <= i
        return j < h or ((i - h) // g == (j - h) // g and j <= i)

    return UniMask.target_groups(either(r, t), g), n, n, seen


def meta_hstu(n, t, c, length, full):
    """generative-recommenders, ops/pytorch/pt_hstu_attention.py::_get_valid_attn_mask, causal, one sequence."""
    ids = torch.arange(n)
    top = n
    if c > 0:
        ids = (ids - c + 1).clamp(min=0)
        top = top - c + 1
    top = top - t
    ids = ids.clamp(max=top)
    row, col = ids[:, None], ids[None]
    distance = row - col
    valid = torch.eye(n, dtype=torch.bool) | (distance > 0)
    if length > 0:
        near = distance <= length
        if full > 0:
            near = near | (row >= top - full)
        valid = valid & near
    if c > 0:
        valid = valid | ((row == 0) & (col < top))
    return valid


def hstu(r, c=None, length=None, full=None):
    n = lengths_of(r)
    t = targets_of(r, n)
    c = [r.choice([0, 1, r.randint(0, 6)]) for _ in n] if c is None else [c] * len(n)
    length = r.randint(0, 8) if length is None else length
    full = r.choice([0, r.randint(0, 6)]) if full is None else full
    mask = UniMask.hstu(either(r, t), contextual=either(r, c), max_attn_len=length, min_full_attn_len=full)
    want = [meta_hstu(n[b], t[b], c[b], length, full) for b in range(len(n))]
    return mask, n, n, lambda b, i, j: want[b][i, j]


def hstu_contextual(r):
    return hstu(r, c=r.randint(1, 4), length=0, full=0)


def hstu_window(r):
    return hstu(r, c=0, length=r.randint(1, 8), full=0)


def semi_local(r):
    n, local, prefix = lengths_of(r), r.randint(0, 6), r.randint(0, 6)
    return UniMask.semi_local(local, prefix), n, n, lambda b, i, j: j <= i and (i - j < local or j < prefix)


def beam_tree(r):
    w, levels = r.randint(1, 4), r.randint(1, 3)
    h = [r.randint(0, 6) for _ in range(r.randint(1, 3))]
    n = [x + w * levels for x in h]
    shared = r.random() < 0.3
    parents = torch.tensor(
        [[[r.randrange(w) for _ in range(w)] for _ in range(levels - 1)] for _ in h]
    ).reshape(len(h), levels - 1, w)
    given = parents[0] if shared else parents

    def seen(b, i, j):
        if j < h[b]:
            return j <= i
        if i < h[b]:
            return False
        level, beam = divmod(i - h[b], w)
        while True:
            if j == h[b] + level * w + beam:
                return True
            if level == 0:
                return False
            beam, level = int(parents[0 if shared else b][level - 1][beam]), level - 1

    return UniMask.beam_tree(either(r, h), given), n, n, seen


def session(r):
    n = lengths_of(r)
    cut, base, prefix = cuts_within(r, n), cuts(n), targets_of(r, n)
    if r.random() < 0.4:
        prefix = [0 for _ in n]
    mask = UniMask.session(cut, prefix=0 if not any(prefix) else either(r, prefix))
    same = lambda b, i, j: segment(cut, base[b] + i) == segment(cut, base[b] + j)  # noqa: E731
    return mask, n, n, lambda b, i, j: j <= i and (same(b, i, j) or j < prefix[b])


def classes(r):
    n, causal = lengths_of(r), r.random() < 0.5
    word = lambda: r.choice([0, 1, 2, 3, 5, -(2**31), 2**31 - 1])  # noqa: E731
    sees, words, base = [word() for _ in range(sum(n))], [word() for _ in range(sum(n))], cuts(n).tolist()
    mask = UniMask.classes(torch.tensor(sees), torch.tensor(words))
    mask = mask & UniMask.causal() if causal else mask
    return mask, n, n, lambda b, i, j: (sees[base[b] + i] & words[base[b] + j]) and (j <= i or not causal)


def bos_interval(r):
    n, p = lengths_of(r), r.randint(1, 5)
    return UniMask.bos_interval(p), n, n, lambda b, i, j: j <= i and not ((j + 1) % p == 0 and i >= j + p)


def cross(r):
    q = lengths_of(r)
    k, strict = [r.randint(0, 9) for _ in q], r.random() < 0.5
    t_q = [[r.randint(0, 9) for _ in range(n)] for n in q]
    t_k = [sorted(r.randint(0, 9) for _ in range(n)) for n in k]
    flat = lambda rows: torch.tensor([x for row in rows for x in row], dtype=torch.int64)  # noqa: E731
    mask = UniMask.cross(flat(t_q), flat(t_k), strict=strict)
    return mask, q, k, lambda b, i, j: t_k[b][j] < t_q[b][i] or (t_k[b][j] == t_q[b][i] and not strict)


def intervals(r):
    n, slots = lengths_of(r), r.randint(1, 4)
    start = torch.tensor([[r.randint(-2, 9) for _ in range(slots)] for _ in range(sum(n))]).reshape(-1, slots)
    stop = start + torch.tensor([[r.randint(-2, 6) for _ in range(slots)] for _ in start.tolist()]).reshape(
        -1, slots
    )
    base = cuts(n)

    def seen(b, i, j):
        row = base[b] + i
        return any(s <= j < e for s, e in zip(start[row].tolist(), stop[row].tolist(), strict=True))

    return UniMask.intervals(start, stop), n, n, seen


def stochastic_length(r):
    """Not a mask: the history is sampled first, the cuts rebuilt, and the base mask is that of what is left."""
    n = [r.randint(0, n) for n in lengths_of(r)]
    t = targets_of(r, n)
    return UniMask.hstu(torch.tensor(t)), n, n, lambda b, i, j: meta_hstu(n[b], t[b], 0, 0, 0)[i, j]


MASKS = [
    full, causal, causal_bottom_right, prefix_lm, window, causal_window, sinks_window, document, candidates, target_groups,
    hstu_contextual, hstu_window, hstu, semi_local, beam_tree, session, classes, bos_interval, cross, intervals,
    stochastic_length,
]  # fmt: skip


@pytest.mark.parametrize("make", MASKS, ids=lambda make: make.__name__)
def test_mask_equals_its_predicate_on_200_random_batches(make):
    r = random.Random(f"mask {make.__name__}")
    empty_rows = pairs = 0
    for _ in range(CASES):
        mask, q, k, seen = make(r)
        cu_q, cu_k = cuts(q), cuts(k)
        got = mask.to_dense(cu_q, cu_q if k is q else cu_k)
        want = block_diagonal(q, k, seen)
        assert torch.equal(got, want), (q, k, mask)
        table = mask.table(cu_q, cu_k)
        assert 1 <= len(table.start) <= 4
        keys = torch.repeat_interleave(torch.tensor(k), torch.tensor(q))
        assert (table.start >= 0).all()
        assert (table.stop <= keys).all()
        if table.column_start is None and table.sees is None:
            assert int((table.stop - table.start).clamp_min(0).sum()) == int(want.sum()), "slots overlap"
        empty_rows, pairs = empty_rows + int((~want.any(1)).sum()), pairs + int(want.sum())
    assert pairs > 1000


def test_hstu_equals_metas_definition_over_a_grid_of_parameters():
    for n in (0, 1, 2, 17, 64):
        for t in {0, 1, min(9, n), max(n - 1, 0), n}:
            for c in (0, 1, 6, n):
                for length in (0, 1, 5, 40):
                    for full_length in (0, 1, 7):
                        mask = UniMask.hstu(
                            t, contextual=c, max_attn_len=length, min_full_attn_len=full_length
                        )
                        want = meta_hstu(n, t, c, length, full_length)
                        assert torch.equal(mask.to_dense(cuts([n])), want), (n, t, c, length, full_length)
                        assert len(mask.table(cuts([n])).start) <= 2


def test_queries_are_the_newest_of_their_sequence_under_every_mask():
    """A decoding step's few queries see what the same rows of the whole pass see."""
    n = 12
    masks = [
        UniMask.causal(), UniMask.causal(window=3), UniMask.prefix_lm(4), UniMask.window(2, 1), UniMask.sinks_window(2, 3),
        UniMask.document(torch.tensor([0, 5, 12]), causal=True), UniMask.session(torch.tensor([0, 5, 12]), prefix=2),
        UniMask.hstu(4, contextual=2, max_attn_len=3), UniMask.target_groups(4, 2), UniMask.semi_local(2, 3),
        UniMask.beam_tree(6, torch.tensor([[1, 0], [0, 0]])), UniMask.bos_interval(3),
    ]  # fmt: skip
    for mask in masks:
        whole = mask.to_dense(cuts([n]))
        for newest in (1, 3, 7):
            assert torch.equal(mask.to_dense(cuts([newest]), cuts([n])), whole[-newest:]), mask


def test_composition_is_the_keys_that_both_masks_allow():
    r = random.Random("compose")
    checked = 0
    for _ in range(CASES):
        n = lengths_of(r)
        t = targets_of(r, n)
        some = [
            UniMask.causal(window=r.randint(1, 6)), UniMask.prefix_lm(r.randint(0, 5)), UniMask.document(cuts_within(r, n)),
            UniMask.hstu(torch.tensor(t)), UniMask.sinks_window(r.randint(0, 3), r.randint(0, 4)), UniMask.bos_interval(3),
            UniMask.classes(*(torch.tensor([r.randint(0, 7) for _ in range(sum(n))]) for _ in range(2))),
        ]  # fmt: skip
        one, other, third = r.choice(some), r.choice(some), r.choice(some)
        cut = cuts(n)
        both = one.to_dense(cut) & other.to_dense(cut) & third.to_dense(cut)
        try:
            got = (one & other & third).to_dense(cut)
        except (
            ConfigError
        ):  # more than four intervals in a row, or too many classes: the sum below bounds these
            continue
        checked += 1
        assert torch.equal(got, both)
    assert checked > CASES * 0.8


def test_more_than_four_intervals_in_a_row_are_an_error_that_says_so():
    start = torch.tensor([[0, 4, 8, 12]]).expand(16, 4)
    comb, shifted = UniMask.intervals(start, start + 3), UniMask.intervals(start + 2, start + 5)
    with pytest.raises(ConfigError, match="needs 7 intervals in a row"):
        (comb & shifted).table(cuts([16]))
    zeros = torch.zeros(2, 5, dtype=torch.long)
    with pytest.raises(ConfigError, match="5 intervals a row"):
        UniMask.intervals(zeros, zeros)
    with pytest.raises(ConfigError, match="must both be"):
        UniMask.intervals(zeros, zeros[:, :2])
    with pytest.raises(ConfigError, match="at most 3 levels"):
        UniMask.beam_tree(4, torch.zeros(3, 2, dtype=torch.long))


def test_dense_masks_are_read_back_exactly_or_refused():
    r = torch.Generator().manual_seed(5)
    refused = 0
    for case in range(CASES):
        lengths = [case % 7, 3, 9]
        density = torch.rand(1, generator=r)
        seen = [torch.rand(n, n, generator=r) < density for n in lengths]
        want = torch.block_diag(*seen).bool()
        runs = max(
            int((m.int().diff(dim=1, prepend=m.new_zeros(len(m), 1).int()) == 1).sum(1).max())
            for m in seen
            if len(m)
        )
        columns = max(
            int((m.int().diff(dim=0, prepend=m.new_zeros(1, len(m)).int()) == 1).sum(0).max())
            for m in seen
            if len(m)
        )
        if runs > 4 and columns > 1:
            refused += 1
            with pytest.raises(ConfigError, match=f"{runs} intervals in a row"):
                UniMask.from_dense(seen).table(cuts(lengths))
        else:
            assert torch.equal(UniMask.from_dense(seen).to_dense(cuts(lengths)), want)
    assert refused < CASES / 2


def test_a_mask_of_many_runs_a_row_and_one_a_column_is_read_as_columns():
    seen = UniMask.bos_interval(3).to_dense(cuts([40]))
    table = UniMask.from_dense(seen).table(cuts([40]))
    assert table.column_start is not None
    assert torch.equal(UniMask.from_dense(seen).to_dense(cuts([40])), seen)
    with pytest.raises(ConfigError, match="20 intervals in a row and 20 in a column"):
        UniMask.from_dense((torch.arange(40)[:, None] + torch.arange(40)) % 2 == 0).table(cuts([40]))
    with pytest.raises(ConfigError, match=r"\(3, 3\).*\(4, 4\)"):
        UniMask.from_dense(torch.ones(3, 3)).table(cuts([4]))


def test_mask_mods_are_read_exactly_and_must_not_differ_by_head():
    lengths = [5, 0, 17]
    mod = lambda b, h, q, k: (q >= k) & ((k < 3) | (q - k < 4 + b))  # noqa: E731
    got = UniMask.from_mask_mod(mod).to_dense(cuts(lengths))
    assert torch.equal(
        got, block_diagonal(lengths, lengths, lambda b, i, j: i >= j and (j < 3 or i - j < 4 + b))
    )
    with pytest.raises(ConfigError, match="differs between heads"):
        UniMask.from_mask_mod(lambda b, h, q, k: q - k <= h).table(cuts(lengths))


def test_disjoint_slots_keep_their_keys_and_places():
    start, stop = torch.tensor([[4, 0, 2], [0, 3, 9]]), torch.tensor([[6, 3, 5], [5, 4, 9]])
    begin, end = disjoint(start, stop)
    assert begin.tolist()[0] == [5, 0, 3]
    assert (end == stop).all()
    assert begin[1, 0] == 0
    assert begin[1, 1] >= 4


def test_wrong_numbers_name_the_argument_and_what_was_wanted():
    cut = cuts([3, 4])
    with pytest.raises(ConfigError, match=r"targets has shape \[3\]; this batch wants \[2\]"):
        UniMask.hstu(torch.tensor([1, 2, 3])).table(cut)
    with pytest.raises(ConfigError, match=r"words has shape \[3\]; this batch wants \[7\]"):
        UniMask.classes(torch.zeros(7).int(), torch.zeros(3).int()).table(cut)
    with pytest.raises(ConfigError, match="intervals for 3 queries"):
        UniMask.intervals(torch.zeros(3, 1).long(), torch.ones(3, 1).long()).table(cut)
    with pytest.raises(ConfigError, match="must rise from 0"):
        UniMask.causal().table(torch.tensor([0, 5, 3]))
    with pytest.raises(ConfigError, match="at least 1 key"):
        UniMask.causal(window=0)
    with pytest.raises(ConfigError, match="at least 0"):
        UniMask.window(-1)
    with pytest.raises(ConfigError, match="both time_q"):
        UniMask.cross(torch.zeros(3))


def test_equal_masks_are_equal_and_frozen():
    assert UniMask.causal(window=2) == UniMask.causal(window=2) != UniMask.causal()
    with pytest.raises(AttributeError):
        UniMask.causal().rule = None


def test_flops_count_visible_pairs():
    cut = cuts([3, 0, 2])
    assert UniMask.causal().flops(cut, heads=2, width=4) == (6 + 3) * 2 * 4 * 4
    assert UniMask.full().flops(cut, heads=1, width=4, value_width=2, backward=True) == (9 + 4) * (
        2 * 3 * 4 + 4 * 2
    )
    assert UniMask.bos_interval(2).flops(cut, heads=1, width=1) == 4 * int(
        UniMask.bos_interval(2).to_dense(cut).sum()
    )


def test_flex_twin_sees_the_same_pairs():
    from torch.nn.attention.flex_attention import create_mask

    from nonet.attention.dense import flex_mod

    lengths = [70, 0, 90]
    words = torch.arange(160) % 3 + 1
    for mask in (
        UniMask.hstu(torch.tensor([9, 0, 30]), max_attn_len=20),
        UniMask.bos_interval(4) & UniMask.classes(words, words.flip(0)),
    ):
        table = mask.table(cuts(lengths))
        got = create_mask(flex_mod(table), None, None, 160, 160, device="cpu")[0, 0]
        assert torch.equal(got, mask.to_dense(cuts(lengths)))
        assert mask.to_flex(cuts(lengths)).shape[-2:] == (160, 160)
