"""A log that is too large to read whole is told by some of its users."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.samples.profiles import reading

ROWS = 40_000


@pytest.fixture
def log(tmp_path):
    dice = np.random.default_rng(3)
    table = {
        "user_id": dice.integers(0, 2000, ROWS),
        "item_id": np.minimum(dice.geometric(0.01, ROWS), 500),
        "timestamp": 1_600_000_000 + dice.integers(0, 10_000_000, ROWS),
        "event": np.array(["view", "buy"])[(dice.random(ROWS) < 0.2).astype(int)],
    }
    pq.write_table(pa.table(table), tmp_path / "log.parquet", row_group_size=5000)
    return str(tmp_path / "log.parquet")


def test_a_profile_of_some_users_is_near_that_of_all_and_counts_items_exactly(log, monkeypatch):
    keep = {"item_events": 5, "user_events": 2}
    whole = reading.read_profile(log, keep=keep)
    monkeypatch.setattr(reading, "MOST_EVENTS", 10_000)
    monkeypatch.setattr(reading, "SAMPLED_EVENTS", 10_000)
    reading._cache.clear()
    some = reading.read_profile(log, keep=keep)
    reading._cache.clear()
    assert some.users == pytest.approx(whole.users, rel=0.1)  # a sample of 500 users
    assert some.events == pytest.approx(whole.events, rel=0.1)
    assert some.get_length_quantile(0.5) == pytest.approx(whole.get_length_quantile(0.5), abs=1)
    assert some.repeats == pytest.approx(whole.repeats, abs=0.05)
    assert some.items == whole.items
    assert some.items_of.tolist() == whole.items_of.tolist()
    assert some.kinds["view"] == pytest.approx(whole.kinds["view"], rel=0.1)
