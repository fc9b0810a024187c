"""Tables of edges, and what is wrong with one in a line."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from nonet.errors import DataError
from nonet.samples.batches.graphs import Graph, read_edges
from nonet.samples.batches.graphs.adjacency import WEIGHT_1

IDS = {"item": np.array(["a", "b", "c"], object), "user": np.array([10, 20, 30])}
GOOD = {
    "source": ["a", "c"],
    "target": [30, 10],
    "time": [1_600_000_000, 1_700_000_000],
    "weight": [1.0, 4.0],
}


def read(tmp_path, rows, ids=IDS, **options):
    path = tmp_path / "edges.parquet"
    pq.write_table(pa.table(rows), path)
    return read_edges("near", Graph(edges="item-user", table=str(path), **options), ids)


def test_ids_become_indices_and_weights_are_relative_to_the_largest(tmp_path):
    edges = read(tmp_path, GOOD)
    assert (edges.source.tolist(), edges.target.tolist()) == ([0, 2], [2, 0])
    assert edges.time.tolist() == GOOD["time"]
    assert edges.weight.tolist() == [WEIGHT_1 // 4, WEIGHT_1]


def test_columns_have_names_of_their_own_and_weights_may_be_missing(tmp_path):
    rows = {"from": ["b"], "to": ["20"], "since": [1_600_000_000_000]}
    edges = read(tmp_path, rows, columns={"source": "from", "target": "to", "time": "since"})
    assert [each.tolist() for each in (edges.source, edges.target, edges.time)] == [[1], [1], [1_600_000_000]]
    assert edges.weight.tolist() == [WEIGHT_1]


def test_edges_with_unknown_ids_are_dropped_where_that_is_said(tmp_path):
    rows = {**GOOD, "target": [30, 77]}
    assert read(tmp_path, rows, unknown_ids="drop").source.tolist() == [0]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"target": [30, 77]}, {}, r"1 of 2 edges have a target that is no user of the log, such as 77; remove"),
        ({"source": ["x", "y"]}, {"unknown_ids": "drop"}, r"2 of 2 edges have a source that is no item of the log, such"),
        ({"source": ["x", "a"], "target": [30, 7]}, {"unknown_ids": "drop"}, r"no edge leads from a known item to a known"),
        ({"time": None}, {}, r"no column 'time'; it has source, target, weight\. Name it: data\.graph\.near\.columns"),
        ({}, {"columns": {"weight": "wieght"}}, r"no column 'wieght'; it has .* Did you mean 'weight'"),
        ({"source": [None, "a"]}, {}, r"column 'source' lacks 1 of 2 values"),
        ({"weight": [0.0, 1.0]}, {}, r"column 'weight' has weights from 0 to 1; they must be above 0"),
        ({"weight": ["x", "y"]}, {}, r"column 'weight' has no numbers"),
        ({"time": ["once", "twice"]}, {}, r"column 'time' has no times"),
        ({name: pa.array([], pa.int64()) for name in GOOD}, {}, r"has no edges"),
    ],
)  # fmt: skip
def test_a_wrong_table_is_refused_in_a_line(tmp_path, change, options, message):
    rows = {name: values for name, values in (GOOD | change).items() if values is not None}
    with pytest.raises(DataError, match=message) as refused:
        read(tmp_path, rows, **options)
    assert str(refused.value).startswith("data.graph.near.table: ")
    assert "\n" not in str(refused.value)


def test_a_table_is_checked_without_ids(tmp_path):
    assert len(read(tmp_path, {**GOOD, "target": [1, 2]}, None)) == 0
    with pytest.raises(DataError, match="no column 'target'"):
        read(tmp_path, {name: values for name, values in GOOD.items() if name != "target"}, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"edges": "user-user"}, "the log has no edges between users"),
        ({"edges": "item-item", "columns": {"source": "a"}}, "columns are those of a table"),
        ({"edges": "item-item", "unknown_ids": "drop"}, "only a table of edges has unknown ids"),
        ({"edges": "item-user", "window": 3}, "window is of edges: item-item from the log"),
        (
            {"edges": "item-item", "table": "e.parquet", "window": 3},
            "window is of edges: item-item from the log",
        ),
        ({"edges": "item-item", "k": 0}, "greater than or equal to 1"),
        ({"edges": "item-item", "half_life": 0.5}, "greater than or equal to 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        Graph(**options)
