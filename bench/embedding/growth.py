"""Steps that grow a table, steps that evict from a full one, and a table of a hundred million rows.

Times are CPU times of this thread, which exclude stalls by other processes. The tail is that of whole training steps:
lookup with new rows, then apply.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.bench.embedding.contenders import Contenders, hash_ranks
from nonet.bench.timing import Call, LapTimer, compute_ratios, time_interleaved, time_isolated
from nonet.embedding.tables import TableSpec, make_table
from nonet.random import rng

_KEYS, _WIDTH = 8192, 64  # keys of a batch, floats of a row
_GROWN_ROWS = 4_000_000  # at the end of `grow`
_BUDGET_ROWS = 1_000_000  # of the table of `evict`
_LARGE_ROWS, _LARGE_WIDTH, _FILL_ROWS = (
    100_000_000,
    16,
    1 << 17,
)  # of the large table; _FILL_ROWS are created at once
_BATCHES = 96


def grow(seed: int) -> dict[str, Any]:
    """Time steps from an empty table to 4 M rows: with all keys new, and with a tenth of them new."""
    result: dict[str, Any] = {"rows": [], "ratio": {}}
    for share in (1.0, 0.1):
        table = make_table("bench", TableSpec(_WIDTH), seed)
        steps = int(_GROWN_ROWS / (_KEYS * share))
        batches = _draw_arriving_keys(steps, share, seed)
        _time_steps(result, table, batches, f"growth, {share:.0%} new keys a step", warm=steps // 10)
        del table
        gc.collect()
    return result


def evict(seed: int) -> dict[str, Any]:
    """Time steps on a full table of a million rows, under LRU, LFU, and LRU with a time to live; a tenth of the keys is new."""
    result: dict[str, Any] = {"rows": [], "ratio": {}}
    cases: list[dict[str, Any]] = [{"evict": "lru"}, {"evict": "lfu"}, {"evict": "lru", "ttl_steps": 2000}]
    for policy in cases:
        table = make_table("bench", TableSpec(_WIDTH, budget_rows=_BUDGET_ROWS, **policy), seed)
        for start in range(0, 2 * _BUDGET_ROWS, 1 << 16):
            keys = hash_ranks(np.arange(start, start + (1 << 16)) + (1 << 40))  # keys that no later batch has
            table.lookup(keys, train=True)
            table.apply(keys, torch.zeros(len(keys), _WIDTH), table.step + 1)
        case = "eviction, " + " and ".join(f"{key} {value}" for key, value in policy.items())
        _time_steps(result, table, _draw_arriving_keys(1500, 0.1, seed), case, warm=100)
        result["rows"][-1]["rows"] = len(table)
        del table
        gc.collect()
    return result


def measure_hundred_million(seed: int) -> dict[str, Any]:
    """Fill a table of 100 M rows of width 16 and measure its memory, and compare its lookups with others.

    The others are gathers from as many dense rows as fit into memory, and lookups in tables of a million rows.
    """
    insert_timer = LapTimer()
    with LapTimer() as fill_timer:
        table = make_table("bench", TableSpec(_LARGE_WIDTH), seed)
        for start in range(0, _LARGE_ROWS, _FILL_ROWS):
            with insert_timer:
                stop = min(start + _FILL_ROWS, _LARGE_ROWS)
                table.lookup(hash_ranks(np.arange(start, stop)), train=True)
    row = {
        "case": "100 M rows x 16",
        "filled_s": fill_timer.last_s,
        "gib": getattr(table, "resident_bytes", float("nan")) / 2**30,
        "peak_rss_gib": _read_status_gib("VmHWM"),
        "slowest 131,072 inserts ms": 1e3 * max(insert_timer.cpu_s),
    }
    result = {"rows": [row], "ratio": {}}
    result["ratio"]["100 M rows: bytes / (rows + state + key + step)"] = row["gib"] * 2**30 / table.nbytes
    source = rng(seed, "bench", "100m")
    ids = [hash_ranks(source.integers(0, _LARGE_ROWS, _KEYS)) for _ in range(_BATCHES)]
    free_bytes = int(_read_free_gib() - 2) * 2**30  # leaves 2 GiB
    dense_rows = min(_LARGE_ROWS, free_bytes // (4 * _LARGE_WIDTH))
    dense = torch.empty(dense_rows, _LARGE_WIDTH).fill_(0.5)
    ranks = [torch.from_numpy(source.integers(0, len(dense), _KEYS)) for _ in range(_BATCHES)]
    calls = {
        **_make_small_lookups(_LARGE_WIDTH, seed),
        **_make_small_lookups(_WIDTH, seed),
        "core 100 M": lambda batch: table.lookup(ids[batch], train=False),
        "dense": lambda batch: dense.index_select(0, ranks[batch]),
    }
    for protocol, run in (("isolated", time_isolated), ("interleaved", time_interleaved)):
        times = run(calls, _BATCHES)
        case = f"100 M rows x 16, {protocol}"
        result["rows"] += [{"case": case, "what": name, **timer.to_row()} for name, timer in times.items()]
        [large_ratio] = compute_ratios(times, [("core 100 M", "dense")]).values()
        label = f"core / {len(dense) / 1e6:.0f} M dense rows"
        result["ratio"][f"{case}: {label}"] = large_ratio
        for width in (_LARGE_WIDTH, _WIDTH):
            small = f"1 M x {width}"
            [small_ratio] = compute_ratios(times, [(f"core {small}", f"dense {small}")]).values()
            result["ratio"][f"{case}: {label}, over core / dense at {small}"] = large_ratio / small_ratio
    return result


def _make_small_lookups(width: int, seed: int) -> dict[str, Call]:
    """Return lookups in a million rows of a width, in Nonet's table and in dense rows."""
    contenders = Contenders(1_000_000, width, keys=_KEYS, batches=_BATCHES, seed=seed, kind="uniform")
    calls = contenders.make_calls("core lookup", "torch index_select")
    return {
        f"core 1 M x {width}": calls["core lookup"],
        f"dense 1 M x {width}": calls["torch index_select"],
    }


