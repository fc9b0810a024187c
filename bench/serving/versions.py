"""Versions: bytes of a delta, seconds of a rollback, and answers while versions swap under load."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nonet.bench.serving.load import compute_median
from nonet.bench.serving.queue import Result, make_questions, open_engine
from nonet.deploy.serving.service import EnginePool
from nonet.embedding.reading import RowLayer
from nonet.embedding.tables import TableSpec
from nonet.models.inference import InferenceEngine
from nonet.workers import write_tensors
from nonet.workers.registry import Version, VersionContents, VersionRegistry

_ROWS, _DIM, _SHARE = 1_000_000, 16, 0.01


def bench_versions(run: str, rounds: int) -> Result:
    """Measure bytes of a delta of 1 % of 1 M rows beside the full version, and seconds of a rollback with the same bits."""
    draw = np.random.default_rng(0)
    key = np.sort(draw.integers(-(2**62), 2**62, _ROWS)).astype(np.int64)
    row = draw.standard_normal((_ROWS, _DIM), np.float32)
    none = np.empty(0, np.int64)
    specs = {"item": TableSpec(_DIM, "sgd")}
    asked = torch.from_numpy(draw.choice(key, 4096))
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        registry, dense = VersionRegistry(Path(folder) / "registry"), Path(folder) / "model.safetensors"
        write_tensors(dense, {"w": torch.randn(1 << 18)})
        full = registry.publish(VersionContents(dense, {"item": RowLayer(key, row, none)}, {}, "t"))
        before = registry.open_rows(1, specs).read_rows("item", asked)
        base, delta = 1, full
        for _ in range(rounds):
            changed = row.copy()
            changed[draw.choice(_ROWS, int(_SHARE * _ROWS), replace=False)] += 1
            delta = registry.publish(
                VersionContents(dense, {"item": RowLayer(key, changed, none)}, {}, "t"), base=base
            )
            began = time.perf_counter()
            registry.rollback(1)
            again = VersionRegistry(registry.root)  # a process that has checked no file yet
            back = again.open_rows(again.serving.default or 0, specs).read_rows("item", asked)
            seconds.append(time.perf_counter() - began)
            assert torch.equal(back, before), "rows after a rollback are not those before"
    rows = [
        {
            "full, bytes": full.written,
            "delta of 1 %, bytes": delta.written,
            "rollback, s": compute_median(seconds),
        }
    ]
    return rows, {"bytes: delta of 1 % / full": delta.written / full.written}


def bench_swaps(run: str, rounds: int) -> Result:
    """Count failed and wrong answers during 20 swaps and 5 rollbacks under load.

    An answer is wrong if its bits are not those of the version that it names.
    """
    made, _ = open_engine(run)
    asked = make_questions(made)[:32]
    registry, newest = made.registry, made.registry.list_versions()[-1]
    numbers = [newest, *(_publish_other(made, registry, newest, turn).number for turn in range(2))]
    expected = {
        n: InferenceEngine(made.load_recommender(registry.read_version(n)), n).answer(asked) for n in numbers
    }
    engines = EnginePool(made, follow=False, look_s=0.02)
    failed, wrong, answered, stop = [0], [0], [0], threading.Event()

    def load(seed: int) -> None:
        draw = np.random.default_rng(seed)
        while not stop.is_set():
            places = draw.integers(0, len(asked), 8).tolist()
            futures = [(place, *engines.submit(asked[place], 30.0)) for place in places]
            for place, future, version in futures:
                answered[0] += 1
                try:
                    answer = future.result(30)
                except Exception:
                    failed[0] += 1
                    continue
                right = expected[version][place]
                same = (answer.item == right.item).all() and np.abs(answer.score - right.score).max() < 1e-5
                wrong[0] += not same

    threads = [threading.Thread(target=load, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    times: dict[str, list[float]] = {"swap": [], "rollback": []}
    for turn in range(20):
        times["swap"].append(_time_swap(engines, registry, numbers[1 + turn % 2] if turn % 4 else newest))
        if turn % 4 == 3:
            times["rollback"].append(_time_rollback(engines, registry, newest))
            _reset_serving(registry)
    stop.set()
    for thread in threads:
        thread.join()
    engines.close()
    row = {"answers": answered[0], "failed": failed[0], "of no version": wrong[0], "swaps": engines.swaps}
    return [row | {f"{name}, s (median)": compute_median(taken) for name, taken in times.items()}], {}


def _publish_other(made: Any, registry: VersionRegistry, base: int, turn: int) -> Version:
    """Publish a version that is made from another, with slightly different rows."""
    commit, manifest = made.find_newest_commit()
    contents = made.build_contents(commit, manifest)
    rows = {
        name: RowLayer(layer.key, layer.row * np.float32(1.05 + 0.05 * turn), layer.gone)
        for name, layer in contents.rows.items()
    }
    changed = VersionContents(
        contents.dense, rows, contents.counts, contents.catalogue, {"step": -1, "commit": f"bench {turn}"}
    )
    return registry.publish(changed, base=base, serve=False)


def _time_swap(engines: EnginePool, registry: VersionRegistry, version: int) -> float:
    began = time.perf_counter()
    registry.promote(version)
    return _wait_for_version(engines, version, began)


def _time_rollback(engines: EnginePool, registry: VersionRegistry, version: int) -> float:
    began = time.perf_counter()
    registry.rollback(version)
    return _wait_for_version(engines, version, began)


def _wait_for_version(engines: EnginePool, version: int, began: float) -> float:
    while engines.serving.default != version:
        time.sleep(0.002)
    return time.perf_counter() - began


def _reset_serving(registry: VersionRegistry) -> None:
    """Reset the serving state, so that refused versions may be served again."""
    serving = registry.serving
    type(serving)(serving.default, {}, (), (), serving.turn + 1).write(registry.root / "serving.json")
