"""Best fit: the fewest nodes, and among those that fit the fullest, in the fullest rack.

Four one-GPU groups share a node and three whole nodes stay whole, where Ray's own placement leaves none
(`nonet bench placement`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nonet.controller.cluster.placement.base import NodeSlots, PlacementPolicy


def pack_best_fit(
    slots: Sequence[NodeSlots], count: int, gang: bool, options: Mapping[str, Any]
) -> list[tuple[NodeSlots, int]]:
    """Take the fewest nodes; a group that is no gang fills broken nodes first."""
    taken: list[tuple[NodeSlots, int]] = []
    if not gang:
        for room in sorted((r for r in slots if r.broken), key=lambda r: (r.slots, r.full, r.order)):
            if room.slots >= count:
                break
            taken.append((room, room.slots))
            count -= room.slots
    used = {room.order for room, _ in taken}
    left = sorted((r for r in slots if r.order not in used), key=lambda r: (-r.slots, r.full, r.order))
    for index, room in enumerate(left):
        if room.slots >= count:
            taken.append((_find_tightest(left[index:], count), count))
            break
        taken.append((room, room.slots))
        count -= room.slots
    return taken


def _find_tightest(rooms: list[NodeSlots], count: int) -> NodeSlots:
    return min((r for r in rooms if r.slots >= count), key=lambda r: (r.slots, r.full, r.order))


SPEC = PlacementPolicy(pack_best_fit)
