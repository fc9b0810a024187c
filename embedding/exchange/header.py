"""What an exchange of the sparse world is about: eight int64 that travel in front of the keys.

Every rank gets every trainer's header together with its keys, so a shard learns what is asked and trainers that differ
are an error on all ranks, not a hang; it costs no collective of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nonet.errors import NonetError

PULL, READ, PUSH, STOP, TAKE, MOVE = 1, 2, 3, 4, 5, 6
_OPS = {PULL: "pull", READ: "read", PUSH: "push", STOP: "stop", TAKE: "take", MOVE: "move"}
_NO_LR = -1

# A block's words: the header's own five, then how many keys follow, whether they are those of the last pull, and
# whether the sender has more keys for somebody than the block can hold.
WORDS, COUNT, SAME, MORE = 8, 5, 6, 7


@dataclass(frozen=True, slots=True)
class ExchangeHeader:
    """An operation, the table's number, the step, the learning rate (None: the table's own), the slice map's version."""

    op: int
    table: int = 0
    step: int = 0
    lr: float | None = None
    slices: int = 0

    def to_words(self) -> list[int]:
        """Five int64; a learning rate travels as its bits."""
        lr = _NO_LR if self.lr is None else struct.unpack("<q", struct.pack("<d", self.lr))[0]
        return [self.op, self.table, self.step, lr, self.slices]

    @classmethod
    def from_words(cls, words: Sequence[int]) -> ExchangeHeader:
        """The header that gave these words."""
        op, table, step, lr, slices = words
        rate = None if lr == _NO_LR else struct.unpack("<d", struct.pack("<q", lr))[0]
        return cls(op, table, step, rate, slices)

    def describe(self, names: Sequence[str]) -> str:
        """For a message, e.g. "push of 'item' at step 12"."""
        named = f" of {names[self.table]!r}" if self.op != STOP else ""
        return f"{_OPS[self.op]}{named} at step {self.step} with lr {self.lr} and slice map {self.slices}"


def check_agreement(
    mine: ExchangeHeader | None, headers: Iterable[Sequence[int]], names: Sequence[str]
) -> ExchangeHeader:
    """The one header that all trainers gave; `headers` are their words. Raises NonetError when they differ."""
    first, *others = (ExchangeHeader.from_words(words) for words in headers)
    for other in others:
        if other != first:
            ours = "this one is a shard" if mine is None else f"this one asks a {mine.describe(names)}"
            raise NonetError(
                f"trainers of the sparse world differ in what they ask ({ours}; there are a "
                f"{first.describe(names)} and a {other.describe(names)}); all of them must pull and push the same tables in "
                "the same order"
            )
    return first
