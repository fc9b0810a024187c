"""`nonet bench samples`: the speed of reading Parquet files into torch tensors, of resuming, and of the ledger.

Nonet's readers are compared with pyarrow, Ray Data and DataLoader. The contenders take turns over the same files, and medians
are reported. Each reads N and 4N rows of distinct files, which separates a fixed time from the slope: slope = 3N rows /
(seconds of 4N - seconds of N). All must read the same sum of values. The files are in the page cache.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nonet.bench.samples.contenders import (
    ReadPass,
    make_nonet_reader,
    read_arrow_batches,
    read_ray_batches,
    read_torch_batches,
    time_pass,
    write_files,
)
from nonet.bench.samples.cost import measure_cost
from nonet.errors import ConfigError

_FILES = 4  # number of files with N rows in total; 4N rows are in four times as many


def bench_samples(
    rows: int = 500_000, rounds: int = 5, ray: bool = True, sections: str = "speed,resume,ledger,cost"
) -> dict[str, Any]:
    """Run the sections.

    Args:
        rows: Number N of rows.
        rounds: Number of rounds of each contender.
        ray: Whether Ray Data is measured too, which takes seconds per pass.
        sections: Names of sections (speed, resume, ledger, cost), separated by commas.

    Returns:
        The rows of all sections, and their ratios.

    Raises:
        ConfigError: A section is unknown.
    """
    folder = Path(tempfile.mkdtemp(prefix="nonet-bench-samples-"))
    result: dict[str, Any] = {"rows": [], "ratio": {}}
    parts: dict[str, Callable[[], tuple[list[Any], dict[str, float]]]] = {
        "speed": lambda: _measure_speed(write_files(folder, 4 * _FILES, rows // _FILES), rounds, ray),
        "resume": lambda: _measure_resume(
            write_files(folder, 4 * _FILES, rows // _FILES), folder, rounds, ray
        ),
        "ledger": _measure_ledger,
        "cost": lambda: measure_cost(folder),
    }
    try:
        for name in sections.split(","):
            if name not in parts:
                raise ConfigError(f"bench samples has no section {name!r}; there are {', '.join(parts)}")
            rows_of_section, ratios = parts[name]()
            result["rows"] += rows_of_section
            result["ratio"] |= ratios
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _measure_speed(files: list[str], rounds: int, ray: bool) -> tuple[list[Any], dict[str, float]]:
    """Time the passes of all contenders over the first `_FILES` files and over all; return rows and ratios."""
    contenders = {
        "ours, row groups shuffled": make_nonet_reader(),
        "ours without the ledger": make_nonet_reader(ledger=False),
        "ours, rows shuffled too": make_nonet_reader(order="rows"),
        "ours, packed": make_nonet_reader(packed=True),
        "pyarrow iter_batches": read_arrow_batches,
        "DataLoader, 2 workers": read_torch_batches,
    }
    if ray:
        _start_ray()
        contenders["Ray iter_torch_batches"] = read_ray_batches
    small_files = files[:_FILES]
    passes = {name: ([], []) for name in contenders}  # of the small files, and of all files
    for read_batches in contenders.values():
        time_pass(read_batches, small_files)  # loads the files into the page cache, and modules
    for _ in range(rounds):
        for name, read_batches in contenders.items():
            for index, read_files in enumerate((small_files, files)):
                passes[name][index].append(time_pass(read_batches, read_files))
    _check_same_rows([read_pass for small, _ in passes.values() for read_pass in small])
    _check_same_rows([read_pass for _, large in passes.values() for read_pass in large])
    summaries = {name: _summarise_passes(small, large) for name, (small, large) in passes.items()}
    rows = [{"reader": name, **summary} for name, summary in summaries.items()]
    ours, slope, first = summaries["ours, row groups shuffled"], "slope krows/s", "first batch ms"
    ratio = {
        f"slope, ours / {name}": ours[slope] / summary[slope]
        for name, summary in summaries.items()
        if not name.startswith("ours")
    }
    ratio["slope, ours with rows shuffled / pyarrow iter_batches"] = (
        summaries["ours, rows shuffled too"][slope] / summaries["pyarrow iter_batches"][slope]
    )
    ratio["slope, ours packed / pyarrow iter_batches over Parquet"] = (
        summaries["ours, packed"][slope] / summaries["pyarrow iter_batches"][slope]
    )
    ratio["CPU without the ledger / with it"] = (
        summaries["ours without the ledger"]["CPU s a Mrow"] / ours["CPU s a Mrow"]
    )
    if ray:
        ratio["first batch, Ray / ours"] = summaries["Ray iter_torch_batches"][first] / ours[first]
    _stop_ray(ray)
    return rows, ratio


def _summarise_passes(small: list[ReadPass], large: list[ReadPass]) -> dict[str, float]:
    """Compute the slope and the fixed seconds from the medians, and the smallest and largest slope of a round.

    CPU time is that of this process, without workers and Ray.
    """
    small_rows, large_rows = small[0].rows, large[0].rows
    small_s, large_s = (
        statistics.median(read_pass.seconds for read_pass in passes) for passes in (small, large)
    )
    slope = (large_rows - small_rows) / max(1e-9, large_s - small_s)  # rows per second
    slopes = sorted(
        (large_rows - small_rows) / max(1e-9, large_pass.seconds - small_pass.seconds)
        for small_pass, large_pass in zip(small, large, strict=True)
    )
    return {
        "slope krows/s": slope / 1e3,
        "from krows/s": slopes[0] / 1e3,
        "to krows/s": slopes[-1] / 1e3,
        "fixed s": max(0.0, small_s - small_rows / slope),
        "first batch ms": 1e3 * statistics.median(read_pass.first_s for read_pass in small),
        "CPU s a Mrow": 1e6 * statistics.median(read_pass.cpu_s for read_pass in large) / large_rows,
    }


def _check_same_rows(passes: list[ReadPass]) -> None:
    """Raise AssertionError unless all passes have read the same number of rows and the same sum of values."""
    sums = {(read_pass.rows, read_pass.total) for read_pass in passes}
    if len(sums) > 1:
        raise AssertionError(f"the readers read different rows: {sorted(sums)}")


def _measure_resume(
    files: list[str], folder: Path, rounds: int, ray: bool
) -> tuple[list[Any], dict[str, float]]:
    """Measure the time to the first batch, at the start of the data and when resuming after 99 % of the rows.

    Earlier calls have loaded the modules. With `ray`, resuming from a checkpoint of Ray Data is measured too.
    """
    from nonet.samples.ledger import SampleLedger, write_snapshot
    from nonet.samples.streams import read

    stream = read(files).shuffle(7, in_group=False)
    feed = stream.open(rows=4096)
    ledger, resume_step = feed.make_ledger(), int(0.99 * feed.steps.steps_per_epoch)
    for step in range(resume_step):
        for part in feed.get_slices(step):
            ledger.lease(part)
        ledger.apply_step(step)
    checkpoint = folder / "commit"
    write_snapshot(ledger.snapshot(), checkpoint)

    def start() -> None:
        next(stream.open(rows=4096).iterate_epoch(0))

    def resume() -> None:
        resumed_feed = stream.open(rows=4096, manifest=SampleLedger.read_manifest(checkpoint))
        resumed_ledger = resumed_feed.make_ledger()
        resumed_ledger.load(checkpoint)
        part = resumed_feed.get_slices(resume_step)[0]
        assert not resumed_ledger.is_done(part)
        next(iter(resumed_feed.iterate_batches([part], resumed_ledger)))

    seconds: dict[str, list[float]] = {"start": [], "resume": []}
    for _ in range(3 * rounds):
        for name, call in (("start", start), ("resume", resume)):
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    start_s, resume_s = (statistics.median(seconds[name]) for name in ("start", "resume"))
    rows = [
        {"first batch": "at 0 %", "ms": 1e3 * start_s},
        {"first batch": "resumed at 99 %", "ms": 1e3 * resume_s},
    ]
    ratio = {"resume at 99 % / first batch at 0 %": resume_s / start_s}
    if ray:
        ray_s = _measure_ray_checkpoint(files, folder)
        rows.append({"first batch": "Ray's checkpoint at 99 %", "ms": 1e3 * ray_s})
        ratio["resume at 99 %, Ray's checkpoint / ours"] = ray_s / resume_s
    return rows, ratio


def _measure_ray_checkpoint(files: list[str], folder: Path) -> float:
    """Measure the seconds to the first batch with a row checkpoint of Ray Data that contains the ids of 99 % of the rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import ray.data
    from ray.data.checkpoint import CheckpointConfig

    _start_ray()
    users = np.concatenate([pq.read_table(file, columns=["user"])["user"].to_numpy() for file in files])
    checkpoint = folder / "ray-checkpoint"
    checkpoint.mkdir()
    pq.write_table(pa.table({"user": np.sort(users)[: int(0.99 * len(users))]}), checkpoint / "ids.parquet")
    context = ray.data.DataContext.get_current()
    context.checkpoint_config = CheckpointConfig(
        id_column="user", checkpoint_path=str(checkpoint), delete_checkpoint_on_success=False
    )
    try:
        began = time.perf_counter()
        (split,) = ray.data.read_parquet(files).streaming_split(1)
        next(iter(split.iter_batches(batch_size=4096, batch_format="pyarrow")))
        return time.perf_counter() - began
    finally:
        context.checkpoint_config = None
        _stop_ray(True)


