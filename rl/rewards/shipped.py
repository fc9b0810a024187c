"""The shipped rewards.

`hit` is 1 for a beam that is a target, else 0. `rank` is MiniOneRec's ranking reward (paper section 3.4, code
`rl.py`): in a group with a hit every miss at position i loses (1 / log2(i + 2)) / sum_j (1 / log2(j + 2)), so
confident misses lose most and a group without a hit says nothing. Their default reward is `hit` and `rank`
together, weight 1 each.
"""

from __future__ import annotations

import numpy as np

from nonet.rl.rewards.api import reward
from nonet.types import Jagged

# Shapes: U users, W beams.


@reward
def hit(item_id: np.ndarray, target: Jagged, valid: np.ndarray) -> np.ndarray:
    """1 where the beam is one of the user's targets, else 0; [U, W] float32."""
    return _hits(item_id, target, valid).astype(np.float32)


@reward
def rank(item_id: np.ndarray, target: Jagged, valid: np.ndarray) -> np.ndarray:
    """0 for a hit, a share of -1 by position for each miss; all 0 in a group without a hit; [U, W]
    float32.
    """
    hits_UW = _hits(item_id, target, valid)
    gain_UW = np.where(valid, 1.0 / np.log2(np.arange(item_id.shape[1]) + 2.0), 0.0)
    share_UW = gain_UW / np.maximum(gain_UW.sum(1, keepdims=True), 1e-12)
    misses_UW = ~hits_UW & hits_UW.any(1, keepdims=True)
    return np.where(misses_UW, -share_UW, 0.0).astype(np.float32)


def _hits(item_id: np.ndarray, target: Jagged, valid: np.ndarray) -> np.ndarray:
    """Which valid beams are a target of their user, [U, W] bool."""
    counts = np.diff(target.offsets)
    hits_UW = np.zeros(item_id.shape, bool)
    for nth in range(int(counts.max(initial=0))):
        has = np.flatnonzero(counts > nth)
        hits_UW[has] |= item_id[has] == target.values[target.offsets[has] + nth][:, None]
    return hits_UW & valid
