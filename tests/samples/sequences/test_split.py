import datetime as dt

import numpy as np
import pytest

from nonet.errors import ConfigError, DataError
from nonet.samples.sequences.split import (
    RL,
    TEST,
    TRAIN,
    VALID,
    draw_cold_items,
    get_part_starts,
    get_training_end,
    mask_cold_events,
    parse_duration,
    parse_timestamp,
    split_events,
)

DAY = 86400
START = 1_700_000_000


def _users(*lengths: int) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and one event a day for each user."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return offsets, np.concatenate([START + np.arange(n) * DAY for n in lengths])


def test_leave_last_out_takes_the_newest_for_test_then_validation_then_rl():
    codes = split_events(*_users(6, 5, 2), {"use": "leave_last_out", "test": 2, "valid": 1, "rl": 1})
    assert codes.tolist() == [TRAIN, TRAIN, RL, VALID, TEST, TEST, TRAIN, RL, VALID, TEST, TEST, TRAIN, TRAIN]


def test_users_with_nothing_left_to_train_on_only_train():
    codes = split_events(*_users(4, 3, 1), {"test": 1, "valid": 1, "rl": 1})
    assert codes.tolist() == [TRAIN, RL, VALID, TEST] + [TRAIN] * 4


def test_a_user_without_enough_events_left_loses_those_of_items_that_are_held_out_whole():
    offsets, time = _users(4, 3, 2, 1, 4)
    is_cold = np.array([0, 1, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 0], bool)
    kept = mask_cold_events(offsets, time, is_cold, {"test": 1, "valid": 1, "cold_items": 0.5})
    assert kept.astype(int).tolist() == [1, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 0, 1, 1]


@pytest.mark.parametrize("share", [1, -0.5, "a", True])
def test_a_share_of_items_that_is_none_is_refused(share):
    with pytest.raises(ConfigError, match="cold_items"):
        draw_cold_items({"cold_items": share}, np.arange(3))


def test_items_are_drawn_by_their_ids_in_the_share_that_was_asked():
    ids = np.arange(20_000)
    half, tenth = (draw_cold_items({"cold_items": share}, ids) for share in (0.5, 0.1))
    assert (half.mean(), tenth.mean()) == pytest.approx((0.5, 0.1), abs=0.01)
    assert not (tenth & ~half).any()
    assert draw_cold_items({}, ids) is None
    with pytest.raises(ConfigError, match="unknown key 'cold_items'"):
        split_events(*_users(4), {"use": "time", "test": "2026-01-01", "cold_items": 0.1})


def test_time_split_cuts_at_one_moment_for_all_users():
    offsets, time = _users(5, 3)
    test = dt.datetime.fromtimestamp(START + 3 * DAY, dt.UTC).isoformat()
    codes = split_events(offsets, time, {"use": "time", "test": test, "valid": "1d", "rl": "24h"})
    assert codes.tolist() == [TRAIN, RL, VALID, TEST, TEST, TRAIN, RL, VALID]


def test_time_split_without_validation_takes_rl_just_before_the_test():
    offsets, time = _users(4)
    codes = split_events(offsets, time, {"use": "time", "test": _iso(START + 3 * DAY), "rl": "1d"})
    assert codes.tolist() == [TRAIN, TRAIN, RL, TEST]


@pytest.mark.parametrize("seed", range(20))
def test_codes_never_fall_back_inside_a_user_so_train_is_a_prefix(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, size=20)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    time = np.concatenate([np.sort(rng.integers(START, START + 20 * DAY, size=n)) for n in lengths])
    by_count = {"test": int(rng.integers(4)), "valid": int(rng.integers(3)), "rl": int(rng.integers(4))}
    by_time = {"use": "time", "test": _iso(START + 15 * DAY), "valid": "2d", "rl": "36h"}
    for split in (by_count, by_time):
        codes = split_events(offsets, time, split)
        inside = np.ones(len(codes) - 1, bool)
        inside[offsets[1:-1] - 1] = False
        assert (np.diff(codes.astype(int))[inside] >= 0).all()


