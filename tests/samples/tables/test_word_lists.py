"""Categories as lists of words, however they are written."""

from __future__ import annotations

import pyarrow as pa
import pytest

from nonet.errors import DataError
from nonet.samples.tables import (
    are_lists,
    check_items,
    describe_split,
    find_uncut_delimiter,
    guess_categories,
)

PAIRS = [["Casual", "RPG"], ["Action", "RPG"], ["Indie", "Casual"], ["Indie", "Action"]] * 3
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


MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun")
NUMBERS = range(240)
TEXTS_WITH_DELIMITERS = {
    "dates": [f"{MONTHS[n % 6]} {n % 28 + 1:02d}, {2005 + n % 15}" for n in NUMBERS],
    "months": [f"{n % 12 + 1};{2005 + n % 15}" for n in NUMBERS],
    "days": [f"{n % 12 + 1},{n % 28 + 1},{2005 + n % 2}" for n in NUMBERS],
    "days with slashes": [f"{n % 12 + 1}/{n % 28 + 1}" for n in NUMBERS],
    "authors": [
        f"{('Woolf', 'Thomas', 'Poe')[n % 3]}, {('Ann', 'Thomas', 'Eve', 'Bo')[n % 4]}" for n in NUMBERS
    ],
    "cities": [f"City {n % 60}, {('OR', 'WA', 'CA')[n % 3]}" for n in NUMBERS],
    "cities with states": [
        "New York, New York",
        *(f"City {n % 60}, {('New York', 'Iowa')[n % 2]}" for n in NUMBERS),
    ],
    "kinds": [f"{('Red', 'Blue')[n % 2]};{('Small', 'Large', 'Huge')[n % 3]}" for n in NUMBERS],
    "decimals": [f"{n % 10},{n % 9}" if n % 8 else f"{n % 10}" for n in NUMBERS],
    "thousands": [
        f"{n},{n % 7 + 100},{(n + 3) % 7 + 100}" if n % 3 else f"{n % 7 + 100},{n % 5 + 100}" for n in NUMBERS
    ],
}


@pytest.mark.parametrize("name", TEXTS_WITH_DELIMITERS)
def test_texts_whose_parts_keep_their_place_are_no_lists_however_often_a_part_recurs(name):
    texts = TEXTS_WITH_DELIMITERS[name]
    assert not are_lists(pa.array(texts))
    assert categories(pa.array(texts)).to_pylist() == [[text] for text in texts]
    assert find_uncut_delimiter(texts)
    assert describe_split(pa.array(texts), "genres") is None
    roles = {"item": "item_id"}
    assert guess_categories(roles, pa.table({"item_id": range(len(texts)), "x": texts})) == roles


@pytest.mark.parametrize(
    ("delimiter", "rows"),
    [
        (", ", [["Comedy"], ["Comedy", "Drama"], ["Drama", "War"], ["Action", "Comedy"], ["War"]] * 9),
        ("|", [["Comedy", "Drama"], ["Comedy"], ["Action", "Drama"], ["Action"]] * 9),
        (",", [["12", "7", "5"], ["5", "12"], ["7"], ["5", "7", "12"]] * 9),
    ],
)
def test_lists_of_different_lengths_are_split(delimiter, rows):
    column = pa.array([delimiter.join(row) for row in rows])
    assert are_lists(column)
    assert categories(column).to_pylist() == rows
    assert f"whose texts are split at {delimiter!r} into words" in (describe_split(column, "genres") or "")


def test_bars_between_parts_that_keep_their_place_name_no_list_and_how_a_column_is_split_is_told():
    assert not are_lists(pa.array([f"{n % 12}|{2005 + n % 15}" for n in NUMBERS]))
    assert not are_lists(pa.array([f"{word}|{2005 + n % 15}" for n, word in enumerate(MONTHS * 40)]))
    assert describe_split(FORMS["comma"], "x") == (
        "categories = x, whose texts are split at ', ' into words, such as 'Casual, RPG'"
    )
    assert describe_split(FORMS["json"], "x") == (
        """categories = x, whose texts are read as lists, such as '["Casual", "RPG"]'"""
    )
    assert "such as '" + "a" * 57 + "...'" in (describe_split(pa.array(["a" * 60 + "|b"]), "x") or "")
    for column in (FORMS["lists"], pa.array(["a", None, "b"]), pa.array([1, 2])):
        assert describe_split(column, "x") is None


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


def test_lists_without_quotes_and_of_postgres_are_split_outside_quotes():
    column = pa.array(["{a,b c}", '{"a, d",e}', "[Children's, Comedy]", "['a', 'b']"])
    assert categories(column).to_pylist() == [
        ["a", "b c"],
        ["a, d", "e"],
        ["Children's", "Comedy"],
        ["a", "b"],
    ]


def test_a_set_of_words_and_numbers_is_a_list():
    assert categories(pa.array(["{1, 'a'}", "{3, 2}", "{'c', 'b'}"])).to_pylist() == [
        ["a", "1"],
        ["2", "3"],
        ["b", "c"],
    ]


BROKEN = [
    '["a"',
    "'a']",
    '{"name": "a"',
    '["a", "b]',
    '["a", ["b"]',
    '[{"name": "a", "id": }]',
    "[" * 5000 + "1" + "]" * 5000,
    "['a', " * 300 + "'b'" + "]" * 300,
]


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_list_is_no_word_and_is_refused_with_its_row(broken):
    column = pa.array(["['a', 'b']", "['a']", broken, "['b']", "['a', 'b']"])
    with pytest.raises(
        DataError, match=r"^items: column 'categories' is text with lists, of which that in row 2 is broken: "
    ):
        categories(column)
    roles = {"user": "u"}
    assert guess_categories(roles, pa.table({"u": range(5), "words": column})) == {
        **roles,
        "categories": "words",
    }
    objects = pa.array(['[{"id": 1, "rank": 2}]'] * 5)
    assert guess_categories(roles, pa.table({"u": range(5), "words": objects})) == roles


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


def test_an_unfinished_list_of_very_many_blanks_is_refused_at_once():
    with pytest.raises(DataError):
        categories(pa.array(["{" + " " * 100_000 + '"a}', "{a,b}"]))
