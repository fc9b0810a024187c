"""Between rollout and rewards: a worker that takes beams out, here items that hardly anybody has tried.

between: [{use: guard.py:Known, least: 5}]
"""

import numpy as np
import pyarrow.parquet as pq

import nonet


class Known(nonet.DistributeWorker):
    """Marks beams of items with few events as invalid."""

    def __init__(self, least: int = 5):
        self.least = least

    @nonet.method(folders=nonet.Replicate)
    def open(self, folders):
        """Read how many events each item has."""
        items = pq.read_table(f"{folders['sequences']}/items.parquet")
        self.known = items["events"].to_numpy() >= self.least

    @nonet.method(collect="concat", rollouts=nonet.Shard)
    def apply(self, rollouts):
        """Return the rollouts with fewer valid beams."""
        known = self.known[np.maximum(rollouts["item"], 0)]
        return {**rollouts, "valid": rollouts["valid"] & known}
