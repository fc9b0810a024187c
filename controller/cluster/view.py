"""What a cluster has: nodes, their resources, labels and devices, and who holds what; as plain data.

Read from a YAML file (`nonet plan --cluster`, docs/how-to/clusters.md) or from a live Ray (`controller/cluster/live.py`). Pure:
no Ray import. What a view does not say (a device's memory, a node's rack) is unknown, and nothing is decided by guessing it.

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

from nonet.controller.scenario import yaml
from nonet.errors import ConfigError
from nonet.options import Count, Positive, StrictModel
from nonet.units import Bytes, parse_bytes

_FIELD = re.compile(r"\{i(?:(//|%)(\d+))?(?::(0?\d+))?\}")
MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device of a kind: its memory (0: unknown), and how many in a row share a fast link (0: unknown)."""

    memory_bytes: int = 0
    domain: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """Somebody holds `amount` of a resource on a node."""

    by: str
    node: str
    resource: str
    amount: float


@dataclass(frozen=True, slots=True)
class Node:
    """One node: its id, what it has in all, what is free, its labels, and facts of its devices by resource."""

    id: str
    total: dict[str, float]
    free: dict[str, float]
    labels: dict[str, str] = field(default_factory=dict)
    devices: dict[str, DeviceFacts] = field(default_factory=dict)


@dataclass(frozen=True)
class ClusterView:
    """The nodes a plan may use, and who holds what on them."""

    nodes: tuple[Node, ...]
    held: tuple[Held, ...] = ()

    def total(self, resource: str) -> float:
        return sum(node.total.get(resource, 0.0) for node in self.nodes)

    def free(self, resource: str) -> float:
        return sum(node.free.get(resource, 0.0) for node in self.nodes)

    def node(self, name: str) -> Node:
        """The node of that id. Raises KeyError."""
        return self._by_id[name]

    @cached_property
    def _by_id(self) -> dict[str, Node]:
        return {node.id: node for node in self.nodes}


def _amount(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float(parse_bytes(value))


Amount = Annotated[float, BeforeValidator(_amount)]


class _DeviceText(StrictModel):
    memory: Bytes = 0
    domain: Count = 0


class _HeldText(StrictModel):
    by: str
    node: str
    resource: str
    amount: Amount


class _NodeText(StrictModel):
    id: str
    resources: dict[str, Amount]
    used: dict[str, Amount] = {}
    labels: dict[str, str] = {}
    devices: dict[str, _DeviceText] = {}
    count: Positive = 1


class _ViewText(StrictModel):
    nodes: list[_NodeText]
    held: list[_HeldText] = []


def read_view(path: Path) -> ClusterView:
    """A view from YAML. `count: 4` makes four nodes: `{i}`, `{i//2}`, `{i%2}` and `{i:02}` in id and labels are filled in,
    an id without a field gets -0 .. -3. Raises ConfigError.
    """
    try:
        text = _ViewText.model_validate(yaml.read(path))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}; wanted nodes: "
            "[{id, resources: {CPU, GPU, NPU, memory}, used, labels, devices: {GPU: {memory, domain}}, count}]"
        ) from None
    nodes = tuple(_node(node, index) for node in text.nodes for index in range(node.count))
    twice = (
        {node.id for node in nodes if sum(other.id == node.id for other in nodes) > 1}
        if _clash(nodes)
        else ()
    )
    if twice:
        raise ConfigError(
            f"{path}: node id {min(twice)!r} is there twice; put {{i}} into the id of a counted node"
        )
    return ClusterView(nodes, tuple(Held(**entry.model_dump()) for entry in text.held))


def this_machine() -> ClusterView:
    """A view of this machine alone, CPUs and memory: what `nonet plan` assumes without a cluster."""
    total = {"CPU": float(len(os.sched_getaffinity(0))), MEMORY: float(host_memory_bytes())}
    return ClusterView((Node("local", total, dict(total)),))


def host_memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _clash(nodes: tuple[Node, ...]) -> bool:
    return len({node.id for node in nodes}) < len(nodes)


def _node(text: _NodeText, index: int) -> Node:
    name = _filled(text.id, index) if text.count == 1 or _FIELD.search(text.id) else f"{text.id}-{index}"
    total = dict(text.resources)
    unknown = sorted(set(text.used) - set(total))
    over = [key for key in text.used if key in total and text.used[key] > total[key]]
    if unknown or over:
        key = (unknown or over)[0]
        raise ConfigError(
            f"node {name}: used.{key} is {text.used[key]:g}, its resources have {total.get(key, 0):g}"
        )
    return Node(
        name,
        total,
        {key: value - text.used.get(key, 0.0) for key, value in total.items()},
        {key: _filled(value, index) for key, value in text.labels.items()},
        {key: DeviceFacts(facts.memory, facts.domain) for key, facts in text.devices.items()},
    )


def _filled(text: str, index: int) -> str:
    def number(match: re.Match[str]) -> str:
        operator, other, width = match.groups()
        value = index if not operator else index // int(other) if operator == "//" else index % int(other)
        return format(value, width or "")

    return _FIELD.sub(number, text)
