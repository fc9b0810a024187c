"""The sections of `nonet bench embedding`; `python -m nonet.bench.embedding.sections SECTION SEED` prints one JSON line.

Nonet's tables get unbounded ids: 64-bit hashes of ranks from Zipf(1.05) or the uniform distribution. The other contenders get
the ranks themselves, so all access their rows in the same order.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nonet.bench.embedding.contenders import Contenders, explain_missing_fbgemm
from nonet.bench.timing import LapTimer, compute_ratios, time_interleaved, time_isolated
from nonet.embedding.tables import get_core_status

KEYS, WIDTH, BATCHES = 8192, 64, 96  # uniform batches touch about half of a million rows
_GIB = 1 << 30
_FORWARDS = ("TBE forward (CPU)", "TBE forward as it comes (CPU)")
_DENSE = "torch index_select"  # the lower bound of a lookup: one gather without hashing
_RATIOS = [
    ("core lookup", "torch index_select"),
    ("core train step", "TBE train step (CPU, no hashing)"),
    ("core train step", "TBE SGD step (CPU, no hashing)"),
    ("core train step", "torch Embedding(sparse) SGD step"),
    ("torch index_select again", "torch index_select"),
]


def rows_1m(seed: int) -> dict[str, Any]:
    """Measure lookups and train steps on tables of a million rows."""
    return _measure_speed(1_000_000, seed)


def rows_8m(seed: int) -> dict[str, Any]:
    """Measure lookups and train steps on tables of eight million rows, for two ratios only: each table takes 2 GiB."""
    names = (*_RATIOS[0], *_RATIOS[1])
    return _skip_without_memory("rows_8m", 11) or _measure_speed(8_000_000, seed, *names)


def small(seed: int) -> dict[str, Any]:
    """Measure calls of 64, 256 and 1,024 keys, which show the fixed cost of a call; dense gathers are the lower bound."""
    result: dict[str, Any] = {"rows": [], "ratio": {}}
    for keys in (64, 256, 1024):
        contenders = Contenders(1_000_000, WIDTH, keys, BATCHES, seed, "zipf")
        calls = contenders.make_calls("core lookup", _DENSE, *_FORWARDS)
        for protocol, run in (("isolated", time_isolated), ("interleaved", time_interleaved)):
            times = run(calls, BATCHES)
            pairs = [(name, ours) for ours in ("core lookup", _DENSE) for name in _FORWARDS]
            _add_times(result, times, [*pairs, ("core lookup", _DENSE)], f"{keys} keys, {protocol}")
        del contenders, calls
        gc.collect()
    return result


def adam(seed: int) -> dict[str, Any]:
    """Measure the Adam of Nonet's tables, compared with their row-wise Adagrad and with torch's SparseAdam."""
    contenders = Contenders(1_000_000, WIDTH, KEYS, BATCHES, seed, "zipf")
    calls = contenders.make_calls("core train step", "core Adam step", "torch SparseAdam step")
    result: dict[str, Any] = {"rows": [], "ratio": {}}
    pairs = [("core Adam step", "core train step"), ("torch SparseAdam step", "core Adam step")]
    for kind in ("zipf", "uniform"):
        contenders.draw(kind)
        for protocol, run in (("isolated", time_isolated), ("interleaved", time_interleaved)):
            _add_times(result, run(calls, BATCHES), pairs, f"{kind}, {protocol}")
    return result


def growth(seed: int) -> dict[str, Any]:
    """Measure training steps on a table that grows from 0 to 4 million rows, and their 99th percentile."""
    from nonet.bench.embedding.growth import grow

    return grow(seed)


def eviction(seed: int) -> dict[str, Any]:
    """Measure training steps on a full table that evicts a row for every new row."""
    from nonet.bench.embedding.growth import evict

    return evict(seed)


def rows_100m(seed: int) -> dict[str, Any]:
    """Measure a table of a hundred million rows of width 16."""
    from nonet.bench.embedding.growth import measure_hundred_million

    return _skip_without_memory("rows_100m", 14) or measure_hundred_million(seed)


def _measure_speed(rows: int, seed: int, *names: str) -> dict[str, Any]:
    """Time contenders, by default all, on tables of a number of rows."""
    result: dict[str, Any] = {"rows": [], "ratio": {}}
    contenders = Contenders(rows, WIDTH, KEYS, BATCHES, seed, "zipf")
    for ids in ("zipf", "uniform"):
        contenders.draw(ids)
        calls = contenders.make_calls(*names)
        for protocol, run in (("isolated", time_isolated), ("interleaved", time_interleaved)):
            _add_times(result, run(calls, BATCHES), _RATIOS, f"{rows // 1_000_000} M rows, {ids}, {protocol}")
    if reason := explain_missing_fbgemm():
        result["rows"].append({"skipped": "FBGEMM TBE", "reason": reason})
    return result


def _add_times(
    result: dict[str, Any], times: dict[str, LapTimer], pairs: list[tuple[str, str]], case: str
) -> None:
    """Add the times of all contenders, and the ratios of pairs of them, to the result of a section."""
    result["rows"] += [{"case": case, "what": name, **timer.to_row()} for name, timer in times.items()]
    result["ratio"] |= {f"{case}: {pair}": value for pair, value in compute_ratios(times, pairs).items()}


def _skip_without_memory(section: str, gib: int) -> dict[str, Any] | None:
    """Return the result of a skipped section if there is too little memory, else None."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/meminfo", encoding="ascii") as lines:
        free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), free)
    if free >= gib * _GIB:
        return None
    reason = f"needs {gib} GiB of free memory; {free / _GIB:.1f} GiB are free"
    return {"rows": [{"skipped": section, "reason": reason}], "ratio": {}}


SECTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    section.__name__: section for section in (rows_1m, rows_8m, small, adam, growth, eviction, rows_100m)
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    np.seterr(all="raise")
    result = SECTIONS[sys.argv[1]](int(sys.argv[2]))
    result["rows"].append({"section": sys.argv[1], "core": str(get_core_status())})
    print(json.dumps(result))
