"""What a run's data is like: the numbers its speed depends on, and the words for its repeats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nonet.samples.repeats import ALLOW


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What the sequences hold.

    spread     standard deviation over mean of the training events of a user
    targeted   share of the training events that a stage's `target:` keeps, by stage
    items, asked   of the catalogue; held-out prompts that every evaluation ranks
    """

    users: int
    trained_events: int
    spread: float = 1.5
    targeted: Mapping[str, float] = field(default_factory=dict)
    items: int = 0
    asked: int = 0


def repeats_text(data: Mapping[str, Any]) -> str:
    """A sentence on what holds of seen items in this run, and how many events it touches; "" where the data do not say.

    `data`: a report's or the tokenise stage's, whose "repeats" is {"policy", "chosen_by", "share"}.
    """
    repeats = data.get("repeats")
    if not repeats:
        return ""
    by = "chosen by the data" if repeats["chosen_by"] == "data" else "set by the scenario"
    how = f"data.repeats: {repeats['policy']}, {by}"
    test, train = (repeats["share"].get(name, 0.0) for name in ("test", "train"))
    if repeats["policy"] == ALLOW:
        return (
            f"Seen items may be recommended again ({how}): {percent(test)} of the test events return to one, "
            f"{percent(train)} of the training events."
        )
    missed = (
        f"{percent(test)} of the test events return to one and are missed by everybody"
        if test
        else "no test event returns to one"
    )
    return f"Seen items are recommended to nobody again ({how}); {missed}."


def percent(share: float) -> str:
    """A share in per cent, never 0 where there is some."""
    return "less than 0.1 %" if 0 < share < 0.001 else f"{100 * share:.1f} %"
