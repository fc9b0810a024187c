"""`nonet bench checkpoint`: saving and loading sparse rows.

A save takes turns with a plain write of as many bytes: one write of a prepared buffer, then fsync, as at the end of a save. Also
measured are a load, and by how much training steps are delayed while a save runs in another thread ("beside a save"). Each side
uses one thread.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from nonet.bench.embedding.keys import scatter_ranks
from nonet.bench.timing import LapTimer

ROWS, DIM, KEYS = 1_000_000, 64, 8192  # rows of the table, floats of a row, keys of a training step
_FILL_ROWS = 16384  # number of rows that are created at once
_WARM_UP_STEPS = 20


def measure(rounds: int = 5, rows: int = ROWS, dim: int = DIM, folder: str | None = None) -> dict[str, Any]:
    """Measure seconds and bytes.

    Args:
        rounds: Number of saves and of plain writes.
        rows: Number of rows of the table.
        dim: Number of floats of a row.
        folder: Parent of the temporary folder; None for the system's.

    Returns:
        The ratios compare bytes per second (save / plain write), and the longest delays with the duration of a step.
    """
    import torch

    torch.set_num_threads(1)
    tables = _make_filled_tables(rows, dim)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        temporary_folder = Path(name)
        size_bytes, saves_s, plain_writes_s, load_s = _measure_writes(tables, temporary_folder, rounds)
        stall = _measure_stalls(tables, temporary_folder)
        evicting_tables = _make_filled_tables(rows, dim, evict="lru", budget_rows=rows * 9 // 10)
        evicting_ms = _measure_opening(evicting_tables, temporary_folder)
    save_s, plain_s = statistics.median(saves_s), statistics.median(plain_writes_s)
    step_ms = stall["alone_ms"]
    ratio = {
        "save / plain write, bytes a second": plain_s / save_s,
        "the same, fastest of each": min(plain_writes_s) / min(saves_s),
        "slowest plain write / fastest": max(plain_writes_s) / min(plain_writes_s),
        "longest step beside a save - a step, in steps": (stall["beside_max_ms"] - step_ms) / step_ms,
        "the same, of steps that the host took no CPU from": (stall["beside_own_max_ms"] - step_ms) / step_ms,
        "steps beside a save that it took CPU from, of all": stall["beside_stolen"] / stall["steps"],
        "step beside a save, 99 of 100 - a step, in steps": (stall["beside_p99_ms"] - step_ms) / step_ms,
        "longest step alone - a step, in steps": (stall["alone_max_ms"] - step_ms) / step_ms,
        "longest wait for a save's lock, in steps": stall["wait_max_ms"] / step_ms,
        "opening a save, in steps": stall["open_max_ms"] / step_ms,
        "opening a save of a table that evicts, in steps": evicting_ms / step_ms,
        "step beside a save / alone, median": stall["beside_ms"] / step_ms,
        "step beside a save / alone, median CPU time": stall["beside_cpu_ms"] / stall["alone_cpu_ms"],
    }
    result_rows = [
        {"measure": "save", "seconds": save_s, "bytes": size_bytes},
        {"measure": "plain write", "seconds": plain_s, "bytes": size_bytes},
        {"measure": "load", "seconds": load_s, "bytes": size_bytes},
        {"measure": "training", **stall},
    ]
    return {"rows": result_rows, "ratio": ratio}


def _make_filled_tables(rows: int, dim: int, **policy: Any) -> Any:
    """Create a ShardedTables with one table "item", and fill it with rows; `policy` are further fields of its TableSpec."""
    import torch

    from nonet.embedding.tables import TableSpec
    from nonet.embedding.training import ShardedTables

    tables = ShardedTables({"item": TableSpec(dim, **policy)}, seed=7)
    parts = np.array_split(scatter_ranks(np.arange(rows)), max(1, rows // _FILL_ROWS))
    for step, part in enumerate(parts, 1):
        keys = torch.from_numpy(part)
        tables.pull("item", keys)
        tables.push("item", keys, torch.ones(len(part), dim), step)
    return tables


def _measure_writes(tables: Any, folder: Path, rounds: int) -> tuple[int, list[float], list[float], float]:
    """Time saves, plain writes and a load.

    Returns:
        The bytes of a save, the seconds of each save, the seconds of each plain write, and the seconds of the load.
    """
    from nonet.embedding.storage import load, save

    save_timer, plain_writes_s, size_bytes = LapTimer(), [], 0
    for number in range(rounds):
        with save_timer:
            written = save(tables, folder / str(number)).wait()
        size_bytes = sum(file_bytes for _, file_bytes in written.values())
        plain_writes_s.append(_time_plain_write(folder / "plain", size_bytes))
        if number:
            _remove(folder / str(number))
    empty_tables = _empty_like(tables)
    with LapTimer() as load_timer:
        load(empty_tables, folder / "0")
    return size_bytes, save_timer.wall_s, plain_writes_s, load_timer.last_s


def _time_plain_write(path: Path, size_bytes: int) -> float:
    """Return the seconds of a plain write of `size_bytes` bytes."""
    data = np.random.default_rng(1).integers(0, 255, size_bytes, dtype=np.uint8)
    with LapTimer() as timer, path.open("wb", buffering=0) as file:
        remaining = data.data
        while len(remaining):
            remaining = remaining[file.write(remaining) :]
        os.fsync(file.fileno())
    path.unlink()
    return timer.last_s


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)


def _empty_like(tables: Any) -> Any:
    """Create empty tables with the same specs."""
    from nonet.embedding.training import ShardedTables

    return ShardedTables(tables.specs, seed=7)


def _measure_stalls(tables: Any, folder: Path, rounds: int = 4) -> dict[str, float]:
    """Time training steps alone and beside a save, in turns, and how long they wait for the lock that a save takes.

    A turn alone has as many steps as the turn beside a save before it, so both maxima are over the same number of steps.

    Returns:
        "steps": number of steps beside a save. "open_max_ms": longest time to begin a save. "wait_max_ms": longest wait for the
        lock. For NAME "alone" and "beside": "NAME_ms" median, "NAME_max_ms", "NAME_p99_ms" and "NAME_cpu_ms" (median CPU time) of
        the steps; "NAME_stolen": number of steps during which the host gave the CPU to other machines; "NAME_own_max_ms": maximum
        of the other steps.
    """
    from nonet.embedding.storage import save

    steps = _TrainingSteps(tables)
    gc.collect()
    gc.freeze()  # a full collection over torch's modules takes 50 ms, with or without a save
    for _ in range(_WARM_UP_STEPS):
        steps.run_step()
    alone, beside, open_timer = [], [], LapTimer()
    for turn in range(rounds):
        with open_timer:
            running_save = save(tables, folder / f"beside{turn}")
        step_count = 0
        while not running_save.done:
            beside.append(steps.run_step())
            step_count += 1
        running_save.wait()
        _remove(folder / f"beside{turn}")
        steps.run_step()
        alone += [steps.run_step() for _ in range(step_count)]
    measures: dict[str, float] = {"steps": len(beside), "open_max_ms": 1e3 * max(open_timer.wall_s)}
    for name, measured_steps in (("alone", alone), ("beside", beside)):
        wall_ms, cpu_ms, stolen_ticks = zip(*measured_steps, strict=True)
        undisturbed_ms = [ms for ms, ticks in zip(wall_ms, stolen_ticks, strict=True) if not ticks]
        measures |= {
            f"{name}_ms": statistics.median(wall_ms),
            f"{name}_max_ms": max(wall_ms),
            f"{name}_own_max_ms": max(undisturbed_ms, default=float("nan")),
            f"{name}_stolen": len(wall_ms) - len(undisturbed_ms),
            f"{name}_p99_ms": statistics.quantiles(wall_ms, n=100)[98],
            f"{name}_cpu_ms": statistics.median(cpu_ms),
        }
    return measures | {"wait_max_ms": 1e3 * max(steps.waits.wall_s)}


def _measure_opening(tables: Any, folder: Path, rounds: int = 4) -> float:
    """Return the longest time in milliseconds to begin a save, with training steps between the saves."""
    from nonet.embedding.storage import save

    steps, open_timer = _TrainingSteps(tables), LapTimer()
    for turn in range(rounds):
        for _ in range(_WARM_UP_STEPS):
            steps.run_step()
        with open_timer:
            running_save = save(tables, folder / f"opening{turn}")
        running_save.wait()
        _remove(folder / f"opening{turn}")
    return 1e3 * max(open_timer.wall_s)


class _TrainingSteps:
    """Runs and times training steps: a pull and a push of `KEYS` random keys, and a matrix product.

    `waits` times how long the steps wait for the table's lock.
    """

    def __init__(self, tables: Any):
        import torch

        self._tables, self._keys = tables, scatter_ranks(np.arange(len(tables.tables["item"])))
        self._source, self._weight = np.random.default_rng(3), torch.randn(768, 768)
        self._product = torch.empty(768, 768)  # reused, since an allocation in a step could also delay it
        self._number, self.waits = tables.tables["item"].step, LapTimer(wall_s=[0.0])
        _time_lock(tables.histories["item"].lock, self.waits)

    def run_step(self) -> tuple[float, float, int]:
        """Run a step, and return its wall and CPU milliseconds, and the ticks that were stolen during it."""
        import torch

        self._number += 1
        keys = torch.from_numpy(self._keys[self._source.integers(0, len(self._keys), KEYS)])
        ticks_before = _read_stolen_ticks()
        with LapTimer() as timer:
            rows = self._tables.pull("item", keys)
            torch.mm(self._weight, self._weight, out=self._product)
            self._tables.push("item", keys, rows, self._number)
        return 1e3 * timer.last_s, 1e3 * timer.cpu_s[-1], _read_stolen_ticks() - ticks_before


def _read_stolen_ticks() -> int:
    """Return the ticks of 10 ms that the host gave to other machines while a CPU here had work; 0 if they are unknown."""
    try:
        with open("/proc/stat") as file:
            return int(file.readline().split()[8])
    except (OSError, IndexError):
        return 0


def _time_lock(lock: Any, waits: LapTimer) -> None:
    """Replace the `_wait` method of a StepLock by one whose duration is added to `waits`."""
    original_wait = lock._wait

    def wait_timed() -> None:
        with waits:
            original_wait()

    lock._wait = wait_timed
