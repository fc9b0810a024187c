"""Rollouts that do not wait beside rollouts that do: sleeps in place of work, through the loop that runs use.

8 slots answer 64 groups a step, and an update takes as long as a step's rollout takes on average. Times a group: all the same,
or lognormal, whose 99th percentile is 8 times the median. Synchronous is the same loop with a staleness of 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from nonet.bench.rl.asynchronous_picture import Span, picture_of
from nonet.controller.stages import PromptGroups, overlapped
from nonet.random import rng

_SLOTS, _GROUPS = 8, 64
_SIGMA = math.log(8) / 2.3263  # of a lognormal whose 99th percentile is 8 times its median


def asynchronous(
    steps: int = 30, mean_ms: float = 20.0, repeats: int = 3, staleness: int = 1, picture: str = ""
) -> dict[str, Any]:
    """A row a workload: steps a second of both, the median ratio of interleaved repeats, and groups asked again."""
    rows, ratios = [], {}
    for name in ("even", "lognormal"):
        seconds = _times(name, steps, mean_ms / 1e3)
        found = []
        for _ in range(repeats):
            learning = _run(seconds, 0.0, 0)[0] / steps  # a step's rollout alone, as this machine is now
            waits, _, _ = _run(seconds, learning, 0)
            goes, aborted, oldest = _run(seconds, learning, staleness)
            found.append((waits / goes, waits, goes, aborted, oldest))
        ratio = median(each[0] for each in found)
        rows.append(
            {
                "times": name,
                "synchronous, steps/s": steps / median(each[1] for each in found),
                f"staleness {staleness}, steps/s": steps / median(each[2] for each in found),
                "asked again": max(each[3] for each in found),
                "oldest trained": max(each[4] for each in found),
            }
        )
        ratios[f"{name} times, against synchronous"] = ratio
    if picture:
        seconds = _times("lognormal", 4, mean_ms / 1e3)
        learning, panels = _run(seconds, 0.0, 0)[0] / 4, []
        for old in (0, staleness):
            spans: list[Span] = []
            _run(seconds, learning, old, spans)
            panels.append((f"staleness: {old}", spans))
        Path(picture).write_text(picture_of(panels, _SLOTS), encoding="utf-8")
    return {"rows": rows, "ratio": ratios}


def _times(name: str, steps: int, mean_s: float) -> list[list[float]]:
    """Seconds of each group of each step, the same mean for both workloads."""
    if name == "even":
        return [[mean_s] * _GROUPS] * steps
    drawn = rng(7, "bench async").lognormal(-(_SIGMA**2) / 2, _SIGMA, (steps, _GROUPS))
    return (mean_s * drawn).tolist()


def _run(
    seconds: Sequence[Sequence[float]], learning: float, staleness: int, spans: list[Span] | None = None
) -> tuple[float, int, int]:
    """Seconds of the whole, groups asked again, and the age of the oldest that was trained."""
    groups = PromptGroups(_GROUPS, len(seconds), staleness)
    began = time.perf_counter()

    def sleep(row: int, step: int, length: float) -> dict[str, float]:
        start = time.perf_counter() - began
        time.sleep(length)
        if spans is not None:
            spans.append(Span(row, step, start, time.perf_counter() - began))
        return {}

    with ThreadPoolExecutor(_SLOTS + 1) as threads:
        done = list(
            overlapped(
                groups,
                _SLOTS,
                lambda slot, number, version: threads.submit(
                    sleep, slot, number // _GROUPS, seconds[number // _GROUPS][number % _GROUPS]
                ),
                lambda step, batch, answers: threads.submit(sleep, _SLOTS, step, learning),
            )
        )
        wall = time.perf_counter() - began
    return wall, groups.aborted, max(age for each in done for age in each.ages)
