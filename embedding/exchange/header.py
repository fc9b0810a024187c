"""The header of an exchange in the sparse world: five int64, which are sent in front of the keys.

Every rank gets every trainer's header together with its keys, without a collective of its own. Shards read the operation
from the header, and trainers whose headers differ raise an error on all ranks instead of a hang.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nonet.errors import NonetError

PULL, READ, PUSH, STOP, TAKE, MOVE = 1, 2, 3, 4, 5, 6
_OPS = {PULL: "pull", READ: "read", PUSH: "push", STOP: "stop", TAKE: "take", MOVE: "move"}
_NO_LR = -1  # In place of the bits of a learning rate: the table's own rate. As bits it would be a NaN.

# A block of keys begins with 8 words (int64): the five of the header, and at these indices the number of keys, whether
# the keys are those of the last pull, and whether the sender has more keys for some rank than fit into its block.
BLOCK_WORDS, COUNT_WORD, SAME_WORD, MORE_WORD = 8, 5, 6, 7


@dataclass(frozen=True, slots=True)
class ExchangeHeader:
    """The operation of an exchange.

    Attributes:
        op: The operation: pull, read, push, stop, take or move.
        table: The number of the table, in the order of the world's specs.
        step: The step of a push; 0 otherwise.
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
        lr_bits = _NO_LR if self.lr is None else struct.unpack("<q", struct.pack("<d", self.lr))[0]
        return [self.op, self.table, self.step, lr_bits, self.slices]

    @classmethod
    def from_words(cls, words: Sequence[int]) -> ExchangeHeader:
        """Decode a header from the words of `to_words()`."""
        op, table, step, lr_bits, slices = words
        lr = None if lr_bits == _NO_LR else struct.unpack("<d", struct.pack("<q", lr_bits))[0]
        return cls(op, table, step, lr, slices)

    def describe(self, names: Sequence[str]) -> str:
        """Describe the header in a message, for example "push of 'item' at step 12"; `names` are those of the tables."""
        table_text = f" of {names[self.table]!r}" if self.op != STOP else ""
        return (
            f"{_OPS[self.op]}{table_text} at step {self.step} with lr {self.lr} and slice map {self.slices}"
        )


def check_agreement(
    own_header: ExchangeHeader | None, headers: Iterable[Sequence[int]], names: Sequence[str]
) -> ExchangeHeader:
    """Check that all trainers sent the same header, and return it.

    Args:
        own_header: This rank's header; None on a shard.
        headers: The words of all trainers' headers.
        names: The names of the tables.

    Raises:
        NonetError: If the headers differ.
    """
    first, *others = (ExchangeHeader.from_words(words) for words in headers)
    for other in others:
        if other != first:
            own_text = (
                "this one is a shard"
                if own_header is None
                else f"this one asks a {own_header.describe(names)}"
            )
            raise NonetError(
                f"trainers of the sparse world differ in what they ask ({own_text}; there are a "
                f"{first.describe(names)} and a {other.describe(names)}); all of them must pull and push the same tables in "
                "the same order"
            )
    return first
