"""A log that is too large to read whole is told by some of its users."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.errors import DataError
from nonet.samples.profiles import reading
from nonet.samples.sequences import Compress

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


def read_both(monkeypatch, *arguments, **options):
    """Return the profile of all users, and that of a sample of them; a text in place of one that keeps nothing."""
    found = []
    for most_events in (reading.MOST_EVENTS, 10_000):
        monkeypatch.setattr(reading, "MOST_EVENTS", most_events)
        monkeypatch.setattr(reading, "SAMPLED_EVENTS", 10_000)
        reading._cache.clear()
        try:
            found.append(reading.read_profile(*arguments, **options))
        except DataError as error:
            found.append(str(error))
    reading._cache.clear()
    return found


def count_item_events(profile) -> np.ndarray:
    """Return the events of each item, ascending."""
    return np.repeat(np.arange(len(profile.items_of)), profile.items_of)


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
    assert (some.events, some.compute_kept_share(0)) == (whole.events, 1.0)
    assert some.kinds["view"] == pytest.approx(whole.kinds["view"], rel=0.1)


@pytest.fixture
def repeated(tmp_path):
    """A log of 400 items, each of them with 100 events of 25 users, who look four times a day; and some with one event alone."""
    dice = np.random.default_rng(7)
    user, item = np.repeat(dice.integers(0, 2000, 10_000), 4), np.repeat(np.arange(10_000) % 400, 4)
    day = np.repeat(dice.integers(0, 100, 10_000), 4)
    user, item = np.append(user, dice.integers(0, 2000, 300)), np.append(item, 400 + np.arange(300))
    day = np.append(day, dice.integers(0, 100, 300))
    table = {
        "user_id": user,
        "item_id": item,
        "timestamp": 1_600_041_600 + day * 86400 + dice.integers(0, 3600, len(user)),
    }
    pq.write_table(pa.table(table), tmp_path / "log.parquet", row_group_size=5000)
    groups = [[f"c{number // 2}"] for number in range(700)]
    pq.write_table(pa.table({"item_id": np.arange(700), "categories": groups}), tmp_path / "items.parquet")
    return str(tmp_path / "log.parquet"), str(tmp_path / "items.parquet")


@pytest.mark.parametrize("by", ["item", "category"])
def test_a_sample_of_a_compressed_log_counts_the_events_of_items_after_compression(repeated, monkeypatch, by):
    whole, some = read_both(monkeypatch, *repeated, compress=Compress(compress=86400, by=by))
    assert some.events == pytest.approx(whole.events, rel=0.1)
    assert some.items == whole.items
    wanted, found = count_item_events(whole), count_item_events(some)
    assert found.sum() == pytest.approx(wanted.sum(), rel=0.02)
    assert found[:300].tolist() == wanted[:300].tolist() == [1] * 300
    assert np.abs(found - wanted).max() <= 3


@pytest.mark.parametrize(("item_events", "n_items"), [(2, 400), (20, 400), (60, 0)])
def test_a_sample_keeps_items_by_their_events_after_compression(repeated, monkeypatch, item_events, n_items):
    keep = {"item_events": item_events}
    found = read_both(monkeypatch, *repeated, keep=keep, compress=Compress(compress=86400))
    if not n_items:
        assert all("leaves none" in text for text in found)
        return
    whole, some = found
    assert (whole.items, some.items) == (n_items, n_items)
    assert some.events == pytest.approx(whole.events, rel=0.1)
    assert count_item_events(some).mean() == pytest.approx(count_item_events(whole).mean(), rel=0.02)


def test_a_sample_counts_the_events_of_items_without_those_of_users_who_are_left_out(log, monkeypatch):
    whole, some = read_both(monkeypatch, log, keep={"item_events": 5, "user_events": 22})
    assert whole.events < 0.6 * ROWS
    assert some.events == pytest.approx(whole.events, rel=0.1)
    assert count_item_events(some).sum() == pytest.approx(count_item_events(whole).sum(), rel=0.1)
    assert some.items == pytest.approx(whole.items, rel=0.03)
