"""Rollouts of a few users, as they are on the wire."""

from __future__ import annotations

import numpy as np
import pytest

from nonet.types import Jagged, Rollouts


@pytest.fixture
def make_rollouts():
    """Users 501, 502, ... with two beams each, items 10, 11, ...; the target of user n is item 11 + 7 n."""

    def make(users=2, **changes):
        item = np.arange(10, 10 + 2 * users).reshape(users, 2)
        values = {
            "uid": np.array([f"rl/0/{n}" for n in range(users)]),
            "user_id": np.arange(501, 501 + users),
            "item_id": item,
            "item": item,
            "sid": np.zeros((users, 2, 3), np.int32),
            "logp": np.full((users, 2, 3), -0.5, np.float32),
            "valid": np.ones((users, 2), bool),
            "target": Jagged(11 + 7 * np.arange(users), np.arange(users + 1)),
            "history": Jagged(np.array([1, 2, 3]), np.array([0] + [3] * users)),
            "scene": np.zeros(users, np.int64),
            "weights_version": 3,
            "catalogue_version": "abc",
            "step": 12,
        }
        return Rollouts(**(values | changes))

    return make
