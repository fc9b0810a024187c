"""Masks as data: nineteen of them, 200 random batches each, equal to predicates written from their definitions.

The predicates are in mask_predicates.py.
"""

import random

import pytest
import torch
from mask_predicates import (
    MASKS,
    block_diagonal,
    cuts,
    cuts_within,
    lengths_of,
    meta_hstu,
    targets_of,
)

from nonet.attention.masks.from_dense import read_rows
from nonet.attention.masks.mask import UniMask
from nonet.attention.masks.packed import PackedGeometry
from nonet.attention.masks.rules import make_disjoint
from nonet.errors import ConfigError

CASES = 200


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
        table = mask.build_table(cu_q, cu_k)
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
                        assert len(mask.build_table(cuts([n])).start) <= 2


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
        (comb & shifted).build_table(cuts([16]))
    zeros = torch.zeros(2, 5, dtype=torch.long)
    with pytest.raises(ConfigError, match="5 intervals per row"):
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
                UniMask.from_dense(seen).build_table(cuts(lengths))
        else:
            assert torch.equal(UniMask.from_dense(seen).to_dense(cuts(lengths)), want)
    assert refused < CASES / 2


def test_columns_are_read_in_blocks_of_bounded_size(monkeypatch):
    monkeypatch.setattr("nonet.attention.masks.from_dense._BLOCK_ENTRIES", 40)
    blocks = []
    place = torch.arange(16)
    seen = (place % 2 == 1) & (place <= place[:, None])  # eight runs in the last row
    seen[12:, 3] = False  # a run that ends before the last row

    def evaluate(b, first, last):
        blocks.append(last - first)
        return seen[first:last]

    cu = torch.tensor([0, 16])
    rows = read_rows(PackedGeometry.from_cuts(cu, cu, 16, 16), evaluate)
    assert max(blocks) == 2
    start, stop = rows.column
    assert torch.equal((start <= place[:, None]) & (place[:, None] < stop), seen)


def test_a_mask_of_many_runs_a_row_and_one_a_column_is_read_as_columns():
    seen = UniMask.bos_interval(3).to_dense(cuts([40]))
    table = UniMask.from_dense(seen).build_table(cuts([40]))
    assert table.column_start is not None
    assert torch.equal(UniMask.from_dense(seen).to_dense(cuts([40])), seen)
    with pytest.raises(ConfigError, match="20 intervals in a row and 20 in a column"):
        UniMask.from_dense((torch.arange(40)[:, None] + torch.arange(40)) % 2 == 0).build_table(cuts([40]))
    with pytest.raises(ConfigError, match=r"\(3, 3\).*\(4, 4\)"):
        UniMask.from_dense(torch.ones(3, 3)).build_table(cuts([4]))


def test_mask_mods_are_read_exactly_and_must_not_differ_by_head():
    lengths = [5, 0, 17]
    mod = lambda b, h, q, k: (q >= k) & ((k < 3) | (q - k < 4 + b))  # noqa: E731
    got = UniMask.from_mask_mod(mod).to_dense(cuts(lengths))
    assert torch.equal(
        got, block_diagonal(lengths, lengths, lambda b, i, j: i >= j and (j < 3 or i - j < 4 + b))
    )
    with pytest.raises(ConfigError, match="differs between heads"):
        UniMask.from_mask_mod(lambda b, h, q, k: q - k <= h).build_table(cuts(lengths))


def test_disjoint_slots_keep_their_keys_and_places():
    start, stop = torch.tensor([[4, 0, 2], [0, 3, 9]]), torch.tensor([[6, 3, 5], [5, 4, 9]])
    begin, end = make_disjoint(start, stop)
    assert begin.tolist()[0] == [5, 0, 3]
    assert (end == stop).all()
    assert begin[1, 0] == 0
    assert begin[1, 1] >= 4


def test_wrong_numbers_name_the_argument_and_what_was_wanted():
    cut = cuts([3, 4])
    with pytest.raises(ConfigError, match=r"targets has shape \[3\]; this batch wants \[2\]"):
        UniMask.hstu(torch.tensor([1, 2, 3])).build_table(cut)
    with pytest.raises(ConfigError, match=r"words has shape \[3\]; this batch wants \[7\]"):
        UniMask.classes(torch.zeros(7).int(), torch.zeros(3).int()).build_table(cut)
    with pytest.raises(ConfigError, match="intervals for 3 queries"):
        UniMask.intervals(torch.zeros(3, 1).long(), torch.ones(3, 1).long()).build_table(cut)
    with pytest.raises(ConfigError, match="must rise from 0"):
        UniMask.causal().build_table(torch.tensor([0, 5, 3]))
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
    assert UniMask.causal().count_flops(cut, heads=2, width=4) == (6 + 3) * 2 * 4 * 4
    assert UniMask.full().count_flops(cut, heads=1, width=4, value_width=2, backward=True) == (9 + 4) * (
        2 * 3 * 4 + 4 * 2
    )
    assert UniMask.bos_interval(2).count_flops(cut, heads=1, width=1) == 4 * int(
        UniMask.bos_interval(2).to_dense(cut).sum()
    )


def test_flex_twin_sees_the_same_pairs():
    from torch.nn.attention.flex_attention import create_mask

    from nonet.attention.masks.dense_mask import make_flex_mod

    lengths = [70, 0, 90]
    words = torch.arange(160) % 3 + 1
    for mask in (
        UniMask.hstu(torch.tensor([9, 0, 30]), max_attn_len=20),
        UniMask.bos_interval(4) & UniMask.classes(words, words.flip(0)),
    ):
        table = mask.build_table(cuts(lengths))
        got = create_mask(make_flex_mod(table), None, None, 160, 160, device="cpu")[0, 0]
        assert torch.equal(got, mask.to_dense(cuts(lengths)))
        assert mask.to_flex(cuts(lengths)).shape[-2:] == (160, 160)
