"""Graph: the options of a graph in the section `data.graph`, and the names of the features that it gives to click models."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from nonet.options import Positive, StrictModel
from nonet.units import Seconds

ONE_HOP, TWO_HOPS = "_1hop", "_2hop"
"""What the names of the features with counts end in, after the name of the graph."""
EDGE_COLUMNS = ("source", "target", "time", "weight")
"""The columns of a table of edges; `weight` may be missing."""


class Graph(StrictModel):
    """A graph whose edges lead from an item or a user to its neighbours; each edge is known from a time on."""

    edges: Annotated[
        Literal["item-item", "item-user", "user-item", "user-user"],
        Field(
            description="what the edges lead from and to. From the log: item-item, items that follow each other in a user's "
            "history; item-user, the users who had an event with an item; user-item, the items of a user's events"
        ),
    ]
    table: Annotated[
        str | None,
        Field(
            description="a Parquet table of edges with the columns source, target and time, and optionally weight; by default "
            "edges are made from the log"
        ),
    ] = None
    columns: Annotated[
        dict[Literal["source", "target", "time", "weight"], str],
        Field(description="names of the table's columns, where they differ"),
    ] = {}
    unknown_ids: Annotated[
        Literal["refuse", "drop"],
        Field(description="edges of the table whose ids the log lacks: an error, or left out (drop)"),
    ] = "refuse"
    window: Annotated[
        Positive | None,
        Field(
            description="item-item from the log: the largest number of events from one item to the other; an edge over n events "
            "has the weight 1/n. By default 2"
        ),
    ] = None
    k: Annotated[int, Field(ge=1, le=256, description="the number of neighbours that are drawn")] = 10
    newest: Annotated[
        int, Field(ge=1, le=4096, description="neighbours are drawn from so many newest edges of a node")
    ] = 64
    half_life: Annotated[
        Annotated[Seconds, Field(ge=1)] | None,
        Field(description="the age at which an edge has half of its weight; by default weights stay"),
    ] = None

    @property
    def kinds(self) -> tuple[str, str]:
        """What edges lead from and to: "item" or "user" each."""
        source, _, target = self.edges.partition("-")
        return source, target

    @model_validator(mode="after")
    def _check_options(self) -> Graph:
        """Check that the options fit the origin of the edges."""
        if self.table is None:
            if self.edges == "user-user":
                raise ValueError(
                    "edges: user-user: the log has no edges between users; name a table of edges (table)"
                )
            if self.columns:
                raise ValueError("columns are those of a table of edges; name it (table), or remove columns")
            if self.unknown_ids == "drop":
                raise ValueError(
                    "unknown_ids: drop: only a table of edges has unknown ids; name it (table), or remove it"
                )
        if self.window is not None and (self.table is not None or self.edges != "item-item"):
            raise ValueError("window is of edges: item-item from the log; remove it")
        return self


def list_graph_features(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the features of graphs with these names: the neighbours, and the counts of one and of two hops."""
    return tuple(name + ending for name in names for ending in ("", ONE_HOP, TWO_HOPS))


def list_read_graphs(graphs: Mapping[str, Graph], features: Collection[str]) -> list[str]:
    """Return the names of the graphs that give at least one of the features."""
    return [name for name in graphs if set(list_graph_features([name])) & set(features)]
