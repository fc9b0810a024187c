"""ShownUsers: the few users whose history, held-out items and recommendations a report shows by title."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from nonet.models.generation import Corpus

# Shapes: P prompts, k items.

_HISTORY_ITEMS = 8  # Number of the newest items of a history that are shown.


class ShownUsers:
    """Selects evenly spread users that have a test event, with the first test event of each.

    Args:
        corpus: Sequences and items.
        users: Users [P] of the test prompts.
        positions: Positions [P] of the test prompts.
        max_users: Maximum number of users.
    """

    def __init__(self, corpus: Corpus, users: np.ndarray, positions: np.ndarray, max_users: int):
        _, first_prompts = np.unique(users, return_index=True)
        if len(first_prompts):
            n_shown = min(max_users, len(first_prompts))
            evenly_spread = np.linspace(0, len(first_prompts) - 1, n_shown).round().astype(int)
            first_prompts = first_prompts[evenly_spread]
        self._corpus, self.users, self.positions = corpus, users[first_prompts], positions[first_prompts]

    def describe_users(self) -> list[dict[str, Any]]:
        """Return {"user_id", "history": newest titles before the event, "target": titles from the event on} of each user."""
        rows, seq = [], self._corpus.seq
        for user, position in zip(self.users.tolist(), self.positions.tolist(), strict=True):
            items = seq.item[int(seq.offsets[user]) : int(seq.offsets[user + 1])]
            rows.append(
                {
                    "user_id": _to_plain(seq.user_id[user]),
                    "history": self._get_titles(items[max(0, position - _HISTORY_ITEMS) : position]),
                    "target": self._get_titles(items[position:]),
                }
            )
        return rows

    def list_titles(self, select_best: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> list[list[str]]:
        """Return the titles of each user's best items.

        Args:
            select_best: Maps users [P] and positions [P] to items [P, k]; -1 is no item.
        """
        if not len(self.users):
            return []
        item_Pk = select_best(self.users, self.positions)
        return [self._get_titles(item_k[item_k >= 0]) for item_k in item_Pk]

    def _get_titles(self, items: np.ndarray) -> list[str]:
        return [str(text) for text in self._corpus.items["title"].take(pa.array(items)).to_pylist()]


def _to_plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
