"""The mask rule of beam trees: beams that share a history and, level by level, their ancestors.

It has 1 + levels slots, of which all but one are single keys. The layout is level-major: [history h | level 0: W
beams | level 1: W beams | ...].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nonet.attention.masks.packed import MaskRows, PackedGeometry, PerSequence
from nonet.errors import ConfigError

# Shapes: T packed query tokens, B sequences, L levels, W beams a level; p the query's place.


@dataclass(frozen=True, slots=True, eq=False)
class BeamTreeRule:
    """k < h causally, or k an ancestor of the query or itself.

    parents [B, L - 1, W] or [L - 1, W]: for level l >= 1, each beam's parent among the W beams of level l - 1.
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
        beyond = p - h
        inside = (beyond >= 0) & (beyond < self.levels * self.width)
        level = (beyond // self.width).clamp(0, self.levels - 1)
        beam = beyond.clamp_min(0) % self.width
        of = geometry.sequence_T if len(ancestor_BLLW) > 1 else torch.zeros_like(geometry.sequence_T)
        slots = [(torch.zeros_like(p), (p + 1).clamp_max(h))]  # type: ignore[arg-type]
        for above in range(self.levels):
            key = h + above * self.width + ancestor_BLLW[of, level, above, beam]
            slots.append((key, torch.where(inside & (level >= above), key + 1, key)))
        return MaskRows(tuple(slots))

    def _compute_ancestors(self, at: PackedGeometry) -> Tensor:
        """Compute [B or 1, L, L, W]: for each level's beams the ancestor at each level above (itself at its own)."""
        parents = self.parents if self.parents.ndim == 3 else self.parents[None]
        sequences = len(at.cu_q) - 1
        if len(parents) not in (1, sequences) or parents.device != at.cu_q.device:
            raise ConfigError(
                f"parents of shape {list(self.parents.shape)} on {parents.device}; this batch wants "
                f"[{sequences}, levels - 1, {self.width}] or [levels - 1, {self.width}] on {at.cu_q.device}."
            )
        own = torch.arange(self.width, device=parents.device).expand(len(parents), -1)
        lines = [own.expand(self.levels, *own.shape)]
        for level in range(1, self.levels):
            up = parents[:, level - 1].long().expand(self.levels, -1, -1)
            line = lines[-1].gather(2, up)
            lines.append(torch.cat([line[:level], own[None], line[level + 1 :]]))
        return torch.stack(lines).permute(2, 0, 1, 3)
