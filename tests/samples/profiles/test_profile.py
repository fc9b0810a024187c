from __future__ import annotations

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.errors import DataError
from nonet.samples.profiles import format_profile, measure_profile, read_profile
from nonet.samples.sequences import Compress, build_sequences, compress_log
from nonet.samples.tables import read_tables

# users a, b, c with 4, 2 and 1 events of items 0 to 4; item 4 is of the catalogue alone
LOG = {
    "user_id": ["a", "a", "a", "a", "b", "b", "c"],
    "item_id": [0, 1, 1, 0, 2, 2, 3],
    "timestamp": [60, 120, 120, 180, 240, 240, 600],
    "event": ["view", "view", "view", "buy", "view", "view", "view"],
    "rating": [5.0, 3.0, 3.0, None, 4.0, 4.0, 1.0],
}
ITEMS = {
    "item_id": [0, 1, 2, 3, 4],
    "title": ["ink", "pen", "cup", "jar", ""],
    "brand": ["x", "x", "y", "y", None],
    "tags": [["t"], ["t"], ["u"], [], None],
    "price": [1.0, 2.0, 3.0, 4.0, 5.0],
}


@pytest.fixture
def tables(tmp_path):
    pq.write_table(pa.table(LOG), tmp_path / "log.parquet")
    pq.write_table(pa.table(ITEMS), tmp_path / "items.parquet")
    return str(tmp_path / "log.parquet"), str(tmp_path / "items.parquet")


def test_a_profile_counts_what_is_there(tables):
    p = read_profile(*tables)
    assert (p.users, p.items, p.events) == (3, 5, 7)
    assert p.users_of.tolist() == [0, 1, 1, 0, 1]
    assert p.items_of.tolist() == [1, 1, 3]
    assert (p.first, p.last, p.resolution_s, p.counted) == (60, 600, 60, False)
    assert p.ties == 2 / 4  # neighbours of one user: a has 3, b has 1
    assert p.duplicates == 2
    assert p.repeats == 3 / 7
    assert p.immediate == 2 / 7
    assert p.drift == 1.0  # the newest event is of item 3
    assert p.kinds == {"view": 6, "buy": 1}
    assert p.ratings == {3.0: 2, 4.0: 2, 5.0: 1, 1.0: 1}


def test_the_columns_of_the_items_are_told_by_kind_and_by_how_much_they_say(tables):
    columns = {column.name: column for column in read_profile(*tables).columns}
    assert [(c.name, c.kind) for c in columns.values()] == [
        ("title", "text"),
        ("brand", "text"),
        ("tags", "list"),
        ("price", "number"),
    ]
    assert (columns["title"].filled, columns["brand"].filled, columns["tags"].filled) == (0.8, 0.8, 0.6)
    assert (columns["title"].distinct, columns["brand"].distinct, columns["tags"].distinct) == (1.0, 0.4, 0.4)


def test_what_a_split_would_do_is_answered_without_one(tables):
    p = read_profile(*tables)
    assert [p.get_length_quantile(share) for share in (0.3, 0.5, 1.0)] == [1, 2, 4]
    assert (
        p.count_users_above(1),
        p.count_users_above(2),
        p.count_train_events(2),
        p.count_train_events(1),
    ) == (2, 1, 5, 5)
    assert p.get_median_train_length(2) == 2  # a: 4 - 2, b: 2 of 2, c: 1
    assert p.count_tied_tests(1, 1) == (1, 2)  # b's last two events share a second, a's don't
    assert p.count_tied_tests(1, 2) == (0, 1)  # b is too short for that
    assert p.count_tied_tests(2, 2) == (1, 1)  # a's second last event is at the second of the one before it
    assert p.compute_kept_share(2) == 6 / 7


def test_tables_and_sequences_have_the_same_profile(tables):
    keep, split = {"item_events": 2}, {"use": "leave_last_out", "test": 1}
    seq, items = build_sequences(*read_tables(*tables), keep=keep, split=split)
    ours = measure_profile(seq.offsets, seq.item, seq.time, len(items))
    read = read_profile(*tables, keep=keep)
    assert (read.items, read.events) == (3, 6)
    for name in ("users", "items", "events", "ties", "duplicates", "repeats", "drift"):
        assert getattr(ours, name) == getattr(read, name), name
    assert (ours.tied_ends == read.tied_ends).all()


def test_places_in_a_history_are_no_times(tmp_path):
    log = {"user_id": [1, 1, 1, 2, 2], "item_id": [0, 1, 2, 0, 1], "timestamp": [0, 1, 2, 0, 1]}
    pq.write_table(pa.table(log), tmp_path / "log.parquet")
    p = read_profile(str(tmp_path / "log.parquet"))
    assert (p.counted, p.drift) == (True, None)
    assert "none: the place in the user's history" in format_profile(p)


def test_a_table_is_read_once_until_it_changes(tables, monkeypatch):
    from nonet.samples.profiles import reading

    opened = []
    real = reading.read_interactions
    monkeypatch.setattr(reading, "read_interactions", lambda *args: opened.append(args) or real(*args))
    assert read_profile(*tables).events == 7
    assert read_profile(*tables, keep={"user_events": 2}).events == 6
    assert len(opened) == 1
    pq.write_table(pa.table(LOG).slice(0, 5), tables[0])
    os.utime(tables[0], ns=(1, 1))
    assert read_profile(*tables).events == 5
    assert len(opened) == 2


