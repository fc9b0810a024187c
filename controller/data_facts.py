"""What a run's data is like, as far as its speed depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
