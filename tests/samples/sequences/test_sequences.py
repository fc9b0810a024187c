import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.errors import ConfigError, DataError
from nonet.samples.sequences import user_file
from nonet.samples.sequences.sequences import TEST, TRAIN, Sequences, build_sequences
from nonet.samples.tables.keys import NONE, compute_keys


def _log(seed: int = 0, users: int = 30, items: int = 40, events: int = 900) -> tuple[pa.Table, pa.Table]:
    rng = np.random.default_rng(seed)
    rating = rng.integers(1, 6, events).astype(np.float32)
    log = pa.table(
        {
            "user_id": rng.integers(100, 100 + users, events),
            "item_id": [f"i{i}" for i in rng.integers(0, items, events)],
            "timestamp": rng.integers(1_000_000, 1_000_400, events),
            "event": [("click", "cart")[i] for i in rng.integers(0, 2, events)],
            "rating": pa.array(rating, mask=rating == 3),
            "page": rng.integers(0, 9, events),
        }
    )
    order = rng.permutation(items)
    return log, pa.table({"item_id": [f"i{i}" for i in order], "price": order * 1.5})


def _same(a: Sequences, b: Sequences) -> bool:
    names = ("user_id", "offsets", "item", "time", "event", "split", "user_key", "item_key")
    flat = all(
        np.array_equal(getattr(a, n), getattr(b, n)) and getattr(a, n).dtype == getattr(b, n).dtype
        for n in names
    )
    maps = all(
        list(x) == list(y) and all(x[k].dtype == y[k].dtype and x[k].tobytes() == y[k].tobytes() for k in x)
        for x, y in ((a.columns, b.columns), (a.targets, b.targets))
    )
    return flat and maps and a.event_names == b.event_names


def test_sequences_hold_every_event_of_a_user_in_time_order_with_file_order_at_ties():
    log, items = _log()
    seq, table = build_sequences(log, items, split={"test": 2, "valid": 1, "rl": 2})
    rows = sorted(
        enumerate(log.to_pylist()), key=lambda pair: (pair[1]["user_id"], pair[1]["timestamp"], pair[0])
    )
    ids = table["item_id"].to_pylist()
    assert [ids[i] for i in seq.item] == [row["item_id"] for _, row in rows]
    assert seq.user_id[seq.user].tolist() == [row["user_id"] for _, row in rows]
    assert seq.time.tolist() == [row["timestamp"] for _, row in rows]
    assert [seq.event_names[e] for e in seq.event] == [row["event"] for _, row in rows]
    wanted = np.array([np.nan if row["rating"] is None else row["rating"] for _, row in rows], np.float32)
    np.testing.assert_array_equal(seq.columns["rating"], wanted)
    assert set(seq.columns) == {"rating", "page"}


def test_item_table_is_in_dense_order_and_counts_training_events_only():
    log, items = _log()
    seq, table = build_sequences(log, items, split={"test": 2, "valid": 1})
    assert table["item"].to_pylist() == list(range(40))
    assert table["item_id"].to_pylist() == items["item_id"].to_pylist()
    assert table["price"].to_pylist() == items["price"].to_pylist()
    assert table["title"].to_pylist() == items["item_id"].to_pylist()
    assert table["categories"].to_pylist() == [[]] * 40
    assert table["events"].to_pylist() == np.bincount(seq.item[seq.split == TRAIN], minlength=40).tolist()
    assert sum(table["events"].to_pylist()) == seq.count_events()["train"] < seq.count_events()["events"]


def test_keep_holds_for_items_and_users_at_once():
    log, items = _log(events=240)
    seq, table = build_sequences(log, items, keep={"item_events": 4, "user_events": 5}, split={"test": 1})
    assert (np.bincount(seq.item, minlength=len(table)) >= 4).all()
    assert (seq.lengths >= 5).all()
    assert 0 < len(table) < 40


