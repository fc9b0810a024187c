import numpy as np
import pyarrow as pa
import pytest

from nonet.errors import ConfigError, DataError
from nonet.samples.stores import PackedStore, open_store, packed

PRICES = pa.schema([("price", pa.float64()), ("shop", pa.string()), ("tags", pa.list_(pa.int64()))])


def priced(rows: int, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    tags = [rng.integers(0, 9, rng.integers(0, 4)).tolist() for _ in range(rows)]
    return pa.table(
        {
            "price": rng.random(rows),
            "shop": [f"s{i}" for i in range(rows)],
            "tags": pa.array(tags, pa.list_(pa.int64())),
        }
    )


def test_rows_come_in_the_order_of_the_keys_and_absent_ones_are_absent(tmp_path):
    store = PackedStore.create(tmp_path / "s", PRICES, key=pa.int64())
    table = priced(50)
    store.put(np.arange(50)[::-1] * 3, table)
    values, offsets = store.multi_get([6, 1, 6, 0], ["shop", "tags"])
    assert offsets.tolist() == [0, 1, 1, 2, 3]
    assert values.column("shop").to_pylist() == ["s47", "s47", "s49"]
    assert values.column("tags").to_pylist() == [table["tags"][i].as_py() for i in (47, 47, 49)]


def test_a_later_segment_wins_and_merging_changes_no_answer(tmp_path):
    store = PackedStore.create(tmp_path / "s", pa.schema([("n", pa.int64())]), key=pa.string())
    expected: dict[str, int] = {}
    rng = np.random.default_rng(3)
    for turn in range(12):
        keys = [f"k{i}" for i in rng.choice(40, 10, replace=False)]
        store.put(keys, pa.table({"n": np.arange(10) + 100 * turn}))
        expected |= dict(zip(keys, range(100 * turn, 100 * turn + 10), strict=True))
    assert store.collect_stats()["segments"] <= 8
    asked = [f"k{i}" for i in range(40)]
    values, offsets = open_store(str(tmp_path / "s")).multi_get(asked)
    there = [key for key, n in zip(asked, np.diff(offsets), strict=True) if n]
    assert dict(zip(there, values.column("n").to_pylist(), strict=True)) == expected
    scanned = pa.Table.from_batches(list(store.scan()))
    assert dict(zip(scanned["key"].to_pylist(), scanned["n"].to_pylist(), strict=True)) == expected


def test_as_of_gives_the_newest_version_strictly_before_a_time(tmp_path):
    rng = np.random.default_rng(5)
    store = PackedStore.create(tmp_path / "s", pa.schema([("at", pa.int64())]), key=pa.int64(), versions=True)
    written = np.unique(np.stack([rng.integers(0, 20, 400), rng.integers(0, 50, 400)]), axis=1)
    for part in np.array_split(rng.permutation(written.shape[1]), 3):
        store.put(written[0, part], pa.table({"at": written[1, part]}), written[1, part])
    keys, times = rng.integers(0, 25, 3000), rng.integers(-1, 55, 3000)
    values, offsets = store.multi_get(keys, as_of=times)
    place = np.where(np.diff(offsets) > 0, offsets[:-1], -1)
    for key, time, at in zip(keys, times, place, strict=True):
        before = written[1, (written[0] == key) & (written[1] < time)]
        assert (values.column("at")[int(at)].as_py() if at >= 0 else None) == (
            before.max() if len(before) else None
        )


def test_what_cannot_be_is_one_line_that_names_the_store(tmp_path):
    store = PackedStore.create(tmp_path / "s", PRICES, key=pa.int64())
    with pytest.raises(DataError, match="keys are whole numbers, got text"):
        store.multi_get(["a"])
    with pytest.raises(ConfigError, match="keeps no versions"):
        store.multi_get([1], as_of=5)
    with pytest.raises(ConfigError, match=r"no column 'prize'.*Did you mean 'price'"):
        store.multi_get([1], ["prize"])
    with pytest.raises(DataError, match="'price' is double, got int64"):
        store.put([1], pa.table({"price": [1], "shop": ["a"], "tags": pa.array([[1]], pa.list_(pa.int64()))}))
    with pytest.raises(DataError, match="1 rows repeat a key, the first: 4"):
        store.put([4, 4], priced(2))
    with pytest.raises(ConfigError, match="there is no store"):
        open_store(str(tmp_path / "t"))


def test_a_password_in_an_address_is_refused_and_not_repeated():
    with pytest.raises(ConfigError, match="NONET_HBASE_PASSWORD") as told:
        open_store("hbase://:hunter2@host:9090/items")
    assert "hunter2" not in str(told.value)
    with pytest.raises(ConfigError, match="Did you mean 'hbase'"):
        open_store("hbas://host/items")


def test_forty_parts_are_merged_four_times_and_a_merge_writes_each_row_once(tmp_path, monkeypatch):
    rewritten, write = [], packed.write_segment

    def count(folder, keys, rows, *rest):
        rewritten.append(len(rows))
        return write(folder, keys, rows, *rest)

    monkeypatch.setattr(packed, "write_segment", count)
    store = PackedStore.create(tmp_path / "s", pa.schema([("n", pa.int64())]), key=pa.int64())
    for part in range(40):
        store.put(np.arange(part * 10, part * 10 + 10), pa.table({"n": np.arange(10)}))
    merges = [rows for rows in rewritten if rows > 10]
    assert merges == [90, 170, 250, 330]  # all that is there after part 9, 17, 25 and 33
    assert len(rewritten) == 40 + 4
