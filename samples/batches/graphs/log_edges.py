"""The edges that the events of a log make."""

# Shapes: N events.

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nonet.samples.batches.graphs.adjacency import WEIGHT_1, Edges
from nonet.samples.batches.graphs.options import Graph
from nonet.samples.sequences import Sequences

_DEFAULT_WINDOW = 2
_PART_EVENTS = 1 << 19  # Events whose edges are made at once, which bounds memory.


def iterate_log_edges(options: Graph, seq: Sequences) -> Iterator[Edges]:
    """Return the edges that the events of users make, a few hundred thousand events at a time."""
    first_user = 0
    for part in seq.iterate_parts(_PART_EVENTS):
        user = part.user + first_user
        yield make_log_edges(options, user, user, part.item, part.time)[0]
        first_user += len(part)


def make_log_edges(
    options: Graph, history: np.ndarray, user: np.ndarray, item: np.ndarray, time: np.ndarray
) -> tuple[Edges, np.ndarray]:
    """Return the edges that events [N] make, in both directions between items, and the event that makes each edge.

    Args:
        options: Options of the graph.
        history: Number of the history that each event belongs to [N]; the events of a history are together and by time.
        user: Index of the user of each event [N].
        item: Index of its item [N].
        time: Its unix seconds [N].
    """
    source, target = options.kinds
    user, item, time = (np.asarray(values, np.int64) for values in (user, item, time))
    if source != target:
        nodes = {"item": item, "user": user}
        weight = np.full(len(item), WEIGHT_1, np.int64)
        return Edges(nodes[source], nodes[target], time, weight), np.arange(len(item))
    parts, events = [], []
    for distance in range(1, (options.window or _DEFAULT_WINDOW) + 1):
        later = np.arange(distance, len(item))
        is_edge = (history[later] == history[later - distance]) & (item[later] != item[later - distance])
        later = later[is_edge]
        weight = np.full(len(later), WEIGHT_1 // distance, np.int64)
        edges = Edges(item[later - distance], item[later], time[later], weight)
        parts += [edges, edges.reverse()]
        events += [later, later]
    return Edges.concatenate(parts), np.concatenate(events)
