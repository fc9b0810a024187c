"""Cache: the result of a prefill that steps read, one history per prompt.

Besides the last state of each prompt, a decoder may store the packed keys and values of its histories, which all beams of a
prompt share.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nonet.errors import DataError

# Shapes: U prompts, S packed history positions, D width, H heads, E width a head.


@dataclass(frozen=True, slots=True)
class DecoderCache:
    """State [U, D] of each prompt; keys and values [S, H, E] with cuts [U + 1], if the decoder attends to histories."""

    state: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None
    cuts: Tensor | None = None

    def get_history(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and cuts; raise an error if this cache has none."""
        if self.keys is None or self.values is None or self.cuts is None:
            raise DataError(
                "this cache holds no keys: it was not made by a model with depth: attention. Prefill with the same model."
            )
        return self.keys, self.values, self.cuts

    def select_prompts(self, start: int, stop: int) -> DecoderCache:
        """Return the cache of the prompts [start, stop)."""
        if self.keys is None:
            return DecoderCache(self.state[start:stop])
        keys, values, cuts = self.get_history()
        cuts = cuts[start : stop + 1]
        rows = slice(int(cuts[0]), int(cuts[-1]))
        return DecoderCache(self.state[start:stop], keys[rows], values[rows], cuts - cuts[0])
