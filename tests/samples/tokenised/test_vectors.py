"""Files of vectors become columns of the item table, whatever their order, or are refused in one line."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.errors import DataError
from nonet.samples.preparation import BuildOptions, LogChanges, prepare_sequences, read_sample
from nonet.samples.tokenised import add_vector_fields, as_array, attach_vectors
from nonet.workers.roles.artifacts import DataSetup
from nonet.workers.roles.artifacts.sequences import open_sequences

ITEMS = pa.table({"item_id": [30, 10, 20], "title": ["c", "a", "b"]})
VALUES = np.arange(6, dtype=np.float32).reshape(3, 2)


def test_the_rows_of_an_array_are_those_of_the_item_table(tmp_path):
    np.save(tmp_path / "image.npy", VALUES)
    items = attach_vectors(ITEMS, {"image": str(tmp_path / "image.npy")})
    assert items["image"].to_pylist() == VALUES.tolist()
    assert items.schema == add_vector_fields(ITEMS.schema, {"image": str(tmp_path / "image.npy")}, 3)


@pytest.mark.parametrize("ids", [pa.int32(), pa.int64(), pa.uint16()])
def test_a_parquet_file_is_joined_by_id_and_an_item_that_it_lacks_has_no_vector(tmp_path, ids):
    table = {"item_id": pa.array([10, 20, 7, 30], ids), "vector": [None, [1.0, 2.0], [9.0, 9.0], [3.0, 4.0]]}
    pq.write_table(pa.table(table), tmp_path / "image.parquet")
    items = attach_vectors(ITEMS, {"image": str(tmp_path / "image.parquet")})
    assert items["image"].to_pylist() == [[3.0, 4.0], None, [1.0, 2.0]]


def test_items_of_several_chunks_keep_their_vectors(tmp_path, monkeypatch):
    monkeypatch.setattr("nonet.samples.tokenised.vectors._CHUNK_ITEMS", 2)
    table = {"item_id": [20, 30], "a": [1.0, 2.0], "b": [3, 4]}
    pq.write_table(pa.table(table), tmp_path / "image.parquet")
    items = attach_vectors(ITEMS, {"image": str(tmp_path / "image.parquet")})
    assert items["image"].num_chunks == 2
    assert items["image"].to_pylist() == [[2.0, 4.0], None, [1.0, 3.0]]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            VALUES[:2],
            r"is float32 \[2, 2\]; it must be numbers \[3, width\], a row for each row of the item table",
        ),
        (VALUES[:, :0], r"is float32 \[3, 0\]; it must be numbers"),
        (VALUES[0], r"is float32 \[2\]; it must be numbers"),
        (np.array([["a"]] * 3), "must be numbers"),
        (
            np.where(VALUES == 3, np.inf, VALUES),
            "has NaN, infinite or missing values in 1 rows. Clean the file",
        ),
        (np.array([{}] * 3), "must be numbers"),
        (np.array([[1e300]] * 3), "NaN, infinite or missing values in 3 rows"),
    ],
)
def test_an_array_that_does_not_fit_is_one_line(tmp_path, values, said):
    np.save(tmp_path / "image.npy", values)
    with pytest.raises(DataError, match=said) as raised:
        attach_vectors(ITEMS, {"image": str(tmp_path / "image.npy")})
    assert str(raised.value).startswith(f"data.vectors.image: {tmp_path}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (pa.array([1, 2]), "has the vector of none of the 3 items"),
        (pa.array(["10", "20"]), "item_id of string, and the items' are int64; they can never match"),
        (pa.array([10, 10]), "has item 10 twice, in rows 0 and 1"),
        (pa.array([2**64 - 1, 1], pa.uint64()), "item_id: Integer value 18446744073709551615 not in range"),
    ],
)
def test_ids_that_cannot_be_meant_are_one_line(tmp_path, ids, said):
    pq.write_table(pa.table({"item_id": ids, "vector": [[1.0], [2.0]]}), tmp_path / "image.parquet")
    with pytest.raises(DataError, match=said) as raised:
        attach_vectors(ITEMS, {"image": str(tmp_path / "image.parquet")})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("column", [[[20000001], [2]], [20000001, 2]])
def test_whole_numbers_of_any_size_are_rounded(tmp_path, column):
    pq.write_table(pa.table({"item_id": [10, 20], "vector": column}), tmp_path / "image.parquet")
    items = attach_vectors(ITEMS, {"image": str(tmp_path / "image.parquet")})
    assert items["image"].to_pylist() == [None, [2e7], [2.0]]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_text_ids_of_any_type_match_by_the_name_that_the_tables_have(tmp_path, kind):
    items = pa.table({"item_id": ["a", "b"]})
    table = {"sku": pa.array(["b", "c"]).cast(kind), "vector": [[1.0], [2.0]]}
    pq.write_table(pa.table(table), tmp_path / "image.parquet")
    options = BuildOptions(
        "log", items="items", columns={"item": "sku"}, vectors={"image": str(tmp_path / "image.parquet")}
    )
    assert options.attach_vectors(items)["image"].to_pylist() == [None, [1.0]]
    with pytest.raises(DataError, match="has no column item_id; it has sku, vector"):
        attach_vectors(items, options.vectors)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("image.npy", b"\x93NUMPY\x01\x00\x06\x00{'a':\n", "not a .npy array"),
        ("image.npy", VALUES[:2], r"is float32 \[2, 2\]; it must be numbers \[3, width\]"),
        ("image.parquet", {"sku": [1], "vector": [[1.0]]}, "has no column item_id"),
        ("image.parquet", {"item_id": ["1"], "vector": [[1.0]]}, "they can never match"),
        ("image.parquet", {"item_id": [1], "text": ["a"]}, "must have one column of lists of numbers"),
    ],
)
def test_what_the_header_of_a_file_tells_is_refused_before_its_vectors_are_read(
    tmp_path, name, content, said
):
    path = tmp_path / name
    if isinstance(content, dict):
        pq.write_table(pa.table(content), path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    for attach in (
        lambda: add_vector_fields(ITEMS.schema, {"image": str(path)}, 3),
        lambda: attach_vectors(ITEMS, {"image": str(path)}),
    ):
        with pytest.raises(DataError, match=said):
            attach()


def test_an_array_that_says_it_is_huge_takes_no_memory(tmp_path):
    np.save(tmp_path / "image.npy", VALUES)
    old, new = b"(3, 2), }           ", b"(3000000000, 999), }"
    content = (tmp_path / "image.npy").read_bytes().replace(old, new)
    (tmp_path / "image.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"is float32 \[3000000000, 999\]; it must be numbers"):
        attach_vectors(ITEMS, {"image": str(tmp_path / "image.npy")})


def test_rewards_get_a_matrix_with_nan_for_an_item_without_a_vector():
    column = pa.chunked_array(
        [pa.array([None, [1.0, 2.0]], pa.list_(pa.float32())), pa.array([[3.0, 4.0]], pa.list_(pa.float32()))]
    )
    np.testing.assert_array_equal(as_array(column), np.array([[np.nan, np.nan], [1, 2], [3, 4]], np.float32))
    assert as_array(pa.chunked_array([pa.nulls(3, pa.list_(pa.float32()))])).shape == (3, 0)


def test_text_that_is_no_file_of_its_kind_and_an_archive_are_one_line(tmp_path):
    (tmp_path / "image.npy").write_text("no array")
    (tmp_path / "image.parquet").write_text("no table")
    np.savez(tmp_path / "many.npz", VALUES)
    (tmp_path / "many.npz").rename(tmp_path / "many.npy")
    for name, said in (
        ("image.npy", "not a .npy"),
        ("image.parquet", "not a Parquet"),
        ("many.npy", "not a .npy"),
    ):
        with pytest.raises(DataError, match=said):
            attach_vectors(ITEMS, {"image": str(tmp_path / name)})
    with pytest.raises(DataError, match=r"data\.vectors\.image: .*none\.npy: no such file"):
        attach_vectors(ITEMS, {"image": str(tmp_path / "none.npy")})


def test_a_name_that_the_items_have_is_refused_with_and_without_rows(tmp_path):
    np.save(tmp_path / "image.npy", VALUES)
    vectors = {"title": str(tmp_path / "image.npy")}
    for attach in (
        lambda: attach_vectors(ITEMS, vectors),
        lambda: add_vector_fields(ITEMS.schema, vectors, 3),
    ):
        with pytest.raises(
            DataError, match="the item table has a column 'title' already; choose another name"
        ):
            attach()


def test_items_have_their_vectors_in_memory_and_on_disk_and_a_sample_their_columns(tmp_path):
    draw = np.random.default_rng(3)
    n_items, events = 12, 400
    log = {"user_id": draw.integers(0, 30, events), "item_id": draw.integers(0, n_items, events) * 10}
    pq.write_table(pa.table(log | {"timestamp": np.arange(events) + 1_500_000_000}), tmp_path / "log.parquet")
    ids = draw.permutation(n_items) * 10
    pq.write_table(pa.table({"item_id": ids}), tmp_path / "items.parquet")
    np.save(tmp_path / "image.npy", np.stack([ids, ids + 1], 1).astype(np.float32))
    options = BuildOptions(
        str(tmp_path / "log.parquet"),
        items=str(tmp_path / "items.parquet"),
        split={"use": "leave_last_out", "test": 1, "valid": 1},
        vectors={"image": str(tmp_path / "image.npy")},
    )
    data = DataSetup(options=options, tokenizer={}, folder=str(tmp_path), seed=7)
    _, items = data.build()
    _, on_disk = open_sequences(prepare_sequences(options, tmp_path / "out").folder)
    for table in (items, on_disk):
        assert table["image"].to_pylist() == [[each, each + 1] for each in table["item_id"].to_pylist()]
    _, schema = data.sample_tables()
    assert schema.field("image").type == items.schema.field("image").type
    _, schema = read_sample(options.interactions, options.items, {}, {}, LogChanges())
    assert "image" not in schema.names
    before = options.list_item_files()
    np.save(tmp_path / "image.npy", np.zeros((n_items, 2), np.float32))
    assert options.list_item_files() != before  # so a killed preparation does not go on with other vectors
