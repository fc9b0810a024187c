import numpy as np
import pyarrow as pa
import pytest
from redis_server import REDIS, RedisServer

from nonet.errors import ConfigError, DataError, StoreError
from nonet.samples.stores import create_store, open_store

COLUMNS = pa.schema(
    [
        ("price", pa.float64()),
        ("shop", pa.string()),
        ("tags", pa.list_(pa.int32())),
        ("blob", pa.binary()),
        ("rank", pa.int16()),
    ]
)
KINDS = [
    "packed",
    "lmdb",
    pytest.param("redis", marks=pytest.mark.skipif(not REDIS, reason="no redis-server")),
]


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(params=KINDS)
def address(request, tmp_path):
    if request.param == "redis":
        return f"{request.getfixturevalue('redis').address}-{tmp_path.name}"
    return str(tmp_path / "s") if request.param == "packed" else f"lmdb:{tmp_path / 's'}"


def table(rows: int, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)

    def some(value):
        return None if rng.random() < 0.2 else value

    columns = {
        "price": [some(rng.random()) for _ in range(rows)],
        "shop": [some("é" * int(rng.integers(0, 5))) for _ in range(rows)],
        "tags": [some(rng.integers(-5, 5, rng.integers(0, 4)).tolist()) for _ in range(rows)],
        "blob": [some(rng.bytes(int(rng.integers(0, 9)))) for _ in range(rows)],
        "rank": [some(int(rng.integers(-99, 99))) for _ in range(rows)],
    }
    return pa.Table.from_pydict(columns, COLUMNS)


@pytest.mark.parametrize("text", [False, True])
def test_every_store_gives_back_what_was_put_in_the_order_asked(address, text):
    keys = np.random.default_rng(1).permutation(200) - 100
    keys = np.array([f"k{key}" for key in keys]) if text else keys
    rows = table(200)
    create_store(address, COLUMNS, key=pa.string() if text else pa.int64()).put(keys, rows)
    store = open_store(address)
    pick = np.random.default_rng(2).integers(0, 200, 500)
    values, offsets = store.multi_get(keys[pick])
    assert offsets.tolist() == list(range(501))
    for name in COLUMNS.names:
        assert values.column(name).to_pylist() == rows[name].take(pick).to_pylist(), name
    absent = np.array(["nobody", str(keys[3])]) if text else np.array([10**15, keys[3]])
    assert store.multi_get(absent, ["rank"]).offsets.tolist() == [0, 0, 1]
    scanned = pa.Table.from_batches(list(store.scan(["shop"])))
    told = dict(zip(scanned["key"].to_pylist(), scanned["shop"].to_pylist(), strict=True))
    assert told == dict(zip(keys.tolist(), rows["shop"].to_pylist(), strict=True))
    assert store.collect_stats()["keys"] == 200
    store.put(keys[:1], rows.slice(5, 1))
    assert (
        open_store(address).multi_get(keys[:1], ["price"]).values["price"].to_pylist()
        == rows["price"][5:6].to_pylist()
    )


@pytest.mark.parametrize("text", [False, True])
def test_every_store_answers_as_of_a_time_as_a_plain_search_does(address, text):
    rng = np.random.default_rng(5)
    written = np.unique(np.stack([rng.integers(0, 12, 300), rng.integers(-20, 40, 300)]), axis=1)
    key_type = pa.string() if text else pa.int64()
    store = create_store(address, pa.schema([("at", pa.int64())]), key=key_type, versions=True)

    def named(keys):
        return np.array([("a" * key) + "b" for key in keys.tolist()]) if text else keys

    for part in np.array_split(rng.permutation(written.shape[1]), 3):
        store.put(named(written[0, part]), pa.table({"at": written[1, part]}), written[1, part])
    keys, times = rng.integers(0, 14, 1000), rng.integers(-25, 45, 1000)
    for times_asked in (times, None):
        values, offsets = store.multi_get(named(keys), as_of=times_asked)
        found = iter(values.column("at").to_pylist())
        times_found = iter(store.get_times(named(keys), as_of=times_asked)[np.diff(offsets) > 0].tolist())
        until = times if times_asked is not None else np.full(len(keys), 10**9)
        for key, time, n in zip(keys, until, np.diff(offsets), strict=True):
            before = written[1, (written[0] == key) & (written[1] < time)]
            assert n == min(len(before), 1)
            if n:
                assert next(found) == next(times_found) == before.max()
    scanned = pa.Table.from_batches(list(store.scan()))
    assert sorted(scanned["time"].to_pylist()) == sorted(written[1].tolist())


def test_what_does_not_fit_is_one_line(address):
    store = create_store(address, COLUMNS, key=pa.int64())
    with pytest.raises(ConfigError, match="there is one already"):
        create_store(address, COLUMNS, key=pa.int64())
    with pytest.raises(DataError, match="keys are whole numbers, got text"):
        store.multi_get(["a"])
    with pytest.raises(DataError, match="column 'rank' is int16, got int64"):
        store.put([1], table(1).set_column(4, "rank", pa.array([1])))
    with pytest.raises(ConfigError, match=r"no column 'prize'.*Did you mean 'price'"):
        store.multi_get([1], ["prize"])
    with pytest.raises(ConfigError, match="keeps no versions"):
        store.multi_get([1], as_of=5)
    with pytest.raises(ConfigError, match="there is no store; `nonet pack SRC"):
        open_store(address + "-else")


def test_addresses_that_say_too_much_or_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"a user or password stands in the address.*NONET_REDIS_PASSWORD"):
        open_store("redis://me:secret@127.0.0.1/x")
    with pytest.raises(ConfigError, match=r"there are a folder, lmdb:FOLDER.*Did you mean 'redis'"):
        open_store("rediss://127.0.0.1/x")
    with pytest.raises(ConfigError, match="wanted redis://HOST:PORT/NAME"):
        open_store("redis://127.0.0.1")
    with pytest.raises(StoreError, match=r"store redis://127\.0\.0\.1:9/x: no answer, asked 2 times"):
        open_store("redis://127.0.0.1:9/x", attempts=2, timeout_s=0.5)


def test_a_row_that_another_store_wrote_is_named(tmp_path):
    store = create_store(f"lmdb:{tmp_path / 's'}", pa.schema([("n", pa.int64())]), key=pa.int64())
    store.put([1], pa.table({"n": [1]}))
    with store._env.begin(write=True, db=store._rows_db) as writing:
        writing.put(bytes([128, 0, 0, 0, 0, 0, 0, 1]), b"\x04\x00\x00\x00abcd")
    with pytest.raises(DataError, match="a value of column 'n' has another width than int64"):
        store.multi_get([1])
