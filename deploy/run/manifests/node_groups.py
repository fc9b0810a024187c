"""The groups of equal nodes that a scenario needs on a cluster, from the groups of workers that its plan requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from nonet.controller.plan import make_group_requests, resolve_run
from nonet.controller.scenario import Scenario
from nonet.workers.devices import HOST, Device, get_device

_DEVICES_PER_NODE = 8
_CPUS_PER_DEVICE, _GIB_PER_DEVICE = 8, 64
_HOST_CPUS, _HOST_GIB = 8, 32  # of a node without devices


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Equal nodes for one pool.

    Attributes:
        name: The name of the pool.
        device: The kind of device.
        devices: The number of devices of a node; 0 on cpu.
        least: The smallest number of nodes.
        most: The largest number of nodes.
        cpus: The CPUs of a node.
        memory_gib: The memory of a node.
        labels: The labels that Ray's nodes must have.
    """

    name: str
    device: Device
    devices: int
    least: int
    most: int
    cpus: int
    memory_gib: int
    labels: Mapping[str, str]


def list_node_groups(scenario: Scenario) -> list[NodeGroup]:
    """Return the groups of nodes that all stages of a scenario fit on; the sizes of nodes without devices are a guess.

    Raises:
        ConfigError: Roles contradict each other.
    """
    run = resolve_run(scenario)
    least: dict[str, float] = {}
    most: dict[str, float] = {}
    for stage in (None, *scenario.stages):
        stage_least: dict[str, float] = {}
        stage_most: dict[str, float] = {}
        for request in make_group_requests(run, stage):
            if not request.shares:
                stage_least[request.pool] = stage_least.get(request.pool, 0) + request.bundle * request.least
                stage_most[request.pool] = stage_most.get(request.pool, 0) + request.bundle * request.most
        for totals, stage_totals in ((least, stage_least), (most, stage_most)):
            for pool, units in stage_totals.items():
                totals[pool] = max(units, totals.get(pool, 0))
    return [_make_group(scenario, pool, least[pool], most[pool]) for pool in most]


def _make_group(scenario: Scenario, name: str, least: float, most: float) -> NodeGroup:
    """Return the nodes for a pool that needs between `least` and `most` devices, or CPUs."""
    pool = scenario.pools.get(name)
    device = get_device(pool.device if pool else HOST)
    labels = pool.labels if pool else {}
    if not device.resource:
        nodes = ceil(most / _HOST_CPUS)
        return NodeGroup(name, device, 0, nodes, nodes, _HOST_CPUS, _HOST_GIB, labels)
    devices = min(_DEVICES_PER_NODE, ceil(most))
    return NodeGroup(
        name,
        device,
        devices,
        ceil(least / devices),
        ceil(most / devices),
        devices * _CPUS_PER_DEVICE,
        devices * _GIB_PER_DEVICE,
        labels,
    )
