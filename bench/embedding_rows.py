"""A table of very many rows on one machine: `python -m nonet.bench.embedding_rows --rows 100_000_000`.

Rows of width 16 with row-wise Adagrad, made in chunks with progress. What it holds in the end and at its peak, as the table
counts it and as the system does, against the rows' own bytes; and a lookup of 8,192 uniform keys against an `index_select`
of as many dense rows, at a million rows and at all of them, call by call in turns (the dense table has 32 M rows at most, 2 GB:
as cold as a larger one, and there is room for it). Memory is asked for first; where there is not enough, it says why.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from nonet.bench.embedding_clock import interleaved
from nonet.bench.show import show

DIM, KEYS, CHUNK, SMALL = 16, 8192, 1 << 18, 1_000_000
_LEAST_FREE = 14 << 30  # what 100 M rows and their growth take, with a margin for what else runs here
_BATCHES, _MOST_DENSE = 64, 1 << 25


def measure(rows: int = 100_000_000, progress: bool = True) -> dict[str, Any]:
    """Rows of bytes and microseconds; the ratios of bytes held to the rows' own and of lookup to `index_select`."""
    import torch

    from nonet.embedding.native_table import NativeTable

    need = (1 << 30) + rows * (_LEAST_FREE - (1 << 30)) // 100_000_000
    if free_bytes() < need:
        return {
            "rows": [
                {"skipped": f"{rows} rows want {need / 1e9:.1f} GB free, there are {free_bytes() / 1e9:.1f}"}
            ],
            "ratio": {},
        }
    torch.set_num_threads(1)
    small = _lookups(_filled("small", SMALL, False), SMALL)
    before = resident_bytes()
    table, peak = _filled("large", rows, progress, before)
    held, own = table.resident_bytes, rows * table.spec.row_bytes
    resident = resident_bytes() - before
    large = _lookups((table, 0), rows)
    ratio = {
        "bytes held / rows' own": held / own,
        "bytes resident / rows' own": resident / own,
        "growth peak, resident / rows' own": peak / own,
        "lookup / index_select, 1 M rows": small["ratio"],
        "lookup / index_select, all rows": large["ratio"],
        "ratio at all rows / ratio at 1 M": large["ratio"] / small["ratio"],
    }
    assert isinstance(table, NativeTable)
    every = [{"rows": count, **numbers} for count, numbers in ((SMALL, small), (rows, large))]
    return {
        "rows": [{"rows": rows, "own": own, "held": held, "resident": resident, "peak": peak}, *every],
        "ratio": ratio,
    }


def free_bytes() -> int:
    """Memory that could be taken without paging anything out."""
    return _of_proc("/proc/meminfo", "MemAvailable")


def resident_bytes() -> int:
    """Memory that this process has."""
    return _of_proc("/proc/self/status", "VmRSS")


def _of_proc(path: str, name: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"{path} has no {name}; this bench needs Linux")


def _keys(start: int, stop: int) -> np.ndarray:
    """Scattered 64-bit ids; the odd multiplier is a bijection."""
    return (np.arange(start, stop, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def _filled(name: str, rows: int, progress: bool, before: int = 0) -> tuple[Any, int]:
    """A table of so many rows, and the most that the process held above `before` while it grew."""
    import torch

    from nonet.embedding.native_table import NativeTable

    table, peak, began, said = NativeTable(name, DIM, seed=7), 0, time.monotonic(), 0.0
    room = torch.empty(CHUNK, DIM)
    for start in range(0, rows, CHUNK):
        keys = _keys(start, min(start + CHUNK, rows))
        table.lookup(keys, train=True, step=1, out=room[: len(keys)])
        peak = max(peak, resident_bytes() - before)
        if progress and time.monotonic() - said > 10:
            said = time.monotonic()
            print(f"{len(table):,} of {rows:,} rows in {said - began:.0f} s", file=sys.stderr, flush=True)
    return table, peak


def _lookups(filled: tuple[Any, int], rows: int) -> dict[str, float]:
    """Medians of CPU microseconds of a lookup and of an index_select, in turns."""
    import torch

    table = filled[0]
    source = np.random.default_rng(5)
    numbers = [source.integers(0, rows, KEYS) for _ in range(_BATCHES)]
    keys = [
        torch.from_numpy((number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64))
        for number in numbers
    ]
    many = min(rows, _MOST_DENSE)
    at = [torch.from_numpy(number % many) for number in numbers]
    dense, out, ours = torch.full((many, DIM), 0.5), torch.empty(KEYS, DIM), torch.empty(KEYS, DIM)
    times = interleaved(
        {
            "lookup": lambda number: table.lookup(keys[number], train=False, out=ours),
            "index_select": lambda number: torch.index_select(dense, 0, at[number], out=out),
        },
        _BATCHES,
    )
    lookup, floor = times["lookup"].cpu_us(), times["index_select"].cpu_us()
    return {"lookup_us": lookup, "index_select_us": floor, "ratio": lookup / floor}


def main() -> None:
    """Print the rows and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000_000)
    show(measure(parser.parse_args().rows))


if __name__ == "__main__":
    main()
