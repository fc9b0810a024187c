"""The run from which another one starts, as its data know it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nonet.samples.sequences import Sequences, load_item_keys, load_user_keys

if TYPE_CHECKING:
    from nonet.models.tokenizer import KnownSids


@dataclass(frozen=True, slots=True)
class KnownRun:
    """The data of a run whose weights are loaded.

    Attributes:
        run: Id of the run.
        sequences: Folder of its sequences.
        sids: Folder of its semantic ids; None for a click model.
        codes: Number of codes per level.
        replay: Share of events that it had trained on, in a run that trains on new events; None for a run that trains on all.
        rejected: Folder of the events that it trained on (`load_new_events`), if its stages have rejected what it learned from
            them and ended with the weights that they began with; else None.
    """

    run: str
    sequences: str
    sids: str | None
    codes: tuple[int, ...]
    replay: float | None = None
    rejected: str | None = None

    def load_sids(self) -> KnownSids | None:
        """Load the semantic ids that its items keep; None for a click model."""
        if self.sids is None:
            return None
        from nonet.models.tokenizer import KnownSids

        return KnownSids.load(Path(self.sequences), Path(self.sids), self.codes, f"run {self.run}")

    def count_known(self, seq: Sequences) -> dict[str, int]:
        """Count the users and items of other sequences, and how many of them the run knows."""
        users, items = load_user_keys(Path(self.sequences)), load_item_keys(Path(self.sequences))
        return {
            "known_users": int(np.isin(seq.user_key, users).sum()),
            "users": len(seq),
            "known_items": int(np.isin(seq.item_key, items).sum()),
            "items": len(seq.item_key),
        }
