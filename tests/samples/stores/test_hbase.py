"""Test the HBase store against a stand-in for HBase's Thrift 1 protocol, over a socket.

With NONET_HBASE=host:port they run against that HBase, whose table `items` has a family `d` with many versions.
"""

import os
import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from nonet.errors import ConfigError, DataError, StoreError
from nonet.samples.stores import open_store

standin = pytest.importorskip("nonet.bench.samples.hbase_standin", reason="happybase is not installed")
REAL = os.environ.get("NONET_HBASE")
needs_faults = pytest.mark.skipif(REAL is not None, reason="a real HBase injects no faults")
COLUMNS = {"price": "d:price float64", "shop": "d:shop", "at": "d:at int64"}


@pytest.fixture
def server() -> Iterator:
    made = standin.Standin({"items": ["d"]})
    yield made
    made.close()


@pytest.fixture
def address(server) -> str:
    return f"hbase://{REAL or f'127.0.0.1:{server.port}'}/items"


def rows(times: np.ndarray) -> pa.Table:
    return pa.table({"price": times * 0.5, "shop": [f"s{t}" for t in times], "at": times})


def test_versions_are_read_as_of_each_key_s_own_time(address):
    rng, base = (
        np.random.default_rng(1),
        int(time.time()) % 10**6 * 1000,
    )  # keys of their own, also in a real table
    store = open_store(address, COLUMNS)
    written = np.unique(np.stack([base + rng.integers(0, 30, 200), rng.integers(100, 160, 200)]), axis=1)
    store.put(written[0], rows(written[1]), written[1])
    keys, times = base + rng.integers(0, 40, 1000), rng.integers(95, 165, 1000)
    values, offsets = store.multi_get(keys, as_of=times)
    place = np.where(np.diff(offsets) > 0, offsets[:-1], -1)
    for key, when, at in zip(keys, times, place, strict=True):
        before = written[1, (written[0] == key) & (written[1] < when)]
        got = None if at < 0 else {name: values.column(name)[int(at)].as_py() for name in COLUMNS}
        want = (
            None
            if not len(before)
            else {"price": before.max() * 0.5, "shop": f"s{before.max()}", "at": before.max()}
        )
        assert got == want
    newest = store.multi_get([base + 35, *written[0][:1]])
    assert newest.offsets.tolist()[:2] == [0, 0]  # a key that is absent has no row
    store.close()


def test_rows_come_in_batches_that_are_cut(address):
    store = open_store(address, {"at": "d:at int64"}, batch=7)
    keys = np.arange(50) + 10**9
    store.put(keys, pa.table({"at": keys}), np.full(50, 5))
    asked = np.random.default_rng(0).permutation(np.repeat(keys, 3))
    assert store.multi_get(asked).values.column("at").to_pylist() == asked.tolist()
    store.close()


def test_what_is_not_there_or_of_another_width_is_one_line(address):
    with pytest.raises(ConfigError, match=r"there is no such table; there are .*Did you mean 'items'"):
        open_store(address + "x", COLUMNS)
    with pytest.raises(ConfigError, match="is in family 'dd'; the table has d"):
        open_store(address, {"price": "dd:price"})
    with pytest.raises(ConfigError, match=r"no type 'flot64'.*Did you mean 'float64'"):
        open_store(address, {"price": "d:price flot64"})
    open_store(address, {"price": "d:width"}).put([3 * 10**9], pa.table({"price": ["abc"]}), [5])
    with pytest.raises(DataError, match=r"row '3000000000' has 3 bytes in column 'price'.*no float64"):
        open_store(address, {"price": "d:width float64"}).multi_get([3 * 10**9])


def test_nobody_there_is_told_with_what_to_try():
    with pytest.raises(
        StoreError,
        match=r"127\.0\.0\.1:9 \(buffered transport, binary protocol\), asked in 2 attempts .*hbase thrift start",
    ):
        open_store("hbase://127.0.0.1:9/items", COLUMNS, attempts=2, timeout_s=0.5)


@needs_faults
def test_a_connection_that_the_server_closed_for_idling_is_opened_again(server, address):
    store = open_store(address, COLUMNS)
    store.put([1], rows(np.array([4])), [4])
    server.faults.idle_s = 0.05
    assert store.multi_get([1]).values.column("at").to_pylist() == [4]
    time.sleep(0.3)
    assert store.multi_get([1]).values.column("at").to_pylist() == [4]


