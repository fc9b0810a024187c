"""Semantic ids: deterministic, unique, refused when the codebook collapsed; and the user's own files."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.errors import ConfigError, DataError
from nonet.models.tokenizer.kinds import TOKENIZERS
from nonet.models.tokenizer.rq_kmeans import quantise_residuals
from nonet.models.tokenizer.semantic_ids import describe_codebooks, number_collisions, tokenise
from nonet.plugins import PluginFiles
from nonet.samples.sequences.sequences import build_sequences


def clusters(groups=6, each=12, width=8, seed=0):
    """Points around `groups` far-apart centres."""
    rng = np.random.default_rng(seed)
    centres = 10 * rng.standard_normal((groups, width))
    return (np.repeat(centres, each, 0) + rng.standard_normal((groups * each, width))).astype(np.float32)


def tables(items=40, users=30, seed=0):
    """Users who stay near one place of a circle of items; items with titles and categories."""
    rng = np.random.default_rng(seed)
    user = np.repeat(np.arange(users), 20)
    item = (7 * user + rng.integers(0, 6, len(user))) % items
    log = pa.table({"user_id": user, "item_id": 100 + item, "timestamp": np.arange(len(user))})
    catalogue = pa.table(
        {
            "item_id": np.arange(100, 100 + items),
            "title": [f"the {'red' if i % 2 else 'blue'} story {i % 5}" for i in range(items)],
            "categories": [["drama"] if i < items // 2 else ["comedy", "war"] for i in range(items)],
            "price": np.linspace(1, 9, items),
        }
    )
    seq, kept = build_sequences(log, catalogue, split={"test": 2, "valid": 1, "rl": 2})
    return kept, seq


SMALL = {
    "use": "rq_kmeans",
    "vectors": ["title", "categories", "cooccurrence"],
    "levels": 2,
    "codes": 8,
    "dim": 8,
}


def test_first_level_finds_the_clusters():
    codes = quantise_residuals(clusters(), 1, 6, seed=1)[:, 0].reshape(6, 12)
    assert all(len(set(row)) == 1 for row in codes.tolist())
    assert len(set(codes[:, 0].tolist())) == 6


def test_each_level_leaves_less_over():
    x = clusters(seed=3)
    left = []
    for levels in (1, 2, 3):
        codes = quantise_residuals(x, levels, 6, seed=1)
        _, group = np.unique(codes, axis=0, return_inverse=True)
        means = np.stack([x[group.reshape(-1) == g].mean(0) for g in range(group.max() + 1)])
        left.append(((x - means[group.reshape(-1)]) ** 2).sum())
    assert left[0] > 1.5 * left[1] > 2 * left[2]


def test_the_same_seed_gives_the_same_codes_and_another_seed_others():
    x = clusters()
    assert np.array_equal(quantise_residuals(x, 3, 5, seed=1), quantise_residuals(x, 3, 5, seed=1))
    assert not np.array_equal(quantise_residuals(x, 3, 5, seed=1), quantise_residuals(x, 3, 5, seed=2))


def test_no_code_stays_dead_while_vectors_differ():
    x = np.concatenate([np.zeros((200, 2)), np.eye(2), -np.eye(2), 3 * np.eye(2)]).astype(np.float32)
    codes = quantise_residuals(x, 1, 6, seed=0)
    assert len(np.unique(codes)) == 6


def test_more_codes_than_items_are_no_error():
    codes = quantise_residuals(clusters(2, 3), 2, 16, seed=0)
    assert codes.shape == (6, 2)
    assert codes.max() < 16


def test_collisions_are_numbered_in_the_order_of_the_items():
    codes = np.array([[1, 1], [0, 2], [1, 1], [0, 2], [1, 1], [3, 0]], np.int32)
    assert number_collisions(codes).tolist() == [0, 0, 1, 1, 2, 0]


def test_report_of_a_hand_made_codebook():
    report = describe_codebooks(np.array([[0, 0], [0, 0], [1, 0], [1, 1]], np.int32), (4, 2))
    assert report["used"] == [2, 2]
    assert report["perplexity"] == [
        2.0,
        round(float(np.exp(-(0.75 * np.log(0.75) + 0.25 * np.log(0.25)))), 2),
    ]
    assert (report["unique_before_collisions"], report["largest_collision"]) == (0.75, 2)


def test_semantic_ids_are_unique_and_end_in_the_collision_level(tmp_path):
    items, seq = tables()
    tokens = tokenise(items, seq, SMALL, seed=7, folder=tmp_path)
    assert tokens.sids.dtype == np.int32
    assert tokens.sids.shape == (40, 3)
    assert len(np.unique(tokens.sids, axis=0)) == 40
    assert tokens.codes == (8, 8, tokens.report["largest_collision"])
    assert (tokens.sids < np.array(tokens.codes)).all()
    assert len(tokens.report["used"]) == len(tokens.report["perplexity"]) == tokens.report["levels"] == 3
    again = tokenise(items, seq, SMALL, seed=7, folder=tmp_path)
    assert np.array_equal(again.sids, tokens.sids)


def test_the_collision_level_is_there_even_when_nothing_collides(tmp_path):
    items, seq = tables()
    tokens = tokenise(items, seq, SMALL | {"levels": 4, "codes": 16}, seed=7, folder=tmp_path)
    assert tokens.report["largest_collision"] == 1
    assert tokens.codes == (16, 16, 16, 16, 1)


def test_a_collapsed_codebook_is_refused(tmp_path):
    items, seq = tables()
    np.save(tmp_path / "same.npy", np.ones((40, 4), np.float32))
    with pytest.raises(
        DataError, match=r"codebook collapsed: the first level uses 1 codes .* of 8 it could use"
    ):
        tokenise(items, seq, SMALL | {"vectors": "same.npy"}, seed=7, folder=tmp_path)


def test_a_code_space_too_small_for_the_items_is_refused(tmp_path):
    items, seq = tables()
    with pytest.raises(DataError, match=r"40 items share 3 semantic ids.*Raise tokenizer.levels or codes"):
        tokenise(items, seq, SMALL | {"levels": 1, "codes": 3}, seed=7, folder=tmp_path)


def test_an_unknown_tokenizer_is_an_error(tmp_path):
    items, seq = tables()
    with pytest.raises(ConfigError, match="'rqvae' does not exist; choose one of: file, rq_kmeans"):
        tokenise(items, seq, {"use": "rqvae"}, seed=7, folder=tmp_path)


def _json(folder, table):
    (folder / "sids.json").write_text(json.dumps(table))
    return {"use": "file", "path": "sids.json"}


def test_a_json_map_of_unique_ids_is_taken_as_it_is(tmp_path):
    items, seq = tables()
    config = _json(tmp_path, {str(100 + i): [i // 5, i % 5, 0] for i in range(60)})
    tokens = tokenise(items, seq, config, seed=7, folder=tmp_path)
    assert tokens.codes == (8, 5, 1)
    assert tokens.sids[7].tolist() == [1, 2, 0]


def test_ids_of_a_file_that_collide_get_a_last_level(tmp_path):
    items, seq = tables()
    config = _json(tmp_path, {str(100 + i): [i // 2, 3] for i in range(40)})
    tokens = tokenise(items, seq, config, seed=7, folder=tmp_path)
    assert tokens.codes == (20, 4, 2)
    assert tokens.sids[:4].tolist() == [[0, 3, 0], [0, 3, 1], [1, 3, 0], [1, 3, 1]]
    assert tokens.report["unique_before_collisions"] == 0.5


def test_a_parquet_of_ids_gives_the_same_as_json(tmp_path):
    items, seq = tables()
    ids = np.arange(100, 140)[::-1]
    pq.write_table(
        pa.table({"item_id": ids, "l0": (ids - 100) // 5, "l1": (ids - 100) % 5}), tmp_path / "sids.parquet"
    )
    own = tokenise(items, seq, {"use": "file", "path": "sids.parquet"}, seed=7, folder=tmp_path)
    other = _json(tmp_path, {str(100 + i): [i // 5, i % 5] for i in range(40)})
    assert np.array_equal(own.sids, tokenise(items, seq, other, seed=7, folder=tmp_path).sids)


def test_items_without_an_id_are_counted_and_named(tmp_path):
    items, seq = tables()
    config = _json(tmp_path, {str(100 + i): [i, 0] for i in range(37)})
    with pytest.raises(DataError, match=r"3 of 40 items have no semantic id, first 137, 138, 139\."):
        tokenise(items, seq, config, seed=7, folder=tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"103": [1]}, "1 of 40 items have a semantic id of another length than the first, first 103"),
        ({"105": [1, -1]}, "1 of 40 items have a code that is not a whole number .* first 105"),
        ({"105": [1, "a"]}, "1 of 40 items have a code that is not a whole number .* first 105"),
        ({"105": [1, 0.5]}, "1 of 40 items have a code that is not a whole number .* first 105"),
        ({"105": 3}, "must be one JSON object"),
    ],
)
def test_a_broken_map_is_one_readable_error(tmp_path, change, message):
    items, seq = tables()
    config = _json(tmp_path, {str(100 + i): [i, 0] for i in range(40)} | change)
    with pytest.raises(DataError, match=message):
        tokenise(items, seq, config, seed=7, folder=tmp_path)


def test_a_file_that_is_not_there_or_not_json_or_lacks_columns_is_one_readable_error(tmp_path):
    items, seq = tables()
    with pytest.raises(DataError, match="does not exist"):
        tokenise(items, seq, {"use": "file", "path": "nowhere.json"}, seed=7, folder=tmp_path)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        tokenise(items, seq, {"use": "file", "path": "broken.json"}, seed=7, folder=tmp_path)
    pq.write_table(pa.table({"item": [1], "l0": [2]}), tmp_path / "odd.parquet")
    with pytest.raises(DataError, match="has columns item, l0; it needs item_id, l0"):
        tokenise(items, seq, {"use": "file", "path": "odd.parquet"}, seed=7, folder=tmp_path)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("lambda request: None", r"own.py\): encode does not accept \(request: .*see docs/how-to/extend.md"),
        ("'nonet.models:MODELS', check=3", "check is 3, which is not a function"),
    ],
)
def test_a_tokenizer_that_breaks_its_contract_is_refused_in_one_line(tmp_path, body, said):
    (tmp_path / "own.py").write_text(f"from nonet.plug import TokenizerSpec\nSPEC = TokenizerSpec({body})\n")
    with pytest.raises(ConfigError, match=said):
        TOKENIZERS.get("own.py:SPEC", PluginFiles(str(tmp_path)))
