"""Pairs of items are counted alike in one range and in many, with files and without."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from nonet.samples.sequences import pairs as pairs_module
from nonet.samples.sequences.sequences import Sequences, build_sequences
from nonet.samples.sequences.transitions import CountOptions, Transitions

ITEMS = 40


def _seq(seed: int = 0, rows: int = 3000) -> Sequences:
    dice = np.random.default_rng(seed)
    table = {
        "user_id": dice.integers(0, 90, rows),
        "item_id": np.minimum(dice.geometric(0.1, rows), ITEMS),
        "timestamp": dice.integers(0, 5000, rows),
        "event": np.array(["view", "buy"])[dice.integers(0, 2, rows)],
    }
    return build_sequences(pa.table(table), None, split={"test": 1, "valid": 1})[0]


def _wanted(seq: Sequences, reach: int) -> dict[tuple[int, int], float]:
    count: dict[tuple[int, int], float] = {}
    for user in range(len(seq)):
        start = seq.offsets[user]
        items = seq.item[start : start + seq.train_lengths[user]].tolist()
        for step in range(1, reach + 1):
            for pair in zip(items, items[step:], strict=False):
                count[pair] = count.get(pair, 0) + 1 / step
    return count


def test_every_pair_within_reach_counts_one_over_its_distance():
    seq = _seq()
    n_items = int(seq.item.max()) + 1
    fitted = Transitions.fit(seq, n_items, CountOptions(reach=2, neighbours=1000))
    source = np.repeat(np.arange(n_items), np.diff(fitted.row))
    there = {
        (x, y): c
        for x, y, c in zip(source.tolist(), fitted.item.tolist(), fitted.count.tolist(), strict=True)
    }
    wanted = _wanted(seq, 2)
    assert there.keys() == wanted.keys()
    assert all(there[pair] == pytest.approx(count, rel=1e-6) for pair, count in wanted.items())


@pytest.mark.parametrize(
    "options", [CountOptions(neighbours=7), CountOptions(events=("buy",), half_life_s=900.0)]
)
def test_many_ranges_in_files_give_the_bits_of_one_in_memory(tmp_path, monkeypatch, options):
    seq = _seq(1)
    n_items = int(seq.item.max()) + 1
    whole = Transitions.fit(seq, n_items, options)
    monkeypatch.setattr(pairs_module, "RANGE_PAIRS", 500)
    monkeypatch.setattr(
        pairs_module.PairCounter.count_ranges, "__kwdefaults__", {"range_pairs": 500, "folder": None}
    )
    written = Transitions.write(tmp_path / "counts", seq, n_items, options)
    for name in ("row", "item", "count", "occurs"):
        np.testing.assert_array_equal(getattr(written, name), getattr(whole, name), name)
    assert written.options == whole.options
    assert written.until == whole.until
    assert sorted(path.name for path in (tmp_path / "counts").iterdir()) == [
        "count.npy", "item.npy", "meta.json", "occurs.npy", "row.npy",
    ]  # fmt: skip
