"""Categories as lists of words, however they are written."""

from __future__ import annotations

import pyarrow as pa
import pytest

from nonet.errors import DataError
from nonet.samples.tables import check_items, find_uncut_delimiter

PAIRS = [["Casual", "RPG"], ["Action", "RPG"], ["Casual", "Indie"], ["Action", "Indie"]] * 3
FORMS = {
    "python": pa.array([str(pair) for pair in PAIRS]),
    "json": pa.array(['["' + '", "'.join(pair) + '"]' for pair in PAIRS]),
    "comma": pa.array([", ".join(pair) for pair in PAIRS]),
    "semicolon": pa.array([";".join(pair) for pair in PAIRS]),
    "bar": pa.array(["|".join(pair) for pair in PAIRS]),
    "lists": pa.array(PAIRS),
    "large lists": pa.array(PAIRS, pa.large_list(pa.string())),
    "lists of lists": pa.array([[pair[:1], pair] for pair in PAIRS]),
    "structs": pa.array([[{"id": 7, "name": word} for word in pair] for pair in PAIRS]),
}


def categories(column):
    return check_items(pa.table({"item_id": range(len(column)), "categories": column}), None, "items")[
        "categories"
    ]


@pytest.mark.parametrize("form", FORMS)
def test_a_list_is_its_words_however_it_is_written(form):
    assert categories(FORMS[form]).to_pylist() == PAIRS


def test_a_comma_in_a_word_is_no_delimiter_and_a_doubtful_one_is_reported():
    assert categories(pa.array(["Food, Drink", "Tools", "Toys", "Garden"])).to_pylist()[0] == ["Food, Drink"]
    doubtful = ["a, b", "c, d", "e, f", "g"]
    assert categories(pa.array(doubtful)).to_pylist()[0] == ["a, b"]
    assert find_uncut_delimiter(doubtful) == ", "
    assert find_uncut_delimiter(["a", "b"]) is None
    assert find_uncut_delimiter(FORMS["comma"].to_pylist()) is None


def test_nothing_is_an_empty_list_and_a_missing_text_is_no_word():
    assert categories(pa.array(["", None, "NA", "a|NA|b"])).to_pylist() == [[], [], [], ["a", "b"]]
    assert categories(pa.array([["a", None], None])).to_pylist() == [["a"], []]


@pytest.mark.parametrize("column", [pa.array([{"a": 1}]), pa.array([[{"x": 1, "y": 2}]]), pa.array([1.5])])
def test_what_holds_no_words_is_one_line(column):
    with pytest.raises(
        DataError, match=r"column 'categories' is .*; wanted a list of text, or text cut by"
    ) as caught:
        categories(column)
    assert "\n" not in str(caught.value)