def _measure_ledger() -> tuple[list[Any], dict[str, float]]:
    """Measure the size of a ledger's state, and the time of a lease.

    One ledger has applied 1e9 rows in order, the other a random half of 10 million rows.
    """
    from nonet.samples.ledger import DataManifest, OrderSlice, SampleLedger

    rows = []
    ordered = SampleLedger(DataManifest.from_rows("rows", 1 << 30), "order", 1 << 30)
    began = time.perf_counter()
    for step, start in enumerate(range(0, 10**9, 4096)):
        part = OrderSlice(step, 0, 0, start, min(start + 4096, 10**9))
        ordered.lease(part)
        ordered.apply(part)
    lease_us = 1e6 * (time.perf_counter() - began) / (step + 1)
    began = time.perf_counter()
    size_bytes = sum(map(len, ordered.snapshot()))
    rows.append(
        {
            "ledger": "1e9 rows in order",
            "bytes": size_bytes,
            "lease and done us": lease_us,
            "snapshot ms": 1e3 * (time.perf_counter() - began),
        }
    )
    scattered = SampleLedger(DataManifest.from_rows("rows", 10**7), "order", 10**7)
    for row in np.random.default_rng(0).permutation(10**7)[: 5 * 10**6].tolist():
        part = OrderSlice(row, 0, 0, row, row + 1)
        scattered.lease(part)
        scattered.apply(part)
    rows.append({"ledger": "a random half of 10 M rows", "bytes": sum(map(len, scattered.snapshot()))})
    return rows, {f"MB, {row['ledger']}": row["bytes"] / 1e6 for row in rows}


def _start_ray() -> None:
    """Start Ray without progress bars."""
    import ray

    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    if not ray.is_initialized():
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False


def _stop_ray(used: bool) -> None:
    if used:
        import ray

        ray.shutdown()
