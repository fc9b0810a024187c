"""Ties in time are shuffled among events that are trained on, and among those that are held out, never between them."""

import numpy as np
import pyarrow as pa

from nonet.samples.sequences.sequences import build_sequences
from nonet.samples.sequences.split import RL, TEST, TRAIN, VALID
from nonet.samples.sequences.ties import shuffle_ties


def days(users=200, length=9, seed=0):
    """Users whose events have one of three days; every event is an item and a number of its own."""
    rng = np.random.default_rng(seed)
    events = users * length
    log = pa.table(
        {
            "user_id": np.repeat(np.arange(users), length),
            "item_id": np.arange(events),
            "timestamp": np.sort(rng.integers(0, 3, (users, length)), 1).flatten() * 86400,
            "number": np.arange(events),
        }
    )
    split = {"test": 1, "valid": 1, "rl": 2}
    return build_sequences(log, None, split=split, targets={"finetune": "number > 700"})[0]


def test_events_move_within_their_user_time_and_part_alone():
    seq = days()
    other = shuffle_ties(seq, 5)
    moved = other.item != seq.item
    assert 0.3 < moved.mean() < 0.9
    for name in ("time", "split", "user"):
        np.testing.assert_array_equal(getattr(other, name), getattr(seq, name))
    part = np.select([seq.split == TRAIN, seq.split == RL], [0, 1], 2)
    of_item = {item: place for place, item in enumerate(seq.item.tolist())}
    origin = np.array([of_item[item] for item in other.item.tolist()])
    for name, values in (("user", seq.user), ("time", seq.time), ("part", part)):
        np.testing.assert_array_equal(values[origin], values, err_msg=name)
    np.testing.assert_array_equal(other.columns["number"], seq.columns["number"][origin])
    np.testing.assert_array_equal(other.targets["finetune"], seq.targets["finetune"][origin])


def test_validation_and_test_trade_places_for_half_of_the_users_that_have_them_on_one_day():
    seq = days(users=2000)
    other = shuffle_ties(seq, 5)
    valid, test = seq.split == VALID, seq.split == TEST
    tied = seq.time[valid] == seq.time[test]
    traded = other.item[test] == seq.item[valid]
    assert 0.4 < traded[tied].mean() < 0.6  # 2,000 users: a standard error is 0.015
    assert not traded[~tied].any()


def test_the_order_is_the_seeds():
    seq = days()
    np.testing.assert_array_equal(shuffle_ties(seq, 5).item, shuffle_ties(seq, 5).item)
    assert (shuffle_ties(seq, 5).item != shuffle_ties(seq, 6).item).any()
