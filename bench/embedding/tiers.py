"""`nonet bench tiers`: hit rates of the device cache compared with Belady's rule, and the speed of rows on disk.

A hit is a distinct row of a training batch that is already on the device. Belady's rule knows all future batches and may leave
a row on the host, so no rule has a higher hit rate. Batches have 8,192 Zipf(1.05) ids of a million; the first hundred batches
fill the cache and are not counted. All calls use one thread.
"""

# Shapes: U distinct keys of a batch.

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from nonet.bench.embedding.keys import draw_zipf_ranks, scatter_ranks
from nonet.bench.timing import LapTimer
from nonet.embedding.tables import TableSpec, make_table, take
from nonet.embedding.tiers import DiskTier, TieredTable, TierSettings
from nonet.random import rng

ROWS, KEYS, WIDTH = (
    1_000_000,
    8192,
    64,
)  # rows of a table, keys of a batch before duplicates are removed, floats of a row


def measure(seed: int = 7, batches: int = 400) -> dict[str, Any]:
    """Return rows by measure; ratios are points of hit rate below Belady's, and tiered step / host step."""
    torch.set_num_threads(1)
    result: dict[str, Any] = {"rows": [], "ratio": {}}
    key_batches = draw_zipf_batches(seed, batches)
    for share in (0.02, 0.05, 0.1):
        _measure_hit_rates(result, key_batches, int(ROWS * share), share)
    result["rows"] += _measure_disk(seed)
    _measure_steps(result, seed)
    return result


def draw_zipf_batches(seed: int, count: int, rows: int = ROWS, keys: int = KEYS) -> list[np.ndarray]:
    """Draw batches of distinct scattered ids [U], of `keys` draws each."""
    source = rng(seed, "bench", "tiers")
    return [scatter_ranks(np.unique(draw_zipf_ranks(source, rows, keys))) for _ in range(count)]


def compute_belady_hit_rate(coming: Sequence[np.ndarray], capacity: int, warm: int = 100) -> float:
    """Return the hit rate of Belady's rule, which keeps the rows that are needed soonest.

    Args:
        coming: Distinct keys of each batch.
        capacity: Number of rows of the cache.
        warm: Number of batches that are not counted.
    """
    distinct_keys, flat = np.unique(np.concatenate(coming), return_inverse=True)
    batches = np.split(flat, np.cumsum([len(keys) for keys in coming])[:-1])  # indices into distinct_keys
    # Number of the next batch that has each key of a batch, or the number of batches if there is none.
    never = len(coming)
    next_use_by_batch, next_use = [np.empty(0)] * len(coming), np.full(len(distinct_keys), never)
    for number in range(len(coming) - 1, -1, -1):
        next_use_by_batch[number] = next_use[batches[number]].copy()
        next_use[batches[number]] = number
    is_resident, needed_at = np.zeros(len(distinct_keys), bool), np.full(len(distinct_keys), never)
    hits = lookups = 0
    for number, batch in enumerate(batches):
        if number >= warm:
            hits, lookups = hits + int(is_resident[batch].sum()), lookups + len(batch)
        is_resident[batch], needed_at[batch] = True, next_use_by_batch[number]
        resident = np.flatnonzero(is_resident)
        excess = len(resident) - capacity
        if excess > 0:  # evicts the rows that are needed last
            evicted = np.argpartition(-needed_at[resident], excess - 1)[:excess]
            is_resident[resident[evicted]] = False
    return hits / lookups


def measure_hit_rate(
    coming: Sequence[np.ndarray], capacity: int, policy: str, ahead: int, warm: int = 100
) -> float:
    """Return the hit rate of a TieredTable that knows the keys of `ahead` batches, including the current one.

    Args:
        coming: Distinct keys of each batch.
        capacity: Number of rows on the device.
        policy: Eviction policy, "lru" or "lfu".
        ahead: Number of known batches; 1 announces none.
        warm: Number of batches that are not counted.
    """
    host = make_table("bench", TableSpec(1, optimizer="sgd"), 7)
    table = TieredTable.from_host(host, TierSettings(device_rows=capacity, policy=policy))
    assert table.hot is not None
    for number, keys in enumerate(coming):
        if number == warm:
            table.traffic.wanted = table.traffic.loaded = table.traffic.bypassed = 0
        # The first batch announces all known batches, later ones only the one that has become known.
        for later in range(number, min(number + ahead, len(coming))) if ahead > 1 else ():
            if later == number + ahead - 1 or not number:
                table.announce_batch(coming[later], later)
        table.lookup(keys, train=True)
        table.hot.release(number)
    return table.traffic.hit_rate


