"""Saving and loading sparse rows: `python -m nonet.bench.embedding_checkpoint`.

A save against a plain write of as many bytes (one write of a ready buffer, then fsync, as the save ends with), in turns; how
long a training step waits while a save runs beside it; an increment of 1 % touched rows; a load. One thread each.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from nonet.bench.show import show

ROWS, DIM, KEYS = 1_000_000, 64, 8192


def measure(rounds: int = 5, rows: int = ROWS, dim: int = DIM, folder: str | None = None) -> dict[str, Any]:
    """Rows of seconds and bytes by measure; ratios: save / plain write in bytes a second, longest stall in steps."""
    import torch

    torch.set_num_threads(1)
    world = _filled(rows, dim)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        found = _writes(world, Path(place), rounds)
        stall = _stall(world, Path(place))
    size, save_s, plain_s, load_s, increment = found
    ratio = {
        "save / plain write, bytes a second": plain_s / save_s,
        "step / step during a save, median": stall["during_ms"] / stall["before_ms"],
        "longest wait for a save, in steps": stall["wait_ms"] / stall["before_ms"],
        "increment of 1 % / full, bytes": increment / size,
    }
    rows_ = [
        {"measure": "save", "seconds": save_s, "bytes": size},
        {"measure": "plain write", "seconds": plain_s, "bytes": size},
        {"measure": "load", "seconds": load_s, "bytes": size},
        {"measure": "increment of 1 % touched rows", "bytes": increment},
        {"measure": "training beside a save", **stall},
    ]
    return {"rows": rows_, "ratio": ratio}


def _filled(rows: int, dim: int) -> Any:
    import torch

    from nonet.embedding.store import TableSpec
    from nonet.embedding.world import SparseWorld

    world = SparseWorld({"item": TableSpec(dim)}, seed=7)
    for part in np.array_split(_keys(rows), max(1, rows // 16384)):
        keys = torch.from_numpy(part)
        world.pull("item", keys)
        world.push("item", keys, torch.ones(len(part), dim), 1)
    return world


def _keys(rows: int) -> np.ndarray:
    return (np.arange(rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def _writes(world: Any, folder: Path, rounds: int) -> tuple[int, float, float, float, int]:
    from nonet.embedding.checkpoint import load, save

    saves, plains, loads, size = [], [], [], 0
    for number in range(rounds):
        began = time.perf_counter()
        size = sum(save(world, folder / str(number)).wait().values())
        saves.append(time.perf_counter() - began)
        plains.append(_plain(folder / "plain", size))
        if number:
            _remove(folder / str(number))
    other = _empty_like(world)
    began = time.perf_counter()
    load(other, folder / "0")
    loads.append(time.perf_counter() - began)
    _touch(world, len(world.tables["item"]) // 100, 2)
    increment = sum(save(world, folder / "more", base=folder / "0").wait().values())
    return size, statistics.median(saves), statistics.median(plains), loads[0], increment


def _plain(path: Path, size: int) -> float:
    data = np.random.default_rng(1).integers(0, 255, size, dtype=np.uint8)
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        left = memoryview(data)
        while len(left):
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    taken = time.perf_counter() - began
    path.unlink()
    return taken


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)


def _empty_like(world: Any) -> Any:
    from nonet.embedding.world import SparseWorld

    return SparseWorld(world.specs, seed=7)


def _touch(world: Any, count: int, step: int) -> None:
    import torch

    keys = torch.from_numpy(_keys(count))
    world.pull("item", keys)
    world.push("item", keys, torch.ones(count, world.specs["item"].dim), step)


def _stall(world: Any, folder: Path) -> dict[str, float]:
    """Steps of 8,192 random keys and a matrix product, before and beside a save, and how long one waited for its lock."""
    import torch

    from nonet.embedding.checkpoint import save

    rows = len(world.tables["item"])
    source, keys = np.random.default_rng(3), _keys(rows)
    weight, waits = torch.randn(768, 768), [0.0]
    lock = _TimedLock(world.histories["item"].lock, waits)
    world.histories["item"].lock = lock
    number = world.tables["item"].step

    def step() -> float:
        nonlocal number
        number += 1
        asked = torch.from_numpy(keys[source.integers(0, rows, KEYS)])
        began = time.perf_counter()
        got = world.pull("item", asked)
        torch.mm(weight, weight)
        world.push("item", asked, got, number)
        return 1e3 * (time.perf_counter() - began)

    for _ in range(20):
        step()
    before = [step() for _ in range(60)]
    waits[:] = [0.0]
    began = time.perf_counter()
    saving = save(world, folder / "beside")
    opened = 1e3 * (time.perf_counter() - began)
    during = []
    while not saving.done:
        during.append(step())
    saving.wait()
    return {
        "before_ms": statistics.median(before),
        "before_max_ms": max(before),
        "during_ms": statistics.median(during),
        "during_max_ms": max(during),
        "wait_ms": 1e3 * max(waits),
        "open_ms": opened,
        "steps_during": len(during),
    }


class _TimedLock:
    """A lock that notes how long the main thread waited for it."""

    def __init__(self, lock: Any, waits: list[float]):
        import threading

        self._lock, self._waits, self._main = lock, waits, threading.get_ident()

    def __enter__(self) -> None:
        import threading

        began = time.perf_counter()
        self._lock.acquire()
        if threading.get_ident() == self._main:
            self._waits.append(time.perf_counter() - began)

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def main() -> None:
    """Print the rows and ratios."""
    show(measure())


if __name__ == "__main__":
    main()
