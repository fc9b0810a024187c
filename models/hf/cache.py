"""Result of a prefill with a Hugging Face backbone: keys and values of a history, read once, whatever the number of beams.

Steps only read it. What a step computed for its beams is stored next to it, so that the next level, whose beams continue those,
computes one position per beam: nothing is copied when beams are reordered, a mask selects the keys of a beam's ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

# Shapes: U prompts, S history positions, D width, G key heads, E width a head, W nodes of a level, l its depth.
KeysValues = list[tuple[Tensor, Tensor]]


@dataclass(slots=True)
class StepNodes:
    """The nodes of one level that a step computed.

    Attributes:
        codes: Codes [U, W, l] of each node.
        places: Positions [U, W, l] of the nodes' keys among all keys.
        kept: Keys and values of the prompts and these nodes by layer.
    """

    codes: Tensor
    places: Tensor
    kept: KeysValues

    def find_parents(self, codes_UWl: Tensor) -> Tensor | None:
        """Return the node [U, W] that each of the next level's continues from; None if one of them was not computed."""
        same_UWV = (codes_UWl[:, :, None, :-1] == self.codes[:, None]).all(-1)
        return same_UWV.int().argmax(-1) if bool(same_UWV.any(-1).all()) else None


@dataclass(slots=True)
class HfCache:
    """The cache of a batch of prompts.

    Attributes:
        state: States [U, D] that predict the next item.
        x: Inputs [U, S, D] of the backbone.
        lengths: Number of positions [U] of each prompt.
        kept: Keys and values [U, G, S, E] by layer; None for backbones with other caches.
        nodes: Nodes of the last step.
    """

    state: Tensor
    x: Tensor
    lengths: Tensor
    kept: KeysValues | None
    nodes: StepNodes | None = field(default=None, repr=False)

    def select_prompts(self, start: int, stop: int) -> HfCache:
        """Return the cache of the prompts [start, stop)."""
        some = slice(start, stop)
        most = int(self.lengths[some].max())
        kept = self.kept and [(k[some, :, :most], v[some, :, :most]) for k, v in self.kept]
        return HfCache(self.state[some], self.x[some, :most], self.lengths[some], kept)

    def mask_history(self) -> Tensor:
        """Return a mask [U, S] of the keys of the history that are not padding."""
        return torch.arange(self.x.shape[1], device=self.x.device) < self.lengths[:, None]
