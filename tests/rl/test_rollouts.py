"""Rollouts cross between processes as plain arrays, and columns are joined by item."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from nonet.errors import DataError
from nonet.rl.rollouts import from_wire, join, to_wire
from nonet.types import Jagged
from nonet.workers.runtime import payload as rows


def same(a, b):
    for field in ("uid", "user_id", "item_id", "item", "sid", "logp", "valid", "scene"):
        assert np.array_equal(getattr(a, field), getattr(b, field)), field
        assert getattr(a, field).shape == getattr(b, field).shape
    for field in ("target", "history"):
        assert np.array_equal(getattr(a, field).values, getattr(b, field).values)
        assert np.array_equal(getattr(a, field).offsets, getattr(b, field).offsets)
    assert (a.weights_version, a.catalogue_version, a.step) == (
        b.weights_version,
        b.catalogue_version,
        b.step,
    )
    assert {k: v.tolist() for k, v in a.columns.items()} == {k: v.tolist() for k, v in b.columns.items()}


def test_the_wire_brings_back_the_same_rollouts(make_rollouts):
    r = make_rollouts(
        columns={"price": np.array([[1.5, np.inf], [2.0, 3.0]]), "shop": np.array(["a", "bcd"])}
    )
    same(from_wire(pickle.loads(pickle.dumps(to_wire(r)))), r)


def test_the_wire_has_no_object_array_and_no_torch(make_rollouts):
    r = make_rollouts(columns={"title": np.array([["a", None], ["bcd", "e"]], dtype=object)})
    r.user_id, r.uid = np.array([7, 8], dtype=object), np.array(["rl/0/7", "rl/0/8"], dtype=object)
    wire = to_wire(r)
    arrays = [
        part for x in wire.values() for part in ((x.values, x.offsets) if isinstance(x, Jagged) else (x,))
    ]
    assert all(isinstance(array, np.ndarray) and array.dtype.kind != "O" for array in arrays)
    assert b"torch" not in pickle.dumps(wire)
    back = from_wire(wire)
    assert back["title"].tolist() == [["a", ""], ["bcd", "e"]]
    assert (back.user_id.tolist(), back.uid.tolist()) == ([7, 8], ["rl/0/7", "rl/0/8"])


def test_a_worker_group_can_cut_and_join_the_wire(make_rollouts):
    r = make_rollouts(users=5, columns={"age": np.arange(5)})
    wire = to_wire(r)
    assert rows.count_rows(wire) == 5
    parts = [rows.slice_rows(wire, start, stop) for start, stop in rows.split_evenly(5, 3)]
    assert [len(from_wire(part).uid) for part in parts] == [2, 2, 1]
    same(from_wire(rows.concat_rows(parts)), r)
    empty = from_wire(rows.slice_rows(wire, 2, 2))
    assert (len(empty.uid), len(empty.target), empty.step, empty.catalogue_version) == (0, 0, 0, "")


def test_rows_of_two_weight_versions_are_never_mixed(make_rollouts):
    parts = [to_wire(make_rollouts(weights_version=version)) for version in (3, 4)]
    with pytest.raises(DataError, match="different weights_version are mixed: 3 and 4"):
        from_wire(rows.concat_rows(parts))


def test_mixed_objects_and_missing_fields_are_refused(make_rollouts):
    with pytest.raises(DataError, match=r"columns.tags mixes types \(list among str\)"):
        to_wire(make_rollouts(columns={"tags": np.array([["a", "b"], ["c", ["d"]]], dtype=object)}))
    wire = to_wire(make_rollouts())
    del wire["target"]
    with pytest.raises(DataError, match=r"no 'target'"):
        from_wire(wire)


def test_join_reads_each_item_s_row_and_an_empty_value_where_no_beam_is(make_rollouts):
    r = make_rollouts(item=np.array([[2, 0], [1, -1]]), columns={"old": np.zeros(2)})
    items = {
        "price": np.array([1.0, 2.0, 3.0], np.float32),
        "events": np.array([10, 20, 30]),
        "sale": np.array([True, False, True]),
        "title": np.array(["a", "bb", "ccc"]),
        "shop": np.array(["x", "y", None], dtype=object),
        "vector": np.arange(6.0).reshape(3, 2),
    }
    joined = join(r, items, {"age": np.array([30, 40])})
    assert joined["price"][:1].tolist() == [[3.0, 1.0]]
    assert np.isnan(joined["price"][1, 1])
    assert joined["price"].dtype == np.float32
    assert joined["events"].tolist() == [[30, 10], [20, 0]]
    assert joined["sale"].tolist() == [[True, True], [False, False]]
    assert joined["title"].tolist() == [["ccc", "a"], ["bb", ""]]
    assert joined["shop"].tolist() == [[None, "x"], ["y", ""]]
    assert joined["vector"].shape == (2, 2, 2)
    assert joined["vector"][0].tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert joined["age"].tolist() == [30, 40]
    assert set(r.columns) == {"old"}  # the rollouts themselves stay as they were
    assert "old" in joined.columns


def test_columns_of_the_wrong_length_are_named(make_rollouts):
    r = make_rollouts(item=np.array([[2, 0], [1, 3]]))
    with pytest.raises(DataError, match="item column 'price' has 3 rows, but item 3 was recommended"):
        join(r, {"price": np.ones(3)})
    with pytest.raises(DataError, match="user column 'age' has 3 rows for 2 users"):
        join(r, {}, {"age": np.ones(3)})
