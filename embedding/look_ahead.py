"""Which batch needs a key next, as far as the coming batches are known: what Belady's rule would ask.

Keys alone are foreseen, 8 bytes each, so a reader may run many batches ahead of the rows. Every occurrence of a key is linked
to its next one when that becomes known; a batch costs one look into an index, however far ahead it is.
"""

# Shapes: N distinct keys of a batch.

from __future__ import annotations

import numpy as np

from nonet.embedding.slot_index import SlotIndex

NEVER = np.iinfo(np.int64).max


class LookAhead:
    """Batches are foreseen in order of their steps and done in the same order."""

    def __init__(self) -> None:
        self._latest = SlotIndex("look-ahead")  # key -> number of its latest occurrence
        self._next = np.empty(
            0, dtype=np.int64
        )  # of each occurrence since _first, the step of the key's next one
        self._first = 0
        self._batches: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def last(self) -> int:
        """The last step foreseen, -1 before the first."""
        return next(reversed(self._batches), -1)

    def foresee(self, step: int, keys: np.ndarray) -> None:
        """The batch of `step`, later than all before, needs these distinct keys [N]."""
        before = self._latest.find(keys)
        self._next[before[before >= 0] - self._first] = step
        start = self._first + len(self._next)
        self._latest.put(keys, np.arange(start, start + len(keys)))
        self._next = np.concatenate([self._next, np.full(len(keys), NEVER)])
        self._batches[step] = keys

    def done(self, step: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """For every batch up to `step`: its keys and the step that needs each next, NEVER where none is known."""
        found = []
        for past in [known for known in self._batches if known <= step]:
            keys = self._batches.pop(past)
            follows, self._next = self._next[: len(keys)].copy(), self._next[len(keys) :]
            self._first += len(keys)
            self._latest.drop(keys[follows == NEVER])
            found.append((keys, follows))
        return found
