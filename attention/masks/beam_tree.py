"""The mask rule of beam trees: each beam attends to the shared history and to its ancestors.

The keys of a sequence are ordered by level: [history of h keys | level 0: W beams | level 1: W beams | ...]. A row of the
mask has 1 + L intervals (slots): one in the history, and one key or none in each level.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.attention.masks.packed import MaskRows, PackedGeometry, PerSequence
from nonet.errors import ConfigError

# Shapes: T packed query tokens, B sequences, L levels, W beams per level. p is a query's position among the keys.


@dataclass(frozen=True, slots=True, eq=False)
class BeamTreeRule:
    """Attention of beams to their history (causally), to their ancestors and to themselves.

    Attributes:
        history: Number h of history keys.
        width: Number W of beams per level.
        parents: For each level except the first, the index of each beam's parent among the W beams of the previous level,
            [B, L - 1, W], or [L - 1, W] for all sequences.
    """

    history: PerSequence
    width: int
    parents: Tensor

    @property
    def levels(self) -> int:
        """The number of levels."""
        return self.parents.shape[-2] + 1

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        """Compute the row intervals of this mask for a packed batch."""
        ancestor_BLLW = self._compute_ancestors(geometry)
        h = geometry.expand_to_queries(self.history, "history")
        p = geometry.place_T
        offset = p - h
        is_beam = (offset >= 0) & (offset < self.levels * self.width)
        level = (offset // self.width).clamp(0, self.levels - 1)
        beam = offset.clamp_min(0) % self.width
        tree_T = geometry.sequence_T if len(ancestor_BLLW) > 1 else torch.zeros_like(geometry.sequence_T)
        slots = [(torch.zeros_like(p), (p + 1).clamp_max(h))]  # type: ignore[arg-type]
        for ancestor_level in range(self.levels):
            key = h + ancestor_level * self.width + ancestor_BLLW[tree_T, level, ancestor_level, beam]
            slots.append((key, torch.where(is_beam & (level >= ancestor_level), key + 1, key)))
        return MaskRows(tuple(slots))

    def _compute_ancestors(self, geometry: PackedGeometry) -> Tensor:
        """Compute the index of each beam's ancestor at each level, as [b, level of the beam, level of the ancestor, beam].

        The shape is [B or 1, L, L, W]. At its own level a beam is its own ancestor; entries of later levels are unused.
        """
        parents = self.parents if self.parents.ndim == 3 else self.parents[None]
        sequences = len(geometry.cu_q) - 1
        if len(parents) not in (1, sequences) or parents.device != geometry.cu_q.device:
            raise ConfigError(
                f"parents of shape {list(self.parents.shape)} on {parents.device}; this batch wants "
                f"[{sequences}, levels - 1, {self.width}] or [levels - 1, {self.width}] on {geometry.cu_q.device}."
            )
        own_index = torch.arange(self.width, device=parents.device).expand(len(parents), -1)
        ancestors_by_level = [own_index.expand(self.levels, *own_index.shape)]
        for level in range(1, self.levels):
            parent_index = parents[:, level - 1].long().expand(self.levels, -1, -1)
            ancestors = ancestors_by_level[-1].gather(2, parent_index)
            ancestors_by_level.append(torch.cat([ancestors[:level], own_index[None], ancestors[level + 1 :]]))
        return torch.stack(ancestors_by_level).permute(2, 0, 1, 3)
