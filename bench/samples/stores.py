"""`nonet bench stores`: reads by key from packed segments, LMDB, Redis and HBase, and a join compared with happybase.

The contenders take turns in one process, must return equal values, and are compared by medians of rounds. Redis is measured
if a redis-server is installed. Instead of HBase, a stand-in that speaks its protocol runs in another process.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nonet.bench.samples.prefetch import measure_hidden_share
from nonet.bench.timing import find_free_port
from nonet.errors import ConfigError
from nonet.samples.stores import StoreJoin, create_store, open_store

# Of multi_get: number of keys, keys per read, and size of a value. Of join and history: rows per join, and number of items.
_KEYS, _READ_KEYS, _VALUE_BYTES = 100_000, 1000, 1024
_JOINED_ROWS, _ITEMS = 8192, 20_000
RowsAndRatios = tuple[list[dict[str, Any]], dict[str, float]]


def bench_stores(sections: str = "multi_get,join,history,prefetch", rounds: int = 15) -> dict[str, Any]:
    """Run the sections.

    Args:
        sections: The sections, separated by commas: multi_get (reads 1,000 of 100,000 keys with values of 1 KB), join (joins
            8,192 rows with Zipf keys over a socket), history (reads the values that 80,000 events of 20,000 items had at
            their times, from stores with several versions), prefetch (runs whose samples are joined over a socket, with
            and without reading ahead).
        rounds: Number of rounds of each contender.

    Returns:
        The rows of all sections, and their ratios.

    Raises:
        ConfigError: A section is unknown.
    """
    parts: dict[str, Callable[[Path, int], RowsAndRatios]] = {
        "multi_get": _measure_multi_get,
        "join": _measure_join,
        "history": _measure_history,
        "prefetch": _measure_prefetch,
    }
    result: dict[str, Any] = {"rows": [], "ratio": {}}
    for name in sections.split(","):
        if name not in parts:
            raise ConfigError(f"bench stores has no section {name!r}; there are {', '.join(parts)}")
        folder = Path(tempfile.mkdtemp(prefix="nonet-bench-stores-"))
        try:
            rows, ratio = parts[name](folder, rounds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        result["rows"] += rows
        result["ratio"] |= ratio
    return result


def _measure_multi_get(folder: Path, rounds: int) -> RowsAndRatios:
    """Read values of 1 KB by integer keys from Nonet's stores, and by the batch reads of LMDB and Redis."""
    import lmdb

    generator = np.random.default_rng(7)
    keys = np.arange(_KEYS) * 7  # with gaps
    values = generator.integers(0, 256, (_KEYS, _VALUE_BYTES), np.uint8)
    offsets = pa.py_buffer((np.arange(_KEYS + 1, dtype=np.int32) * _VALUE_BYTES).tobytes())
    blob = pa.Array.from_buffers(pa.binary(), _KEYS, [None, offsets, pa.py_buffer(values.tobytes())])
    table = pa.table({"value": blob})
    lmdb_file = lmdb.open(str(folder / "plain"), map_size=4 << 30)
    cells = [row.tobytes() for row in values]
    with lmdb_file.begin(write=True) as transaction:
        key_bytes = [int(key).to_bytes(8, "big") for key in keys]
        transaction.cursor().putmulti(list(zip(key_bytes, cells, strict=True)))
    batches = [keys[generator.integers(0, _KEYS, _READ_KEYS)] for _ in range(rounds * 8)]

    def get_from_lmdb(batch: np.ndarray) -> list[bytes]:
        key_bytes = [key.to_bytes(8, "big") for key in batch.tolist()]
        with lmdb_file.begin() as transaction:
            return [value for _, value in transaction.cursor().getmulti(key_bytes)]

    contenders: dict[str, Callable[[np.ndarray], Any]] = {"lmdb getmulti": get_from_lmdb}
    with contextlib.ExitStack() as stack:
        stack.callback(lmdb_file.close)
        addresses = {"packed": str(folder / "packed"), "lmdb store": f"lmdb:{folder / 'lmdb'}"}
        if port := stack.enter_context(_run_redis(folder)):
            addresses["redis store"] = f"redis://127.0.0.1:{port}/bench"
            contenders["redis mget"] = _make_redis_reader(port, keys, cells)
        for name, address in addresses.items():
            store = create_store(address, pa.schema([("value", pa.binary())]), key=pa.int64())
            store.put(keys, table)
            contenders[name] = store.multi_get
        times_us = _time_in_turns(
            contenders,
            batches,
            lambda result: b"".join(result) if isinstance(result, list) else _to_bytes(result),
        )
    rows: list[dict[str, Any]] = [
        {"reader": name, "us": time_us, "MB/s": _READ_KEYS * _VALUE_BYTES / time_us}
        for name, time_us in times_us.items()
    ]
    ratio = {"multi_get, lmdb getmulti / packed": times_us["lmdb getmulti"] / times_us["packed"]}
    if "redis mget" in times_us:
        ratio["multi_get, redis mget / packed"] = times_us["redis mget"] / times_us["packed"]
        ratio["multi_get, redis store / redis mget"] = times_us["redis store"] / times_us["redis mget"]
    ratio["multi_get, lmdb store / lmdb getmulti"] = times_us["lmdb store"] / times_us["lmdb getmulti"]
    return rows, ratio


