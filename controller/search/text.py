"""Text of a search over placements: the ranking, and the settings of the choice."""

from __future__ import annotations

from typing import Any

from nonet.controller.plan import format_bytes
from nonet.controller.search.placements import PlacedVariant, PlacementSearch

_SHOWN = 12  # placements in the table


def format_search(search: PlacementSearch, limit: int = _SHOWN) -> str:
    """Format the first placements as a table, with the settings of the choice.

    Of placements with the same numbers, one is shown.

    Args:
        search: The search.
        limit: The largest number of placements to show.
    """
    ranked = [variant for variant in search.found if variant.plan]
    choice = search.choice
    variants_by_key: dict[tuple[Any, ...], list[PlacedVariant]] = {}
    for variant in ranked:
        variants_by_key.setdefault(variant.rank_key, []).append(variant)
    shown = [variants[0] for variants in variants_by_key.values()][:limit]
    shown += [choice] if choice and choice not in shown else []
    alike_count = {id(variants[0]): len(variants) - 1 for variants in variants_by_key.values()}
    lines = [f"{'holds':>10}  {'moves a step':>12}  {'processes':>9}  placement"]
    for variant in shown:
        mark = f"  (and {alike_count[id(variant)]} more alike)" if alike_count.get(id(variant)) else ""
        mark += "  <- the choice" if variant is choice else ""
        held, moved = format_bytes(variant.held_bytes), format_bytes(variant.moved_bytes)
        lines.append(f"{held:>10}  {moved:>12}  {variant.processes:>9}  {variant.name}{mark}")
    last_key = max((variant.rank_key for variant in shown), default=())
    behind_count = sum(variant.rank_key > last_key for variant in ranked)
    lines += [f"and {behind_count} that rank behind them"] if behind_count else []
    refused = [variant for variant in search.found if variant.refused]
    if refused:
        lines.append(f"{len(refused)} cannot be placed, e.g. {refused[0].name}: {refused[0].refused[:160]}")
    return "\n".join([*lines, "", *_format_choice(search)])


def make_search_records(search: PlacementSearch) -> list[dict[str, Any]]:
    """Return every placement by rank as plain data."""
    return [
        {
            "variant": variant.name,
            "roles": variant.roles,
            "set": search.list_changes(variant),
            "choice": variant is search.choice,
            "refused": variant.refused,
            "held_bytes": variant.held_bytes,
            "moved_bytes": variant.moved_bytes,
            "processes": variant.processes,
        }
        for variant in search.found
    ]


def _format_choice(search: PlacementSearch) -> list[str]:
    """Return a line with the settings of the choice, no line without one."""
    if search.choice is None:
        return []
    changes = " ".join(f"--set '{change}'" for change in search.list_changes(search.choice))
    return [f"take the first: {changes}" if changes else "take the first: the scenario as it is"]
