"""Where nodes stand to each other: device domain < host < rack < zone, read from labels.

A node without the label of a level belongs to no domain of it: unknown topology is never chosen where that level is wanted,
and used freely where it is not (NeMo-RL once took nodes of unknown domain first, and the job could never start). Zones come
from `zone` or Ray's own availability-zone label, racks from `rack`; a host is a node unless it has a `host` label.
"""

from __future__ import annotations

from collections.abc import Iterator

from nonet.controller.cluster.view import Node
from nonet.controller.scenario import Topology

LEVELS = ("device_domain", "host", "rack", "zone")
_LABELS = {"host": ("host",), "rack": ("rack",), "zone": ("zone", "ray.io/availability-zone")}
ANYWHERE = ""

Domain = tuple[str, ...]


def domain(node: Node, level: str) -> Domain | None:
    """The domain of a level that a node is in; None where its labels do not say."""
    own = next((node.labels[key] for key in _LABELS[level] if key in node.labels), None)
    if level == "host":
        return ("host", own if own is not None else node.id)
    if own is None:
        return None
    return (level, own) if level == "zone" else (level, node.labels.get("zone", ""), own)


def place_key(node: Node) -> tuple[str, str, str]:
    """Sorts nodes so that neighbours in the list are neighbours in the cluster."""
    return (node.labels.get("zone", "~"), node.labels.get("rack", "~"), node.id)


def levels_to_try(topology: Topology) -> Iterator[str]:
    """Levels from the narrowest wanted one outwards; a required level is the last, else ANYWHERE is.

    `prefer: [host, rack]` tries a host, then a rack, then a zone, then any nodes; with `require: [zone]` it ends at the zone.
    """
    required = [LEVELS.index(level) for level in topology.require]
    preferred = [LEVELS.index(level) for level in topology.prefer]
    if not required and not preferred:
        yield ANYWHERE
        return
    last = min(required) if required else len(LEVELS) - 1
    first = min([*preferred, last])
    for index in range(first, last + 1):
        if index == last or index in preferred or index > max(preferred, default=-1):
            yield LEVELS[index]
    if not required:
        yield ANYWHERE
