"""Sentences about a run's data, for notes and reports: repeated items, duplicate events, and items that share codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nonet.controller.scenario.settings.warnings import MANY_DUPLICATES, MANY_IMMEDIATE
from nonet.samples.sequences import ALLOW

# The largest group of items with the same codes is reported from this number of items and this share of all items on.
_MIN_GROUP, _MIN_GROUP_SHARE = 10, 0.1
_MANY_LOST_LABELS = 0.05  # the share of the rows of a label file that may find no event without a warning


def describe_repeats(data: Mapping[str, Any]) -> str:
    """Return a sentence on whether items that a user has seen are recommended again, and how many events that affects.

    Args:
        data: Facts about the data, from a report or the tokenise stage; "repeats" is {"policy", "chosen_by", "share"}, and of
            later versions "immediate".

    Returns:
        The sentence; "" if the facts lack "repeats".
    """
    repeats = data.get("repeats")
    if not repeats:
        return ""
    origin = "chosen by the data" if repeats["chosen_by"] == "data" else "set by the scenario"
    policy_text = f"data.repeats: {repeats['policy']}, {origin}"
    test_share, train_share = (repeats["share"].get(name, 0.0) for name in ("test", "train"))
    if repeats["policy"] == ALLOW:
        immediate = repeats.get("immediate", 0.0)
        advice = (
            f" {format_percent(immediate)} of the test events are of the item of the event right before, which any list that "
            "begins with the newest item finds; `data.events: {compress: ...}` makes one event of them."
            if immediate >= MANY_IMMEDIATE
            else ""
        )
        return (
            f"Seen items may be recommended again ({policy_text}): {format_percent(test_share)} of the test events return to "
            f"one, {format_percent(train_share)} of the training events.{advice}"
        )
    missed_text = (
        f"{format_percent(test_share)} of the test events return to one and are missed by every model"
        if test_share
        else "no test event returns to one"
    )
    return f"Seen items are not recommended again ({policy_text}); {missed_text}."


def describe_unknown_items(data: Mapping[str, Any]) -> str:
    """Return a sentence on the events that were left out because the items table or the run lacks their item.

    Args:
        data: Facts about the data, from a report or the tokenise stage.

    Returns:
        The sentence; "" if none was left out.
    """
    counted = (
        ("unknown_items", "interactions", "items table"),
        ("unknown_items_in_source", "events of data.source", "run"),
    )
    parts: list[str] = []
    for key, events, owner in counted:
        counts: Mapping[str, int] = data.get(key) or {}
        if counts.get("events"):
            parts.append(
                f"{counts['events']:,} of {counts['of']:,} {events} name one of {counts['items']:,} items that the {owner} lacks"
            )
    return f"{', and '.join(parts)}, and are left out (data.unknown_items: drop)." if parts else ""


def describe_lost_labels(data: Mapping[str, Any]) -> str:
    """Return sentences on the rows of label files that found no event, and on events whose labels are not known yet.

    Args:
        data: Facts about the data, from a report or the tokenise stage; "label_files" has the fields of `LabelCounts` by label.

    Returns:
        The sentences; "" if every row found an event and every label is known.
    """
    labels: Mapping[str, Mapping[str, int]] = data.get("label_files") or {}
    parts = [
        f"{counts['no_event'] + counts['too_late']:,} of {counts['rows']:,} rows of {name} ({counts['no_event']:,} have no "
        f"earlier event of their user and item that data.where leaves, {counts['too_late']:,} came after the window)"
        for name, counts in labels.items()
        if counts["no_event"] + counts["too_late"]
    ]
    lost = f"Labels that found no event: {'; '.join(parts)}." if parts else ""
    # Runs of before 0.3 did not count the events.
    waiting = [f"{counts['unknown']:,} of {name}" for name, counts in labels.items() if counts.get("unknown")]
    unknown = f"Events whose label is not known, because its window has not ended: {'; '.join(waiting)}."
    return " ".join(filter(None, [lost, unknown if waiting else ""]))


def has_many_lost_labels(data: Mapping[str, Any]) -> bool:
    """Return whether so many rows of a label file found no event that the file may not be that of the events."""
    labels: Mapping[str, Mapping[str, int]] = data.get("label_files") or {}
    return any(
        counts["no_event"] + counts["too_late"] > _MANY_LOST_LABELS * counts["rows"]
        for counts in labels.values()
    )


def describe_duplicates(data: Mapping[str, Any]) -> str:
    """Return a sentence on the duplicates among a run's events.

    Args:
        data: Facts about the data, from a report or the tokenise stage; "duplicates" is the number of events with the user,
            item and second of an earlier event.

    Returns:
        The sentence; "" if there are few duplicates, or the facts lack them.
    """
    duplicates, events = data.get("duplicates", 0), data.get("events", 0)
    if duplicates <= MANY_DUPLICATES * events:
        return ""
    return (
        f"{duplicates:,} of {events:,} events are duplicates (same user, item and second), so a held-out event may be a copy of "
        "one that was trained on: drop the copies before you compare these numbers with others, unless they are events of "
        "their own."
    )


def describe_shared_codes(tokenizer: Mapping[str, Any], items: int) -> str:
    """Return a sentence on the largest group of items with the same codes.

    Args:
        tokenizer: Facts about the semantic ids; "largest_collision" is the number of items in that group.
        items: The number of items in the catalogue.

    Returns:
        The sentence; "" if the group is small, or its size is unknown.
    """
    largest = tokenizer.get("largest_collision", 0)
    if largest < max(_MIN_GROUP, _MIN_GROUP_SHARE * items):
        return ""
    return (
        f"{largest:,} of {items:,} items ({format_percent(largest / items)}) share the same codes and differ in the collision "
        "level alone, which says nothing about them: name tokenizer.vectors that tell these items apart, or raise "
        "tokenizer.levels or tokenizer.codes."
    )


def format_percent(share: float) -> str:
    """Format a share as a percentage; a share above 0 is never shown as 0."""
    return "less than 0.1 %" if 0 < share < 0.001 else f"{100 * share:.1f} %"
