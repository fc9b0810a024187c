"""Events with columns out of stores: each event's item and user are looked up as of the event's own time."""

# Shapes: n events, I items.

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np

from nonet.samples.sequences.sequences import Sequences
from nonet.samples.stores import Joins


@dataclass(frozen=True)
class JoinedEvents:
    """What `Sequences.joined` is; item_id [I] are the items' own ids."""

    joins: Joins
    item_id: np.ndarray

    def __call__(self, item: np.ndarray, user_id: np.ndarray, time: np.ndarray) -> dict[str, np.ndarray]:
        """Columns [n] of events: dense items [n], own ids of their users [n], times [n]."""
        return self.joins.event_columns(self.item_id[item], user_id, np.asarray(time))


def joined_to(seq: Sequences, joins: Joins, item_id: np.ndarray) -> Sequences:
    """The same sequences, whose batches have the joins' columns beside those that they carry."""
    other = copy.copy(seq)
    other.__dict__["joined"] = JoinedEvents(joins, item_id)
    return other
