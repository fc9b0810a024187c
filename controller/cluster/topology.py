"""Topology of nodes from their labels: device domain < host < rack < zone.

A node without the label of a level belongs to no domain of that level: it is not chosen where that level is required or
preferred, and can be chosen otherwise. Zones come from the label `zone` or Ray's availability zone, and racks from the label
`rack`. A host is a node unless it has the label `host`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from nonet.controller.cluster.view import Node
from nonet.options import StrictModel

Level = Literal["device_domain", "host", "rack", "zone"]
LEVELS: tuple[Level, ...] = get_args(Level)
# The labels of a node that name its domain of a level, the first of them that it has.
_LABELS = {"host": ("host",), "rack": ("rack",), "zone": ("zone", "ray.io/availability-zone")}
ANYWHERE = ""  # the level whose only domain is the whole cluster

Domain = tuple[str, ...]
"""The level and the label that name a domain; a rack is named within its zone."""


class Topology(StrictModel):
    """Topology levels that a role's workers must or should share."""

    require: list[Level] = []
    prefer: list[Level] = []


def find_domain(node: Node, level: str) -> Domain | None:
    """Return the domain of a level that a node belongs to; None if its labels do not state it.

    Args:
        node: The node.
        level: The topology level.
    """
    label_value = next((node.labels[key] for key in _LABELS[level] if key in node.labels), None)
    if level == "host":
        return ("host", label_value if label_value is not None else node.id)
    if label_value is None:
        return None
    return (level, label_value) if level == "zone" else (level, node.labels.get("zone", ""), label_value)


def make_place_key(node: Node) -> tuple[str, str, str]:
    """Return a sort key by which neighbouring nodes of the cluster are neighbours in the list."""
    return (node.labels.get("zone", "~"), node.labels.get("rack", "~"), node.id)


def list_levels(topology: Topology) -> Iterator[str]:
    """Yield levels from the narrowest requested one outwards; the last is a required level or ANYWHERE.

    `prefer: [host, rack]` tries a host, then a rack, then a zone, then any nodes; `require: [zone]` ends at the zone.
    """
    required = [LEVELS.index(level) for level in topology.require]
    preferred = [LEVELS.index(level) for level in topology.prefer]
    if not required and not preferred:
        yield ANYWHERE
        return
    widest = min(required) if required else len(LEVELS) - 1
    narrowest = min([*preferred, widest])
    # Levels between two preferred ones are skipped; those beyond the widest preferred level are tried too.
    for index in range(narrowest, widest + 1):
        if index == widest or index in preferred or index > max(preferred, default=-1):
            yield LEVELS[index]
    if not required:
        yield ANYWHERE