def test_items_nobody_used_stay_when_nothing_is_asked_of_them():
    log, items = _log()
    more = pa.concat_tables([items, pa.table({"item_id": ["never"], "price": [1.0]})])
    _, table = build_sequences(log, more, split={"test": 1})
    assert table["item_id"][-1].as_py() == "never"
    assert table["events"][-1].as_py() == 0


def test_without_an_item_table_the_catalogue_is_what_occurs():
    log, items = _log()
    _, table = build_sequences(log, None, split={"test": 1})
    assert table["item_id"].to_pylist() == sorted(items["item_id"].to_pylist())


def test_target_condition_marks_events_and_where_drops_them():
    log, items = _log()
    seq, _ = build_sequences(
        log, items, split={"test": 1}, targets={"finetune": "rating >= 4", "rl": "event == 'cart'"}
    )
    np.testing.assert_array_equal(seq.targets["finetune"], np.nan_to_num(seq.columns["rating"]) >= 4)
    np.testing.assert_array_equal(seq.targets["rl"], seq.event == seq.event_names.index("cart"))
    assert 0 < seq.targets["finetune"].sum() < len(seq.item)
    fewer, _ = build_sequences(log, items, split={"test": 1}, where="event == 'cart'")
    assert len(fewer.item) == seq.targets["rl"].sum()


def test_shuffled_rows_give_the_same_sequences_when_no_two_times_are_equal():
    log, items = _log()
    log = log.set_column(2, "timestamp", pa.array(np.random.default_rng(1).permutation(len(log))))
    shuffled = log.take(pa.array(np.random.default_rng(2).permutation(len(log))))
    split = {"test": 1, "valid": 1}
    assert _same(
        build_sequences(log, items, split=split)[0], build_sequences(shuffled, items, split=split)[0]
    )


def test_tie_seed_moves_only_events_of_the_same_second():
    log, items = _log()
    plain, _ = build_sequences(log, items, split={"test": 1})
    shuffled, _ = build_sequences(log, items, split={"test": 1}, tie_seed=3)
    again, _ = build_sequences(log, items, split={"test": 1}, tie_seed=3)
    assert _same(shuffled, again)
    assert (shuffled.item != plain.item).any()
    np.testing.assert_array_equal(shuffled.time, plain.time)
    key = [np.lexsort((s.item, s.time, s.user)) for s in (plain, shuffled)]
    np.testing.assert_array_equal(plain.item[key[0]], shuffled.item[key[1]])


@pytest.mark.parametrize("text_users", [False, True])
def test_round_trip_is_bit_identical_and_the_file_is_the_same_each_time(tmp_path, text_users):
    log, items = _log()
    if text_users:
        log = log.set_column(0, "user_id", log["user_id"].cast(pa.string()))
    seq, _ = build_sequences(log, items, split={"test": 1, "rl": 2}, targets={"finetune": "rating > 2"})
    path = seq.save(tmp_path / "a")
    back = Sequences.load(tmp_path / "a")
    assert _same(seq, back)
    hashes = {
        hashlib.sha256(p.read_bytes()).hexdigest()
        for p in (path, seq.save(tmp_path / "b"), back.save(tmp_path / "c"))
    }
    assert len(hashes) == 1
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["item_keys.npy", "part-0.parquet"]


def test_whole_numbers_stay_whole_and_text_is_carried_as_hashes():
    shops = [1000000001, 1000000002, 1000000003, None, 16777217]
    log = pa.table(
        {
            "user_id": [1] * 5,
            "item_id": [1, 2, 3, 4, 5],
            "timestamp": [1, 2, 3, 4, 5],
            "shop": shops,
            "word": ["a", "b", "a", None, "17"],
            "flag": [True, False, None, True, True],
            "tags": [["x"], [], ["y"], [], []],
        }
    )
    seq, _ = build_sequences(log, None, split={"test": 1})
    assert seq.columns["shop"].tolist() == [NONE if shop is None else shop for shop in shops]
    word = seq.columns["word"].tolist()
    assert word[0] == word[2] != word[1]
    assert word[3:] == [NONE, 17]
    assert seq.columns["flag"].tolist() == [1, 0, NONE, 1, 1]
    assert seq.dropped == ("tags (list<item: string>)",)
    with pytest.raises(ConfigError, match="'tags' is list<item: string>; it must hold numbers or text"):
        build_sequences(log, None, split={"test": 1}, columns=["tags"])


