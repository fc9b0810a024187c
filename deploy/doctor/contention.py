"""What a step gains from torch threads, and loses when several processes compute at once and wait for the slowest.

Rank 0 takes a step alone with one thread, alone with several, then all ranks take it in lockstep with one thread each, round by
round: threads and processes are compared on the same seconds of the same cores, so that a busy neighbour, or cores that
are halves of one, cannot favour either. Wall clock, medians.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from nonet.controller.plan import MOST_THREADS
from nonet.deploy.doctor.ranks import beside
from nonet.deploy.doctor.reference_steps import decode_step, train_step, update_step
from nonet.timing import Times
from nonet.workers.runtime import Rendezvous, join_process_group, leave

Points = dict[str, tuple[tuple[float, float], ...]]
_STEPS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "train": (train_step, (64, 3, 8, 50, 3)),
    "update": (update_step, (64, 3, 32, 16)),
    "decode": (decode_step, (64, 3, 32, 16)),
}
_ROUNDS, _MOST = 9, 16


def measure_crowd() -> tuple[Points, Points]:
    """(torch threads, speed over one) and (busy processes, slowdown of each), by kind of step, for two and for as many
    as there are cores; nothing on one core.
    """
    cores = min(_MOST, len(os.sched_getaffinity(0)))
    speeds: Points = dict.fromkeys(_STEPS, ())
    slowdowns: Points = dict.fromkeys(_STEPS, ())
    for ranks in sorted({2, cores}):
        if 1 < ranks <= cores:
            for kind, (speed, slowdown) in _crowd(ranks).items():
                speeds[kind] += ((float(min(ranks, MOST_THREADS)), speed),)
                slowdowns[kind] += ((float(ranks), slowdown),)
    return speeds, slowdowns


def _crowd(ranks: int) -> dict[str, tuple[float, float]]:
    with beside(crowd_rank, ranks) as (host, port):
        return crowd_rank(host, port, 0, ranks)


def crowd_rank(host: str, port: int, rank: int, ranks: int) -> dict[str, tuple[float, float]]:
    """One of the processes: (speed of threads, slowdown of lockstep) by kind; rank 0's are the ones that mean something."""
    torch.set_num_threads(1)
    member = join_process_group(Rendezvous(host, port, 0, ranks, 0), rank)
    try:
        return {
            kind: _compared(make(*shape)[1], rank, min(ranks, MOST_THREADS), member.trainers)
            for kind, (make, shape) in _STEPS.items()
        }
    finally:
        leave(member)


def _compared(step: Callable[[], None], rank: int, threads: int, group: Any) -> tuple[float, float]:
    step()
    alone, threaded, crowded = Times(), Times(), Times()
    for _ in range(_ROUNDS):
        torch.distributed.barrier(group)
        if rank == 0:
            with alone:
                step()
            torch.set_num_threads(threads)
            step()
            with threaded:
                step()
            torch.set_num_threads(1)
        torch.distributed.barrier(group)
        with crowded:
            step()
            torch.distributed.barrier(group)
    if rank:
        return 1.0, 1.0
    one = alone.median_s()
    return one / threaded.median_s(), max(1.0, crowded.median_s() / one)
