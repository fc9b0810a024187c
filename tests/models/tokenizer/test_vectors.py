"""Item vectors: each source against a plain computation, and their weights."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nonet.errors import ConfigError, DataError
from nonet.models.tokenizer.semantic_ids import check_tokenizer
from nonet.models.tokenizer.sparse_matrix import SparseMatrix, compute_ppmi, compute_svd, compute_tfidf
from nonet.models.tokenizer.vectors import compute_item_vectors, parse_weights
from nonet.samples.sequences.sequences import TRAIN, build_sequences


def tables():
    rng = np.random.default_rng(1)
    user = np.repeat(np.arange(12), 15)
    item = rng.integers(0, 20, len(user))
    item[:20] = np.arange(20)
    log = pa.table({"user_id": user, "item_id": item, "timestamp": np.arange(len(user))})
    catalogue = pa.table(
        {
            "item_id": np.arange(20),
            "title": [f"word{i % 3} word{i % 4}" for i in range(20)],
            "categories": [["a"], ["b", "c"]] * 10,
            "price": np.arange(20.0),
            "flag": [True] * 20,
        }
    )
    seq, items = build_sequences(log, catalogue, split={"test": 2, "valid": 1, "rl": 2})
    return items, seq


def dense(matrix: SparseMatrix) -> np.ndarray:
    out = np.zeros(matrix.shape)
    out[matrix.row, matrix.column] = matrix.value
    return out


def vectors(items, seq, spec, folder, seed=0):
    return compute_item_vectors(items, seq, spec, dim=6, seed=seed, folder=folder)


def test_tfidf_of_a_hand_made_corpus():
    matrix = compute_tfidf([["a", "b", "a"], ["b", "c"], ["b"], []])
    # b is in 3 of 4 documents; a and c are in one document each and drop out.
    assert matrix.shape == (4, 3)
    assert sorted(zip(matrix.row.tolist(), matrix.column.tolist(), strict=True)) == [(0, 1), (1, 1), (2, 1)]
    np.testing.assert_allclose(matrix.value, 1.0)
    lone = compute_tfidf([["x"], ["y", "y"]])
    np.testing.assert_allclose(dense(lone), [[1, 0], [0, 1]])


def test_rare_words_weigh_more_than_frequent_ones():
    matrix = dense(compute_tfidf([["often", "rare"], ["often", "rare"], ["often"], ["often"]]))
    assert matrix[0, 1] > matrix[0, 0] > 0
    np.testing.assert_allclose(np.linalg.norm(matrix, axis=1), 1)


def test_svd_equals_numpys_up_to_sign():
    rng = np.random.default_rng(0)
    a = rng.standard_normal((30, 4)) @ rng.standard_normal((4, 25))
    row, column = np.nonzero(np.ones_like(a))
    found = compute_svd(SparseMatrix(row, column, a[row, column], a.shape), 4, 3, "x")
    u, s, _ = np.linalg.svd(a, full_matrices=False)
    np.testing.assert_allclose(np.abs(found), np.abs(u[:, :4] * s[:4]), atol=1e-3)  # float32, values near 30
    root = compute_svd(SparseMatrix(row, column, a[row, column], a.shape), 4, 3, "x", power=0.5)
    np.testing.assert_allclose(np.abs(root), np.abs(u[:, :4] * s[:4] ** 0.5), atol=1e-3)


def test_vectors_do_not_depend_on_the_number_of_threads():
    draw = np.random.default_rng(0)
    row, column = draw.integers(0, 6000, 90_000), draw.integers(0, 500, 90_000)
    matrix = SparseMatrix(row, column, np.ones(len(row), np.float32), (6000, 500))
    found, before = {}, torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found[threads] = compute_svd(matrix, 32, 3, "x")
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(found[1], found[3])


def test_cooccurrence_equals_a_plain_count():
    items, seq = tables()
    n = len(items)
    near = np.zeros((n, n))
    for u in range(len(seq)):
        part = slice(seq.offsets[u], seq.offsets[u + 1])
        walk = seq.item[part][seq.split[part] == TRAIN]
        for i in range(len(walk)):
            for j in range(i + 1, min(i + 6, len(walk))):
                near[walk[i], walk[j]] += (j - i) ** -0.5
                near[walk[j], walk[i]] += (j - i) ** -0.5
    total = near.sum(1)
    context = total**0.75 / (total**0.75).sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        want = np.where(near > 0, np.maximum(np.log(near / (total[:, None] * context)), 0), 0)
    np.testing.assert_allclose(dense(compute_ppmi(seq, n)), want, atol=1e-9)


def test_held_out_events_do_not_shape_the_vectors(tmp_path):
    items, seq = tables()
    before = vectors(items, seq, "cooccurrence", tmp_path)
    held_out = seq.split != TRAIN
    seq.item[held_out] = (seq.item[held_out] + 3) % 20
    assert np.array_equal(before, vectors(items, seq, "cooccurrence", tmp_path))


def test_sources_are_centred_scaled_to_one_and_weighted(tmp_path):
    items, seq = tables()
    found = vectors(items, seq, ["price", {"categories": 0.25}, "cooccurrence"], tmp_path)
    assert found.dtype == np.float32
    price, categories, rest = found[:, :1], found[:, 1:4], found[:, 4:]
    for block, weight in ((price, 1.0), (categories, 0.25), (rest, 1.0)):
        np.testing.assert_allclose(block.mean(0), 0, atol=1e-6)
        np.testing.assert_allclose((block**2).sum(1).mean(), weight**2, rtol=1e-5)


def test_the_same_seed_gives_the_same_vectors(tmp_path):
    items, seq = tables()
    spec = ["title", "categories", "cooccurrence"]
    assert np.array_equal(vectors(items, seq, spec, tmp_path), vectors(items, seq, spec, tmp_path))


def test_a_users_npy_and_parquet_give_the_same(tmp_path):
    items, seq = tables()
    own = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
    np.save(tmp_path / "own.npy", own)
    order = np.arange(20)[::-1]
    pq.write_table(pa.table({"item_id": order, "vector": list(own[order])}), tmp_path / "own.parquet")
    flat = {f"v{i}": own[order][:, i] for i in range(3)}
    pq.write_table(pa.table({"item_id": order, **flat}), tmp_path / "flat.parquet")
    want = vectors(items, seq, "own.npy", tmp_path)
    assert np.array_equal(want, vectors(items, seq, "own.parquet", tmp_path))
    assert np.array_equal(want, vectors(items, seq, {"flat.parquet": 1.0}, tmp_path))


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float64(), 3)])
def test_a_column_of_vectors_is_taken_as_it_is_and_items_without_one_stand_in_the_middle(tmp_path, kind):
    items, seq = tables()
    own = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
    own[4] = np.delete(own, 4, 0).mean(0)
    np.save(tmp_path / "own.npy", own)
    image = pa.array([None if i == 4 else row for i, row in enumerate(own.tolist())], kind)
    np.testing.assert_allclose(
        vectors(items.append_column("image", image), seq, "image", tmp_path),
        vectors(items, seq, "own.npy", tmp_path),
        atol=1e-6,
    )


def test_weights_default_by_name_and_may_be_given():
    assert parse_weights(["title", "cooccurrence"]) == {"title": 0.3, "cooccurrence": 1.0}
    assert parse_weights({"title": 2, "x.npy": 1}) == {"title": 2.0, "x.npy": 1.0}
    for spec, message in (
        ([], "is empty"),
        (["title", {"title": 1}], "named twice"),
        ({"title": 0}, "must be above 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_weights(spec)


def test_a_source_that_is_not_there_is_named_with_those_that_are(tmp_path):
    items, seq = tables()
    with pytest.raises(DataError, match=r"names 'titel'.*there are: cooccurrence, title, categories, price"):
        vectors(items, seq, "titel", tmp_path)
    with pytest.raises(DataError, match=r"none\.npy does not exist"):
        vectors(items, seq, "none.npy", tmp_path)
    with pytest.raises(DataError, match="'flag' is bool; it must be text"):
        vectors(items, seq, "flag", tmp_path)


def test_vectors_that_do_not_fit_the_items_are_one_readable_error(tmp_path):
    items, seq = tables()
    np.save(tmp_path / "short.npy", np.zeros((19, 3)))
    with pytest.raises(DataError, match=r"float64 \[19, 3\]; it must be numbers \[20, width\]"):
        vectors(items, seq, "short.npy", tmp_path)
    np.save(tmp_path / "nan.npy", np.full((20, 2), np.nan))
    with pytest.raises(DataError, match="NaN, infinite or missing values in 20 rows"):
        vectors(items, seq, "nan.npy", tmp_path)
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(DataError, match=r"is not a \.npy array"):
        vectors(items, seq, "text.npy", tmp_path)
    pq.write_table(pa.table({"item_id": np.arange(18), "vector": [[0.0]] * 18}), tmp_path / "few.parquet")
    with pytest.raises(DataError, match=r"lacks 2 of 20 items, first \[18, 19\]"):
        vectors(items, seq, "few.parquet", tmp_path)
    pq.write_table(pa.table({"id": [1]}), tmp_path / "odd.parquet")
    with pytest.raises(DataError, match="has no column item_id; it has id"):
        vectors(items, seq, "odd.parquet", tmp_path)
    uneven = pa.array([[0.5] * (2 + i % 2) for i in range(20)])
    with pytest.raises(DataError, match="'image' has vectors of 2 to 3 numbers"):
        vectors(items.append_column("image", uneven), seq, "image", tmp_path)
    with pytest.raises(DataError, match="'image' has no vector in any row"):
        vectors(items.append_column("image", pa.nulls(20, pa.list_(pa.float32()))), seq, "image", tmp_path)


def test_a_vector_column_by_another_name_and_a_pandas_index_are_read(tmp_path):
    items, seq = tables()
    own = np.random.default_rng(0).integers(0, 9, (20, 3))
    np.save(tmp_path / "own.npy", own)
    order = np.arange(20)[::-1]
    lists = pa.table({"item_id": order, "embedding": own[order].tolist(), "__index_level_0__": order})
    pq.write_table(lists, tmp_path / "named.parquet")
    flat = {f"v{i}": own[order][:, i] for i in range(3)}
    pq.write_table(
        pa.table({"item_id": order, **flat, "__index_level_0__": order}), tmp_path / "flat.parquet"
    )
    want = vectors(items, seq, "own.npy", tmp_path)
    assert np.array_equal(want, vectors(items, seq, "named.parquet", tmp_path))
    assert np.array_equal(want, vectors(items, seq, "flat.parquet", tmp_path))


IDS, ROWS = list(range(20)), [[0.5, float(i)] for i in range(20)]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"item_id": [*IDS, 3], "vector": [*ROWS, [9.0, 9.0]]}, "has item 3 twice, in rows 3 and 20"),
        ({"item_id": [*IDS, None], "vector": [*ROWS, [9.0, 9.0]]}, "has no item_id in row 20"),
        ({"item_id": IDS, "vector": [*ROWS[:18], None, []]}, r"lacks 2 of 20 items, first \[18, 19\]"),
        ({"item_id": IDS, "vector": [*ROWS[:19], [0.5, None]]}, "NaN, infinite or missing values in 1 rows"),
        ({"item_id": IDS, "vector": [*ROWS[:19], [0.5]]}, "vectors of 1 to 2 numbers"),
        ({"item_id": IDS, "a": ROWS, "b": ROWS}, "one column of lists of numbers, such as vector"),
        ({"item_id": IDS, "v0": [1.0] * 20, "name": ["x"] * 20}, "has item_id, v0, name; besides item_id"),
        ({"item_id": IDS}, "besides item_id it must have one column"),
        ({"item_id": IDS, "v0": [*IDS[:19], None]}, "NaN, infinite or missing values in 1 rows"),
    ],
)
def test_a_vector_file_that_cannot_be_meant_is_one_line_before_anything_starts(tmp_path, columns, said):
    items, _ = tables()
    pq.write_table(pa.table(columns), tmp_path / "own.parquet")
    with pytest.raises(DataError, match=said) as raised:
        check_tokenizer(items, {"use": "rq_kmeans", "vectors": ["own.parquet"]}, tmp_path)
    assert "\n" not in str(raised.value)


def test_a_vector_file_that_is_no_parquet_is_one_line(tmp_path):
    items, _ = tables()
    (tmp_path / "own.parquet").write_text("item_id,vector\n")
    with pytest.raises(DataError, match="is not a Parquet file"):
        check_tokenizer(items, {"use": "rq_kmeans", "vectors": ["own.parquet"]}, tmp_path)