def _to_bytes(result: Any) -> bytes:
    """Concatenate the values that a store's `multi_get` returned."""
    return b"".join(result.values.column("value").to_pylist())


def _make_redis_reader(
    port: int, keys: np.ndarray, cells: list[bytes]
) -> Callable[[np.ndarray], list[bytes]]:
    """Write all values to Redis, and return a function that reads a batch of keys with MGET."""
    import redis

    client = redis.Redis("127.0.0.1", port)
    names = [f"plain:{key}" for key in keys.tolist()]
    for start in range(0, len(names), 10_000):
        chunk = slice(start, start + 10_000)
        client.mset(dict(zip(names[chunk], cells[chunk], strict=True)))
    return lambda batch: client.mget([f"plain:{key}" for key in batch.tolist()])  # pyright: ignore


def _measure_join(folder: Path, rounds: int) -> RowsAndRatios:
    """Join two columns to 8,192 rows by item and time, and compare with a happybase loop that reads one row at a time."""
    import happybase

    del folder  # not used; all sections have the same arguments
    generator = np.random.default_rng(7)
    with _run_standin() as port:
        columns = {"price": "d:price float64", "shop": "d:shop int64"}
        store = open_store(f"hbase://127.0.0.1:{port}/items", columns)
        items = np.arange(_ITEMS)
        values = pa.table({"price": generator.random(_ITEMS), "shop": generator.integers(0, 99, _ITEMS)})
        store.put(items, values, np.full(_ITEMS, 100))  # at 100 unix seconds
        join = StoreJoin(store, {"price": "price", "shop": "shop"})
        table = happybase.Connection("127.0.0.1", port).table("items")
        batches = [
            np.minimum(generator.zipf(1.2, _JOINED_ROWS), _ITEMS) - 1 for _ in range(max(3, rounds // 3))
        ]
        times = np.full(_JOINED_ROWS, 200)

        def read_in_loop(batch: np.ndarray) -> list[float]:
            prices = []
            for key in batch.tolist():
                row: Any = table.row(str(key).encode(), [b"d:price", b"d:shop"], timestamp=200_000)
                prices.append(float(np.frombuffer(row[b"d:price"], ">f8")[0]))
            return prices

        times_us = _time_in_turns(
            {"join": lambda batch: join.read(batch, times), "happybase loop": read_in_loop},
            batches,
            lambda result: np.asarray(result if isinstance(result, list) else result["price"]).tobytes(),
        )
        store.close()
    rows: list[dict[str, Any]] = [
        {"reader": name, "us": time_us, "rows/s": 1e6 * _JOINED_ROWS / time_us}
        for name, time_us in times_us.items()
    ]
    return rows, {"join, rows/s over a happybase loop": times_us["happybase loop"] / times_us["join"]}


def _measure_history(folder: Path, rounds: int) -> RowsAndRatios:
    """Count the calls to the store that reads of past values need, and compare them with the upper bound.

    A call reads at most 1,000 values, and one pass over the items is needed per version. Either all items get a new version every
    night, or a random third of them.
    """
    from nonet.bench.samples.hbase_standin import Standin

    del folder, rounds
    rows: list[dict[str, Any]] = []
    ratio: dict[str, float] = {}
    generator = np.random.default_rng(7)
    for name, share in (("all items every night", 1.0), ("a third of the items every night", 1 / 3)):
        server = Standin({"items": ["d"]})
        store = open_store(f"hbase://127.0.0.1:{server.port}/items", {"price": "d:price float64"})
        versions = np.zeros(_ITEMS, int)
        for night in range(100, 600, 100):
            items = np.flatnonzero(generator.random(_ITEMS) < share)
            versions[items] += 1
            store.put(
                items, pa.table({"price": np.full(len(items), float(night))}), np.full(len(items), night)
            )
        keys = generator.integers(0, _ITEMS, 4 * _ITEMS)
        times = generator.integers(50, 700, 4 * _ITEMS)
        calls_before, began = server.faults.calls, time.perf_counter()
        store.multi_get(keys, as_of=times)
        seconds, calls = time.perf_counter() - began, server.faults.calls - calls_before
        max_calls = (int(versions.max()) + 1) * _ITEMS / 1000
        rows.append({"history": name, "calls": calls, "calls at most": max_calls, "s": seconds})
        ratio[f"history, {name}: calls over the bound"] = calls / max_calls
        store.close()
        server.close()
    return rows, ratio


def _measure_prefetch(folder: Path, rounds: int) -> RowsAndRatios:
    """Measure which share of the join's time is hidden by reading ahead."""
    del rounds
    with _run_standin() as port:
        return measure_hidden_share(folder, port)


def _time_in_turns(
    contenders: dict[str, Callable[[np.ndarray], Any]],
    batches: list[np.ndarray],
    to_bytes: Callable[[Any], bytes],
) -> dict[str, float]:
    """Return the median microseconds of each contender; they take turns with the same batches of keys.

    The first batch is not timed. Its results are converted by `to_bytes` and compared.

    Raises:
        AssertionError: The results differ.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number, keys in enumerate(batches):
        results = []
        for name, call in contenders.items():
            began = time.perf_counter()
            result = call(keys)
            seconds[name].append(time.perf_counter() - began)
            results.append(to_bytes(result) if number == 0 else b"")
        if len(set(results)) != 1:
            raise AssertionError(f"the results of the readers differ: {', '.join(contenders)}")
    return {name: 1e6 * statistics.median(times[1:]) for name, times in seconds.items()}


@contextlib.contextmanager
def _run_redis(folder: Path) -> Iterator[int]:
    """Run a redis-server and yield its port, or 0 if none is installed."""
    program = shutil.which("redis-server")
    if program is None:
        yield 0
        return
    port = find_free_port()
    process = subprocess.Popen(
        [program, "--port", str(port), "--save", "", "--appendonly", "no"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
    )
    try:
        _wait_until_answering(port)
        yield port
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _run_standin() -> Iterator[int]:
    """Run the stand-in for HBase in another process and yield its port."""
    command = [sys.executable, "-m", "nonet.bench.samples.hbase_standin", "0"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline().split()[1])
    finally:
        process.kill()
        process.wait()


def _wait_until_answering(port: int) -> None:
    """Wait until a port accepts connections; after 20 s, raise the error of the last attempt."""
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
