"""The cache of a prefill, which the decoding steps read.

It contains the last state of each prompt. If the decoder attends to histories, it also contains their packed keys and values,
which all beams of a prompt share.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nonet.errors import DataError

# Shapes: U prompts, S packed history positions, D width, H heads, E width per head.


@dataclass(frozen=True, slots=True)
class DecoderCache:
    """The result of a prefill.

    Attributes:
        state: Last state of each prompt [U, D].
        keys: Packed keys of the histories [S, H, E]; None if the decoder does not attend to histories.
        values: Packed values of the histories [S, H, E], or None.
        cuts: Offsets of the prompts' histories in `keys` and `values` [U + 1], or None.
    """

    state: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None
    cuts: Tensor | None = None

    def get_history(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and offsets; raise DataError if this cache has none."""
        if self.keys is None or self.values is None or self.cuts is None:
            raise DataError(
                "this cache holds no keys of histories, because the model that made it does not have `depth: attention`. "
                "Prefill with the same model."
            )
        return self.keys, self.values, self.cuts

    def select_prompts(self, start: int, stop: int) -> DecoderCache:
        """Return the cache of the prompts [start, stop)."""
        if self.keys is None:
            return DecoderCache(self.state[start:stop])
        keys, values, offsets = self.get_history()
        offsets = offsets[start : stop + 1]
        rows = slice(int(offsets[0]), int(offsets[-1]))
        return DecoderCache(self.state[start:stop], keys[rows], values[rows], offsets - offsets[0])
