"""NeighbourGraph: the edges of one graph in both directions, and neighbours that are drawn from them."""

# Shapes: P rows, Q requests.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nonet.atomic import make_folder
from nonet.ranges import expand_ranges
from nonet.samples.batches.graphs.adjacency import Adjacency, Candidates, Edges
from nonet.samples.batches.graphs.options import Graph
from nonet.types import Jagged


@dataclass(frozen=True)
class AddedEdges:
    """Edges that only the rows of one request see: `edges`, sorted by request, and the first edge of each request [Q + 1]."""

    edges: Edges
    offsets: np.ndarray

    def match(self, context: np.ndarray, node: np.ndarray, time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return pairs (row, edge) of the edges that lead from the node [P] of a row of a request before a time [P]."""
        edge, offsets = expand_ranges(self.offsets[context], self.offsets[context + 1])
        row = np.repeat(np.arange(len(context)), np.diff(offsets))
        is_seen = (self.edges.source[edge] == node[row]) & (self.edges.time[edge] < time[row])
        return row[is_seen], edge[is_seen]


@dataclass(frozen=True)
class NeighbourGraph:
    """A graph with its edges.

    Attributes:
        options: The options of the graph.
        edges: The edges by the node that they lead from.
        back: The edges in the other direction, which lead from neighbours; `edges` if both kinds of nodes are the same.
    """

    options: Graph
    edges: Adjacency
    back: Adjacency

    @classmethod
    def build(
        cls,
        options: Graph,
        parts: Callable[[], Iterable[Edges]],
        n_nodes: Mapping[str, int],
        folder: Path | None,
    ) -> NeighbourGraph:
        """Build a graph from edges, which are sorted in both directions.

        Args:
            options: The options of the graph.
            parts: Function that makes the edges, part by part.
            n_nodes: Number of items and users by kind.
            folder: Folder for the files of the edges; None to keep them in memory.
        """
        source, target = options.kinds
        forward = Adjacency.build(parts, n_nodes[source], *_make_allocator(folder, "edges"))
        if source == target:
            return cls(options, forward, forward)

        def make_reversed() -> Iterator[Edges]:
            return (edges.reverse() for edges in parts())

        back = Adjacency.build(make_reversed, n_nodes[target], *_make_allocator(folder, "back"))
        return cls(options, forward, back)

    def draw(
        self,
        node: np.ndarray,
        time: np.ndarray,
        draw_numbers: Callable[[np.ndarray], np.ndarray],
        with_hops: bool,
        added: tuple[AddedEdges, AddedEdges, np.ndarray] | None,
    ) -> tuple[Jagged, np.ndarray, np.ndarray | None]:
        """Draw neighbours.

        Args:
            node: The node of each row [P]; -1 if unknown.
            time: Unix seconds of each row [P].
            draw_numbers: Function of the number of edges of each node [P] that draws a random number for each row [P].
            with_hops: Whether to count the edges of neighbours.
            added: Edges of requests from nodes and from neighbours, and the request of each row [P]; None without requests.

        Returns:
            The neighbours by row, the number of edges of each node [P], and that of its neighbours [P].
        """
        options = self.options
        begin, end = self.edges.find_known(node, time)
        one_hop = end - begin
        candidates = Candidates.gather(self.edges, begin, end, options.newest)
        if added is not None:
            forward, _, context = added
            row, edge = forward.match(context, node, time)
            one_hop = one_hop + np.bincount(row, minlength=len(node))
            candidates = candidates.add(row, forward.edges.select(edge), options.newest)
        drawn = candidates.draw(options.k, options.half_life, time, draw_numbers(one_hop))
        if not with_hops:
            return drawn, one_hop, None
        row = np.repeat(np.arange(len(node)), np.diff(drawn.offsets))
        begin, end = self.back.find_known(drawn.values, time[row])
        n_edges = end - begin
        if added is not None:
            _, back, context = added
            neighbour, _ = back.match(context[row], drawn.values, time[row])
            n_edges = n_edges + np.bincount(neighbour, minlength=len(row))
        return drawn, one_hop, np.bincount(row, n_edges, len(node)).astype(np.int64)


def _make_allocator(folder: Path | None, part: str) -> list[Callable[[str, int, str], np.ndarray]]:
    """Return the argument `allocate` of `Adjacency.build` for files in a folder; none for memory."""
    if folder is None:
        return []
    make_folder(folder)

    def allocate(name: str, size: int, dtype: str) -> np.ndarray:
        return np.lib.format.open_memmap(folder / f"{part}-{name}.npy", "w+", np.dtype(dtype), (size,))

    return [allocate]
