"""Sentences about a run's data: repeated items, duplicate events, and items that share codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nonet.controller.scenario.settings.warnings import MANY_DUPLICATES
from nonet.samples.sequences import ALLOW

# Number of items with the same codes, and their share of all items, from which a sentence says so.
_LEAST_SHARING, _MANY_SHARING = 10, 0.1


def describe_repeats(data: Mapping[str, Any]) -> str:
    """Return a sentence on whether seen items are recommended again, and on how many events that affects.

    Args:
        data: Facts from a report or the tokenise stage; "repeats" is {"policy", "chosen_by", "share"}.

    Returns:
        The sentence; "" if the facts lack it.
    """
    repeats = data.get("repeats")
    if not repeats:
        return ""
    by = "chosen by the data" if repeats["chosen_by"] == "data" else "set by the scenario"
    how = f"data.repeats: {repeats['policy']}, {by}"
    test, train = (repeats["share"].get(name, 0.0) for name in ("test", "train"))
    if repeats["policy"] == ALLOW:
        return (
            f"Seen items may be recommended again ({how}): {format_percent(test)} of the test events return to one, "
            f"{format_percent(train)} of the training events."
        )
    missed = (
        f"{format_percent(test)} of the test events return to one and are missed by every model"
        if test
        else "no test event returns to one"
    )
    return f"Seen items are not recommended again ({how}); {missed}."


def describe_duplicates(data: Mapping[str, Any]) -> str:
    """Return a sentence on the duplicates among a run's events.

    Args:
        data: Facts from a report or the tokenise stage; "duplicates" counts events with the user, item and second of
            another.

    Returns:
        The sentence; "" if there are few, or the facts lack them.
    """
    copies, events = data.get("duplicates", 0), data.get("events", 0)
    if copies <= MANY_DUPLICATES * events:
        return ""
    return (
        f"{copies:,} of {events:,} events are duplicates (same user, item and second), so a held-out event may be a copy of "
        "one that was trained on: drop the copies before you compare these numbers with others, unless they are events of "
        "their own."
    )


def describe_shared_codes(tokenizer: Mapping[str, Any], items: int) -> str:
    """Return a sentence on the largest group of items with the same codes.

    Args:
        tokenizer: The report on semantic ids; "largest_collision" is the size of that group.
        items: The number of items in the catalogue.

    Returns:
        The sentence; "" if the group is small, or unknown.
    """
    largest = tokenizer.get("largest_collision", 0)
    if largest < max(_LEAST_SHARING, _MANY_SHARING * items):
        return ""
    return (
        f"{largest:,} of {items:,} items ({format_percent(largest / items)}) share the same codes and differ in the collision "
        "level alone, which says nothing about them: name tokenizer.vectors that tell these items apart, or raise "
        "tokenizer.levels or tokenizer.codes."
    )


def format_percent(share: float) -> str:
    """Format a share as a percentage; a share above 0 is never shown as 0."""
    return "less than 0.1 %" if 0 < share < 0.001 else f"{100 * share:.1f} %"