def test_keys_are_those_of_the_ids_whatever_else_is_in_the_data():
    log, items = _log()
    seq, table = build_sequences(log, items, split={"test": 1})
    few, fewer = build_sequences(log.slice(400), items, split={"test": 1}, where="user_id > 20")
    keys = dict(zip(seq.user_id.tolist(), seq.user_key.tolist(), strict=True))
    assert [keys[user] for user in few.user_id.tolist()] == few.user_key.tolist()
    of_item = dict(zip(table["item_id"].to_pylist(), seq.item_key.tolist(), strict=True))
    assert [of_item[item] for item in fewer["item_id"].to_pylist()] == few.item_key.tolist()
    assert not set(seq.user_key.tolist()) & set(seq.item_key.tolist())


def test_large_sequences_are_cut_into_row_groups_between_users(tmp_path, monkeypatch):
    monkeypatch.setattr(user_file, "_GROUP_EVENTS", 100)
    log, items = _log()
    seq, _ = build_sequences(log, items, split={"test": 1})
    path = seq.save(tmp_path)
    assert pq.ParquetFile(path).num_row_groups > 5
    assert _same(seq, Sequences.load(tmp_path))


def test_file_has_a_row_a_user_with_raw_bytes(tmp_path):
    log, items = _log()
    seq, _ = build_sequences(log, items, split={"test": 1})
    table = pq.read_table(seq.save(tmp_path))
    assert table.num_rows == len(seq)
    assert table.schema.field("item").type == pa.binary()
    second = np.frombuffer(table["item"][1].as_py(), "<i4")
    np.testing.assert_array_equal(second, seq.item[seq.offsets[1] : seq.offsets[2]])


def test_counts_tell_who_only_trains_and_who_has_no_history():
    log = pa.table({"user_id": [1, 1, 1, 2, 3], "item_id": [1, 2, 3, 1, 2], "timestamp": [1, 2, 3, 1, 9]})
    seq, _ = build_sequences(log, None, split={"test": 1, "rl": 1})
    assert seq.count_events() == {
        "users": 3,
        "events": 5,
        "train": 3,
        "rl": 1,
        "valid": 0,
        "test": 1,
        "train_only_users": 2,
        "test_without_history": 0,
    }
    late, _ = build_sequences(log, None, split={"use": "time", "test": "1970-01-01T00:00:03"})
    assert (late.split == TEST).sum() == 2
    assert late.count_events()["test_without_history"] == 1


def test_interaction_of_an_unknown_item_names_count_and_first_ids():
    log, items = _log()
    with pytest.raises(
        DataError, match=r"\d+ of 900 interactions.*not in the items table; 2 ids, the first: i\d+, i\d+"
    ):
        build_sequences(log, items.slice(2), split={"test": 1})


def test_ids_of_unlike_types_say_that_they_can_never_match():
    log, items = _log()
    numbered = items.set_column(0, "item_id", pa.array(range(40)))
    with pytest.raises(DataError, match="string in the interactions and int64 in the items table"):
        build_sequences(log, numbered, split={"test": 1})


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"keep": {"item_event": 5}}, "unknown key 'item_event'.*Did you mean 'item_events'"),
        ({"keep": {"item_events": -1}}, "item_events: -1 is not a count"),
        ({"keep": {"user_events": 1000}}, "leaves none of 900 interactions"),
        ({"where": "rating > 9"}, "matches no interaction"),
        ({"where": "ratin > 9"}, "data.where: .*Did you mean 'rating'"),
        ({"targets": {"finetune": "stars > 3"}}, "stages.finetune.target: .*column 'stars'"),
        ({"columns": ["pages"]}, "no interaction column 'pages'. Did you mean 'page'"),
    ],
)
def test_wrong_argument_is_one_readable_line(kwargs, says):
    log, items = _log()
    with pytest.raises(ConfigError, match=says) as caught:
        build_sequences(log, items, **{"split": {"test": 1}, **kwargs})
    assert "\n" not in str(caught.value)


