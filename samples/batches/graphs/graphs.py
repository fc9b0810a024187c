"""Graphs: the graphs of a run by name, and the neighbours of users and items as of a time.

    <folder>/<name>/{edges,back}-{offsets,target,time,weight}.npy     sorted edges, memory-mapped when they are read
    <folder>/graphs.json                                              format, and options of the graphs

A row at a time t sees the edges that became known before t: never one of its own event or of its own second. The edges are an
artifact of the run in arrays of their own instead of a store, because a draw needs the newest edges of a node as of a time, and a
store returns one version of a value by key. The artifact is written once, and all processes of a machine share its pages.
"""

# Shapes: P rows, U users, I items, N events, Q contexts of requests.

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nonet.errors import DataError
from nonet.random import draw_numbers
from nonet.samples.batches.graphs.adjacency import Adjacency, Edges
from nonet.samples.batches.graphs.graph import AddedEdges, NeighbourGraph
from nonet.samples.batches.graphs.log_edges import iterate_log_edges, make_log_edges
from nonet.samples.batches.graphs.options import TWO_HOPS, Graph, list_read_graphs
from nonet.samples.sequences import Sequences, release_pages
from nonet.types import Jagged

FORMAT = 1  # of the folder
_CONFIG = "graphs.json"
_PARTS, _FIELDS = ("edges", "back"), ("offsets", "target", "time", "weight")
_CHUNK_CANDIDATES = 1 << 20  # Edges that are drawn from at once; their weights then sum to less than 2^63.


@dataclass(frozen=True)
class Neighbours:
    """The neighbours of P rows in one graph.

    Attributes:
        kind: What they are, "item" or "user".
        drawn: Indices of the drawn neighbours by row.
        one_hop: Number of edges of each row's node [P] that are known by then.
        two_hops: Number of such edges of the drawn neighbours together [P]; None if no feature reads it.
    """

    kind: str
    drawn: Jagged
    one_hop: np.ndarray
    two_hops: np.ndarray | None


@dataclass(frozen=True)
class History:
    """The past events of Q requests, from which edges are added that the graphs do not have yet.

    Attributes:
        user: Index of each request's user [Q]; -1 if unknown.
        past: Indices of the items of the past events, oldest first; -1 for unknown ones.
        time: Unix seconds of the past events.
        context: The request that each of the rows [P] belongs to.
    """

    user: np.ndarray
    past: Jagged
    time: np.ndarray
    context: np.ndarray


