import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.samples.batches.prompt_rows import (
    find_rl_events,
    gather_masked_items,
    gather_seen_items,
    list_prompts,
    locate_prompts,
)
from nonet.samples.batches.steps import select_step_prompts
from nonet.samples.sequences.repeats import find_duplicates
from nonet.samples.sequences.sequences import RL, TEST, TRAIN, Sequences, build_sequences
from nonet.samples.sequences.split import NAMES

SPLIT = {"test": 1, "valid": 1, "rl": 2}


def _build(rows, *, repeats=None, split=SPLIT) -> Sequences:
    """Users' items in time order."""
    log = pa.table(
        {
            "user_id": [user for user, items in enumerate(rows) for _ in items],
            "item_id": [item for items in rows for item in items],
            "timestamp": [when for items in rows for when, _ in enumerate(items)],
        }
    )
    return build_sequences(log, None, split=split, repeats=repeats)[0]


def _walks(users=20, events=10, returns=()):
    """Users that return to nothing, but those in `returns`, whose last event is their first item."""
    rows = [[100 * user + event for event in range(events)] for user in range(users)]
    for user in returns:
        rows[user][-1] = rows[user][0]
    return rows


@pytest.mark.parametrize("seed", range(3))
def test_an_event_is_a_repeat_when_its_user_had_the_item_before(seed):
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 9, rng.integers(5, 15)).tolist() for _ in range(30)]
    wanted = [item in items[:at] for items in rows for at, item in enumerate(items)]
    assert _build(rows).repeated.tolist() == wanted


def test_events_that_repeat_the_one_right_before_are_counted_within_their_user():
    rows = [[1, 2, 3, 4, 4], [4, 5, 6, 7, 8], [8, 1, 2, 3, 3], [3, 1, 1, 1, 2]]
    assert _build(rows).measure_immediate_repeats(TEST) == 0.5
    assert _build(rows, split={"test": 0, "valid": 1, "rl": 1}).measure_immediate_repeats(TEST) == 0


def test_data_that_return_to_nothing_mask_and_data_that_return_allow():
    assert _build(_walks()).repeats == "mask"
    assert _build([[1, 2, 3] * 4, [4, 5, 6] * 4]).repeats == "allow"


@pytest.mark.parametrize(("returning", "policy"), [(1, "mask"), (2, "mask"), (3, "allow")])
def test_the_data_allow_repeats_above_one_event_in_a_hundred(returning, policy):
    """20 users with 10 events before the test's: 2 of 200 events are 1 %."""
    rows = _walks(events=11)
    for user in range(returning):
        rows[user][3] = rows[user][0]
    assert _build(rows).repeats == policy


def test_the_test_events_have_no_say_in_what_holds():
    seq = _build(_walks(returns=range(20)))
    assert seq.repeated[seq.split == TEST].all()
    assert seq.repeats == "mask"


def test_what_the_scenario_says_holds_whatever_the_data_are_like():
    assert _build(_walks(), repeats="allow").repeats == "allow"
    assert _build([[1, 2, 3] * 4], repeats="mask").repeats == "mask"


def test_under_mask_all_that_was_seen_is_masked_and_under_allow_nothing_is():
    rows = [[1, 2, 1, 3, 1, 2, 4], [5, 6, 7, 8, 9, 5, 5]]
    for repeats in ("mask", "allow"):
        seq = _build(rows, repeats=repeats)
        users, positions = list_prompts(seq, TEST)
        history, hidden = gather_seen_items(seq, users, positions), gather_masked_items(seq, users, positions)
        assert history.offsets.tolist() == [0, 6, 12]
        assert hidden.offsets.tolist() == (history.offsets.tolist() if repeats == "mask" else [0, 0, 0])
        assert hidden.values.tolist() == (history.values.tolist() if repeats == "mask" else [])


def test_rl_asks_for_every_event_under_allow_and_for_no_repeat_under_mask():
    rows = [[1, 2, 3, 1, 4, 5, 6], [7, 8, 9, 10, 7, 11, 12], [13, 14, 15, 16, 17, 18, 19]]
    for repeats, count in (("allow", 6), ("mask", 4)):
        seq = _build(rows, repeats=repeats)
        found = find_rl_events(seq)
        assert (seq.split[found] == RL).all()
        assert len(found) == count
        assert repeats == "allow" or not seq.repeated[found].any()
        leased = []
        for step in range(-(-count // 2)):
            _, users, positions = select_step_prompts(seq, 2, 1, "rl", step)
            leased += (seq.offsets[users] + positions).tolist()
        assert sorted(leased) == found.tolist()
        of_one = find_rl_events(seq, seq.user == 1)
        assert locate_prompts(seq, of_one)[0].tolist() == [1] * (2 if repeats == "allow" else 1)


def test_a_file_keeps_what_holds_and_one_that_says_nothing_masks(tmp_path):
    rows = [[1, 2, 3] * 4, [4, 5, 6] * 4]
    for repeats in ("allow", "mask"):
        _build(rows, repeats=repeats).save(tmp_path / repeats)
        assert Sequences.load(tmp_path / repeats).repeats == repeats
        meta = pq.read_schema(tmp_path / repeats / "part-0.parquet").metadata[b"nonet.sequences"]
        # The hash of the file names the artifact: data that mask keep the name they had.
        assert ("repeats" in json.loads(meta)) == (repeats == "allow")


def test_shares_are_of_each_splits_events():

    seq = _build([[1, 2, 1, 3, 4, 1], [5, 6, 7, 8, 9, 10]])
    assert seq.repeat_shares == {"train": 0.0, "rl": 0.25, "valid": 0.0, "test": 0.5}
    only = _build([[1, 1, 2]], split={"test": 1, "valid": 0})
    assert set(only.repeat_shares) == {NAMES[TRAIN], NAMES[TEST]}


def test_a_copy_of_a_row_is_no_return():
    draw = np.random.default_rng(0)
    user = np.repeat(np.arange(40), 20)
    table = {"user_id": user, "item_id": np.concatenate([draw.permutation(50)[:20] for _ in range(40)])}
    table["timestamp"] = 1_600_000_000 + np.tile(np.arange(20) * 60, 40)
    log = pa.table(table)
    copied = pa.concat_tables([log, log.slice(100, 40)])
    split = {"use": "leave_last_out", "test": 1}
    for each in (log, copied):
        seq, _ = build_sequences(each, None, split=split)
        assert (seq.repeats, set(seq.repeat_shares.values())) == ("mask", {0.0})
    returned = copied.set_column(
        2, "timestamp", pa.array([*table["timestamp"], *(table["timestamp"][100:140] + 1)])
    )
    assert build_sequences(returned, None, split=split)[0].repeats == "allow"
    assert find_duplicates(np.array([1, 1, 1]), np.array([5, 6, 5]), np.array([9, 9, 9])).tolist() == [
        False,
        False,
        True,
    ]
