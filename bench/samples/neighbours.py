"""`nonet bench neighbours`: drawing neighbours of events from a graph as of their times, on one core."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from nonet.samples.batches.graphs import Graph, Graphs
from nonet.samples.sequences import Sequences, build_sequences

_GRAPHS = {
    "item-item": Graph(edges="item-item", window=3, half_life=30 * 86400.0),
    "item-user": Graph(edges="item-user"),
    "user-item": Graph(edges="user-item"),
}
_SPAN_S, _LOOP_ROWS = 365 * 86400, 2000


def bench_neighbours(
    events: int = 1_000_000,
    users: int = 20_000,
    items: int = 5_000,
    rows: int = 100_000,
    rounds: int = 5,
    seed: int = 7,
) -> dict[str, Any]:
    """Draw 10 neighbours for events of a log, and compare with a loop that calls `Generator.choice` for each event.

    Args:
        events: Number of events of the log, whose items are drawn with probabilities that fall with their rank.
        users: Number of users.
        items: Number of items.
        rows: Number of events for which neighbours are drawn.
        rounds: Number of rounds, whose median is reported.
        seed: Seed of the log.

    Returns:
        The events per second of CPU time by graph, with and without the counts of two hops.
    """
    seq = _make_sequences(events, users, items, seed)
    measured: list[dict[str, Any]] = []
    ratio = {}
    for name, options in _GRAPHS.items():
        build_s, graphs = _measure_cpu_s(partial(Graphs.build, {"g": options}, seq, items, {}, seed))
        index = np.random.default_rng(seed).integers(0, len(seq.item), rows)
        speeds = {
            features[-1]: rows / _measure_median_s(partial(_draw, graphs, seq, index, features), rounds)
            for features in (["g"], ["g", "g_2hop"])
        }
        draw_in_loop = partial(_draw_in_loop, graphs, options, seq, index[:_LOOP_ROWS])
        loop_speed = _LOOP_ROWS / _measure_median_s(draw_in_loop, rounds)
        edges = len(graphs.graphs["g"].edges.time)
        measured.append(
            {
                "graph": name,
                "edges": edges,
                "built, million edges/s": edges / build_s / 1e6,
                "events/s": speeds["g"],
                "events/s with two hops": speeds["g_2hop"],
                "events/s of a loop": loop_speed,
            }
        )
        ratio[f"{name}, events/s over a loop"] = speeds["g"] / loop_speed
    return {"rows": measured, "ratio": ratio}


def _draw(graphs: Graphs, seq: Sequences, index: np.ndarray, features: list[str]) -> Any:
    """Draw the neighbours of events."""
    return graphs.find_neighbours(features, seq.user[index], seq.item[index], seq.time[index])


def _draw_in_loop(graphs: Graphs, options: Graph, seq: Sequences, index: np.ndarray) -> list[np.ndarray]:
    """Draw as many neighbours of the same edges for one event after the other, with replacement."""
    generator, edges = np.random.default_rng(0), graphs.graphs["g"].edges
    nodes = seq.item if options.kinds[0] == "item" else seq.user
    found = []
    for node, now in zip(nodes[index].tolist(), seq.time[index].tolist(), strict=True):
        begin, end = edges.offsets[node], edges.offsets[node + 1]
        end = begin + int(np.searchsorted(edges.time[begin:end], now))
        newest = slice(max(begin, end - options.newest), end)
        weight = edges.weight[newest].astype(np.float64)
        if options.half_life is not None:
            weight *= 0.5 ** ((now - edges.time[newest]) / options.half_life)
        if len(weight):
            found.append(generator.choice(edges.target[newest], options.k, p=weight / weight.sum()))
    return found


def _make_sequences(events: int, users: int, items: int, seed: int) -> Sequences:
    """Return the sequences of a drawn log in which every user and every item occurs."""
    draw = np.random.default_rng(seed)
    rank = (items * draw.random(events) ** 3).astype(np.int64)
    log = pa.table(
        {
            "user_id": np.r_[np.arange(users), draw.integers(0, users, events - users)],
            "item_id": np.r_[np.arange(items), rank[items:]],
            "timestamp": draw.integers(0, _SPAN_S, events),
        }
    )
    return build_sequences(log, None, split={"use": "leave_last_out", "test": 1})[0]


def _measure_cpu_s(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of a call in this process, and its result."""
    started_s = time.process_time()
    result = call()
    return time.process_time() - started_s, result


def _measure_median_s(call: Callable[[], Any], rounds: int) -> float:
    """Return the median CPU seconds of a call."""
    return statistics.median(_measure_cpu_s(call)[0] for _ in range(rounds))
