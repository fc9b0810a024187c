"""Servers that are killed, hang, answer late or drop connections while a join reads: a seeded schedule each."""

import threading
import time

import numpy as np
import pyarrow as pa
import pytest
from redis_server import REDIS, RedisServer

from nonet.errors import StoreError
from nonet.samples.stores import StoreJoin, create_store, open_store

from .faulty_proxy import FaultyProxy

KEYS, VERSIONS = 30, 5
needs_redis = pytest.mark.skipif(not REDIS, reason="no redis-server")
FAST = [0, 1]


class Redis:
    """A real server behind the proxy; what it acknowledged is in its file when it is killed."""

    def __init__(self, folder):
        self.server = RedisServer(folder)
        self.proxy = FaultyProxy(self.server.port)
        self.use = f"redis://127.0.0.1:{self.proxy.port}/prices"
        schema = pa.schema([("price", pa.float64())])
        create_store(self.use, schema, key=pa.int64(), versions=True)

    def open(self):
        return open_store(self.use, timeout_s=0.3, attempts=4)

    def kill(self):
        self.server.kill()

    def start(self):
        self.server.start()

    def close(self):
        self.proxy.close()
        self.server.kill()


class HBase:
    """The stand-in for HBase's protocol behind the proxy; killed, it keeps its tables."""

    def __init__(self, folder):
        standin = pytest.importorskip(
            "nonet.bench.samples.hbase_standin", reason="happybase is not installed"
        )
        self.made = standin.Standin
        self.server = standin.Standin({"prices": ["d"]})
        self.proxy = FaultyProxy(self.server.port)
        self.use = f"hbase://127.0.0.1:{self.proxy.port}/prices"

    def open(self):
        return open_store(self.use, {"price": "d:price float64"}, timeout_s=0.3, attempts=4)

    def kill(self):
        self.server.close()

    def start(self):
        until = time.monotonic() + 20
        while True:
            try:
                self.server = self.made({}, self.server.port, stopped=self.server)
                break
            except OSError:  # the port is still held by a connection that is being closed
                assert time.monotonic() < until
                time.sleep(0.05)

    def close(self):
        self.proxy.close()
        self.server.close()


def wanted(key: int, time: int) -> float | None:
    """Return the version that was written before a time: key and time are in the price."""
    before = [100 * v for v in range(VERSIONS) if 100 * v < time]
    return key + before[-1] / 1000 if before else None


def disturbed(service, rng: np.random.Generator, over: threading.Event) -> None:
    """Faults one after the other, a kill among them, until a dozen are through."""
    faults = rng.choice(["drop", "hang", "slow", "kill"], 5)
    for fault in [*faults, "kill"]:
        time.sleep(rng.uniform(0.01, 0.08))
        if fault == "drop":
            service.proxy.drop()
        elif fault == "hang":
            service.proxy.hung.set()
            time.sleep(rng.uniform(0.05, 0.5))
            service.proxy.hung.clear()
        elif fault == "slow":
            service.proxy.slow_s = rng.uniform(0.005, 0.05)
            time.sleep(0.1)
            service.proxy.slow_s = 0.0
        else:
            service.kill()
            service.proxy.drop()
            time.sleep(rng.uniform(0, 0.4))
            service.start()
    over.set()


def schedule(service, seed: int) -> None:
    rng = np.random.default_rng(seed)
    store = service.open()
    for version in range(VERSIONS):
        prices = np.arange(KEYS) + version / 10
        store.put(np.arange(KEYS), pa.table({"price": prices}), np.full(KEYS, 100 * version))
    join = StoreJoin(store, {"price": "price"})
    over = threading.Event()
    faults = threading.Thread(target=disturbed, args=(service, np.random.default_rng(seed + 1), over))
    faults.start()
    read, told = 0, []

    def asked() -> None:
        keys, times = rng.integers(0, KEYS, 64), rng.integers(-50, 600, 64)
        got = join.read(keys, times)["price"].to_pylist()
        assert got == pytest.approx(
            [wanted(k, t) for k, t in zip(keys.tolist(), times.tolist(), strict=True)]
        )

    while not over.is_set():
        try:
            asked()
            read += 1
        except StoreError as error:  # it gave up, in one line that names the store
            told.append(str(error))
    faults.join()
    for _ in range(5):
        asked()
    assert read + len(told) > 0
    assert all(service.use in line and "\n" not in line for line in told)
    store.close()


@pytest.mark.parametrize("make", [pytest.param(Redis, marks=needs_redis), HBase])
@pytest.mark.parametrize(
    "seed", [*FAST, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))]
)
def test_no_row_is_lost_or_joined_wrongly_whatever_happens_to_the_server(tmp_path, make, seed):
    service = make(tmp_path)
    try:
        schedule(service, seed)
    finally:
        service.close()
