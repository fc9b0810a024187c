"""The placement policy "best_fit": the fewest nodes; of several nodes that fit, the fullest one, in the fullest rack.

For example, four groups of one GPU share a node, so that three of four nodes stay free. Ray's own placement leaves none free
(`nonet bench placement`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nonet.controller.cluster.placement.base import NodeSlots, PlacementPolicy


def pack_best_fit(
    slots: Sequence[NodeSlots], count: int, gang: bool, options: Mapping[str, Any]
) -> list[tuple[NodeSlots, int]]:
    """Choose the fewest nodes; a group that is no gang first fills nodes that are partly in use.

    Args:
        slots: The candidate nodes, with the number of workers that fit on each.
        count: The number of workers.
        gang: Whether the workers communicate all the time.
        options: The options of the policy, which has none.

    Returns:
        The chosen nodes, with the number of workers on each.
    """
    choices: list[tuple[NodeSlots, int]] = []
    if not gang:
        for node in sorted((r for r in slots if r.broken), key=lambda r: (r.slots, r.full, r.order)):
            if node.slots >= count:
                break
            choices.append((node, node.slots))
            count -= node.slots
    chosen = {node.order for node, _ in choices}
    others = sorted((r for r in slots if r.order not in chosen), key=lambda r: (-r.slots, r.full, r.order))
    for index, node in enumerate(others):
        if node.slots >= count:
            choices.append((_find_tightest(others[index:], count), count))
            break
        choices.append((node, node.slots))
        count -= node.slots
    return choices


def _find_tightest(rooms: list[NodeSlots], count: int) -> NodeSlots:
    """Return the node with the fewest slots on which `count` workers fit."""
    return min((r for r in rooms if r.slots >= count), key=lambda r: (r.slots, r.full, r.order))


SPEC = PlacementPolicy(pack_best_fit)
