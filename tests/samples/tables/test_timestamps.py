import datetime as dt

import numpy as np
import pyarrow as pa
import pytest

from nonet.samples.tables.times import compute_fractions, convert_times, convert_to_seconds, find_implausible

WHEN = dt.datetime(2026, 11, 19, 12, 0, 0)
UNIX = 1795089600
CET = dt.timezone(dt.timedelta(hours=1))


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (pa.array([UNIX]), "timestamp"),
        (pa.array([UNIX * 1000 + 999]), "timestamp"),
        (pa.array([UNIX * 1_000_000]), "timestamp"),
        (pa.array([UNIX * 1_000_000_000]), "timestamp"),
        (pa.array([float(UNIX) + 0.75]), "timestamp"),
        (pa.array([UNIX], pa.uint32()), "timestamp"),
        (pa.array([WHEN], pa.timestamp("ms")), "at"),
        (pa.array([WHEN], pa.timestamp("ns", "UTC")), "at"),
        (pa.array([WHEN.replace(tzinfo=CET)], pa.timestamp("s", "+01:00")), "cet"),
    ],
)
def test_every_usual_form_of_time_becomes_unix_seconds(values, name):
    seconds, _ = convert_to_seconds(pa.chunked_array([values]), name)
    assert seconds.dtype == np.int64
    assert seconds.tolist() == [UNIX - 3600 * (name == "cet")]


def test_dates_are_midnight_utc():
    assert convert_to_seconds(pa.chunked_array([pa.array([WHEN.date()])]), "day")[0].tolist() == [
        UNIX - 43200
    ]


def test_seconds_among_milliseconds_are_refused_and_the_ending_of_the_name_settles_it():
    mixed = pa.chunked_array([pa.array([UNIX, UNIX * 1000, 0])])
    with pytest.raises(ValueError, match=r"1 of 3 values look like s and the others like ms"):
        convert_to_seconds(mixed, "ts")
    assert convert_to_seconds(mixed, "ts_ms")[0].tolist() == [UNIX // 1000, UNIX, 0]


def test_ending_of_the_name_wins_over_the_size_of_the_numbers():
    small = pa.chunked_array([pa.array([5000, 12000])])
    assert convert_to_seconds(small, "ts_ms")[0].tolist() == [5, 12]
    assert convert_to_seconds(small, "ts_s")[0].tolist() == [5000, 12000]
    assert convert_to_seconds(small, "clicks")[0].tolist() == [5000, 12000]


def test_finer_values_come_back_to_order_events_within_a_second():
    _, finer = convert_to_seconds(pa.chunked_array([pa.array([1500, 1200])]), "ts_ms")
    assert finer is not None
    assert finer.tolist() == [1500, 1200]
    assert convert_to_seconds(pa.chunked_array([pa.array([15, 12])]), "t")[1] is None


def test_times_before_1970_round_down():
    assert convert_to_seconds(pa.chunked_array([pa.array([-1500])]), "ts_ms")[0].tolist() == [-2]


@pytest.mark.parametrize("values", [pa.array(["next tuesday"]), pa.array([[1]]), pa.array([True])])
def test_what_is_no_time_is_a_type_error(values):
    with pytest.raises(TypeError):
        convert_to_seconds(pa.chunked_array([values]), "timestamp")


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["2026-11-19T12:00:00Z"]),
        pa.array(["2026-11-19T13:00:00+01:00"]),
        pa.array(["2026-11-19 12:00:00"]),
        pa.array(["2026-11-19T12:00:00.123456789Z"]),
        pa.array([str(UNIX)]),
        pa.array([str(UNIX * 1000)], pa.large_string()),
    ],
)
def test_iso_text_and_digits_are_times(values):
    assert convert_to_seconds(pa.chunked_array([values]), "timestamp")[0].tolist() == [UNIX]


@pytest.mark.parametrize("kind", [pa.int64(), pa.int32(), pa.float64(), pa.string()])
def test_numbers_that_are_all_calendar_dates_are_dates(kind):
    values = pa.chunked_array([pa.array([20261119, 20240229, 19700101]).cast(kind)])
    assert convert_to_seconds(values, "date")[0].tolist() == [UNIX - 43200, 1709164800, 0]
    relative = pa.chunked_array([pa.array([20261119, 20261399])])
    assert convert_to_seconds(relative, "seconds_of_log")[0].tolist() == [20261119, 20261399]


def test_times_near_1970_among_milliseconds_stay_what_they_are():
    values = pa.chunked_array([pa.array([UNIX * 1000, -86_400_000, 86_400_000])])
    assert convert_to_seconds(values, "timestamp")[0].tolist() == [UNIX, -86400, 86400]


def test_a_name_whose_unit_cannot_be_right_is_refused():
    with pytest.raises(
        ValueError,
        match="the name 'ts_ms' says ms, in which no value is between 1990 and next year; in s all are",
    ):
        convert_to_seconds(pa.chunked_array([pa.array([UNIX, UNIX + 5])]), "ts_ms")


def test_floats_that_cannot_hold_seconds_are_refused():
    values = pa.chunked_array([pa.array([float(UNIX)], pa.float32())])
    with pytest.raises(ValueError, match="float cannot hold such times, since its values are 128 apart"):
        convert_to_seconds(values, "timestamp")
    relative = pa.chunked_array([pa.array([12.0, 86400.0], pa.float32())])
    assert convert_to_seconds(relative, "t")[0].tolist() == [12, 86400]


@pytest.mark.parametrize(("name", "per_second"), [("t_s", 1), ("t_ms", 1e3), ("t_us", 1e6), ("t_ns", 1e9)])
def test_floats_are_the_same_moments_as_whole_milliseconds(name, per_second):
    whole = UNIX * 1000 + np.arange(1000)
    floats = pa.chunked_array([pa.array(whole / 1000 * per_second)])
    exact = pa.chunked_array([pa.array(whole)])
    assert (compute_fractions(floats, name) == compute_fractions(exact, "t_ms")).all()
    assert (convert_to_seconds(floats, name)[0] == UNIX).all()


def test_a_float_that_is_rounded_up_to_the_next_second_is_in_that_second():
    values = pa.chunked_array([pa.array([UNIX + 1 - 2.0**-22, -(2.0**-40), UNIX + 0.999999])])
    assert convert_to_seconds(values, "t")[0].tolist() == [UNIX + 1, 0, UNIX]
    assert compute_fractions(values, "t").tolist() == [0, 0, 999_999_000]
    assert convert_times(values, "s").tolist() == [UNIX + 1, 0, UNIX]
    assert convert_times([UNIX + 1 - 2.0**-22], "s").tolist() == [UNIX + 1]


def test_dates_before_1990_and_after_next_year_are_implausible():
    later = int(dt.datetime(dt.datetime.now().year + 2, 1, 1, tzinfo=dt.UTC).timestamp())
    assert find_implausible(np.array([631_151_999, 631_152_000, later - 1, later])).tolist() == [
        True,
        False,
        False,
        True,
    ]
