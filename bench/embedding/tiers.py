"""The benefit of tiers: hit rates of the device cache compared with Belady's, and the speed of rows on disk.

`nonet bench tiers`. A hit is a distinct row of a training batch that was on the device already. Belady's rule knows
all batches and may leave a row on the host, so no rule does better. Batches have 8,192 Zipf(1.05) ids of a million;
the first hundred fill the cache and are not counted. One thread.
"""

# Shapes: U distinct keys of a batch.

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from nonet.bench.embedding.keys import draw_zipf_ranks, scatter_ranks
from nonet.embedding.tables import TableSpec, make_table, take
from nonet.embedding.tiers import DiskTier, TieredTable, TierSettings
from nonet.random import rng
from nonet.timing import LapTimer

ROWS, KEYS, WIDTH = 1_000_000, 8192, 64


def measure(seed: int = 7, batches: int = 400) -> dict[str, Any]:
    """Return rows by measure; ratios are points of hit rate below Belady's, and tiered step / host step."""
    torch.set_num_threads(1)
    result: dict[str, Any] = {"rows": [], "ratio": {}}
    coming = draw_zipf_batches(seed, batches)
    for share in (0.02, 0.05, 0.1):
        _measure_hit_rates(result, coming, int(ROWS * share), share)
    result["rows"] += _measure_disk(seed)
    _measure_steps(result, seed)
    return result


def draw_zipf_batches(seed: int, count: int, rows: int = ROWS, keys: int = KEYS) -> list[np.ndarray]:
    """Draw batches of distinct scattered ids [U], of `keys` draws each."""
    source = rng(seed, "bench", "tiers")
    return [scatter_ranks(np.unique(draw_zipf_ranks(source, rows, keys))) for _ in range(count)]


def compute_belady_hit_rate(coming: Sequence[np.ndarray], capacity: int, warm: int = 100) -> float:
    """Return the hit rate of Belady's rule, which keeps the rows that are needed soonest."""
    names, flat = np.unique(np.concatenate(coming), return_inverse=True)
    batches = np.split(flat, np.cumsum([len(keys) for keys in coming])[:-1])
    follows, after = [np.empty(0)] * len(coming), np.full(len(names), len(coming))
    for at in range(len(coming) - 1, -1, -1):
        follows[at] = after[batches[at]].copy()
        after[batches[at]] = at
    resident, needed, hits, lookups = np.zeros(len(names), bool), np.full(len(names), len(coming)), 0, 0
    for at, batch in enumerate(batches):
        if at >= warm:
            hits, lookups = hits + int(resident[batch].sum()), lookups + len(batch)
        resident[batch], needed[batch] = True, follows[at]
        here = np.flatnonzero(resident)
        over = len(here) - capacity
        if over > 0:
            resident[here[np.argpartition(-needed[here], over - 1)[:over]]] = False
    return hits / lookups


def measure_hit_rate(
    coming: Sequence[np.ndarray], capacity: int, policy: str, ahead: int, warm: int = 100
) -> float:
    """Return the hit rate of a TieredTable that knows the keys of `ahead` batches, including the current one."""
    host = make_table("bench", TableSpec(1, optimizer="sgd"), 7)
    table = TieredTable.from_host(host, TierSettings(device_rows=capacity, policy=policy))
    assert table.hot is not None
    for at, keys in enumerate(coming):
        if at == warm:
            table.traffic.wanted = table.traffic.loaded = table.traffic.bypassed = 0
        for later in range(at if at else 0, min(at + ahead, len(coming))) if ahead > 1 else ():
            if later == at + ahead - 1 or not at:
                table.announce_batch(coming[later], later)
        table.lookup(keys, train=True)
        table.hot.release(at)
    return table.traffic.hit_rate


