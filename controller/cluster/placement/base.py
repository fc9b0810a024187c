"""The interface of placement policies, which choose nodes for the workers of one group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from nonet.errors import ConfigError
from nonet.options import StrictModel
from nonet.plugins import PluginRegistry
from nonet.replaceable import Replaceable

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NodeSlots:
    """A node and the number of workers of a group that fit on it.

    Attributes:
        node: The node (`nonet.controller.cluster.Node`), with labels, devices, total and free resources.
        order: Its position in the order of the cluster's nodes, in which ranks are numbered.
        slots: Number of workers that fit.
        broken: Whether part of the requested resource of the node is already in use.
        full: How much of the requested resource is free: (in its rack, in its zone). The smaller, the fuller they are.
    """

    node: Any
    order: int
    slots: int
    broken: bool
    full: tuple[float, float]


@dataclass(frozen=True)
class PlacementPolicy:
    """A kind of placement policy, with the function that chooses nodes for the workers of one group.

    Attributes:
        pack: Called as `pack(slots, count, gang, options)`, it returns the chosen slots and the number of workers on each,
            `count` in total. `slots` lists the candidate nodes within one domain of the topology level that the group
            requests. `gang` is whether the workers communicate all the time. The result must depend on the arguments
            only, because the same plan is made again when a run is resumed.
        options: The class of its keys in a scenario.
    """

    pack: Callable[[Sequence[NodeSlots], int, bool, Options], list[tuple[NodeSlots, int]]]
    options: type[StrictModel] = StrictModel


def _pack(slots: Any, count: Any, gang: Any, options: Any) -> Any:
    """Declare the arguments of `PlacementPolicy.pack`, against which the functions of plug-ins are checked."""


PLACEMENTS = PluginRegistry(
    "placement", PlacementPolicy, "nonet.controller.cluster.placement", contract={"pack": _pack}
)


class Placement(Replaceable):
    """The policy that chooses nodes for the workers of a group."""

    default: ClassVar[str] = "best_fit"
    registry: ClassVar[PluginRegistry[Any] | None] = PLACEMENTS


def pack_workers(
    policy: PlacementPolicy, options: Options, slots: Sequence[NodeSlots], count: int, gang: bool
) -> list[tuple[NodeSlots, int]]:
    """Choose nodes for `count` workers by a policy.

    Returns:
        The chosen nodes with their numbers of workers, in the order of `NodeSlots.order`.

    Raises:
        ConfigError: The policy places more or fewer than `count` workers, or more on a node than fit.
    """
    choices = sorted(policy.pack(slots, count, gang, options), key=lambda choice: choice[0].order)
    for node_slots, workers in choices:
        if workers > node_slots.slots:
            raise ConfigError(
                f"placement: the policy puts {workers} workers on node {node_slots.node.id}, where {node_slots.slots} fit"
            )
    if sum(workers for _, workers in choices) != count:
        raise ConfigError(
            f"placement: the policy places {sum(n for _, n in choices)} workers; it must place {count}"
        )
    return [(node_slots, workers) for node_slots, workers in choices if workers]
