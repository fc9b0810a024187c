"""How much of the sparse time the pipeline hides: `nonet bench pipeline`.

A trainer and a shard, two processes over gloo, 8,192 Zipf keys x 64 a step; every exchange of the trainer is delayed by
`wire_ms`, as a slow network would (a sleep, so it costs no core). Dense work is on a device (the trainer's thread waits, as
for a GPU, and leaves its core to the others) or on this core (a matrix product repeated; then two busy processes and their
network threads share the machine's cores, and on two of them the CPU itself is a limit). Runs without, with and again without
overlap take turns: hidden = (time without - time with) / the shorter of sparse and dense time, and the two runs without
give the noise in the same unit. The rows must be equal bit for bit.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from nonet.bench.embedding.ranks import run_as_rank, run_both_ranks
from nonet.bench.embedding.wire import DIM, draw_batches
from nonet.bench.timing import LapTimer

_STEPS = 40
_RUNS = (1, None, 1)  # depth of the runs that take turns; None: the depth asked for
# name -> (delay of an exchange, dense time, where): dense longer than sparse, and the other way round.
CASES = {
    "dense longer, on a device": (8.0, 40.0, "device"),
    "sparse longer, on a device": (20.0, 25.0, "device"),
    "dense longer, on this core": (8.0, 40.0, "core"),
    "sparse longer, on this core": (20.0, 25.0, "core"),
}


def measure(rounds: int = 3, depth: int = 3) -> dict[str, Any]:
    """Return milliseconds of a step by case, and the hidden share (median over rounds); `bits equal` is 1.0 if they are equal."""
    trainer, shard = run_both_ranks("nonet.bench.embedding.pipeline", rounds, depth)
    rows, ratio = [], {}
    for name, (wire_ms, *_) in CASES.items():
        medians = {key: statistics.median(run[key] for run in trainer[name]) for key in trainer[name][0]}
        rows.append({"case": name, "wire_ms": wire_ms, **medians})
        ratio[f"hidden, {name}"] = medians["hidden"]
        ratio[f"hidden, {name}, least of the rounds"] = min(run["hidden"] for run in trainer[name])
        ratio[f"noise, {name}"] = medians["noise"]
    ratio["bits equal"] = float(all(len(set(runs)) == 1 for runs in shard))
    return {"rows": rows, "ratio": ratio}


def _run_rank(rank: int, rounds: str, depth: str) -> Any:
    return _serve_shard(int(rounds)) if rank else _train_rank(int(rounds), int(depth))


def _make_tables(rank: int) -> Any:
    """Make the sharded tables of a rank."""
    from nonet.embedding.exchange import RankLayout
    from nonet.embedding.tables import TableSpec
    from nonet.embedding.training import ShardedTables

    return ShardedTables(
        {"item": TableSpec(DIM, init_scale=0.5)}, seed=7, layout=RankLayout.separate(rank, 1, 1)
    )


def _serve_shard(rounds: int) -> list[list[str]]:
    """Serve as the shard, and return the hashes of the rows after each turn of runs, which see the same batches."""
    turns = []
    for _ in range(rounds * len(CASES)):
        turn = []
        for _ in _RUNS:
            world = _make_tables(1)
            world.serve()
            turn.append(world.tables["item"].hash_state())
        turns.append(turn)
    return turns


def _train_rank(rounds: int, depth: int) -> dict[str, list[dict[str, float]]]:
    """Train as the trainer, and return the numbers of each round by case."""
    import torch

    keys = [torch.from_numpy(batch) for batch in draw_batches("zipf", 0)]
    numbers_of: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name, (wire_ms, dense_ms, where) in CASES.items():
            runs = [_time_run(keys, wire_ms, dense_ms, where, run_depth or depth) for run_depth in _RUNS]
            (first, dense), (on, _), (again, later) = runs
            off, dense = (first + again) / 2, (dense + later) / 2
            shorter = min(off - dense, dense)
            numbers = {"dense": dense, "sparse": off - dense, "off": off, "on": on}
            numbers_of[name].append(
                numbers | {"hidden": (off - on) / shorter, "noise": abs(first - again) / shorter}
            )
    return numbers_of


def _time_run(
    keys: list[Any], wire_ms: float, dense_ms: float, where: str, depth: int
) -> tuple[float, float]:
    """Return the milliseconds of a step, and how many of them are dense."""
    import torch

    from nonet.embedding.training import PrefetchPipeline

    world, dense = _make_tables(0), LapTimer()
    _delay_exchanges(world, wire_ms / 1e3)
    weight = torch.randn(256, 256)

    def compute(number: int, data: Any, rows: Any) -> Any:
        until = time.perf_counter() + dense_ms / 1e3
        with dense:
            if where == "device":
                time.sleep(dense_ms / 1e3)
            while time.perf_counter() < until:
                torch.mm(weight, weight)
            return {"item": torch.sin(rows["item"])}, None

    running = PrefetchPipeline(
        world, lambda number: keys[number % len(keys)], lambda data: {"item": data}, compute, depth=depth
    )
    world.pull("item", keys[0][:0])  # the shard may still hash the rows of the run before
    with LapTimer() as timer:
        running.run(0, _STEPS)
    world.stop()
    return 1e3 * timer.last_s / _STEPS, 1e3 * sum(dense.wall_s) / _STEPS


def _delay_exchanges(world: Any, seconds: float) -> None:
    """Delay every exchange of these tables."""
    ask = world.wire.exchange_keys

    def ask_slowly(*arguments: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return ask(*arguments, **named)

    world.wire.exchange_keys = ask_slowly


if __name__ == "__main__":
    run_as_rank(_run_rank)
