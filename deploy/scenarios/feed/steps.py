"""A step between rollout and rewards: items above a price are not recommended."""

import numpy as np
import pyarrow.parquet as pq

import nonet


class PriceGuard(nonet.DistributeWorker):
    """Marks beams of items whose list price is above a limit as invalid.

    Args:
        most: The limit.
    """

    def __init__(self, most: float = 500.0):
        self._most = most

    @nonet.method(folders=nonet.Replicate)
    def open(self, folders):
        """Read the list prices of the items."""
        items = pq.read_table(f"{folders['sequences']}/items.parquet", columns=["list_price"])
        self._allowed = items["list_price"].to_numpy() <= self._most

    @nonet.method(collect="concat", rollouts=nonet.Shard)
    def apply(self, rollouts):
        """Return the rollouts with fewer valid beams."""
        allowed = self._allowed[np.maximum(rollouts["item"], 0)]
        return {**rollouts, "valid": rollouts["valid"] & allowed}
