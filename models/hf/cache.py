"""Result of a prefill with a Hugging Face backbone: keys and values of a history, computed once, whatever the number of beams.

The keys and values that a step computes for its beams are stored in `nodes`. The next level, whose beams continue these, then
computes one position per beam. Nothing is copied when beams are reordered: a mask selects the keys of a beam's ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

# Shapes: U prompts, S history positions, D width, G key heads, E width per head, W nodes of a level, l codes of a node, V nodes
# of the level before.
KeysValues = list[tuple[Tensor, Tensor]]


@dataclass(slots=True)
class StepNodes:
    """The prefixes of one level (nodes) whose keys and values a step computed.

    Attributes:
        codes: Codes [U, W, l] of each node.
        key_positions: Indices [U, W, l] of the keys of each node's codes among all keys in `kv`.
        kv: Keys and values by layer, those of the histories first, then those of the nodes.
    """

    codes: Tensor
    key_positions: Tensor
    kv: KeysValues

    def find_parents(self, codes_UWl: Tensor) -> Tensor | None:
        """Return the node [U, W] of which each prefix `codes_UWl` of the next level is a child; None if a parent is missing."""
        same_UWV = (codes_UWl[:, :, None, :-1] == self.codes[:, None]).all(-1)
        return same_UWV.int().argmax(-1) if bool(same_UWV.any(-1).all()) else None


@dataclass(slots=True)
class HfCache:
    """The cache of a batch of prompts.

    Attributes:
        state: States [U, D] that predict the first code of the next item.
        x: Inputs [U, S, D] of the backbone.
        lengths: Number of positions [U] of each prompt.
        kv: Keys and values [U, G, S, E] by layer; None for backbones with other caches.
        nodes: Nodes of the last step.
    """

    state: Tensor
    x: Tensor
    lengths: Tensor
    kv: KeysValues | None
    nodes: StepNodes | None = field(default=None, repr=False)

    def select_prompts(self, start: int, stop: int) -> HfCache:
        """Return the cache of the prompts [start, stop)."""
        prompts = slice(start, stop)
        longest = int(self.lengths[prompts].max())
        kv = self.kv and [(k[prompts, :, :longest], v[prompts, :, :longest]) for k, v in self.kv]
        return HfCache(self.state[prompts], self.x[prompts, :longest], self.lengths[prompts], kv)

    def mask_history(self) -> Tensor:
        """Return a mask [U, S] of the keys of the history that are not padding."""
        return torch.arange(self.x.shape[1], device=self.x.device) < self.lengths[:, None]
