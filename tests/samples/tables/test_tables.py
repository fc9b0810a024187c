import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.errors import ConfigError, DataError
from nonet.samples.tables.tables import (
    check_interactions,
    check_items,
    read_interactions,
    read_items,
    read_tables,
)

LOG = {"user_id": [1, 1, 2], "item_id": ["a", "b", "a"], "timestamp": [10, 20, 30]}


def _written(tmp_path, file="log.parquet", /, **columns):
    path = tmp_path / file
    pq.write_table(pa.table(columns), path)
    return path


def test_renamed_columns_get_the_names_that_the_rest_relies_on(tmp_path):
    path = _written(
        tmp_path,
        uid=[1, 2],
        sku=["a", "b"],
        ts_ms=[1_700_000_000_500, 1_700_000_001_000],
        action=["x", "y"],
        page=[3, 4],
    )
    items = _written(tmp_path, "items.parquet", sku=["a", "b"], name=["A", "B"])
    columns = {
        "user": "uid",
        "item": "sku",
        "time": "ts_ms",
        "event": "action",
        "scene": "page",
        "title": "name",
    }
    table, catalogue = read_tables(path, items, columns)
    assert table.to_pydict() == {
        "user_id": [1, 2],
        "item_id": ["a", "b"],
        "timestamp": [1_700_000_000, 1_700_000_001],
        "event": ["x", "y"],
        "scene": [3, 4],
    }
    assert catalogue is not None
    assert catalogue.to_pydict() == {"item_id": ["a", "b"], "title": ["A", "B"]}


def test_items_may_already_have_the_wanted_name(tmp_path):
    items = _written(tmp_path, "items.parquet", item_id=["a", "b"])
    assert read_items(items, {"item": "sku"})["item_id"].to_pylist() == ["a", "b"]


def test_a_chosen_column_replaces_one_that_had_its_name(tmp_path):
    path = _written(tmp_path, **LOG, uid=[7, 8, 9])
    assert read_interactions(path, {"user": "uid"})["user_id"].to_pylist() == [7, 8, 9]


def test_types_are_normalised():
    table = check_interactions(
        pa.table(
            {
                "user_id": pa.array([1, 2], pa.int32()),
                "item_id": pa.array(["a", "b"]).dictionary_encode(),
                "timestamp": [5.0, 6.9],
                "rating": pa.array([4, None], pa.int8()),
                "note": pa.array(["x", "y"], pa.large_string()),
            }
        ),
        None,
        "log",
    )
    assert [str(field.type) for field in table.schema] == ["int64", "string", "int64", "float", "string"]
    assert table["timestamp"].to_pylist() == [5, 6]
    assert table["rating"].to_pylist() == [4.0, None]


def test_events_within_a_second_come_in_the_order_of_their_milliseconds():
    log = pa.table({"user_id": [1, 1, 1], "item_id": [1, 2, 3], "ts_ms": [1900, 1100, 1500]})
    table = check_interactions(log, {"time": "ts_ms"}, "log")
    assert table["item_id"].to_pylist() == [2, 3, 1]
    assert table["timestamp"].to_pylist() == [1, 1, 1]


@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.large_list(pa.large_string())])
def test_categories_are_lists_of_text_and_never_null(kind):
    items = pa.table({"item_id": [1, 2, 3], "categories": pa.array([["a", "b"], None, []], kind)})
    assert check_items(items, None, "items")["categories"].to_pylist() == [["a", "b"], [], []]
    text = pa.table({"item_id": [1, 2, 3], "categories": ["a|b", None, ""]})
    assert check_items(text, None, "items")["categories"].to_pylist() == [["a", "b"], [], []]


@pytest.mark.parametrize(
    ("change", "columns", "says"),
    [
        (
            {"user_id": None, "uid": [1, 2, 3]},
            None,
            "no column 'user_id'; it has item_id, timestamp, uid. Did you",
        ),
        ({"user_id": None, "uid": [1, 2, 3]}, None, r"holds the user: columns: {user: <column>}\."),
        (
            {"timestamp": None},
            {"time": "ts"},
            r"no column 'ts' \(columns says time: ts\); it has user_id, item_id",
        ),
        ({"user_id": [1.5, 2.0, 3.0]}, None, "column 'user_id' is double; expected whole numbers or text"),
        ({"item_id": [[1], [2], [3]]}, None, "column 'item_id' is list.*; expected whole numbers or text"),
        (
            {"timestamp": ["a", "b", "c"]},
            None,
            "column 'timestamp' is string; wanted a timestamp, or a number",
        ),
        ({"rating": ["a", "b", "c"]}, None, "column 'rating' is string; wanted numbers"),
        ({"event": [1.5, 2.5, 3.5]}, None, "column 'event' is double; wanted text or whole numbers"),
        ({"user_id": [1, None, None]}, None, "2 of 3 rows have no user_id"),
        ({"item_id": ["a", None, "b"]}, None, "1 of 3 rows have no item_id"),
        ({"timestamp": [1, 2, None]}, None, "1 of 3 rows have no timestamp"),
        ({"timestamp": [1.0, float("nan"), 3.0]}, None, "1 of 3 rows have no timestamp"),
        ({"event": ["a", None, "b"]}, None, "1 of 3 rows have no event"),
        ({name: pa.array([], pa.int64()) for name in LOG}, None, "the table is empty"),
        ({}, {"user": 3}, "columns: user: 3 is not a column name"),
    ],
)
def test_wrong_interactions_are_one_line_that_says_what_is_there_and_what_is_wanted(change, columns, says):
    table = pa.table({name: values for name, values in {**LOG, **change}.items() if values is not None})
    with pytest.raises(ConfigError, match=says) as caught:
        check_interactions(table, columns, "interactions log.parquet")
    assert "\n" not in str(caught.value)
    if columns != {"user": 3}:
        assert isinstance(caught.value, DataError)
        assert str(caught.value).startswith("interactions log.parquet: ")


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"id": [1]}, "no column 'item_id'; it has id"),
        ({"item_id": [1, 2, 2, 3, 3, 3]}, "2 item ids occur more than once, the first: 2, 3"),
        ({"item_id": ["a", None]}, "1 of 2 rows have no item_id"),
        ({"item_id": [1], "title": [[1]]}, "column 'title' is list.*; wanted text"),
        ({"item_id": [1], "categories": [1]}, "column 'categories' is int64; wanted a list of text"),
        ({"item_id": pa.array([], pa.string())}, "the table is empty"),
    ],
)
def test_wrong_items_are_one_line(columns, says):
    with pytest.raises(DataError, match=says):
        check_items(pa.table(columns), None, "items")


def test_a_column_that_neither_table_has_is_named_with_a_suggestion(tmp_path):
    path, items = (
        _written(tmp_path, **LOG),
        _written(tmp_path, "items.parquet", item_id=["a", "b"], title=["A", "B"]),
    )
    with pytest.raises(
        DataError, match=r"columns: scene: 'titel' is in neither table.* Did you mean 'title'"
    ):
        read_tables(path, items, {"scene": "titel"})


@pytest.mark.parametrize(
    "name", ["unix time_s", "fraction of a second:", "label end:bought", "repeat:times", "row:"]
)
def test_columns_with_names_of_our_own_are_refused_with_what_to_do(name):
    table = pa.table({"user_id": [1], "item_id": [2], "timestamp": [3], name: [4]})
    with pytest.raises(
        DataError, match=f"log: column '{name}' has a name that Nonet uses for its own; rename it"
    ):
        check_interactions(table, {}, "log")
