"""Keys to their last bit, versions in one second, and fills that fail."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.errors import ConfigError, DataError
from nonet.samples.stores import create_store, open_store
from nonet.samples.stores.filling import StoreFiller
from nonet.samples.stores.join import StoreJoin

BIG = 2**53


@pytest.fixture
def store(tmp_path):
    store = create_store(str(tmp_path / "s"), pa.schema([("v", pa.int64())]), key=pa.int64())
    store.put(np.array([BIG, BIG + 1]), pa.table({"v": [0, 1]}))
    return store


@pytest.mark.parametrize(
    "keys",
    [
        pa.array([BIG + 1, None]),
        [BIG + 1, None],
        pa.chunked_array([pa.array([BIG + 1]), pa.array([None], pa.int64())]),
    ],
)
def test_a_missing_key_rounds_no_other_and_finds_nothing(store, keys):
    values, offsets = store.multi_get(keys, ["v"])
    assert values["v"].to_pylist() == [1]
    assert offsets.tolist() == [0, 1, 1]


def test_a_missing_key_is_never_written(store):
    with pytest.raises(DataError, match="1 of 2 keys are missing; every row needs one"):
        store.put(pa.array([1, None]), pa.table({"v": [1, 2]}))


def test_an_unsigned_key_above_two_to_63_is_no_negative_one(store):
    with pytest.raises(DataError, match=rf"the key {2**63 + 5} is above 2\^63 - 1; write such keys as text"):
        store.put(np.array([2**63 + 5], np.uint64), pa.table({"v": [9]}))
    values, _ = store.multi_get(np.array([BIG + 1], np.uint64), ["v"])
    assert values["v"].to_pylist() == [1]


def test_text_keys_may_be_missing_too(tmp_path):
    store = create_store(str(tmp_path / "t"), pa.schema([("v", pa.int64())]), key=pa.string())
    store.put(["a", "b"], pa.table({"v": [1, 2]}))
    values, offsets = store.multi_get(["b", None, "a"], ["v"])
    assert (values["v"].to_pylist(), offsets.tolist()) == ([2, 1], [0, 1, 1, 2])


def rows(path, **columns):
    pq.write_table(pa.table(columns), path)
    return str(path)


def test_of_versions_in_one_second_the_newest_is_the_value(tmp_path):
    source = rows(
        tmp_path / "x.parquet",
        key=[7, 7, 7],
        at=[1_600_000_000_900, 1_600_000_000_100, 1_600_000_001_000],
        v=[2, 1, 3],
    )
    store, _ = StoreFiller(source, "key", "at").pack(str(tmp_path / "s"))
    values, _ = store.multi_get([7, 7], ["v"], as_of=[1_600_000_001, 1_600_000_002])
    assert values["v"].to_pylist() == [2, 3]


def test_a_refused_fill_leaves_nothing(tmp_path):
    source = rows(tmp_path / "x.parquet", key=pa.array([1, None], pa.int64()), v=[1, 2])
    with pytest.raises(DataError, match="'key' has 1 rows without a key"):
        StoreFiller(source, "key").pack(str(tmp_path / "s"))
    assert not (tmp_path / "s").exists()


def test_a_join_that_may_see_the_future_is_reported(tmp_path, store):
    assert "keeps no versions, so events of every age get today's values" in str(
        StoreJoin(store, {"v": "v"}).describe_warning()
    )
    assert StoreJoin(store, {"v": "v"}, "newest").describe_warning() is None
    timed = create_store(
        str(tmp_path / "timed"), pa.schema([("v", pa.int64())]), key=pa.int64(), versions=True
    )
    assert StoreJoin(timed, {"v": "v"}).describe_warning() is None
    timed.kept_versions = 3
    assert "keeps 3 versions of each value (VERSIONS)" in str(StoreJoin(timed, {"v": "v"}).describe_warning())
    timed.kept_versions = 1
    with pytest.raises(ConfigError, match="keeps one version of each value"):
        StoreJoin(timed, {"v": "v"}, "time")
    open_store(str(tmp_path / "timed")).close()
