"""The header of an exchange in the sparse world: eight int64 in front of the keys.

Every rank gets every trainer's header together with its keys. Shards learn the operation from it, and trainers that
differ raise an error on all ranks instead of a hang. It needs no collective of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nonet.errors import NonetError

PULL, READ, PUSH, STOP, TAKE, MOVE = 1, 2, 3, 4, 5, 6
_OPS = {PULL: "pull", READ: "read", PUSH: "push", STOP: "stop", TAKE: "take", MOVE: "move"}
_NO_LR = -1

# The words of a block: the five of the header, the number of keys, whether the keys are those of the last pull, and
# whether the sender has more keys for some rank than fit into the block.
WORDS, COUNT, SAME, MORE = 8, 5, 6, 7


@dataclass(frozen=True, slots=True)
class ExchangeHeader:
    """The operation of an exchange.

    Attributes:
        op: The operation: pull, read, push, stop, take or move.
        table: The number of the table.
        step: The step.
        lr: The learning rate; None: the table's own.
        slices: The version of the slice map.
    """

    op: int
    table: int = 0
    step: int = 0
    lr: float | None = None
    slices: int = 0

    def to_words(self) -> list[int]:
        """Convert the header to five int64; the learning rate is encoded as its bits."""
        lr = _NO_LR if self.lr is None else struct.unpack("<q", struct.pack("<d", self.lr))[0]
        return [self.op, self.table, self.step, lr, self.slices]

    @classmethod
    def from_words(cls, words: Sequence[int]) -> ExchangeHeader:
        """Decode a header from the words of `to_words()`."""
        op, table, step, lr, slices = words
        rate = None if lr == _NO_LR else struct.unpack("<d", struct.pack("<q", lr))[0]
        return cls(op, table, step, rate, slices)

    def describe(self, names: Sequence[str]) -> str:
        """Describe the header in a message, for example "push of 'item' at step 12"."""
        named = f" of {names[self.table]!r}" if self.op != STOP else ""
        return f"{_OPS[self.op]}{named} at step {self.step} with lr {self.lr} and slice map {self.slices}"


def check_agreement(
    mine: ExchangeHeader | None, headers: Iterable[Sequence[int]], names: Sequence[str]
) -> ExchangeHeader:
    """Check that all trainers sent the same header, and return it.

    Args:
        mine: This rank's header; None on a shard.
        headers: The words of all trainers' headers.
        names: The names of the tables.

    Raises:
        NonetError: If the headers differ.
    """
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
