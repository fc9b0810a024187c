"""`nonet bench samples`: rows a second from Parquet to torch beside pyarrow, Ray Data and DataLoader; resuming; the ledger.

Contenders take turns over the same files, `rounds` times; medians. Each reads N rows and 4N rows of distinct files,
which separates fixed seconds from the slope: slope = 3N rows / (seconds of 4N - seconds of N). All must read the same
sum of values. The page cache is warm.
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

_FILES = 4  # of N rows; 4N have four times as many


def bench_samples(
    rows: int = 500_000, rounds: int = 5, ray: bool = True, sections: str = "speed,resume,ledger,cost"
) -> dict[str, Any]:
    """Run the sections.

    Args:
        rows: Number N of rows.
        rounds: Rounds of each contender.
        ray: Whether Ray takes part (seconds for each pass).
        sections: speed, resume, ledger, cost.

    Raises:
        ConfigError: A section is unknown.
    """
    folder = Path(tempfile.mkdtemp(prefix="nonet-bench-samples-"))
    made: dict[str, Any] = {"rows": [], "ratio": {}}
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
            made["rows"] += rows_of_section
            made["ratio"] |= ratios
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return made


def _measure_speed(files: list[str], rounds: int, ray: bool) -> tuple[list[Any], dict[str, float]]:
    """Time the passes of all contenders."""
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
    small, passes = files[:_FILES], {name: ([], []) for name in contenders}
    for batches in contenders.values():
        time_pass(batches, small)  # files into the page cache, modules in memory
    for _ in range(rounds):
        for name, batches in contenders.items():
            for which, of in enumerate((small, files)):
                passes[name][which].append(time_pass(batches, of))
    _check_same_rows([each for pair in passes.values() for each in pair[0]])
    _check_same_rows([each for pair in passes.values() for each in pair[1]])
    facts = {name: _summarise_passes(*pair) for name, pair in passes.items()}
    rows = [{"reader": name, **fact} for name, fact in facts.items()]
    mine, slope, first = facts["ours, row groups shuffled"], "slope krows/s", "first batch ms"
    ratio = {
        f"slope, ours / {name}": mine[slope] / fact[slope]
        for name, fact in facts.items()
        if not name.startswith("ours")
    }
    ratio["slope, ours with rows shuffled / pyarrow iter_batches"] = (
        facts["ours, rows shuffled too"][slope] / facts["pyarrow iter_batches"][slope]
    )
    ratio["slope, ours packed / pyarrow iter_batches over Parquet"] = (
        facts["ours, packed"][slope] / facts["pyarrow iter_batches"][slope]
    )
    ratio["CPU without the ledger / with it"] = (
        facts["ours without the ledger"]["CPU s a Mrow"] / mine["CPU s a Mrow"]
    )
    if ray:
        ratio["first batch, Ray / ours"] = facts["Ray iter_torch_batches"][first] / mine[first]
    _stop_ray(ray)
    return rows, ratio


def _summarise_passes(small: list[ReadPass], large: list[ReadPass]) -> dict[str, float]:
    """Compute fixed seconds and slope from medians; CPU time is that of this process alone (not of workers or Ray)."""
    n, wide = small[0].rows, large[0].rows
    few, many = (statistics.median(each.seconds for each in passes) for passes in (small, large))
    slope = (wide - n) / max(1e-9, many - few)
    spread = sorted((wide - n) / max(1e-9, b.seconds - a.seconds) for a, b in zip(small, large, strict=True))
    return {
        "slope krows/s": slope / 1e3,
        "from krows/s": spread[0] / 1e3,
        "to krows/s": spread[-1] / 1e3,
        "fixed s": max(0.0, few - n / slope),
        "first batch ms": 1e3 * statistics.median(each.first_s for each in small),
        "CPU s a Mrow": 1e6 * statistics.median(each.cpu_s for each in large) / wide,
    }


def _check_same_rows(passes: list[ReadPass]) -> None:
    if len({(each.total, each.rows) for each in passes}) > 1:
        raise AssertionError(
            f"the readers read different rows: {sorted({(p.rows, p.total) for p in passes})}"
        )


def _measure_resume(
    files: list[str], folder: Path, rounds: int, ray: bool
) -> tuple[list[Any], dict[str, float]]:
    """Measure the seconds to the first batch with loaded modules: at the start, and after 99 % of the rows."""
    from nonet.samples.ledger import SampleLedger, write_snapshot
    from nonet.samples.streams import read

    stream = read(files).shuffle(7, in_group=False)
    feed = stream.open(rows=4096)
    ledger, at = feed.make_ledger(), int(0.99 * feed.steps.an_epoch)
    for step in range(at):
        for part in feed.get_slices(step):
            ledger.lease(part)
        ledger.apply_step(step)
    commit = folder / "commit"
    write_snapshot(ledger.snapshot(), commit)

    def start() -> None:
        next(stream.open(rows=4096).iterate_epoch(0))

    def resume() -> None:
        again = stream.open(rows=4096, manifest=SampleLedger.read_manifest(commit))
        account = again.make_ledger()
        account.load(commit)
        part = again.get_slices(at)[0]
        assert not account.is_done(part)
        next(iter(again.iterate_batches([part], account)))

    seconds: dict[str, list[float]] = {"start": [], "resume": []}
    for _ in range(3 * rounds):
        for name, call in (("start", start), ("resume", resume)):
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    begun, resumed = (statistics.median(seconds[name]) for name in ("start", "resume"))
    rows = [
        {"first batch": "at 0 %", "ms": 1e3 * begun},
        {"first batch": "resumed at 99 %", "ms": 1e3 * resumed},
    ]
    ratio = {"resume at 99 % / first batch at 0 %": resumed / begun}
    if ray:
        theirs = _measure_ray_checkpoint(files, folder)
        rows.append({"first batch": "Ray's checkpoint at 99 %", "ms": 1e3 * theirs})
        ratio["resume at 99 %, Ray's checkpoint / ours"] = theirs / resumed
    return rows, ratio


def _measure_ray_checkpoint(files: list[str], folder: Path) -> float:
    """Measure the seconds to the first batch with Ray Data's row checkpoint, which has the ids of 99 % of the rows by `user`."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import ray.data
    from ray.data.checkpoint import CheckpointConfig

    _start_ray()
    users = np.concatenate([pq.read_table(file, columns=["user"])["user"].to_numpy() for file in files])
    place = folder / "ray-checkpoint"
    place.mkdir()
    pq.write_table(pa.table({"user": np.sort(users)[: int(0.99 * len(users))]}), place / "ids.parquet")
    context = ray.data.DataContext.get_current()
    context.checkpoint_config = CheckpointConfig(
        id_column="user", checkpoint_path=str(place), delete_checkpoint_on_success=False
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
    """Measure the bytes of a ledger's state and the cost of a lease.

    States are 1e9 rows in order, and 10 M rows of which a random half is done.
    """
    from nonet.samples.ledger import DataManifest, OrderSlice, SampleLedger

    rows = []
    whole = SampleLedger(DataManifest.from_rows("rows", 1 << 30), "order", 1 << 30)
    began = time.perf_counter()
    for step, start in enumerate(range(0, 10**9, 4096)):
        part = OrderSlice(step, 0, 0, start, min(start + 4096, 10**9))
        whole.lease(part)
        whole.apply(part)
    micros = 1e6 * (time.perf_counter() - began) / (step + 1)
    began = time.perf_counter()
    size = sum(map(len, whole.snapshot()))
    rows.append(
        {
            "ledger": "1e9 rows in order",
            "bytes": size,
            "lease and done us": micros,
            "snapshot ms": 1e3 * (time.perf_counter() - began),
        }
    )
    half = SampleLedger(DataManifest.from_rows("rows", 10**7), "order", 10**7)
    for place in np.random.default_rng(0).permutation(10**7)[: 5 * 10**6].tolist():
        part = OrderSlice(place, 0, 0, place, place + 1)
        half.lease(part)
        half.apply(part)
    rows.append({"ledger": "a random half of 10 M rows", "bytes": sum(map(len, half.snapshot()))})
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
