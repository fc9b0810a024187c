"""What is known of all users from the ranks of some of them."""

from __future__ import annotations

import numpy as np
import pytest

from nonet.models.ranking.metrics import per_event
from nonet.random import rng
from nonet.samples.batches.prompt_rows import some_prompts
from nonet.samples.sequences.sequences import TEST, Sequences

USERS, DRAWN = 20_000, 2_000


@pytest.fixture(scope="module")
def seq():
    """A user has one to five test events."""
    lengths = rng(0, "lengths").integers(1, 6, USERS)
    events = int(lengths.sum())
    return Sequences(
        user_id=np.arange(USERS),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        item=np.zeros(events, np.int32),
        time=np.zeros(events, np.int64),
        event=np.zeros(events, np.int32),
        split=np.full(events, TEST, np.int8),
    )


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["recall@10", "ndcg@10"])
def test_the_interval_of_drawn_users_holds_the_full_result_in_93_of_100_draws(seq, metric):
    """2,000 draws; users differ, so that events of one are alike. The interval is that of a ratio of sums over users."""
    skill = rng(1, "users").beta(0.5, 3, USERS)[seq.user]
    hit = rng(1, "events").random(len(skill)) < skill
    ranks = np.where(hit, rng(1, "ranks").integers(0, 10, len(skill)), 1000)
    value = per_event(metric, ranks)
    full, held = value.mean(), 0
    for seed in range(2000):
        users, positions = some_prompts(seq, TEST, DRAWN, seed)
        mine = value[seq.offsets[users] + positions]
        _, place = np.unique(users, return_inverse=True)
        total, events = np.bincount(place, weights=mine), np.bincount(place)
        mean = total.sum() / events.sum()
        error = np.sqrt(((total - mean * events) ** 2).sum()) / events.sum()
        held += abs(mean - full) <= 1.96 * error
    assert held / 2000 >= 0.93