def _measure_hit_rates(
    result: dict[str, Any], key_batches: list[np.ndarray], capacity: int, share: float
) -> None:
    """Add the hit rates of one capacity, `share` of all rows, to the result."""
    belady = compute_belady_hit_rate(key_batches, capacity)
    row: dict[str, Any] = {"measure": f"hit rate, {share:.0%} of the rows on the device", "belady": belady}
    for policy, ahead in (("lru", 1), ("lfu", 1), ("lfu", 8), ("lfu", 32), ("lfu", 128)):
        rate = row[f"{policy}, {ahead} known"] = measure_hit_rate(key_batches, capacity, policy, ahead)
        result["ratio"][f"{share:.0%}: points below Belady, {policy}, {ahead} known"] = 100 * (belady - rate)
    result["rows"].append(row)


def _measure_disk(seed: int, count: int = 40, size: int = 8192) -> list[dict[str, Any]]:
    """Time writes, reads and removals of rows on disk, and of LMDB if it is installed; rows have row-wise Adagrad's state.

    Args:
        seed: Seed of the rows and keys.
        count: Number of batches.
        size: Number of rows of a batch.
    """
    table = make_table("bench", TableSpec(WIDTH), seed)
    keys = scatter_ranks(np.arange(count * size))
    source = rng(seed, "bench", "disk")
    parts = np.split(keys, count)
    for part in parts:
        table.lookup(part, train=True)
    rows = [take(table, part) for part in parts]
    key_batches = [source.choice(keys, size, replace=False) for _ in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        disk = DiskTier(folder, table.spec)
        put_us = _measure_us_per_row(disk.put, rows, size)
        read_us = _measure_us_per_row(disk.read, key_batches, size)
        drop_us = _measure_us_per_row(disk.drop, parts[: count // 2], size)
    measures = [
        {
            "measure": "cold tier, us a row",
            "put": put_us,
            "read": read_us,
            "drop": drop_us,
            "bytes a row": disk._record_dtype.itemsize,
        }
    ]
    try:
        import lmdb  # pyright: ignore[reportMissingImports]
    except ImportError:
        return [*measures, {"skipped": "LMDB", "reason": "lmdb is not installed"}]
    with tempfile.TemporaryDirectory() as folder, lmdb.open(folder, map_size=1 << 30, sync=False) as store:
        put_us = _measure_us_per_row(lambda batch: _put_lmdb(store, batch), rows, size)
        read_us = _measure_us_per_row(lambda batch: _get_lmdb(store, batch), key_batches, size)
    return [*measures, {"measure": "LMDB, us a row", "put": put_us, "read": read_us}]


def _put_lmdb(store: Any, rows: Any) -> None:
    """Write rows with their optimizer state to LMDB in one transaction."""
    data = np.concatenate([rows.row, rows.state], axis=1)
    with store.begin(write=True) as writer:
        for key, row in zip(rows.key, data, strict=True):
            writer.put(key.tobytes(), row.tobytes())


def _get_lmdb(store: Any, keys: np.ndarray) -> np.ndarray:
    """Read the rows of keys from LMDB, as one flat array."""
    with store.begin() as reader:
        return np.frombuffer(b"".join(reader.get(key.tobytes()) for key in keys), np.float32)


def _measure_us_per_row(call: Callable[[Any], Any], batches: Sequence[Any], size: int) -> float:
    """Return the median microseconds per row of a call on batches of `size` rows."""
    timer = LapTimer()
    for batch in batches:
        timer.measure(call, batch)
    return timer.compute_median_us() / size


def _measure_steps(result: dict[str, Any], seed: int) -> None:
    """Time training steps of a TieredTable with a tenth of the rows on the "device" (this CPU), and of the host's table alone.

    The measures are added to the result.
    """
    key_batches = draw_zipf_batches(seed, 60)
    tables = {"host alone": make_table("bench", TableSpec(WIDTH), seed)}
    tables["tiered"] = TieredTable.from_host(
        make_table("bench", TableSpec(WIDTH), seed), TierSettings(device_rows=ROWS // 10)
    )
    grads = torch.randn(KEYS, WIDTH, generator=torch.Generator().manual_seed(1))
    timers = {name: LapTimer() for name in tables}
    for step, keys in enumerate(key_batches, 1):
        for name, table in tables.items():
            with timers[name]:
                table.lookup(keys, train=True)
                table.apply(keys, grads[: len(keys)], step)
    # The first 20 steps fill the cache.
    medians_ms = {name: 1e3 * timer.drop_laps_before(20).compute_median_s() for name, timer in timers.items()}
    result["rows"].append({"measure": "training step of 3,790 distinct keys x 64, ms", **medians_ms})
    result["ratio"]["tiered step on a CPU / host alone"] = medians_ms["tiered"] / medians_ms["host alone"]