def _measure_hit_rates(result: dict[str, Any], coming: list[np.ndarray], capacity: int, share: float) -> None:
    """Add the hit rates of one capacity to the result."""
    best = compute_belady_hit_rate(coming, capacity)
    row: dict[str, Any] = {"measure": f"hit rate, {share:.0%} of the rows on the device", "belady": best}
    for policy, ahead in (("lru", 1), ("lfu", 1), ("lfu", 8), ("lfu", 32), ("lfu", 128)):
        rate = row[f"{policy}, {ahead} known"] = measure_hit_rate(coming, capacity, policy, ahead)
        result["ratio"][f"{share:.0%}: points below Belady, {policy}, {ahead} known"] = 100 * (best - rate)
    result["rows"].append(row)


def _measure_disk(seed: int, count: int = 40, size: int = 8192) -> list[dict[str, Any]]:
    """Time rows of width 64 with row-wise Adagrad's state to disk and back, beside LMDB where it is installed."""
    table = make_table("bench", TableSpec(WIDTH), seed)
    keys = scatter_ranks(np.arange(count * size))
    source = rng(seed, "bench", "disk")
    parts = np.split(keys, count)
    for part in parts:
        table.lookup(part, train=True)
    rows = [take(table, part) for part in parts]
    key_batches = [source.choice(keys, size, replace=False) for _ in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        cold = DiskTier(folder, table.spec)
        put, read = (
            _measure_us_per_row(cold.put, rows, size),
            _measure_us_per_row(cold.read, key_batches, size),
        )
        dropped = _measure_us_per_row(cold.drop, parts[: count // 2], size)
    measures = [
        {
            "measure": "cold tier, us a row",
            "put": put,
            "read": read,
            "drop": dropped,
            "bytes a row": cold._record_dtype.itemsize,
        }
    ]
    try:
        import lmdb  # pyright: ignore[reportMissingImports]
    except ImportError:
        return [*measures, {"skipped": "LMDB", "reason": "lmdb is not installed"}]
    with tempfile.TemporaryDirectory() as folder, lmdb.open(folder, map_size=1 << 30, sync=False) as store:
        put = _measure_us_per_row(lambda part: _put_lmdb(store, part), rows, size)
        read = _measure_us_per_row(lambda some: _get_lmdb(store, some), key_batches, size)
    return [*measures, {"measure": "LMDB, us a row", "put": put, "read": read}]


def _put_lmdb(store: Any, rows: Any) -> None:
    data = np.concatenate([rows.row, rows.state], axis=1)
    with store.begin(write=True) as writer:
        for key, row in zip(rows.key, data, strict=True):
            writer.put(key.tobytes(), row.tobytes())


def _get_lmdb(store: Any, keys: np.ndarray) -> np.ndarray:
    with store.begin() as reader:
        return np.frombuffer(b"".join(reader.get(key.tobytes()) for key in keys), np.float32)


def _measure_us_per_row(call: Callable[[Any], Any], batches: Sequence[Any], size: int) -> float:
    times = LapTimer()
    for batch in batches:
        times.measure(call, batch)
    return times.compute_median_us() / size


def _measure_steps(result: dict[str, Any], seed: int) -> None:
    """Time a training step with a tenth of the rows "on the device" (this CPU) beside the host store alone."""
    coming = draw_zipf_batches(seed, 60)
    tables = {"host alone": make_table("bench", TableSpec(WIDTH), seed)}
    tables["tiered"] = TieredTable.from_host(
        make_table("bench", TableSpec(WIDTH), seed), TierSettings(device_rows=ROWS // 10)
    )
    grads = torch.randn(KEYS, WIDTH, generator=torch.Generator().manual_seed(1))
    times = {name: LapTimer() for name in tables}
    for step, keys in enumerate(coming, 1):
        for name, table in tables.items():
            with times[name]:
                table.lookup(keys, train=True)
                table.apply(keys, grads[: len(keys)], step)
    medians = {name: 1e3 * timer.drop_laps_before(20).compute_median_s() for name, timer in times.items()}
    result["rows"].append({"measure": "training step of 3,790 distinct keys x 64, ms", **medians})
    result["ratio"]["tiered step on a CPU / host alone"] = medians["tiered"] / medians["host alone"]