def test_only_the_columns_of_a_profile_are_read(tables, monkeypatch):
    from nonet.samples.tables import tables as reader

    asked = []
    real = reader.read_parquet
    monkeypatch.setattr(
        reader, "read_parquet", lambda path, what, only=None: asked.append(only) or real(path, what, only)
    )
    os.utime(tables[0], ns=(2, 2))
    read_profile(*tables)
    assert asked == [
        {"user_id", "item_id", "timestamp", "event", "rating"},
        {"item_id", "title", "brand", "tags"},
    ]


def test_where_is_asked_of_all_columns(tmp_path):
    table = pa.table(LOG).append_column("price", pa.array(np.arange(7.0)))
    pq.write_table(table, tmp_path / "log.parquet")
    assert read_profile(str(tmp_path / "log.parquet"), where="price < 2").events == 2
    with pytest.raises(DataError, match="matches no interaction"):
        read_profile(str(tmp_path / "log.parquet"), where="price > 99")


def test_ratings_without_end_are_counted_by_their_quantiles(tmp_path):
    log = {"user_id": np.repeat(np.arange(100), 5), "item_id": np.tile(np.arange(5), 100)}
    log |= {"timestamp": np.arange(500), "rating": np.arange(500) / 7}
    pq.write_table(pa.table(log), tmp_path / "log.parquet")
    ratings = read_profile(str(tmp_path / "log.parquet")).ratings
    assert sum(ratings.values()) == 500
    assert len(ratings) <= 100


@pytest.mark.parametrize(
    ("ids", "hint"), [(["007", "010"], {"item": "007"}), (["007", "b"], {}), (["7", "10"], {})]
)
@pytest.mark.parametrize("catalogue", [True, False])
def test_numbers_with_zeros_in_front_are_hinted_at_and_other_texts_are_not(tmp_path, ids, hint, catalogue):
    log = {"user_id": ["0", "1"] * 2, "item_id": ids * 2, "timestamp": [10, 20, 30, 40]}
    pq.write_table(pa.table(log), tmp_path / "log.parquet")
    pq.write_table(pa.table({"item_id": ids}), tmp_path / "items.parquet")
    items = str(tmp_path / "items.parquet") if catalogue else None
    found = read_profile(str(tmp_path / "log.parquet"), items)
    assert found.zero_padded == hint
    assert ("item ids" in format_profile(found)) == bool(hint)


def test_a_profile_of_a_compressed_log_is_that_of_its_first_events(tables):
    p = read_profile(*tables, compress=Compress(compress=86400))
    assert (p.events, p.users_of.tolist(), p.items_of.tolist()) == (4, [0, 2, 1], [1, 4])
    assert p.kinds == {"view": 4}
    assert (p.immediate, p.repeats, p.duplicates) == (0, 0, 0)


@pytest.mark.parametrize("by", ["item", "category"])
def test_a_profile_of_a_compressed_log_is_that_of_the_log_that_compression_makes(tmp_path, by):
    draw = np.random.default_rng(5)
    log = pa.table(
        {
            "user_id": draw.integers(0, 40, 2000),
            "item_id": draw.integers(0, 30, 2000),
            "timestamp": 1_600_000_000 + draw.integers(0, 10 * 86400, 2000),
            "event": np.array(["view", "buy"])[draw.integers(0, 2, 2000)],
        }
    )
    words = [[f"c{n % 4}"] if n % 5 else [] for n in range(30)]
    items = pa.table({"item_id": np.arange(30)[::-1], "shelf": words})
    compressed = compress_log(log, 86400, by, items.rename_columns(["item_id", "categories"])).events
    log_path, items_path, compressed_path = (
        str(tmp_path / f"{name}.parquet") for name in ("log", "items", "compressed")
    )
    pq.write_table(log, log_path)
    pq.write_table(items, items_path)
    pq.write_table(compressed.select(log.column_names), compressed_path)
    expected = read_profile(compressed_path)
    p = read_profile(log_path, items_path, {"categories": "shelf"}, compress=Compress(compress=86400, by=by))
    assert (p.events, p.kinds, p.repeats) == (expected.events, expected.kinds, expected.repeats)
    assert p.users_of.tolist() == expected.users_of.tolist()
    assert p.items_of.tolist() == expected.items_of.tolist()
    assert len(compressed) < (1900 if by == "item" else 1600)


def test_a_profile_by_category_needs_categories(tables):
    for items in (tables[1], None):
        with pytest.raises(DataError, match=r"by: category wants data\.items with a column categories"):
            read_profile(tables[0], items, compress=Compress(compress=86400, by="category"))


def test_events_of_one_item_on_different_days_do_not_repeat_at_once():
    offsets, item = np.array([0, 4]), np.array([1, 1, 1, 2])
    for time, share in (([0, 9, 86399, 86400], 0.5), ([0, 86400, 86409, 86410], 0.25), ([0, 1, 2, 3], 0.0)):
        assert measure_profile(offsets, item, np.array(time), 3).immediate == share