def test_missing_torn_or_foreign_file_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        Sequences.load(tmp_path)
    (tmp_path / "part-0.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match="not a Parquet file"):
        Sequences.load(tmp_path)
    pq.write_table(pa.table({"a": [1]}), tmp_path / "part-0.parquet")
    with pytest.raises(DataError, match="format None; this version reads 2"):
        Sequences.load(tmp_path)


@pytest.mark.parametrize(
    "codec", [{"compression": "zstd", "use_dictionary": True}, {"compression": "lz4", "use_dictionary": True}]
)
def test_a_small_file_that_unpacks_to_very_much_is_refused_before_a_column_is_read(tmp_path, codec):
    log, items = _log()
    build_sequences(log, items, split={"test": 2, "valid": 1, "rl": 2})[0].save(tmp_path)
    table = pq.read_table(tmp_path / "part-0.parquet")
    zeros = pa.array([bytes(4 << 20)] * len(table), type=pa.binary())
    pq.write_table(table.append_column("column:zz", zeros), tmp_path / "part-0.parquet", **codec)
    before = pa.total_allocated_bytes()
    for read in (Sequences.load, user_file.load_user_keys):
        with pytest.raises(DataError, match=r"packed by .* alone"):
            read(tmp_path)
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_a_footer_with_more_rows_than_fit_into_the_file_is_refused(tmp_path):
    ids = pa.array([None] * 10_000_000, type=pa.int64())
    pq.write_table(
        pa.table({"user_key": ids}), tmp_path / "part-0.parquet", compression="lz4", use_dictionary=False
    )
    with pytest.raises(DataError, match="80,000,000 bytes, at most"):
        user_file.load_user_keys(tmp_path)


def test_a_column_that_the_metadata_do_not_name_is_not_read(tmp_path, monkeypatch):
    log, items = _log()
    seq = build_sequences(log, items, split={"test": 2, "valid": 1, "rl": 2})[0]
    seq.save(tmp_path)
    table = pq.read_table(tmp_path / "part-0.parquet")
    zeros = pa.array([bytes(50_000)] * len(table), type=pa.binary())
    pq.write_table(
        table.append_column("zz", zeros), tmp_path / "part-0.parquet", compression="lz4", use_dictionary=False
    )
    names, read = [], pq.ParquetFile.read
    monkeypatch.setattr(
        pq.ParquetFile,
        "read",
        lambda self, **options: names.append(options["columns"]) or read(self, **options),
    )
    assert _same(Sequences.load(tmp_path), seq)
    assert names
    assert ["zz"] not in names
    assert None not in names


def test_ids_titles_and_keys_of_each_event_are_the_log_s_where_an_item_is_dropped_from_the_middle():
    rare = pa.table(
        {"user_id": [1, 2, 1, 2, 1], "item_id": [30, 30, 10, 10, 20], "timestamp": [1, 2, 3, 4, 5]}
    )
    items = pa.table(
        {"item_id": [10, 20, 30], "title": ["ten", "twenty", "thirty"], "categories": [["x"], ["y"], ["z"]]}
    )
    seq, table = build_sequences(
        rare, items, keep={"item_events": 2}, split={"use": "leave_last_out", "test": 1}
    )
    titles = [table["title"][int(item)].as_py() for item in seq.item]
    ids = [table["item_id"][int(item)].as_py() for item in seq.item]
    assert table["item"].to_pylist() == [0, 1]
    assert (ids, titles) == ([30, 10, 30, 10], ["thirty", "ten", "thirty", "ten"])
    assert seq.item_key[seq.item].tolist() == compute_keys("item", np.array(ids)).tolist()
