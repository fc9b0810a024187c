"""The keys that a table has deleted and when, so that an incremental export can include the deletes.

A deleted key takes 16 bytes until `forget` is called, after a version or checkpoint up to that step was published.
"""

# Shapes: N keys.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nonet.embedding import is_within
from nonet.errors import StaleVersion


class TombstoneLog:
    """Deleted keys and the steps in which they were deleted; a deleted key may have a new row by now."""

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return sum(len(keys) for keys, _ in self._parts)

    def add(self, keys: np.ndarray, step: int | np.ndarray) -> None:
        """Record that int64 keys [N] were deleted at `step`, one number for all or an array [N]."""
        if len(keys):
            self._parts.append((keys, np.broadcast_to(np.asarray(step, dtype=np.int64), keys.shape)))

    def copy(self) -> TombstoneLog:
        """Return a copy that later changes do not affect."""
        copied = TombstoneLog()
        copied._parts, copied._forgotten = list(self._parts), self._forgotten
        return copied

    def is_complete_since(self, step: int) -> bool:
        """Return whether every delete after `step` is still recorded."""
        return step >= self._forgotten

    def list_since(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys that were deleted after `step`, sorted and distinct, and the step of each key's last delete.

        Raises:
            StaleVersion: If some of them were forgotten.
        """
        if not self.is_complete_since(step):
            raise StaleVersion(
                f"the keys deleted after step {step} are not known: deletes up to step {self._forgotten} were forgotten; "
                "export everything (since=None)"
            )
        if not self._parts:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        keys, steps = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        keys, steps = keys[steps > step], steps[steps > step]
        order = np.lexsort((steps, keys))
        keys, steps = keys[order], steps[order]
        is_last = np.append(keys[1:] != keys[:-1], True)[: len(keys)]
        return keys[is_last], steps[is_last]

    def drop_slices(self, slices: Sequence[range]) -> None:
        """Remove the keys of slices that another shard now owns and reports."""
        parts = [(keys, steps, ~is_within(keys, slices)) for keys, steps in self._parts]
        self._parts = [(keys[stays], steps[stays]) for keys, steps, stays in parts if stays.any()]

    def forget(self, step: int) -> None:
        """Remove the keys that were deleted at or before `step`."""
        self._forgotten = max(self._forgotten, step)
        parts = [(keys[steps > step], steps[steps > step]) for keys, steps in self._parts]
        self._parts = [part for part in parts if len(part[0])]

    def clear(self) -> None:
        """Remove everything and count steps from 0 again."""
        self._parts: list[
            tuple[np.ndarray, np.ndarray]
        ] = []  # Keys [N] and steps [N], in the order of `add`.
        self._forgotten = -1  # The last step whose deletes were forgotten.