def test_durations_carry_units():
    assert [parse_duration(d) for d in ("1d", "12h", "30min", "5m", "90s", "2w", "1.5h", 60)] == [
        *(86400, 43200, 1800, 300, 90, 1209600, 5400, 60)
    ]


@pytest.mark.parametrize("bad", ["1 fortnight", "d", "", "-1d", True, -5])
def test_wrong_duration_shows_how_to_write_one(bad):
    with pytest.raises(ConfigError, match="such as 1d"):
        parse_duration(bad, "rl")


def test_moments_without_a_zone_are_utc_and_yaml_dates_are_taken():
    same = [
        parse_timestamp("2026-11-19T00:00:00Z"),
        parse_timestamp("2026-11-19"),
        parse_timestamp(dt.date(2026, 11, 19)),
    ]
    same += [parse_timestamp(dt.datetime(2026, 11, 19)), parse_timestamp("2026-11-19T01:00:00+01:00")]
    assert set(same) == {1795046400}


@pytest.mark.parametrize(
    ("split", "says"),
    [
        ({"use": "leave_lst_out", "test": 1}, "Did you mean 'leave_last_out'"),
        ({"test": 1, "vald": 1}, "unknown key 'vald'.*Did you mean 'valid'"),
        ({"test": -1}, "test: -1 is not a count"),
        ({"test": "one"}, "test: 'one' is not a count"),
        ({"test": True}, "test: True is not a count"),
        ({"use": "time", "rl": "1d"}, "wants test: a timestamp"),
        ({"use": "time", "test": "yesterday"}, "'yesterday' is not an ISO timestamp"),
    ],
)
def test_wrong_split_is_a_config_error(split, says):
    with pytest.raises(ConfigError, match=says):
        split_events(*_users(5), split)


def test_nobody_left_to_evaluate_says_what_is_needed_and_what_there_is():
    with pytest.raises(DataError, match="at least 12 events; the longest of 2 users has 7"):
        split_events(*_users(7, 3), {"test": 5, "valid": 1, "rl": 5})


def test_time_split_after_the_last_event_says_how_far_the_data_runs():
    with pytest.raises(
        DataError, match=r"no user to evaluate: the events run from 2023-11-14.* to 2023-11-18"
    ):
        split_events(*_users(5), {"use": "time", "test": "2030-01-01"})


def test_time_split_before_the_first_event_leaves_nothing_to_train_on():
    with pytest.raises(DataError, match="no event to train on"):
        split_events(*_users(5), {"use": "time", "test": "2020-01-01"})


def _iso(unix_s: int) -> str:
    return dt.datetime.fromtimestamp(unix_s, dt.UTC).isoformat()


def test_a_split_by_time_holds_out_only_the_parts_that_have_a_time_span():
    moment = "1970-01-11T00:00:00Z"
    times = np.arange(12, dtype=np.int64) * 86_400
    offsets = np.array([0, 12])
    for parts, expected in (
        ({}, [TRAIN] * 10 + [TEST] * 2),
        ({"valid": None, "rl": None}, [TRAIN] * 10 + [TEST] * 2),
        ({"valid": "2d", "rl": None}, [TRAIN] * 8 + [VALID] * 2 + [TEST] * 2),
        ({"valid": None, "rl": "3d"}, [TRAIN] * 7 + [RL] * 3 + [TEST] * 2),
    ):
        split = {"use": "time", "test": moment, **parts}
        assert split_events(offsets, times, split).tolist() == expected
        assert (
            get_training_end(split) == times[expected.index(next(code for code in expected if code != TRAIN))]
        )
        codes = np.array([TRAIN, RL, VALID, TEST])[
            [sum(time >= start for start in get_part_starts(split)) for time in times]
        ]
        assert codes.tolist() == expected
    assert get_part_starts({"use": "leave_last_out", "test": 1}) == ()
    with pytest.raises(ConfigError, match="split: valid: 'soon' is not a duration"):
        split_events(offsets, times, {"use": "time", "test": moment, "valid": "soon"})
