"""The GPU bench's rows say the same mask to every implementation, and count its work rightly."""

import pytest
import torch

from nonet.bench.attention import masks
from nonet.bench.attention import workloads as work


def dense(row):
    predicate = row.predicate("cpu")
    queries, keys = int(row.table.cu_q[-1]), int(row.table.cu_k[-1])
    q, k = torch.arange(queries)[:, None], torch.arange(keys)
    return predicate(0, 0, q, k).expand(queries, keys)


def small(monkeypatch):
    monkeypatch.setattr(
        work, "draw_lengths", lambda rows, mean, longest, seed: [130, 1, 300, 257, 31][: max(rows // 8, 2)]
    )
    whole = work.build_beam_step
    monkeypatch.setattr(work, "build_beam_step", lambda history, beams: whole([70, 3], 5))
    causal = masks.build_causal
    monkeypatch.setattr(
        masks,
        "build_causal",
        lambda n, *window: causal([200], *window) if n == [8192] else causal(n, *window),
    )
    return work.list_workloads(64)


def test_flex_predicates_equal_the_interval_tables_of_every_row(monkeypatch):
    rows = small(monkeypatch)
    assert len(rows) == 9
    for row in rows:
        assert torch.equal(dense(row), masks.compute_visible(row.table)), row.name


def test_the_work_counted_is_that_of_visible_pairs(monkeypatch):
    for row in small(monkeypatch):
        pairs = int(masks.compute_visible(row.table).sum())
        assert row.count_flops() == 4.0 * pairs * 8 * 64, row.name


@pytest.mark.parametrize("name", masks.CHECKED)
def test_visible_pairs_of_overlapping_slots_are_counted_once(name):
    table = masks.CHECKED[name]([90, 0, 1, 33])
    assert work.count_visible_pairs(table) == int(masks.compute_visible(table).sum())


def test_lengths_are_ragged_within_bounds_and_the_same_every_time():
    lengths = work.draw_lengths(64, 512, 2048, 0)
    assert len(lengths) == 64
    assert min(lengths) >= 1
    assert max(lengths) <= 2048
    assert len(set(lengths)) > 32
    assert 350 <= sum(lengths) / 64 <= 512, "the mean before long ones are cut is 512"
    assert lengths == work.draw_lengths(64, 512, 2048, 0)
    assert lengths != work.draw_lengths(64, 512, 2048, 1)
