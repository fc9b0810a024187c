"""Adds columns of stores to events: the item and user of each event are looked up as of the event's time."""

# Shapes: n events, I items.

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np

from nonet.samples.sequences.sequences import Sequences
from nonet.samples.stores import StoreJoins


@dataclass(frozen=True)
class JoinedEvents:
    """The value of `Sequences.joined`.

    Attributes:
        joins: The joins of the run.
        item_id: The items' own ids [I].
    """

    joins: StoreJoins
    item_id: np.ndarray

    def __call__(self, item: np.ndarray, user_id: np.ndarray, time: np.ndarray) -> dict[str, np.ndarray]:
        """Return the columns [n] of events, given dense items [n], the users' own ids [n] and times [n]."""
        return self.joins.read_event_columns(self.item_id[item], user_id, np.asarray(time))


def add_joins(seq: Sequences, joins: StoreJoins, item_id: np.ndarray) -> Sequences:
    """Return the same sequences; their batches have the joined columns beside those that they carry."""
    other = copy.copy(seq)
    other.__dict__["joined"] = JoinedEvents(joins, item_id)
    return other
