"""Which keys a table has forgotten and when, so that an export since a step can say so to its readers.

16 bytes a forgotten key, kept until `forget`: whoever has published or committed up to a step calls it.
"""

# Shapes: N keys.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nonet.embedding import is_within
from nonet.errors import StaleVersion


class TombstoneLog:
    """Keys and the steps in which they went; a key may have come back since."""

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return sum(len(keys) for keys, _ in self._parts)

    def add(self, keys: np.ndarray, step: int | np.ndarray) -> None:
        """These int64 keys [N] went at `step`, one for all or one each [N]."""
        if len(keys):
            self._parts.append((keys, np.broadcast_to(np.asarray(step, dtype=np.int64), keys.shape)))

    def copy(self) -> TombstoneLog:
        """The same marks, whatever is added or forgotten from now on."""
        same = TombstoneLog()
        same._parts, same._forgotten = list(self._parts), self._forgotten
        return same

    def is_complete_since(self, step: int) -> bool:
        """Whether nothing that went after `step` was forgotten."""
        return step >= self._forgotten

    def list_since(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys that went after `step`, sorted and each once, and the last step in which each went.

        Raises StaleVersion where some of them were forgotten.
        """
        if not self.is_complete_since(step):
            raise StaleVersion(
                f"which keys went after step {step} is not known: up to step {self._forgotten} that was forgotten; "
                "send or save everything"
            )
        if not self._parts:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        keys, steps = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        keys, steps = keys[steps > step], steps[steps > step]
        order = np.lexsort((steps, keys))
        keys, steps = keys[order], steps[order]
        last = np.append(keys[1:] != keys[:-1], True)[: len(keys)]
        return keys[last], steps[last]

    def drop_slices(self, slices: Sequence[range]) -> None:
        """Drop the keys of these slices: the shard that has them tells of them."""
        parts = [(keys, steps, ~is_within(keys, slices)) for keys, steps in self._parts]
        self._parts = [(keys[here], steps[here]) for keys, steps, here in parts if here.any()]

    def forget(self, step: int) -> None:
        """Drop what went at or before `step`."""
        self._forgotten = max(self._forgotten, step)
        parts = [(keys[steps > step], steps[steps > step]) for keys, steps in self._parts]
        self._parts = [part for part in parts if len(part[0])]

    def clear(self) -> None:
        """Drop everything; steps count from 0 again."""
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []
        self._forgotten = -1
