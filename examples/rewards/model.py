"""State: a small model that is read once in each worker. Here, how much less than usual an item was taken.

rewards: {fresh: {use: model.py:Fresh, workers: 2}}
"""

import numpy as np

import nonet


class Fresh(nonet.Reward):
    """Rewards items with fewer events than average."""

    columns = ["events"]

    def __init__(self, strength: float = 1.0):
        self.strength = strength

    def open(self, run):
        """Fit the model. It is called once in each worker, before the first beams."""
        events = run.column("events").astype(np.float64)
        self.mean, self.scale = events.mean(), events.std() + 1e-9

    def score(self, r):
        """Return the scores [U, W]."""
        return 1 / (1 + np.exp(self.strength * (r["events"] - self.mean) / self.scale))
