import datetime as dt

import numpy as np
import pyarrow as pa
import pytest

from nonet.samples.tables.times import unix_seconds

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
    seconds, _ = unix_seconds(pa.chunked_array([values]), name)
    assert seconds.dtype == np.int64
    assert seconds.tolist() == [UNIX - 3600 * (name == "cet")]


def test_dates_are_midnight_utc():
    assert unix_seconds(pa.chunked_array([pa.array([WHEN.date()])]), "day")[0].tolist() == [UNIX - 43200]


def test_seconds_among_milliseconds_are_refused_and_the_ending_of_the_name_settles_it():
    mixed = pa.chunked_array([pa.array([UNIX, UNIX * 1000, 0])])
    with pytest.raises(ValueError, match=r"1 of 3 values look like s and the others like ms"):
        unix_seconds(mixed, "ts")
    assert unix_seconds(mixed, "ts_ms")[0].tolist() == [UNIX // 1000, UNIX, 0]


def test_ending_of_the_name_wins_over_the_size_of_the_numbers():
    small = pa.chunked_array([pa.array([5000, 12000])])
    assert unix_seconds(small, "ts_ms")[0].tolist() == [5, 12]
    assert unix_seconds(small, "ts_s")[0].tolist() == [5000, 12000]
    assert unix_seconds(small, "clicks")[0].tolist() == [5000, 12000]


def test_finer_values_come_back_to_order_events_within_a_second():
    _, finer = unix_seconds(pa.chunked_array([pa.array([1500, 1200])]), "ts_ms")
    assert finer is not None
    assert finer.tolist() == [1500, 1200]
    assert unix_seconds(pa.chunked_array([pa.array([15, 12])]), "t")[1] is None


def test_times_before_1970_round_down():
    assert unix_seconds(pa.chunked_array([pa.array([-1500])]), "ts_ms")[0].tolist() == [-2]


@pytest.mark.parametrize("values", [pa.array(["2026-11-19"]), pa.array([[1]]), pa.array([True])])
def test_what_is_no_time_is_a_type_error(values):
    with pytest.raises(TypeError):
        unix_seconds(pa.chunked_array([values]), "timestamp")