@dataclass(frozen=True)
class Graphs:
    """The graphs of a run.

    Attributes:
        graphs: The graphs by name.
        seed: Seed of the run, on which draws depend.
        keys: Sparse keys of items [I] and users [U] by kind, on which draws depend.
        until: Unix seconds [U] of each user's newest event in the log; later ones of requests add edges.
    """

    graphs: Mapping[str, NeighbourGraph]
    seed: int
    keys: Mapping[str, np.ndarray]
    until: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    @classmethod
    def build(
        cls,
        options: Mapping[str, Graph],
        seq: Sequences,
        n_items: int,
        tables: Mapping[str, Edges],
        seed: int,
        folder: Path | None = None,
    ) -> Graphs:
        """Build graphs from the events of all splits, and from tables.

        Args:
            options: Options of the graphs by name.
            seq: The events.
            n_items: Number of items.
            tables: The edges of the graphs that have a table, by name.
            seed: Seed of the run.
            folder: Folder to write the graphs to, so that memory does not grow with the edges; None to keep them in memory.
        """
        n_nodes = {"item": n_items, "user": len(seq)}
        graphs = {}
        for name, graph in options.items():
            table = tables.get(name)
            parts = partial(iterate_log_edges, graph, seq) if table is None else partial(iter, [table])
            graphs[name] = NeighbourGraph.build(graph, parts, n_nodes, folder and folder / name)
        built = cls(graphs, seed, _get_keys(seq), _find_newest_times(seq))
        if folder is not None:
            config = {"format": FORMAT, "graphs": built.describe()}
            (folder / _CONFIG).write_text(json.dumps(config), encoding="utf-8")
        return built

    @property
    def options(self) -> dict[str, Graph]:
        """The options of the graphs by name."""
        return {name: graph.options for name, graph in self.graphs.items()}

    def attach_to(self, seq: Sequences) -> Sequences:
        """Return a copy of sequences that has these graphs of its users and items."""
        other = copy.copy(seq)
        other.__dict__["graphs"] = self
        return other

    def replace_events(self, seq: Sequences, user_id: np.ndarray) -> Graphs:
        """Return the graphs for other events of the same items: edges from the log are made anew, those of tables stay.

        Args:
            seq: The other events.
            user_id: Ids of the users of this object's edges.
        """
        row_by_user = {user: row for row, user in enumerate(seq.user_id.tolist())}
        row = np.array([row_by_user.get(user, -1) for user in user_id.tolist()], np.int64)
        tables = {
            name: _renumber_users(graph, row)
            for name, graph in self.graphs.items()
            if graph.options.table is not None
        }
        return Graphs.build(self.options, seq, len(self.keys["item"]), tables, self.seed)

    def find_neighbours(
        self,
        features: Collection[str],
        user: np.ndarray,
        item: np.ndarray,
        time: np.ndarray,
        history: History | None = None,
    ) -> dict[str, Neighbours]:
        """Find the neighbours of rows [P] in the graphs of which a feature is, by name.

        Args:
            features: Names of the features.
            user: Index of each row's user [P]; -1 if unknown.
            item: Index of each row's item [P].
            time: Unix seconds of the rows [P].
            history: The past events of the requests that the rows belong to; None for rows of the log.
        """
        found = {}
        for name in list_read_graphs(self.options, features):
            graph = self.graphs[name]
            source, target = graph.options.kinds
            node = np.asarray(item if source == "item" else user, np.int64)
            key = np.where(node >= 0, self.keys[source][np.maximum(node, 0)], 0) if len(node) else node
            # An unchanged node has the same neighbours in every request, up to the decay of weights.
            draw = partial(draw_numbers, self.seed, ("neighbours", name))
            with_hops = name + TWO_HOPS in features
            added = None if history is None else self._add_edges(graph, history)
            parts = []
            chunk_rows = max(1, _CHUNK_CANDIDATES // graph.options.newest)
            for start in range(0, max(1, len(node)), chunk_rows):
                rows = slice(start, start + chunk_rows)
                chunk_added = None if added is None or history is None else (*added, history.context[rows])
                draw_row_numbers = partial(draw, key[rows])
                parts.append(graph.draw(node[rows], time[rows], draw_row_numbers, with_hops, chunk_added))
            drawn, one_hop, two_hops = zip(*parts, strict=True)
            counts = np.concatenate([np.diff(part.offsets) for part in drawn])
            found[name] = Neighbours(
                target,
                Jagged(
                    np.concatenate([part.values for part in drawn]),
                    _make_offsets(counts),
                ),
                np.concatenate(one_hop),
                np.concatenate(two_hops) if with_hops else None,
            )
        return found

    def _add_edges(self, graph: NeighbourGraph, history: History) -> tuple[AddedEdges, AddedEdges] | None:
        """Return the edges of the events of requests that are newer than the log, from nodes and from neighbours.

        Returns:
            None if there are none, as for a graph with a table of edges, to which events add none.
        """
        if graph.options.table is not None:
            return None
        lengths = np.diff(history.past.offsets)
        context = np.repeat(np.arange(len(lengths)), lengths)
        user = history.user[context]
        known_until = np.full(len(context), np.iinfo(np.int64).min)
        if len(self.until):
            known_until = np.where(user >= 0, self.until[np.maximum(user, 0)], known_until)
        is_new = history.time > known_until
        edges, event = make_log_edges(graph.options, context, user, history.past.values, history.time)
        source, target = graph.options.kinds
        # An unknown user is the node of the row itself, but has no key as a neighbour.
        is_kept = is_new[event] & (edges.target >= 0) & ((edges.source >= 0) | (source == "user"))
        if not is_kept.any():
            return None
        edges, context = edges.select(is_kept), context[event][is_kept]
        order = np.argsort(context, kind="stable")
        edges, offsets = edges.select(order), _make_offsets(np.bincount(context, minlength=len(lengths)))
        forward = AddedEdges(edges, offsets)
        return forward, forward if source == target else AddedEdges(edges.reverse(), offsets)

    @classmethod
    def load(cls, folder: Path, seq: Sequences, seed: int) -> Graphs:
        """Open the graphs of a run, memory-mapped.

        Args:
            folder: The folder that `build` wrote.
            seq: The events of the run.
            seed: Seed of the run.

        Raises:
            DataError: The folder has another format.
        """
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        if config.get("format") != FORMAT:
            raise DataError(
                f"{folder / _CONFIG}: format {config.get('format')}; this version reads {FORMAT}. Run the tokenise stage again."
            )
        arrays = {
            str(file.relative_to(folder).with_suffix("")): np.load(file, mmap_mode="r")
            for file in folder.rglob("*.npy")
        }
        return cls.from_arrays(config["graphs"], arrays, seed, _get_keys(seq), _find_newest_times(seq))

    def release_pages(self) -> None:
        """Drop the resident pages of the memory-mapped files (`madvise(DONTNEED)`); a later access reads them again."""
        release_pages(*self.to_arrays().values())

    def count_edges(self) -> dict[str, int]:
        """Return the number of edges of each graph by its name."""
        return {name: len(graph.edges.time) for name, graph in self.graphs.items()}

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return the options of the graphs by name, as plain data."""
        return {name: options.model_dump() for name, options in self.options.items()}

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of all edges by the name of the graph, the part and the field."""
        arrays = {}
        for name, graph in self.graphs.items():
            source, target = graph.options.kinds
            for part in _PARTS[: 1 if source == target else 2]:
                for array in _FIELDS:
                    arrays[f"{name}/{part}-{array}"] = getattr(getattr(graph, part), array)
        return arrays

    @classmethod
    def from_arrays(
        cls,
        config: Mapping[str, Mapping[str, Any]],
        arrays: Mapping[str, np.ndarray],
        seed: int,
        keys: Mapping[str, np.ndarray],
        until: np.ndarray,
    ) -> Graphs:
        """Create graphs from what `to_arrays` returned.

        Args:
            config: What `describe` returned.
            arrays: The arrays.
            seed: Seed of the run.
            keys: Sparse keys of items and users by kind.
            until: Unix seconds [U] of each user's newest event in the log.
        """
        graphs = {}
        for name, values in config.items():
            parts = [
                Adjacency(*(arrays[f"{name}/{part}-{array}"] for array in _FIELDS))
                for part in _PARTS
                if f"{name}/{part}-{_FIELDS[0]}" in arrays
            ]
            graphs[name] = NeighbourGraph(Graph.model_validate(values), parts[0], parts[-1])
        return cls(graphs, seed, keys, until)


def _renumber_users(graph: NeighbourGraph, row: np.ndarray) -> Edges:
    """Return the edges of a graph with other indices of users, without those of users that have none.

    Args:
        graph: The graph.
        row: The other index of each user [U]; -1 for none.
    """
    edges = graph.edges.list_edges()
    source, target = (
        row[nodes] if kind == "user" else np.asarray(nodes, np.int64)
        for kind, nodes in zip(graph.options.kinds, (edges.source, edges.target), strict=True)
    )
    return Edges(source, target, edges.time, edges.weight).select((source >= 0) & (target >= 0))


def _get_keys(seq: Sequences) -> dict[str, np.ndarray]:
    """Return the sparse keys of the items and users by kind."""
    return {"item": np.asarray(seq.item_key), "user": np.asarray(seq.user_key)}


def _find_newest_times(seq: Sequences) -> np.ndarray:
    """Return the unix seconds [U] of each user's newest event; the smallest int64 for a user without events."""
    newest = np.full(len(seq), np.iinfo(np.int64).min)
    has_events = seq.lengths > 0
    newest[has_events] = seq.time[seq.offsets[1:][has_events] - 1]
    return newest


def _make_offsets(counts: np.ndarray) -> np.ndarray:
    """Return the offsets [n + 1] of ranges with these numbers of elements [n]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
