"""Saving and loading sparse rows: `nonet bench checkpoint`.

A save is compared in turns with a plain write of as many bytes (one write of a prepared buffer, then fsync, with
which a save ends too). Also measured are the time that a training step waits while a save runs beside it, and a load.
One thread each.
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
from nonet.timing import LapTimer

ROWS, DIM, KEYS = 1_000_000, 64, 8192


def measure(rounds: int = 5, rows: int = ROWS, dim: int = DIM, folder: str | None = None) -> dict[str, Any]:
    """Measure seconds and bytes; the ratios are of bytes per second (save / plain write) and of the longest stall in steps."""
    import torch

    torch.set_num_threads(1)
    world = _make_filled_tables(rows, dim)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        writes = _measure_writes(world, Path(place), rounds)
        stall = _measure_stalls(world, Path(place))
        evicting_ms = _measure_opening(
            _make_filled_tables(rows, dim, evict="lru", budget_rows=rows * 9 // 10), Path(place)
        )
    size, saves, plains, load_s = writes
    save_s, plain_s = statistics.median(saves), statistics.median(plains)
    one = stall["alone_ms"]
    ratio = {
        "save / plain write, bytes a second": plain_s / save_s,
        "the same, fastest of each": min(plains) / min(saves),
        "slowest plain write / fastest": max(plains) / min(plains),
        "longest step beside a save - a step, in steps": (stall["beside_max_ms"] - one) / one,
        "the same, of steps that the host took no CPU from": (stall["beside_own_max_ms"] - one) / one,
        "steps beside a save that it took CPU from, of all": stall["beside_stolen"] / stall["steps"],
        "step beside a save, 99 of 100 - a step, in steps": (stall["beside_p99_ms"] - one) / one,
        "longest step alone - a step, in steps": (stall["alone_max_ms"] - one) / one,
        "longest wait for a save's lock, in steps": stall["wait_max_ms"] / one,
        "opening a save, in steps": stall["open_max_ms"] / one,
        "opening a save of a table that evicts, in steps": evicting_ms / one,
        "step beside a save / alone, median": stall["beside_ms"] / one,
        "step beside a save / alone, median CPU time": stall["beside_cpu_ms"] / stall["alone_cpu_ms"],
    }
    rows_ = [
        {"measure": "save", "seconds": save_s, "bytes": size},
        {"measure": "plain write", "seconds": plain_s, "bytes": size},
        {"measure": "load", "seconds": load_s, "bytes": size},
        {"measure": "training", **stall},
    ]
    return {"rows": rows_, "ratio": ratio}


def _make_filled_tables(rows: int, dim: int, **policy: Any) -> Any:
    """Make tables that are filled with rows."""
    import torch

    from nonet.embedding.tables import TableSpec
    from nonet.embedding.training import ShardedTables

    world = ShardedTables({"item": TableSpec(dim, **policy)}, seed=7)
    for step, part in enumerate(np.array_split(scatter_ranks(np.arange(rows)), max(1, rows // 16384)), 1):
        keys = torch.from_numpy(part)
        world.pull("item", keys)
        world.push("item", keys, torch.ones(len(part), dim), step)
    return world


def _measure_writes(world: Any, folder: Path, rounds: int) -> tuple[int, list[float], list[float], float]:
    """Time saves, plain writes and a load, and return bytes, seconds of saves, seconds of plain writes, seconds of the load."""
    from nonet.embedding.storage import load, save

    saves, plains, size = LapTimer(), [], 0
    for number in range(rounds):
        with saves:
            written = save(world, folder / str(number)).wait()
        size = sum(size for _, size in written.values())
        plains.append(_write_plain(folder / "plain", size))
        if number:
            _remove(folder / str(number))
    other = _empty_like(world)
    with LapTimer() as loading:
        load(other, folder / "0")
    return size, saves.wall_s, plains, loading.last_s


def _write_plain(path: Path, size: int) -> float:
    """Time a plain write of so many bytes."""
    data = np.random.default_rng(1).integers(0, 255, size, dtype=np.uint8)
    with LapTimer() as taken, path.open("wb", buffering=0) as file:
        left = data.data
        while len(left):
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    path.unlink()
    return taken.last_s


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)


def _empty_like(world: Any) -> Any:
    from nonet.embedding.training import ShardedTables

    return ShardedTables(world.specs, seed=7)


def _measure_stalls(world: Any, folder: Path, rounds: int = 4) -> dict[str, float]:
    """Time steps of 8,192 random keys and a matrix product, alone and beside a save in turns, and their waits for its lock.

    The turns alone have as many steps as those beside a save, so that both maxima are over the same number of steps.
    """
    from nonet.embedding.storage import save

    steps = _Steps(world)
    gc.collect()
    gc.freeze()  # a full collection over torch's modules takes 50 ms, with or without a save
    for _ in range(20):
        steps.run_step()
    alone, beside, opened = [], [], LapTimer()
    for turn in range(rounds):
        with opened:
            saving = save(world, folder / f"beside{turn}")
        many = 0
        while not saving.done:
            beside.append(steps.run_step())
            many += 1
        saving.wait()
        _remove(folder / f"beside{turn}")
        steps.run_step()
        alone += [steps.run_step() for _ in range(many)]
    measures: dict[str, float] = {"steps": len(beside), "open_max_ms": 1e3 * max(opened.wall_s)}
    for name, turn in (("alone", alone), ("beside", beside)):
        wall, cpu, stolen = zip(*turn, strict=True)
        own = [taken for taken, ticks in zip(wall, stolen, strict=True) if not ticks]
        measures |= {f"{name}_ms": statistics.median(wall), f"{name}_max_ms": max(wall)}
        measures |= {
            f"{name}_own_max_ms": max(own, default=float("nan")),
            f"{name}_stolen": len(wall) - len(own),
        }
        measures |= {
            f"{name}_p99_ms": statistics.quantiles(wall, n=100)[98],
            f"{name}_cpu_ms": statistics.median(cpu),
        }
    return measures | {"wait_max_ms": 1e3 * max(steps.waits.wall_s)}


def _measure_opening(world: Any, folder: Path, rounds: int = 4) -> float:
    """Return the longest time in milliseconds of opening a save, with steps between saves."""
    from nonet.embedding.storage import save

    steps, taken = _Steps(world), LapTimer()
    for turn in range(rounds):
        for _ in range(20):
            steps.run_step()
        with taken:
            saving = save(world, folder / f"opening{turn}")
        saving.wait()
        _remove(folder / f"opening{turn}")
    return 1e3 * max(taken.wall_s)


class _Steps:
    """Training steps, timed; `waits` are the seconds that each waited for the table's lock."""

    def __init__(self, world: Any):
        import torch

        self._world, self._keys = world, scatter_ranks(np.arange(len(world.tables["item"])))
        self._source, self._weight = np.random.default_rng(3), torch.randn(768, 768)
        self._product = torch.empty(768, 768)  # kept: memory that is asked for anew is another's stall
        self._number, self.waits = world.tables["item"].step, LapTimer(wall_s=[0.0])
        _time_lock(world.histories["item"].lock, self.waits)

    def run_step(self) -> tuple[float, float, int]:
        """Run a step, and return wall and CPU milliseconds, and ticks that were stolen meanwhile."""
        import torch

        self._number += 1
        keys = torch.from_numpy(self._keys[self._source.integers(0, len(self._keys), KEYS)])
        before = _read_stolen_ticks()
        with LapTimer() as taken:
            got = self._world.pull("item", keys)
            torch.mm(self._weight, self._weight, out=self._product)
            self._world.push("item", keys, got, self._number)
        return 1e3 * taken.last_s, 1e3 * taken.cpu_s[-1], _read_stolen_ticks() - before


def _read_stolen_ticks() -> int:
    """Return the ticks of 10 ms that the host gave to other machines while a CPU here had work, 0 where unknown."""
    try:
        with open("/proc/stat") as file:
            return int(file.readline().split()[8])
    except (OSError, IndexError):
        return 0


def _time_lock(lock: Any, waits: LapTimer) -> None:
    """Record how long each step waits for this StepLock."""
    take = lock._wait

    def wait_timed() -> None:
        with waits:
            take()

    lock._wait = wait_timed
