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
        order: Its number in the order of places.
        slots: Number of workers that fit.
        broken: Whether part of the node is taken.
        full: What is free of the resource in its rack and in its zone.
    """

    node: Any
    order: int
    slots: int
    broken: bool
    full: tuple[float, float]


@dataclass(frozen=True)
class PlacementPolicy:
    """A kind of placement policy, which chooses nodes for workers.

    Attributes:
        pack: (slots, count, gang, options) -> the chosen slots and the number of workers on each, `count` together. The
            slots are those of the topology level that the group asks for. Workers of a gang communicate all the time.
            It must be a function of its arguments alone: the same plan is made again when a run is resumed.
        options: Its keys in a scenario.
    """

    pack: Callable[[Sequence[NodeSlots], int, bool, Options], list[tuple[NodeSlots, int]]]
    options: type[StrictModel] = StrictModel


def _pack(slots: Any, count: Any, gang: Any, options: Any) -> Any:
    """Declare the arguments of `PlacementPolicy.pack`."""


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
    """Choose nodes for `count` workers by a policy, in order of place.

    Raises:
        ConfigError: The policy places another number of workers, or more than fit on a node.
    """
    taken = sorted(policy.pack(slots, count, gang, options), key=lambda choice: choice[0].order)
    for room, workers in taken:
        if workers > room.slots:
            raise ConfigError(
                f"placement: the policy puts {workers} workers on node {room.node.id}, where {room.slots} fit"
            )
    if sum(workers for _, workers in taken) != count:
        raise ConfigError(
            f"placement: the policy places {sum(n for _, n in taken)} workers; it must place {count}"
        )
    return [(room, workers) for room, workers in taken if workers]