@needs_faults
def test_reads_go_on_over_dropped_connections_and_writes_are_not_repeated(server, address):
    store = open_store(address, COLUMNS, attempts=5)
    store.put(np.arange(40), rows(np.arange(40)), np.full(40, 4))
    server.faults.drop_every = 3
    for _ in range(10):
        assert store.multi_get(np.arange(40)).values.column("at").to_pylist() == list(range(40))
    server.faults.drop_every = 0
    assert store.collect_stats()["retries"] > 0
    server.faults.drop_every = 1
    with pytest.raises(StoreError, match="a write is not repeated"):
        store.put([1], rows(np.array([9])), [9])


@needs_faults
def test_a_server_that_hangs_ends_in_one_line_after_bounded_attempts(server, address):
    store = open_store(address, COLUMNS, attempts=2, timeout_s=0.3)
    server.faults.hung.set()
    began = time.monotonic()
    with pytest.raises(StoreError, match="no answer from"):
        store.multi_get([1])
    assert time.monotonic() - began < 10
    server.faults.hung.clear()
    assert len(store.multi_get([1]).values) == 0


def read_as_of(store, written: np.ndarray, keys: np.ndarray, times: np.ndarray) -> list[bool]:
    """Whether each key read as of its time has the newest older value, by hand; written: [2, n] keys and times."""
    values, offsets = store.multi_get(keys, ["at"], as_of=times)
    place, at = np.where(np.diff(offsets) > 0, offsets[:-1], -1), values.column("at").to_numpy()
    got = np.where(place >= 0, at[place], -1)
    order = np.lexsort(written[::-1])
    key, time_ = written[0][order], written[1][order]
    last = np.searchsorted(key * 10**6 + time_, keys * 10**6 + times) - 1
    want = np.where((last >= 0) & (key[last] == keys), time_[last], -1)
    return (got == want).tolist()


@needs_faults
def test_features_written_nightly_are_read_as_of_the_past_in_one_call_per_version_and_thousand_items(
    server, address
):
    store = open_store(address, {"at": "d:at int64", "shop": "d:shop"})
    nights, items = np.array([100, 200, 300, 400]), np.arange(3000)
    for night in nights.tolist():
        written = pa.table({"at": np.full(3000, night), "shop": [f"s{night}"] * 3000})
        store.put(items, written, np.full(3000, night))
    rng = np.random.default_rng(0)
    keys, times = rng.integers(0, 3000, 12_000), rng.integers(50, 500, 12_000)
    before = server.faults.calls
    values, offsets = store.multi_get(keys, as_of=times)
    assert server.faults.calls - before <= (4 + 1) * 3000 / 1000
    there = np.diff(offsets) > 0
    assert (there == (times > 100)).all()
    want = nights[np.searchsorted(nights, times[there]) - 1]
    assert values.column("at").take(pa.array(offsets[:-1][there])).to_pylist() == want.tolist()
    shops = values.column("shop").take(pa.array(offsets[:-1][there])).to_pylist()
    assert shops == [f"s{night}" for night in want.tolist()]
    store.close()


@needs_faults
@pytest.mark.parametrize("seed", range(3))
def test_items_that_change_at_times_of_their_own_are_read_as_of_the_past_with_few_calls(
    server, address, seed
):
    rng = np.random.default_rng(seed)
    store = open_store(address, {"at": "d:at int64"}, batch=100)
    days = np.sort(rng.choice(np.arange(100, 1000), 12, replace=False))
    written = np.unique(np.stack([rng.integers(0, 900, 3000), days[rng.integers(0, 12, 3000)]]), axis=1)
    for day in days.tolist():
        mine = written[0][written[1] == day]
        store.put(mine, pa.table({"at": np.full(len(mine), day)}), np.full(len(mine), day))
    keys, times = rng.integers(0, 1000, 5000), rng.integers(50, 1050, 5000)
    before = server.faults.calls
    assert all(read_as_of(store, written, keys, times))
    busiest = np.unique(written[0], return_counts=True)[1].max()
    assert server.faults.calls - before <= (busiest + 1) * 1000 / 100
    store.close()


@needs_faults
def test_an_item_with_many_versions_is_read_in_one_call_once_nobody_shares_its_times(server, address):
    store = open_store(address, {"at": "d:at int64"})
    for time_ in range(100, 300):
        store.put([1], pa.table({"at": [time_]}), [time_])
    written = np.stack([np.ones(200, int), np.arange(100, 300)])
    before = server.faults.calls
    assert all(read_as_of(store, written, np.ones(300, int), np.arange(50, 350)))
    assert server.faults.calls - before == 2
    store.close()
