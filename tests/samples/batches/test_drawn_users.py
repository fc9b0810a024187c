"""What is known of all users from the ranks of some of them."""

from __future__ import annotations

import numpy as np
import pytest

from nonet.models.ranking.metrics import compute_half_width, compute_per_event
from nonet.random import rng
from nonet.samples.batches.prompt_rows import sample_prompts
from nonet.samples.sequences.sequences import TEST, Sequences

USERS, DRAWN = 20_000, 2_000


@pytest.fixture(scope="module")
def seq():
    """Make users with one to five test events each."""
    lengths = rng(0, "lengths").integers(1, 6, USERS)
    events = int(lengths.sum())
    return Sequences(
        user_id=np.arange(USERS),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        item=np.zeros(events, np.int32),
        time=np.zeros(events, np.int64),
        event=np.zeros(events, np.int32),
        split=np.full(events, TEST, np.int8),
        user_key=np.arange(USERS),
        item_key=np.arange(1),
    )


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["recall@10", "ndcg@10"])
def test_the_interval_of_drawn_users_holds_the_full_result_in_93_of_100_draws(seq, metric):
    """2,000 draws; users differ, so that events of one are alike."""
    skill = rng(1, "users").beta(0.5, 3, USERS)[seq.user]
    hit = rng(1, "events").random(len(skill)) < skill
    ranks = np.where(hit, rng(1, "ranks").integers(0, 10, len(skill)), 1000)
    value = compute_per_event(metric, ranks)
    full, held = value.mean(), 0
    for seed in range(2000):
        users, positions = sample_prompts(seq, TEST, DRAWN, seed)
        mine = value[seq.offsets[users] + positions]
        held += abs(mine.mean() - full) <= compute_half_width(mine, users, USERS)
    assert 0.93 <= held / 2000 <= 0.97


def test_nothing_is_uncertain_where_all_users_were_ranked_and_half_a_draw_is_known_by_hand():
    values, users = np.array([1.0, 0.0, 1.0, 1.0]), np.array([0, 0, 3, 5])
    assert compute_half_width(values, users, 3) == 0.0
    # 3 of 12 users: totals 1, 1, 1 of 2, 1, 1 events, mean 3/4: residuals -1/2, 1/4, 1/4; variance 3/8 / 2 / 3 * 3/4 over (4/3)^2
    assert compute_half_width(values, users, 12) == pytest.approx(1.959964 * (3 / 64 / (16 / 9)) ** 0.5)
