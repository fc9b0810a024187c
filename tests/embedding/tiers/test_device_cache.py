"""Hot rows: who may leave, who goes first, and what look-ahead is worth."""

import numpy as np
import pytest
import torch

from nonet.embedding.tables.rows import RowColumns
from nonet.embedding.tables.spec import TableSpec
from nonet.embedding.tiers.device_cache import NEVER, DeviceCache, LookAhead
from nonet.embedding.tiers.device_optimizer import sum_gradients
from nonet.embedding.tiers.hot_rows import HotRows
from nonet.random import rng


def rows_of(keys):
    keys = np.asarray(keys, dtype=np.int64)
    number = keys.astype(np.float32)[:, None]
    return RowColumns(keys, np.repeat(number, 2, axis=1), number, keys * 0, np.zeros(len(keys), bool))


def cache(rows, **words):
    return DeviceCache(TableSpec(2), rows, **words)


def held(made):
    return sorted(made.keys.tolist())


def ask(made, *keys):
    """Look a training batch of keys up: rows that are cached are read, others are loaded."""
    wanted = np.array(keys)
    here = made.contains(wanted)
    rows = made.lookup(wanted[here], train=True)
    assert rows[:, 0].tolist() == wanted[here].tolist()
    return made.admit(rows_of(wanted[~here]))


def test_the_cache_speaks_the_protocol_of_hot_rows():
    assert isinstance(cache(2), HotRows)


def test_a_prefetch_never_takes_the_place_of_a_row_that_was_prefetched_before():
    made = cache(4)
    for step, keys in ((1, [1, 2]), (2, [3, 4]), (3, [5, 6])):  # six rows, room for four
        made.lookup(np.empty(0, np.int64), train=True)  # other batches are served between
        made.admit(rows_of(keys))
        made.pin(step, np.array(keys))
    assert held(made) == [1, 2, 3, 4]
    assert made.lookup(np.array([1, 2, 1]), train=True)[:, 0].tolist() == [1, 2, 1]
    made.release(1)
    ask(made, 3, 4)
    made.admit(rows_of([5, 6]))
    assert held(made) == [3, 4, 5, 6]


def test_a_row_that_two_batches_in_flight_need_stays_until_both_are_done():
    made = cache(2)
    made.admit(rows_of([1, 2]))
    for step in (1, 2):
        made.pin(step, np.array([1, 2]))
    ask(made, 8)
    made.release(1)
    ask(made, 9)
    assert held(made) == [1, 2]
    made.release(2)
    ask(made, 8, 9)
    assert held(made) == [8, 9]


def test_rows_of_the_batch_that_is_being_served_do_not_make_room_for_each_other():
    made = cache(3)
    ask(made, 1, 2)
    ask(made, 1, 2, 3, 4, 5)
    assert len(made) == 3
    assert {1, 2} < set(held(made))


@pytest.mark.parametrize(("policy", "stays"), [("lfu", [1, 3]), ("lru", [2, 3])])
def test_the_least_used_or_the_longest_unused_row_leaves(policy, stays):
    made = cache(2, policy=policy)
    ask(made, 1, 2)
    for _ in range(3):
        ask(made, 1)
    ask(made, 2)
    ask(made, 3)
    assert held(made) == stays


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_rows_that_coming_batches_need_stay_and_those_needed_last_leave_first(policy):
    made = cache(3, policy=policy)
    ask(made, 1, 2, 3)
    for _ in range(5):
        ask(made, 3)
    made.announce_batch(10, np.array([1]))
    made.announce_batch(11, np.array([2]))
    ask(made, 4)
    assert held(made) == [1, 2, 4]
    made.announce_batch(12, np.array([4]))
    ask(made, 5, 6)
    assert held(made) == [1, 5, 6]
    made.release(10)
    ask(made, 7)
    assert 1 not in held(made)


def test_only_changed_rows_are_handed_back_and_once():
    made = cache(2)
    made.admit(rows_of([1, 2]))
    made.apply(np.array([1]), torch.ones(1, 2), 5, 0.02)
    gone = ask(made, 3, 4)
    assert (gone.key.tolist(), gone.step.tolist()) == ([1], [5])
    assert gone.state[0, 0] == 2.0  # 1, and the mean square of the gradient
    assert len(made.pop_dirty().key) == 0
    made.apply(np.array([3, 4]), torch.ones(2, 2), 6, 0.02)
    assert sorted(made.pop_dirty().key.tolist()) == [3, 4]
    assert len(made.pop_dirty().key) == 0


def test_the_next_use_of_a_key_is_known_as_far_as_batches_are():
    ahead, source = LookAhead(), rng(7, "look-ahead")
    coming = [np.unique(source.integers(0, 30, 12)) for _ in range(60)]
    window = 7
    for step, keys in enumerate(coming[:window]):
        ahead.add_batch(step, keys)
    for step, keys in enumerate(coming):
        ((asked, follows),) = ahead.pop_batches(step)
        assert np.array_equal(asked, keys)
        for key, found in zip(keys.tolist(), follows.tolist(), strict=True):
            later = [at for at in range(step + 1, min(step + window, 60)) if key in coming[at]]
            assert found == min(later, default=NEVER)
        if step + window < 60:
            ahead.add_batch(step + window, coming[step + window])
    assert len(ahead) == 0


def test_gradients_of_equal_rows_are_added_one_after_another_by_both_ways_of_adding():
    source = rng(7, "summed")
    grads = source.standard_normal((3000, 4)) * 10.0 ** source.integers(-4, 5, (3000, 1))
    inverse, grads = torch.from_numpy(source.integers(0, 5, 3000)), torch.from_numpy(grads.astype(np.float32))
    expected = np.zeros((5, 4), np.float32)
    for row, grad in zip(inverse.tolist(), grads.numpy(), strict=True):
        expected[row] += grad
    assert np.array_equal(sum_gradients(grads, inverse, 5).numpy(), expected)
    put = torch.zeros(5, 4).index_put_((inverse,), grads, accumulate=True)  # what other devices do
    assert np.array_equal(put.numpy(), expected)


def test_look_ahead_brings_the_hit_rate_within_five_points_of_beladys():
    from nonet.bench.embedding.tiers import compute_belady_hit_rate, draw_zipf_batches, measure_hit_rate

    coming = draw_zipf_batches(7, 240, rows=40_000, keys=1000)
    best = compute_belady_hit_rate(coming, 2000, warm=60)
    far = measure_hit_rate(coming, 2000, "lfu", ahead=64, warm=60)
    blind = measure_hit_rate(coming, 2000, "lfu", ahead=1, warm=60)
    assert best - 0.05 <= far <= best
    assert far > blind + 0.03
