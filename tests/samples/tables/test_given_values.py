"""Times and ids that a user gives to a finished run."""

import datetime as dt

import numpy as np
import pyarrow as pa
import pytest

from nonet.errors import ConfigError, DataError
from nonet.samples.sequences.flat import MappedTextIds
from nonet.samples.tables import IdKind, TableFormat, check_interactions, convert_ids, convert_times

UNIX = 1_772_928_000
INTEGERS = IdKind.from_ids(np.array([1, 2]))
WORDS = IdKind.from_ids(np.array(["user_001", "042"], object))
MIXED = IdKind.from_ids(pa.array(["user_001", "42"]))


def test_numbers_are_in_the_unit_of_the_run_and_texts_and_timestamps_are_always_accepted():
    moments = [UNIX * 1000 + 999, "2026-03-08T00:00:00Z", "2026-03-08T01:00:00+01:00", dt.date(2026, 3, 8)]
    assert convert_times([*moments, f"{UNIX}000"], "ms").tolist() == [UNIX] * 5
    for unit, factor in (("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)):
        assert convert_times(np.array([UNIX * factor]), unit).tolist() == [UNIX]
    assert convert_times(pa.array([dt.datetime(2026, 3, 8)]), "ms").tolist() == [UNIX]
    for column in (["2026-03-08T00:00:00Z", "2026-03-08"], [f"{UNIX}000"] * 2, [dt.date(2026, 3, 8)] * 2):
        assert convert_times(pa.array(column), "ms").tolist() == [UNIX] * 2
    mixed_zones = pa.chunked_array([["2026-03-08T00:00:00", "2026-03-08T01:00:00+01:00"]])
    assert convert_times(mixed_zones, "ms").tolist() == [UNIX] * 2
    assert convert_times([], "s").tolist() == []
    assert convert_times([100, -1, 0], "s").tolist() == [100, -1, 0]  # times of a log that begins at 0


@pytest.mark.parametrize(
    ("value", "unit", "name"),
    [
        (UNIX, "ms", "milliseconds"),
        (UNIX * 1000, "s", "seconds"),
        (str(UNIX), "us", "microseconds"),
        (UNIX * 1000, "ns", "nanoseconds"),
        (2**70, "ns", "nanoseconds"),
        ("9" * 25, "ns", "nanoseconds"),
        *((value, "s", "seconds") for value in (True, None, float("nan"), float("inf"), "soon", [1])),
    ],
)
def test_what_is_no_moment_of_the_unit_is_refused_with_the_name_of_the_unit(value, unit, name):
    with pytest.raises(
        DataError, match=rf"^time: .* is no moment in {name}; the log of the run counts {name}"
    ):
        convert_times([value], unit)


def test_an_unknown_unit_is_refused():
    with pytest.raises(ConfigError, match="time unit 'h': there are s, ms, us, ns"):
        convert_times([1], "h")


def test_a_file_for_a_run_is_read_in_the_unit_of_the_run_unless_its_column_names_another():
    table = pa.table({"user_id": ["a"], "item_id": [1], "at": [5000], "at_s": [UNIX]})
    in_ms = TableFormat({"time": "at"}, time_unit="ms")
    assert check_interactions(table, in_ms, "log")["timestamp"].to_pylist() == [5]
    in_s = in_ms.replace_columns({"time": "at_s"})
    assert check_interactions(table, in_s, "log")["timestamp"].to_pylist() == [UNIX]
    seconds = table.set_column(2, "at", pa.array([UNIX]))
    with pytest.raises(DataError, match="log: column 'at': 1772928000 is no moment in milliseconds"):
        check_interactions(seconds, in_ms, "log")


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (INTEGERS, "42", 42),
        (INTEGERS, np.int64(42), 42),
        (MIXED, 42, "42"),
        (MIXED, "new", "new"),
        (WORDS, "42", "42"),
    ],
)
def test_a_number_and_its_text_are_one_id(kind, value, expected):
    assert convert_ids([value], kind) == [expected]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (WORDS, 42),
        (INTEGERS, "user_001"),
        (INTEGERS, "042"),
        (INTEGERS, 2**64),
        *((kind, value) for kind in (WORDS, INTEGERS, MIXED) for value in (1.0, True, None, "", [1])),
    ],
)
def test_what_can_be_no_id_of_the_run_is_refused(kind, value):
    with pytest.raises(DataError, match=r"^user: .* can be no id of this run, whose ids are (text|whole)"):
        convert_ids([value], kind, "user")


def test_ids_of_mapped_sequences_and_of_an_empty_run_have_a_kind():
    mapped = MappedTextIds(pa.chunked_array([["u1", "42"]], pa.large_string()))
    assert IdKind.from_ids(mapped) == IdKind(True, True, "u1")
    assert IdKind.from_ids(np.array([], object)) == IdKind(True, True)


def test_a_column_of_texts_with_too_many_digits_is_refused_in_one_line():
    table = pa.table({"user_id": ["a"], "item_id": [1], "at": ["9" * 25]})
    for time_unit in (None, "s"):
        with pytest.raises(
            DataError, match=r"column 'at'.*(more digits than a time has|is no moment in seconds)"
        ):
            check_interactions(table, TableFormat({"time": "at"}, time_unit=time_unit), "log")
