"""What a cluster has: nodes, their resources and labels, as plain data.

Read from a YAML file (`nonet plan --cluster`) or from a live Ray (`controller/placement.py`). Pure: no Ray import.

    nodes:
      - {id: n1, resources: {CPU: 64, GPU: 8}, labels: {zone: a, rack: r1}, count: 4}
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nonet.controller import yaml
from nonet.controller.options import Part, Positive
from nonet.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Node:
    """One node: its id, what it has in all, what is free, and its labels."""

    id: str
    total: dict[str, float]
    free: dict[str, float]
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The nodes a plan may use."""

    nodes: tuple[Node, ...]

    def total(self, resource: str) -> float:
        return sum(node.total.get(resource, 0.0) for node in self.nodes)

    def free(self, resource: str) -> float:
        return sum(node.free.get(resource, 0.0) for node in self.nodes)


class _NodeText(Part):
    id: str
    resources: dict[str, float | int]
    labels: dict[str, str] = {}
    count: Positive = 1


class _ViewText(Part):
    nodes: list[_NodeText]


def read_view(path: Path) -> ClusterView:
    """A view from YAML; `count: 4` makes id-0 .. id-3. Raises ConfigError."""
    try:
        text = _ViewText.model_validate(yaml.read(path))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}; "
            "wanted nodes: [{id, resources: {CPU, GPU, NPU}, labels, count}]"
        ) from None
    nodes = [
        _node(node.id if node.count == 1 else f"{node.id}-{index}", dict(node.resources), node.labels)
        for node in text.nodes
        for index in range(node.count)
    ]
    return ClusterView(tuple(nodes))


def this_machine() -> ClusterView:
    """A view of this machine alone, CPUs only: what `nonet plan` assumes without a cluster."""
    return ClusterView((_node("local", {"CPU": float(len(os.sched_getaffinity(0)))}, {}),))


def _node(name: str, resources: dict[str, Any], labels: dict[str, str]) -> Node:
    total = {key: float(value) for key, value in resources.items()}
    return Node(name, total, dict(total), labels)
