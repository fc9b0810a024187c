"""`nonet bench wire`: a remote lookup of sparse rows, compared with a bare gloo all-to-all and with Ray calls.

Two processes with one thread each both train and hold half of the rows. Each rank requests 8,192 keys per lookup, whose rows
have 64 floats. The variants:

    bare        Sends the same keys and rows in three all-to-alls (sizes, keys, rows) into reused buffers, with one
                `index_select` at the owner and one permutation at the requesting rank; no hashing, no deduplication.
    pull        `ShardedTables.pull` over gloo.
    pull local  The same through shared memory, which ranks of one machine use.

All variants take turns in one loop, so they have the same noise. Then one trainer requests rows from one shard in another
process ("pull apart"), by both ways in turns, which corresponds to one caller of one Ray actor: Ray keeps results on one
machine in shared memory as well. The actor holds a dense table without hashing. Keys are sent as an argument, rows come back
through the object store, and the caller permutes them once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from nonet.bench.embedding.keys import draw_zipf_ranks, number_of, scatter_ranks
from nonet.bench.embedding.ranks import run_as_rank, run_both_ranks
from nonet.bench.timing import LapTimer

KEYS, DIM, ROWS = 8192, 64, 1_000_000  # keys per lookup, floats per row, rows of the table
_SEED = 7
_BATCHES = 32  # number of batches of keys, which are looked up in turn
_FILL_PARTS = 64  # number of parts in which the rows are created
Variant = Callable[[int], Any]  # takes the number of the round


def measure(rounds: int = 150, ray: bool = True, table: str = "default") -> dict[str, Any]:
    """Return microseconds (median, p10) by variant, wire bytes by codec, and the ratios of medians.

    Args:
        rounds: Number of rounds.
        ray: Whether Ray calls are measured.
        table: "default" is the table of a ShardedTables; "dense" is an `index_select` without hashing, which measures only the
            communication.
    """
    measures = run_both_ranks("nonet.bench.embedding.wire", rounds, table)[0]  # of rank 0
    rows = [{"variant": name, **times} for name, times in measures["times"].items()]
    medians = {name: times["median_us"] for name, times in measures["times"].items()}
    ratio = {
        "pull / bare, uniform": medians["pull uniform"] / medians["bare uniform"],
        "pull / bare, uniform, p10": measures["times"]["pull uniform"]["p10_us"]
        / measures["times"]["bare uniform"]["p10_us"],
        "pull / bare, uniform, CPU time of the process": measures["times"]["pull uniform"]["cpu_us"]
        / measures["times"]["bare uniform"]["cpu_us"],
        "pull local / bare, uniform": medians["pull local uniform"] / medians["bare uniform"],
        "pull / bare, zipf": medians["pull zipf"] / medians["bare zipf"],
        **{f"bytes {name} / naive": share for name, share in measures["bytes"].items()},
    }
    if ray:
        rows.append({"variant": "ray calls uniform", **_summarise_times(_measure_ray(rounds))})
        for name in ("pull apart local", "pull apart"):
            ratio[f"ray calls / {name}, uniform"] = rows[-1]["median_us"] / medians[f"{name} uniform"]
            ratio[f"the same, p10, {name}"] = (
                rows[-1]["p10_us"] / measures["times"][f"{name} uniform"]["p10_us"]
            )
    return {"rows": rows, "ratio": ratio}


def draw_batches(kind: str, rank: int, count: int = _BATCHES) -> list[np.ndarray]:
    """Draw batches of `KEYS` scattered 64-bit ids out of `ROWS`: "uniform" (distinct in a batch) or "zipf" (exponent 1.05)."""
    from nonet.random import rng

    source = rng(_SEED, "bench", kind, rank)
    if kind == "uniform":
        batches = [source.choice(ROWS, KEYS, replace=False) for _ in range(count)]
    else:
        batches = [draw_zipf_ranks(source, ROWS, KEYS) for _ in range(count)]
    return [scatter_ranks(numbers) for numbers in batches]


class DenseRows:
    """A table without hashing, whose rows are found by their number: a lower bound for the time of any lookup."""

    def __init__(self, name: str, dim: int):
        import torch

        self.name, self.dim, self.absent = name, dim, 0
        # Not zeros: those would all be the operating system's one shared zero page.
        self._rows = torch.full((ROWS // 2, dim), 0.5)

    def lookup(self, keys: Any, *, train: bool) -> Any:
        """Return the rows of keys."""
        import torch

        return self._rows.index_select(0, torch.from_numpy(number_of(keys)))


def _run_rank(rank: int, rounds: str, table: str) -> dict[str, Any]:
    """Measure all variants on one rank; return times and bytes on rank 0, and {} on rank 1."""
    import torch.distributed as dist

    variants, compute_byte_shares = _make_variants(rank, table)
    timers = {name: LapTimer(time.process_time) for name in variants}
    for number in range(int(rounds)):
        for name, run_variant in variants.items():
            dist.barrier()
            timers[name].measure(run_variant, number)
    timers |= _measure_apart(rank, int(rounds))
    dist.barrier()
    if rank:
        return {}
    warm_up = int(rounds) // 5  # rounds that are not counted
    times = {name: _summarise_times(timer.drop_laps_before(warm_up)) for name, timer in timers.items()}
    return {"times": times, "bytes": compute_byte_shares()}


def _measure_apart(rank: int, rounds: int) -> dict[str, LapTimer]:
    """Time pulls by one trainer, rank 0, from one shard, rank 1, which correspond to calls of one Ray actor.

    Pulls over gloo and through shared memory take turns of ten pulls.
    """
    import torch
    import torch.distributed as dist

    from nonet.embedding.exchange import RankLayout
    from nonet.embedding.tables import TableSpec
    from nonet.embedding.training import ShardedTables

    tables_by_name = {
        name: ShardedTables(
            {"item": TableSpec(DIM)},
            seed=_SEED,
            layout=RankLayout.separate(rank, 1, 1),
            local=name.endswith("local"),
        )
        for name in ("pull apart", "pull apart local")
    }
    timers = {f"{name} uniform": LapTimer(time.process_time) for name in tables_by_name}
    keys = [torch.from_numpy(batch) for batch in draw_batches("uniform", 0)]
    for turn in range(-1, -(-rounds // 10)):  # turn -1 creates the rows and is not timed
        for name, tables in tables_by_name.items():
            dist.barrier()
            if rank:
                tables.serve()
                continue
            for part in np.array_split(scatter_ranks(np.arange(ROWS)), _FILL_PARTS) if turn < 0 else ():
                tables.pull("item", torch.from_numpy(part))
            for number in range(12):
                # The first two pulls fit the blocks of shared memory to the batch.
                with timers[f"{name} uniform"] if turn >= 0 and number >= 2 else nullcontext():
                    tables.pull("item", keys[(turn + number) % len(keys)], train=False)
            tables.stop()
    return timers


def _measure_ray(rounds: int) -> LapTimer:
    """Time lookups by one caller from one actor.

    Keys are sent inline, since they are below Ray's limit of 100 kB; rows are written once into shared memory.
    """
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)

    @ray.remote(num_cpus=0.5)
    class RayShard:
        def __init__(self) -> None:
            import torch

            torch.set_num_threads(1)
            self._table = torch.full((ROWS, DIM), 0.5)

        def select_rows(self, numbers: np.ndarray) -> np.ndarray:
            import torch

            return self._table.index_select(0, torch.from_numpy(numbers.copy())).numpy()

    try:
        shard, source, timer = RayShard.remote(), np.random.default_rng(2), LapTimer(time.process_time)
        permutation = source.permutation(KEYS)
        for _ in range(rounds):
            numbers = source.integers(0, ROWS, KEYS)
            with timer:
                ray.get(shard.select_rows.remote(numbers))[permutation]
        return timer.drop_laps_before(rounds // 5)
    finally:
        ray.shutdown()


def _summarise_times(times: LapTimer) -> dict[str, float]:
    """Return the median and p10 wall time and the median CPU time in microseconds."""
    p10_s = statistics.quantiles(times.wall_s, n=10)[0]
    return {
        "median_us": times.compute_median_us(),
        "p10_us": 1e6 * p10_s,
        "cpu_us": 1e6 * statistics.median(times.cpu_s),
    }


def _make_variants(rank: int, kind: str) -> tuple[dict[str, Variant], Callable[[], dict[str, float]]]:
    """Return the variants by name, and a function that computes the sent bytes by codec.

    The bytes are relative to sending every key with its fp32 row, without deduplication.
    """
    import torch

    from nonet.embedding.exchange import RankLayout
    from nonet.embedding.tables import TableSpec
    from nonet.embedding.training import ShardedTables

    options: dict[str, Any] = (
        {} if kind == "default" else {"make": lambda name, spec, seed: DenseRows(name, spec.dim)}
    )
    tables_by_codec = {
        codec: ShardedTables(
            {"item": TableSpec(DIM)},
            seed=_SEED,
            layout=RankLayout.fused(rank, 2),
            wire=codec.removesuffix(" local"),
            local=codec.endswith("local"),
            **options,
        )
        for codec in ("fp32", "fp16", "int8", "fp32 local")
    }
    keys = {
        name: [torch.from_numpy(batch) for batch in draw_batches(name, rank)] for name in ("uniform", "zipf")
    }
    _create_rows(tables_by_codec, rank)
    bare = {name: _BareExchange(tables_by_codec["fp32"], keys[name]) for name in keys}

    def pull(codec: str, name: str) -> Variant:
        return lambda number: tables_by_codec[codec].pull("item", keys[name][number % _BATCHES], train=False)

    def compute_byte_shares() -> dict[str, float]:
        naive_bytes = KEYS * (8 + 4 * DIM) * len(keys["zipf"])  # a key takes 8 bytes
        distinct_count = sum(len(batch.unique()) for batch in keys["zipf"])
        row_bytes = {
            codec: tables.count_wire_bytes("item")
            for codec, tables in tables_by_codec.items()
            if not codec.endswith("local")
        }
        return {codec: distinct_count * (8 + size) / naive_bytes for codec, size in row_bytes.items()}

    variants: dict[str, Variant] = {
        "bare uniform": bare["uniform"],
        "pull uniform": pull("fp32", "uniform"),
        "pull local uniform": pull("fp32 local", "uniform"),
        "bare zipf": bare["zipf"],
        "pull zipf": pull("fp32", "zipf"),
        "pull zipf fp16": pull("fp16", "zipf"),
        "pull zipf int8": pull("int8", "zipf"),
    }
    return variants, compute_byte_shares


def _create_rows(tables_by_codec: dict[str, Any], rank: int) -> None:
    """Create the rows of all keys at their owners before anything is timed."""
    all_keys = scatter_ranks(np.arange(ROWS))
    for tables in tables_by_codec.values():
        for part in np.array_split(all_keys[tables.slices.find_owners(all_keys) == rank], _FILL_PARTS):
            tables.tables["item"].lookup(part, train=True)


class _BareExchange:
    """An exchange of sizes, keys and rows over gloo into reused buffers, with one index_select and one permutation.

    Args:
        tables: The tables whose owners of keys are used.
        keys: The batches of keys that this rank requests.
    """

    def __init__(self, tables: Any, keys: list[Any]):
        import torch

        owners = [torch.from_numpy(tables.slices.find_owners(batch.numpy())) for batch in keys]
        self._order = [torch.argsort(owner, stable=True) for owner in owners]
        self._keys = [batch[order].contiguous() for batch, order in zip(keys, self._order, strict=True)]
        self._inverse_order = [torch.argsort(order) for order in self._order]
        self._sizes = [torch.bincount(owner, minlength=2) for owner in owners]
        self._table = torch.full((ROWS // 2, DIM), 0.5)
        self._received_keys = torch.empty(2 * KEYS, dtype=torch.int64)
        self._received_sizes = torch.empty(2, dtype=torch.int64)
        self._selected, self._rows = torch.empty(2 * KEYS, DIM), torch.empty(KEYS, DIM)
        self._out = torch.empty(KEYS, DIM)
        # The rows of the received keys are looked up before the clock starts, so the time has no lookup of keys.
        self._numbers = [
            torch.from_numpy(number_of(self._exchange_keys(batch))) for batch in range(len(keys))
        ]

    def _exchange_keys(self, batch: int) -> np.ndarray:
        """Exchange the keys of a batch once, and return the keys that this rank has received."""
        import torch.distributed as dist

        dist.all_to_all_single(self._received_sizes, self._sizes[batch])
        received, sent = self._received_sizes.tolist(), self._sizes[batch].tolist()
        dist.all_to_all_single(self._received_keys[: sum(received)], self._keys[batch], received, sent)
        return self._received_keys[: sum(received)].numpy().copy()

    def __call__(self, number: int) -> Any:
        import torch
        import torch.distributed as dist

        batch = number % _BATCHES
        sent = self._sizes[batch].tolist()
        dist.all_to_all_single(self._received_sizes, self._sizes[batch])
        received = self._received_sizes.tolist()
        count = sum(received)
        dist.all_to_all_single(self._received_keys[:count], self._keys[batch], received, sent)
        torch.index_select(self._table, 0, self._numbers[batch], out=self._selected[:count])
        dist.all_to_all_single(self._rows, self._selected[:count], sent, received)
        return torch.index_select(self._rows, 0, self._inverse_order[batch], out=self._out)


if __name__ == "__main__":
    run_as_rank(_run_rank)
