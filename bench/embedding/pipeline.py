"""How much of the sparse time the pipeline hides: `python -m nonet.bench.embedding.pipeline`.

A trainer and a shard, two processes over gloo, 8,192 Zipf keys x 64 a step; every exchange of the trainer is delayed by
`wire_ms`, as a slow network would (a sleep, so it costs no core). Dense work is on a device (the trainer's thread waits, as
for a GPU, and leaves its core to the others) or on this core (a matrix product repeated; then two busy processes and their
network threads share the machine's cores, and on two of them the CPU itself is a limit). Runs without, with and again without
overlap take turns: hidden = (time without - time with) / the shorter of sparse and dense time, and the two runs without
give the noise in the same unit. The rows must be equal bit for bit.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from nonet.bench.embedding.wire import DIM, batches

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
    """Rows of milliseconds a step by case, and the share hidden (median over rounds); `bits equal` is 1.0 when they are."""
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "nonet.bench.embedding.pipeline",
                    str(rank),
                    folder,
                    str(rounds),
                    str(depth),
                ]
            )
            for rank in range(2)
        ]
        for process in started:
            if process.wait(timeout=300):
                raise RuntimeError(f"a rank of the bench failed with exit code {process.returncode}")
        trainer, shard = (json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2))
    rows, ratio = [], {}
    for name, (wire_ms, *_) in CASES.items():
        found = {key: statistics.median(run[key] for run in trainer[name]) for key in trainer[name][0]}
        rows.append({"case": name, "wire_ms": wire_ms, **found})
        ratio[f"hidden, {name}"] = found["hidden"]
        ratio[f"hidden, {name}, least of the rounds"] = min(run["hidden"] for run in trainer[name])
        ratio[f"noise, {name}"] = found["noise"]
    ratio["bits equal"] = float(all(len(set(runs)) == 1 for runs in shard))
    return {"rows": rows, "ratio": ratio}


def _rank(rank: int, folder: Path, rounds: int, depth: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    found = _trains(rounds, depth) if rank == 0 else _serves(rounds)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _world(rank: int) -> Any:
    from nonet.embedding.exchange import Layout
    from nonet.embedding.tables import TableSpec
    from nonet.embedding.training import SparseWorld

    return SparseWorld({"item": TableSpec(DIM, init_scale=0.5)}, seed=7, layout=Layout.apart(rank, 1, 1))


def _serves(rounds: int) -> list[list[str]]:
    """Hashes of the rows after each turn of runs, which see the same batches."""
    turns = []
    for _ in range(rounds * len(CASES)):
        turn = []
        for _ in _RUNS:
            world = _world(1)
            world.serve()
            turn.append(world.tables["item"].state_hash())
        turns.append(turn)
    return turns


def _trains(rounds: int, depth: int) -> dict[str, list[dict[str, float]]]:
    import torch

    keys = [torch.from_numpy(batch) for batch in batches("zipf", 0)]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name, (wire_ms, dense_ms, where) in CASES.items():
            runs = [_timed(keys, wire_ms, dense_ms, where, wanted or depth) for wanted in _RUNS]
            (first, dense), (on, _), (again, later) = runs
            off, dense = (first + again) / 2, (dense + later) / 2
            shorter = min(off - dense, dense)
            numbers = {"dense": dense, "sparse": off - dense, "off": off, "on": on}
            found[name].append(
                numbers | {"hidden": (off - on) / shorter, "noise": abs(first - again) / shorter}
            )
    return found


def _timed(keys: list[Any], wire_ms: float, dense_ms: float, where: str, depth: int) -> tuple[float, float]:
    """Milliseconds a step, and how many of them are dense."""
    import torch

    from nonet.embedding.training import Pipeline

    world, dense = _world(0), []
    _delay(world, wire_ms / 1e3)
    weight = torch.randn(256, 256)

    def compute(number: int, data: Any, rows: Any) -> Any:
        began = time.perf_counter()
        if where == "device":
            time.sleep(dense_ms / 1e3)
        while time.perf_counter() - began < dense_ms / 1e3:
            torch.mm(weight, weight)
        grads = torch.sin(rows["item"])
        dense.append(time.perf_counter() - began)
        return {"item": grads}, None

    running = Pipeline(
        world, lambda number: keys[number % len(keys)], lambda data: {"item": data}, compute, depth=depth
    )
    world.pull("item", keys[0][:0])  # the shard may still hash the rows of the run before
    began = time.perf_counter()
    running.run(0, _STEPS)
    taken = 1e3 * (time.perf_counter() - began) / _STEPS
    world.stop()
    return taken, 1e3 * float(np.sum(dense)) / _STEPS


def _delay(world: Any, seconds: float) -> None:
    """Every exchange of this world takes so much longer."""
    ask = world.wire.ask

    def slow(*given: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return ask(*given, **named)

    world.wire.ask = slow


def main() -> None:
    """Print the rows and ratios; with RANK FOLDER ROUNDS DEPTH be one of the two processes."""
    if len(sys.argv) == 5:
        _rank(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
        return
    found = measure()
    for row in found["rows"]:
        print(
            json.dumps(
                {name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()}
            )
        )
    print(json.dumps({name: round(value, 3) for name, value in found["ratio"].items()}, indent=1))


if __name__ == "__main__":
    main()
