"""The events that a continued run trains on."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from nonet.errors import DataError
from nonet.samples.batches.new_events import NEW, choose_new_targets, find_new_events
from nonet.samples.sequences import LABEL_END, NEVER, build_sequences
from nonet.samples.sequences.sequences import TRAIN

SPLIT = {"test": 1, "valid": 1}


def sequences(events, split=SPLIT, **options):
    """Build the sequences of events (user, item, time)."""
    users, items, times = zip(*events, strict=True)
    log = pa.table({"user_id": users, "item_id": items, "timestamp": pa.array(times, pa.int64())})
    return build_sequences(log, None, split=split, **options)[0]


def identify(seq, mask):
    """Return (user, item key, time) of each event of a mask."""
    index = np.flatnonzero(mask)
    users = seq.user_id[seq.find_users(index)].tolist()
    keys = seq.get_item_keys(seq.item[index]).tolist()
    return list(zip(users, keys, seq.time[index].tolist(), strict=True))


def draw_log(n_users=30, n_items=12, events=9, seed=0):
    """Draw a log in which every user has events at times of its own."""
    draw = np.random.default_rng(seed)
    return [
        (user, int(draw.integers(n_items)), int(time))
        for user in range(n_users)
        for time in np.sort(draw.integers(0, 1000, events))
    ]


def test_events_are_new_that_were_no_training_events_before():
    log = draw_log()
    earlier = sequences([event for event in log if event[2] < 600])
    seq = sequences(log)
    is_train = seq.split == TRAIN
    trained_before = identify(earlier, earlier.split == TRAIN)
    found, all_events = identify(seq, find_new_events(seq, earlier)), identify(seq, is_train)
    assert sorted(found + trained_before) == sorted(all_events), "each event is trained on by one of both"
    assert 0 < len(found) < len(all_events)


def test_a_late_event_between_known_ones_is_the_only_new_one():
    log = [(1, item, 10 * item) for item in range(1, 8)]
    seq = sequences([*log, (1, 3, 25)])
    assert identify(seq, find_new_events(seq, sequences(log))) == [
        (1, seq.get_item_keys(seq.item[2:3])[0], 25)
    ]


def test_of_equal_events_those_are_new_that_exceed_the_earlier_number():
    log = [(1, 5, 10), (1, 6, 20), (1, 7, 30), (1, 8, 40)]
    earlier, seq = sequences(log), sequences([(1, 5, 10), (1, 5, 10), *log])
    assert [time for _, _, time in identify(seq, find_new_events(seq, earlier))] == [10, 10]


def test_users_and_items_have_other_rows_in_the_earlier_run():
    late = [("zoe", f"item {item}", time) for time, item in enumerate((9, 4, 7, 2, 8, 1))]
    early = [("amy", f"item {item}", time) for time, item in enumerate((3, 9, 5, 1))]
    earlier, seq = sequences(late), sequences([*early, *late])
    found = identify(seq, find_new_events(seq, earlier))
    assert {user for user, _, _ in found} == {"amy"}
    assert len(found) == 2, "her two newest events are held out"


def test_the_parts_of_a_large_log_are_compared_one_by_one(monkeypatch):
    log = draw_log(seed=3)
    earlier, seq = sequences([event for event in log if event[2] < 500]), sequences(log)
    whole = find_new_events(seq, earlier)
    bounds = [(start, min(start + 7, len(seq))) for start in range(0, len(seq), 7)]
    monkeypatch.setattr(type(seq), "iterate_parts", lambda self: (self.slice_users(*part) for part in bounds))
    assert np.array_equal(find_new_events(seq, earlier), whole)


def test_a_run_after_one_of_other_users_trains_on_all_its_events():
    earlier = sequences([(7, item, item) for item in range(5)])
    seq = sequences([(8, item, item) for item in range(5)])
    assert np.array_equal(find_new_events(seq, earlier), seq.split == TRAIN)


def add_labels(seq, name="click", known=True, label=True):
    """Add a target whose label is known of some events, and 1 of some."""
    seq.targets[name] = np.broadcast_to(label, len(seq.item)).copy()
    seq.columns[LABEL_END + name] = np.where(np.broadcast_to(known, len(seq.item)), seq.time, NEVER)
    return seq


def test_known_events_are_new_once_their_label_is_known():
    log = draw_log(n_users=4)
    earlier, seq = sequences(log), sequences(log)
    index = np.arange(len(seq.item))
    was_known, is_known = index % 2 == 0, index % 3 != 0
    add_labels(earlier, known=was_known)
    add_labels(seq, known=is_known)
    assert np.array_equal(find_new_events(seq, earlier), (seq.split == TRAIN) & is_known & ~was_known)


def test_events_are_new_again_that_the_earlier_run_has_rejected():
    log = draw_log(n_users=6)
    earlier, seq = sequences([event for event in log if event[2] < 700]), sequences(log)
    rejected = (np.arange(len(earlier.item)) % 4 == 0) & (earlier.split == TRAIN)
    found = identify(seq, find_new_events(seq, earlier, rejected))
    assert sorted(found) == sorted(identify(seq, find_new_events(seq, earlier)) + identify(earlier, rejected))


def test_a_stage_without_a_target_among_the_new_events_is_refused():
    log = draw_log(n_users=6)
    earlier, seq = sequences([event for event in log if event[2] < 700]), sequences(log)
    is_new = find_new_events(seq, earlier)
    add_labels(seq, label=is_new), add_labels(earlier)
    codes, counts = choose_new_targets(seq, earlier, 0.0, 0, "night-1")
    assert counts.labelled == {"click": int((codes == NEW).sum())}
    add_labels(seq, label=~is_new)
    with pytest.raises(
        DataError, match=r"stages.click.target: it holds for none of the \d+ events that are new since run"
    ):
        choose_new_targets(seq, earlier, 0.0, 0, "night-1")


@pytest.mark.parametrize("replay", [0.0, 0.2, 0.5, 0.9])
def test_older_events_of_drawn_users_are_trained_on_again(replay):
    log = draw_log(n_users=200, events=12)
    earlier = sequences([event for event in log if event[2] < 900])
    seq = sequences(log)
    codes, counts = choose_new_targets(seq, earlier, replay, 0, "night-1")
    is_new, target = find_new_events(seq, earlier), codes > 0
    assert np.array_equal(codes == NEW, is_new)
    assert not (target & (seq.split != TRAIN)).any()
    old = target & ~is_new
    assert (counts.new, counts.replayed) == (int(is_new.sum()), int(old.sum()))
    wanted = replay / (1 - replay) * counts.new
    available = int(((seq.split == TRAIN) & ~is_new).sum())
    assert min(wanted, available) <= counts.replayed < wanted + 12
    assert replay or not counts.replayed
    assert counts.users == len(np.unique(seq.find_users(np.flatnonzero(target))))
    replayed_users = np.unique(seq.find_users(np.flatnonzero(old)))
    mask = np.isin(seq.user, replayed_users) & (seq.split == TRAIN)
    assert np.array_equal(target & mask, mask), "whole users are drawn"


def test_another_run_replays_other_users():
    log = draw_log(n_users=200, events=12)
    earlier, seq = sequences([event for event in log if event[2] < 900]), sequences(log)
    first, again, other = (choose_new_targets(seq, earlier, 0.2, 0, run)[0] for run in ("a", "a", "b"))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_log_without_new_events_is_refused():
    seq = sequences(draw_log())
    with pytest.raises(
        DataError, match=r"init.train: new: run night-1 has trained on all 210 training events; add newer"
    ):
        choose_new_targets(seq, sequences(draw_log()), 0.2, 0, "night-1")
