"""Categories as lists of words, however they are written."""

from __future__ import annotations

import pyarrow as pa
import pytest

from nonet.errors import DataError
from nonet.samples.tables import are_lists, check_items, find_uncut_delimiter

PAIRS = [["Casual", "RPG"], ["Action", "RPG"], ["Casual", "Indie"], ["Action", "Indie"]] * 3
FORMS = {
    "python": pa.array([str(pair) for pair in PAIRS]),
    "json": pa.array(['["' + '", "'.join(pair) + '"]' for pair in PAIRS]),
    "comma": pa.array([", ".join(pair) for pair in PAIRS]),
    "semicolon": pa.array([";".join(pair) for pair in PAIRS]),
    "tuples": pa.array([str(tuple(pair)) for pair in PAIRS]),
    "numpy": pa.array([f"['{first}' '{second}']" for first, second in PAIRS]),
    "postgres": pa.array([f'{{{first},"{second}"}}' for first, second in PAIRS]),
    "spark": pa.array([f"[{first}, {second}]" for first, second in PAIRS]),
    "objects": pa.array(
        [str([{"id": 7, "name": word} for word in pair]).replace("'", '"') for pair in PAIRS]
    ),
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


def test_few_texts_are_lists_where_words_change_their_place_and_not_where_they_keep_it():
    moving = ["Casual, RPG", "Action, RPG", "Indie, Action"]
    assert categories(pa.array(moving)).to_pylist() == [text.split(", ") for text in moving]
    towns = ["Salem, OR", "Portland, OR", "Seattle, WA", "Tacoma, WA"]
    assert categories(pa.array(towns)).to_pylist() == [[town] for town in towns]
    assert find_uncut_delimiter(towns) == ", "


def test_a_text_among_lists_is_one_word_and_a_missing_one_none():
    column = pa.array(["['a', 'b']", "NA", "c", '["b"]', "(d)", "[]", None, "['a']", "{'b', 'a'}"])
    assert categories(column).to_pylist() == [
        ["a", "b"],
        [],
        ["c"],
        ["b"],
        ["(d)"],
        [],
        [],
        ["a"],
        ["a", "b"],
    ]
    assert categories(pa.array(["Film (1995)", "(1995)", "['x']"])).to_pylist()[1] == ["(1995)"]


def test_texts_that_are_lists_of_objects_without_a_name_are_refused():
    with pytest.raises(DataError, match="a list of objects without a name"):
        categories(pa.array(['[{"id": 1, "rank": 2}]'] * 3))


def test_only_texts_that_are_certain_to_be_lists_are_found_whatever_their_column_is_called():
    for form in ("python", "json", "comma", "semicolon", "bar", "numpy"):
        assert are_lists(FORMS[form]), form
    prose = [f"In {n} winters, she walks to town {n}, and back" for n in range(40)]
    paths = [f"img/a/{n}.jpg" for n in range(40)]
    for texts in (prose, paths, ["a", "b"], [None, ""], ["Salem, OR", "Portland, OR"]):
        assert not are_lists(pa.array(texts)), texts[0]


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
