"""The content of a cluster as plain data: nodes with resources, labels and devices, and who holds what.

A view is read from a YAML file (`nonet plan --cluster`, docs/how-to/clusters.md) or from a running Ray
(`controller/cluster/live.py`). This module does not import Ray. What a view does not state, such as a device's memory or a
node's rack, is unknown and never guessed.

    nodes:
      - {id: "gpu-{i:02}", count: 16, resources: {CPU: 96, GPU: 8, memory: 1TB}, labels: {zone: a, rack: "a{i//4}"},
         devices: {GPU: {memory: 80GB}}}
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, ValidationError

from nonet import yaml
from nonet.errors import ConfigError
from nonet.options import Count, Positive, StrictModel
from nonet.units import Bytes, parse_bytes

# A field of a node's id or labels: {i}, with an optional operation (//2 or %2) and an optional width (:02).
_FIELD = re.compile(r"\{i(?:(//|%)(\d+))?(?::(0?\d+))?\}")
MEMORY = "memory"  # Ray's name of host memory


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts about one kind of device.

    Attributes:
        memory_bytes: The memory of one device; 0 if unknown.
        domain: How many consecutive devices share a fast link; 0 if unknown.
    """

    memory_bytes: int = 0
    domain: int = 0


@dataclass(frozen=True, slots=True)
class Holding:
    """Resources of a node that someone holds.

    Attributes:
        by: The name of the holder.
        node: The id of the node.
        resource: Ray's name of the resource.
        amount: Units of the resource.
    """

    by: str
    node: str
    resource: str
    amount: float


@dataclass(frozen=True, slots=True)
class Node:
    """One node.

    Attributes:
        id: The id of the node.
        total: All units, by Ray's name of the resource.
        free: Free units, by resource.
        labels: Labels, such as the zone and rack.
        devices: Facts about its devices, by resource.
    """

    id: str
    total: dict[str, float]
    free: dict[str, float]
    labels: dict[str, str] = field(default_factory=dict)
    devices: dict[str, DeviceFacts] = field(default_factory=dict)


@dataclass(frozen=True)
class ClusterView:
    """The nodes that a plan may use.

    Attributes:
        nodes: The nodes.
        held: The resources on them that someone holds.
    """

    nodes: tuple[Node, ...]
    held: tuple[Holding, ...] = ()

    def get_total(self, resource: str) -> float:
        """Return the units of a resource on all nodes."""
        return sum(node.total.get(resource, 0.0) for node in self.nodes)

    def get_free(self, resource: str) -> float:
        """Return the free units of a resource on all nodes."""
        return sum(node.free.get(resource, 0.0) for node in self.nodes)

    def get_node(self, name: str) -> Node:
        """Return the node whose id is `name`.

        Raises:
            KeyError: There is no such node.
        """
        return self._by_id[name]

    @cached_property
    def _by_id(self) -> dict[str, Node]:
        """The nodes by id."""
        return {node.id: node for node in self.nodes}


def _parse_amount(value: object) -> float:
    """Parse an amount of a resource: a number, or bytes such as "1TB"."""
    return float(value) if isinstance(value, int | float) else float(parse_bytes(value))


Amount = Annotated[float, BeforeValidator(_parse_amount)]


class _DeviceText(StrictModel):
    """The keys of a device in YAML."""

    memory: Bytes = 0
    domain: Count = 0


class _HoldingText(StrictModel):
    """The keys of a holder in YAML."""

    by: str
    node: str
    resource: str
    amount: Amount


class _NodeText(StrictModel):
    """The keys of one or several equal nodes in YAML."""

    id: str
    resources: dict[str, Amount]
    used: dict[str, Amount] = {}
    labels: dict[str, str] = {}
    devices: dict[str, _DeviceText] = {}
    count: Positive = 1


class _ViewText(StrictModel):
    """The keys of a view in YAML."""

    nodes: list[_NodeText]
    held: list[_HoldingText] = []


def read_view(path: Path) -> ClusterView:
    """Read a view from a YAML file.

    `count: 4` makes four nodes. `{i}`, `{i//2}`, `{i%2}` and `{i:02}` in ids and labels are replaced by the number of the
    node; an id without a field gets the suffix -0 to -3.

    Raises:
        ConfigError: The file is invalid.
    """
    try:
        text = _ViewText.model_validate(yaml.read(path))
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(
            f"{path}: {'.'.join(map(str, problem['loc']))}: {problem['msg'].removeprefix('Value error, ')}; wanted nodes: "
            "[{id, resources: {CPU, GPU, NPU, memory}, used, labels, devices: {GPU: {memory, domain}}, count}]"
        ) from None
    nodes = tuple(_make_node(node, index) for node in text.nodes for index in range(node.count))
    duplicate_ids = (
        {node.id for node in nodes if sum(other.id == node.id for other in nodes) > 1}
        if _has_duplicate_ids(nodes)
        else ()
    )
    if duplicate_ids:
        raise ConfigError(
            f"{path}: node id {min(duplicate_ids)!r} occurs twice; put {{i}} into the id of a node with a count"
        )
    return ClusterView(nodes, tuple(Holding(**entry.model_dump()) for entry in text.held))


def read_local_view() -> ClusterView:
    """Return a view of this machine's CPUs and memory, which `nonet plan` assumes without a cluster."""
    total = {"CPU": float(len(os.sched_getaffinity(0))), MEMORY: float(get_host_memory_bytes())}
    return ClusterView((Node("local", total, dict(total)),))


def get_host_memory_bytes() -> int:
    """Return the memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _has_duplicate_ids(nodes: tuple[Node, ...]) -> bool:
    """Return whether two nodes have the same id."""
    return len({node.id for node in nodes}) < len(nodes)


def _make_node(entry: _NodeText, index: int) -> Node:
    """Build the node with number `index` of an entry in YAML.

    Raises:
        ConfigError: More of a resource is used than the node has.
    """
    is_unique = entry.count == 1 or _FIELD.search(entry.id)
    node_id = _fill_index(entry.id, index) if is_unique else f"{entry.id}-{index}"
    total = dict(entry.resources)
    unknown = sorted(set(entry.used) - set(total))
    overused = [key for key in entry.used if key in total and entry.used[key] > total[key]]
    if unknown or overused:
        key = (unknown or overused)[0]
        raise ConfigError(
            f"node {node_id}: used.{key} is {entry.used[key]:g}, its resources have {total.get(key, 0):g}"
        )
    return Node(
        id=node_id,
        total=total,
        free={key: value - entry.used.get(key, 0.0) for key, value in total.items()},
        labels={key: _fill_index(value, index) for key, value in entry.labels.items()},
        devices={key: DeviceFacts(facts.memory, facts.domain) for key, facts in entry.devices.items()},
    )


def _fill_index(text: str, index: int) -> str:
    """Replace the fields of an id or label by the number of the node, such as "a{i//4}" by "a1" for node 5."""

    def format_index(match: re.Match[str]) -> str:
        operator, operand, width = match.groups()
        number = (
            index if not operator else index // int(operand) if operator == "//" else index % int(operand)
        )
        return format(number, width or "")

    return _FIELD.sub(format_index, text)
