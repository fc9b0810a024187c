"""Ids that a spreadsheet has rewritten as numbers are found, and codes are not taken for them."""

import numpy as np
import pyarrow as pa
import pytest

from nonet.errors import DataError
from nonet.samples.tables import check_items, describe_rewritten_ids

LONG = 1_234_567_890_123_450


@pytest.mark.parametrize(
    "text",
    [
        "9.78014E+12",
        "9,78014E+12",
        "9.78014e+12",
        "1E+16",
        "-1.5E+15",
        "97.8014E+11",
        "9.78014E12",
        f"{LONG}.0",
    ],
)
def test_one_id_of_a_number_of_floating_point_is_told_with_its_text(text):
    ids = pa.chunked_array([["a", "b"], [text, text]])
    note = describe_rewritten_ids(ids, "item")
    assert note is not None
    assert (
        f"1 of 3 distinct item ids are written as a spreadsheet writes long numbers, such as {text}:" in note
    )


@pytest.mark.parametrize(
    "texts",
    [
        [
            "12E3A",
            "0E0A",
            "E+12",
            "1E-01",
            "4E12",
            "12E3",
            "A9.7E+12",
            "9.7E+12-x",
            "1.5",
            "9780140123456",
            "2.0",
        ],
        [],
        [None, "x"],
        [str(LONG + step) for step in range(20)],
        [str(LONG + 10 * step) for step in range(9)],
    ],
)
def test_codes_and_numbers_with_all_their_digits_are_not_told(texts):
    assert describe_rewritten_ids(pa.array(texts, pa.string()), "user") is None


def test_long_integers_that_all_end_in_zeros_after_their_fifteenth_digit_are_told():
    rounded = np.arange(LONG, LONG + 200, 10)
    for ids in (rounded, rounded.astype(str).astype(object), np.append(rounded, 7)):
        assert "last digits are lost" in (describe_rewritten_ids(ids, "user") or "")
    assert describe_rewritten_ids(np.append(rounded, LONG + 1), "user") is None


def test_items_that_are_there_twice_since_their_ids_lost_digits_are_refused_with_that_cause():
    items = pa.table({"item_id": ["9.78014E+12", "9.78014E+12", "9.78015E+12"]})
    with pytest.raises(DataError, match=r"occur more than once.* 2 of 2 distinct item ids .* spreadsheet"):
        check_items(items, None, "items x.csv")
