"""Remote lookup end to end against a bare gloo all-to-all, and against Ray calls: `nonet bench wire`.

Two processes, one thread each, both train and hold half the rows; 8,192 keys x 64 floats a rank. The bare side sends the
same keys and rows (sizes, keys, rows: three all-to-alls into kept buffers), one `index_select` at the owner, one permute at
the asker; no hashing, no dedup, no agreement. "pull" is over gloo too; "pull local" is what ranks of one machine do, through
shared memory. All variants take turns in one loop, so they meet the same noise. Then one trainer asks one shard apart, both
ways in turns, as one caller asks one actor: Ray keeps results on one machine in shared memory as well. The actor holds a
dense table without hashing, keys go as an argument, rows come back through the object store, one permute at the caller.
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
from nonet.timing import LapTimer

KEYS, DIM, ROWS = 8192, 64, 1_000_000
_SEED = 7
Variant = Callable[[int], Any]


def measure(rounds: int = 150, ray: bool = True, table: str = "default") -> dict[str, Any]:
    """Return microseconds (median, p10) by variant, wire bytes by codec, and the ratios of medians.

    Args:
        rounds: Number of rounds.
        ray: Whether Ray calls are measured.
        table: "default" is the table of a ShardedTables; "dense" is an `index_select` without hashing, which shows
            the wire alone.
    """
    measures = run_both_ranks("nonet.bench.embedding.wire", rounds, table)[0]
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


def draw_batches(kind: str, rank: int, count: int = 32) -> list[np.ndarray]:
    """Draw batches of 8,192 keys: scattered 64-bit ids of a million, uniform (distinct in a batch) or Zipf 1.05."""
    from nonet.random import rng

    source = rng(_SEED, "bench", kind, rank)
    if kind == "uniform":
        picks = [source.choice(ROWS, KEYS, replace=False) for _ in range(count)]
    else:
        picks = [draw_zipf_ranks(source, ROWS, KEYS) for _ in range(count)]
    return [scatter_ranks(pick) for pick in picks]


class DenseRows:
    """Rows by number without a hash table: the lower bound of any lookup."""

    def __init__(self, name: str, dim: int):
        import torch

        self.name, self.dim, self.absent = name, dim, 0
        self._rows = torch.full(
            (ROWS // 2, dim), 0.5
        )  # written, else all rows are the kernel's one zero page

    def lookup(self, keys: Any, *, train: bool) -> Any:
        """Return the rows of keys."""
        import torch

        return self._rows.index_select(0, torch.from_numpy(number_of(keys)))


def _run_rank(rank: int, rounds: str, table: str) -> dict[str, Any]:
    """Measure all variants on one rank."""
    import torch.distributed as dist

    variants, bytes_of = _make_variants(rank, table)
    taken = {name: LapTimer(time.process_time) for name in variants}
    for number in range(int(rounds)):
        for name, once in variants.items():
            dist.barrier()
            taken[name].measure(once, number)
    taken |= _measure_apart(rank, int(rounds))
    dist.barrier()
    if rank:
        return {}
    times = {name: _summarise_times(each.drop_laps_before(int(rounds) // 5)) for name, each in taken.items()}
    return {"times": times, "bytes": bytes_of()}


def _measure_apart(rank: int, rounds: int) -> dict[str, LapTimer]:
    """Time pulls by one trainer from one shard, which correspond to one caller of Ray actors.

    They run over gloo and through shared memory, in turns of ten.
    """
    import torch
    import torch.distributed as dist

    from nonet.embedding.exchange import RankLayout
    from nonet.embedding.tables import TableSpec
    from nonet.embedding.training import ShardedTables

    worlds = {
        name: ShardedTables(
            {"item": TableSpec(DIM)},
            seed=_SEED,
            layout=RankLayout.separate(rank, 1, 1),
            local=name.endswith("local"),
        )
        for name in ("pull apart", "pull apart local")
    }
    taken = {f"{name} uniform": LapTimer(time.process_time) for name in worlds}
    keys = [torch.from_numpy(batch) for batch in draw_batches("uniform", 0)]
    for turn in range(-1, -(-rounds // 10)):
        for name, world in worlds.items():
            dist.barrier()
            if rank:
                world.serve()
                continue
            for part in np.array_split(scatter_ranks(np.arange(ROWS)), 64) if turn < 0 else ():
                world.pull("item", torch.from_numpy(part))
            for number in range(12):
                # The first two fit the blocks to the batch.
                with taken[f"{name} uniform"] if turn >= 0 and number >= 2 else nullcontext():
                    world.pull("item", keys[(turn + number) % len(keys)], train=False)
            world.stop()
    return taken


def _measure_ray(rounds: int) -> LapTimer:
    """Time one caller's lookups from one actor: keys inline below Ray's 100 kB, rows written once into shared memory."""
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
        shard, source, taken = RayShard.remote(), np.random.default_rng(2), LapTimer(time.process_time)
        back = source.permutation(KEYS)
        for _ in range(rounds):
            numbers = source.integers(0, ROWS, KEYS)
            with taken:
                ray.get(shard.select_rows.remote(numbers))[back]
        return taken.drop_laps_before(rounds // 5)
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
    """Return the variants by name, and a function that computes the wire bytes by codec relative to naive ones."""
    import torch

    from nonet.embedding.exchange import RankLayout
    from nonet.embedding.tables import TableSpec
    from nonet.embedding.training import ShardedTables

    make: dict[str, Any] = (
        {} if kind == "default" else {"make": lambda name, spec, seed: DenseRows(name, spec.dim)}
    )
    worlds = {
        codec: ShardedTables(
            {"item": TableSpec(DIM)},
            seed=_SEED,
            layout=RankLayout.fused(rank, 2),
            wire=codec.removesuffix(" local"),
            local=codec.endswith("local"),
            **make,
        )
        for codec in ("fp32", "fp16", "int8", "fp32 local")
    }
    keys = {
        name: [torch.from_numpy(batch) for batch in draw_batches(name, rank)] for name in ("uniform", "zipf")
    }
    _fill(worlds, rank)
    bare = {name: _Bare(worlds["fp32"], keys[name]) for name in keys}

    def pull(codec: str, name: str) -> Variant:
        return lambda number: worlds[codec].pull("item", keys[name][number % 32], train=False)

    def compute_byte_shares() -> dict[str, float]:
        naive = KEYS * (8 + 4 * DIM) * len(keys["zipf"])
        distinct = sum(len(batch.unique()) for batch in keys["zipf"])
        of_row = {
            codec: world.count_wire_bytes("item")
            for codec, world in worlds.items()
            if not codec.endswith("local")
        }
        return {codec: distinct * (8 + width) / naive for codec, width in of_row.items()}

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


def _fill(worlds: dict[str, Any], rank: int) -> None:
    """Create the rows of all keys at their owners before anything is timed."""
    every = scatter_ranks(np.arange(ROWS))
    for world in worlds.values():
        for part in np.array_split(every[world.slices.find_owners(every) == rank], 64):
            world.tables["item"].lookup(part, train=True)


class _Bare:
    """A bare exchange of sizes, keys and rows over gloo into kept buffers, with one index_select and one permute."""

    def __init__(self, world: Any, keys: list[Any]):
        import torch

        owners = [torch.from_numpy(world.slices.find_owners(batch.numpy())) for batch in keys]
        self._order = [torch.argsort(owner, stable=True) for owner in owners]
        self._keys = [batch[order].contiguous() for batch, order in zip(keys, self._order, strict=True)]
        self._back = [torch.argsort(order) for order in self._order]
        self._sizes = [torch.bincount(owner, minlength=2) for owner in owners]
        self._table = torch.full((ROWS // 2, DIM), 0.5)
        self._asked = torch.empty(2 * KEYS, dtype=torch.int64)
        self._got_sizes = torch.empty(2, dtype=torch.int64)
        self._selected, self._rows = torch.empty(2 * KEYS, DIM), torch.empty(KEYS, DIM)
        self._out = torch.empty(KEYS, DIM)
        # Which row a key means costs the bare side nothing: it is known before the clock starts.
        self._numbers = [torch.from_numpy(number_of(self._exchange_keys(at))) for at in range(len(keys))]

    def _exchange_keys(self, at: int) -> np.ndarray:
        """Exchange the keys of a batch once, and return the keys that this rank is asked for."""
        import torch.distributed as dist

        dist.all_to_all_single(self._got_sizes, self._sizes[at])
        got, sent = self._got_sizes.tolist(), self._sizes[at].tolist()
        dist.all_to_all_single(self._asked[: sum(got)], self._keys[at], got, sent)
        return self._asked[: sum(got)].numpy().copy()

    def __call__(self, number: int) -> Any:
        import torch
        import torch.distributed as dist

        at = number % 32
        sent = self._sizes[at].tolist()
        dist.all_to_all_single(self._got_sizes, self._sizes[at])
        got = self._got_sizes.tolist()
        count = sum(got)
        dist.all_to_all_single(self._asked[:count], self._keys[at], got, sent)
        torch.index_select(self._table, 0, self._numbers[at], out=self._selected[:count])
        dist.all_to_all_single(self._rows, self._selected[:count], sent, got)
        return torch.index_select(self._rows, 0, self._back[at], out=self._out)


if __name__ == "__main__":
    run_as_rank(_run_rank)
