"""How much slower compute gets when several processes compute at once: caches, memory and waiting for the slowest of each step.

Ranks take train steps alone and in lockstep, in turn, round by round, so that a neighbour's noise falls on both. Wall clock.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from nonet.deploy.probes import train_step, update_step
from nonet.workers.gang import Gang, join, leave, open_store

_SHAPES = ((train_step, (64, 3, 8, 50, 3)), (update_step, (64, 3, 32, 16)))
_ROUNDS, _STEPS, _MOST = 5, 2, 16


def measure_crowd() -> tuple[tuple[float, float], ...]:
    """(busy processes, slowdown) for two, and for as many as there are cores; nothing on one core."""
    cores = min(_MOST, len(os.sched_getaffinity(0)))
    return tuple((float(ranks), _crowd(ranks)) for ranks in sorted({2, cores}) if 1 < ranks <= cores)


def _crowd(ranks: int) -> float:
    host, port, store = open_store()
    code = "from nonet.deploy.crowd_measures import crowd_rank; crowd_rank({!r}, {}, {}, {})"
    others = [
        subprocess.Popen([sys.executable, "-c", code.format(host, port, rank, ranks)])
        for rank in range(1, ranks)
    ]
    try:
        return crowd_rank(host, port, 0, ranks)
    finally:
        for other in others:
            try:
                other.wait(60)
            except subprocess.TimeoutExpired:
                other.kill()
        del store


def crowd_rank(host: str, port: int, rank: int, ranks: int) -> float:
    """One of the processes: the slowdown of lockstep over rank 0 alone, a median over rounds and kinds of step."""
    torch.set_num_threads(1)
    member = join(Gang(host, port, 0, ranks, 0), rank)
    try:
        found = []
        for make, shape in _SHAPES:
            step = make(*shape)[1]
            step()
            found += [_slowdown(step, rank, member.trainers) for _ in range(_ROUNDS)]
        return max(1.0, statistics.median(found))
    finally:
        leave(member)


def _slowdown(step: Callable[[], None], rank: int, group: object) -> float:
    """Seconds of steps in lockstep over seconds of as many on rank 0 while the others wait."""
    torch.distributed.barrier(group)
    began = time.perf_counter()
    if rank == 0:
        for _ in range(_STEPS):
            step()
    alone = time.perf_counter() - began
    torch.distributed.barrier(group)
    began = time.perf_counter()
    for _ in range(_STEPS):
        step()
        torch.distributed.barrier(group)
    return (time.perf_counter() - began) / max(alone, 1e-9)
