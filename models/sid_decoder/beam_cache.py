"""Cache: what a prefill leaves for the steps, one history a prompt; steps only read it.

Besides the last state of each prompt a decoder may keep its histories' keys and values, packed: all beams of a prompt share them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nonet.errors import DataError

# Shapes: U prompts, S packed history positions, D width, H heads, E width a head.


@dataclass(frozen=True, slots=True)
class Cache:
    """state [U, D]; keys and values [S, H, E] cut by cuts [U + 1], where the decoder attends to histories."""

    state: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None
    cuts: Tensor | None = None

    def history(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and cuts; an error where this cache has none."""
        if self.keys is None or self.values is None or self.cuts is None:
            raise DataError(
                "this cache holds no keys: it was not made by a model with depth: attention. Prefill with the same model."
            )
        return self.keys, self.values, self.cuts

    def part(self, start: int, stop: int) -> Cache:
        """The prompts [start, stop)."""
        if self.keys is None:
            return Cache(self.state[start:stop])
        keys, values, cuts = self.history()
        cuts = cuts[start : stop + 1]
        rows = slice(int(cuts[0]), int(cuts[-1]))
        return Cache(self.state[start:stop], keys[rows], values[rows], cuts - cuts[0])
