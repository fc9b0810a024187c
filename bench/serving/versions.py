"""Model versions in serving: bytes of a delta, seconds of a rollback, and answers while versions are swapped under load."""

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

_ROWS, _DIM, _CHANGED_SHARE = (
    1_000_000,
    16,
    0.01,
)  # rows of a version, floats of a row, share of rows in a delta


def bench_versions(run: str, rounds: int) -> Result:
    """Measure the bytes of a delta of 1 % of 1 M rows and of a full version, and the seconds of a rollback to equal rows."""
    generator = np.random.default_rng(0)
    key = np.sort(generator.integers(-(2**62), 2**62, _ROWS)).astype(np.int64)
    row = generator.standard_normal((_ROWS, _DIM), np.float32)
    no_keys = np.empty(0, np.int64)  # of removed rows
    specs = {"item": TableSpec(_DIM, "sgd")}
    read_keys = torch.from_numpy(generator.choice(key, 4096))
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        registry, dense = VersionRegistry(Path(folder) / "registry"), Path(folder) / "model.safetensors"
        write_tensors(dense, {"w": torch.randn(1 << 18)})
        full = registry.publish(VersionContents(dense, {"item": RowLayer(key, row, no_keys)}, {}, "t"))
        rows_before = registry.open_rows(1, specs).read_rows("item", read_keys)
        base, delta = 1, full
        for _ in range(rounds):
            changed = row.copy()
            changed[generator.choice(_ROWS, int(_CHANGED_SHARE * _ROWS), replace=False)] += 1
            delta = registry.publish(
                VersionContents(dense, {"item": RowLayer(key, changed, no_keys)}, {}, "t"), base=base
            )
            began = time.perf_counter()
            registry.rollback(1)
            new_registry = VersionRegistry(
                registry.root
            )  # as in a process that has not verified any file yet
            version = new_registry.serving.default or 0
            rows_after = new_registry.open_rows(version, specs).read_rows("item", read_keys)
            seconds.append(time.perf_counter() - began)
            assert torch.equal(rows_after, rows_before), "rows after a rollback are not those before"
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
    served_run, _ = open_engine(run)
    questions = make_questions(served_run)[:32]
    registry, newest = served_run.registry, served_run.registry.list_versions()[-1]
    versions = [newest, *(_publish_other(served_run, registry, newest, turn).number for turn in range(2))]
    expected = {
        number: InferenceEngine(served_run.load_recommender(registry.read_version(number)), number).answer(
            questions
        )
        for number in versions
    }
    engines = EnginePool(served_run, follow=False, look_s=0.02)
    # Counts in lists, so that the threads can change them.
    failed, wrong, answered, stop = [0], [0], [0], threading.Event()

    def load(seed: int) -> None:
        generator = np.random.default_rng(seed)
        while not stop.is_set():
            picks = generator.integers(0, len(questions), 8).tolist()
            futures = [(pick, *engines.submit(questions[pick], 30.0)) for pick in picks]
            for pick, future, version in futures:
                answered[0] += 1
                try:
                    answer = future.result(30)
                except Exception:
                    failed[0] += 1
                    continue
                right = expected[version][pick]
                is_right = (answer.item == right.item).all() and np.abs(
                    answer.score - right.score
                ).max() < 1e-5
                wrong[0] += not is_right

    threads = [threading.Thread(target=load, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    times: dict[str, list[float]] = {"swap": [], "rollback": []}
    for turn in range(20):
        next_version = versions[1 + turn % 2] if turn % 4 else newest
        times["swap"].append(_time_swap(engines, registry, next_version))
        if turn % 4 == 3:
            times["rollback"].append(_time_rollback(engines, registry, newest))
            _reset_serving(registry)
    stop.set()
    for thread in threads:
        thread.join()
    engines.close()
    row = {"answers": answered[0], "failed": failed[0], "of no version": wrong[0], "swaps": engines.swaps}
    return [row | {f"{name}, s (median)": compute_median(seconds) for name, seconds in times.items()}], {}


def _publish_other(served_run: Any, registry: VersionRegistry, base: int, turn: int) -> Version:
    """Publish a version of the newest checkpoint with slightly different rows, without serving it."""
    commit, manifest = served_run.find_newest_commit()
    contents = served_run.build_contents(commit, manifest)
    rows = {
        name: RowLayer(layer.key, layer.row * np.float32(1.05 + 0.05 * turn), layer.gone)
        for name, layer in contents.rows.items()
    }
    changed = VersionContents(
        contents.dense, rows, contents.counts, contents.catalogue, {"step": -1, "commit": f"bench {turn}"}
    )
    return registry.publish(changed, base=base, serve=False)


def _time_swap(engines: EnginePool, registry: VersionRegistry, version: int) -> float:
    """Promote a version, and return the seconds until it is served."""
    began = time.perf_counter()
    registry.promote(version)
    return _wait_for_version(engines, version, began)


def _time_rollback(engines: EnginePool, registry: VersionRegistry, version: int) -> float:
    """Roll back to a version, and return the seconds until it is served."""
    began = time.perf_counter()
    registry.rollback(version)
    return _wait_for_version(engines, version, began)


def _wait_for_version(engines: EnginePool, version: int, began: float) -> float:
    """Wait until a version is served, and return the seconds since `began`."""
    while engines.serving.default != version:
        time.sleep(0.002)
    return time.perf_counter() - began


def _reset_serving(registry: VersionRegistry) -> None:
    """Reset the serving state, so that refused versions may be served again."""
    serving = registry.serving
    type(serving)(serving.default, {}, (), (), serving.turn + 1).write(registry.root / "serving.json")