def _draw_arriving_keys(steps: int, share: float, seed: int) -> Iterable[Tensor]:
    """Yield batches with a `share` of new ids; the others are drawn uniformly from the earlier ones."""
    source, known_count = rng(seed, "bench", "arriving"), _KEYS
    for _ in range(steps):
        new_count = int(_KEYS * share)
        old_ranks = source.integers(0, known_count, _KEYS - new_count)
        ranks = np.concatenate([old_ranks, np.arange(known_count, known_count + new_count)])
        known_count += new_count
        yield hash_ranks(source.permutation(ranks))


def _time_steps(result: dict[str, Any], table: Any, batches: Iterable[Tensor], case: str, warm: int) -> None:
    """Time training steps on batches, of which the first `warm` are not counted, and add a row and a ratio to the result."""
    grads = torch.randn(_KEYS, _WIDTH, generator=torch.Generator().manual_seed(1)) * 0.01
    out = torch.zeros(_KEYS, _WIDTH)
    timer = LapTimer()
    for keys in batches:
        with timer:
            table.lookup(keys, train=True, out=out)
            table.apply(keys, grads, table.step + 1)
    cpu_s = timer.cpu_s[warm:]
    ordered = sorted(cpu_s)
    median, p99 = statistics.median(cpu_s), ordered[int(0.99 * len(ordered))]
    result["rows"].append(
        {
            "case": case,
            "steps": len(cpu_s),
            "median_us": 1e6 * median,
            "p99_us": 1e6 * p99,
            "max_us": 1e6 * ordered[-1],
        }
    )
    result["ratio"][f"{case}: p99 / median"] = p99 / median


def _read_status_gib(field: str) -> float:
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) / 2**20 for line in lines if line.startswith(field))


def _read_free_gib() -> float:
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) / 2**20 for line in lines if line.startswith("MemAvailable"))
