"""`data.missing`: which texts stand for a missing value, in every reader of tables."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.errors import ConfigError, DataError
from nonet.samples.importers.import_csv import import_csv
from nonet.samples.preparation import BuildOptions, prepare_sequences, read_sample
from nonet.samples.profiles import read_profile
from nonet.samples.tables import MISSING, TableFormat, check_items, read_interactions, read_tables
from nonet.workers.roles.artifacts.sequences import open_sequences

ONLY_EMPTY = TableFormat(missing=("",))
SPLIT = {"use": "leave_last_out", "test": 1, "valid": 1, "rl": 0}


def write_log(folder, users=("NA", "DE", "FR"), each: int = 6) -> str:
    """Parquet of `each` events of every user, hours apart."""
    rows = [(user, f"i{place}", 1_600_000_000 + 3600 * place) for user in users for place in range(each)]
    columns = zip(*rows, strict=True)
    path = str(folder / "visits.parquet")
    pq.write_table(pa.table(dict(zip(("user_id", "item_id", "timestamp"), columns, strict=True))), path)
    return path


def write_items(folder) -> str:
    path = str(folder / "items.parquet")
    ids = [f"i{place}" for place in range(6)]
    pq.write_table(pa.table({"item_id": ids, "categories": ["NA|x", "None", "?|y", "x", "y", ""]}), path)
    return path


def test_an_id_is_missing_only_where_the_list_says_so(tmp_path):
    path = write_log(tmp_path)
    with pytest.raises(DataError, match=r"6 of 18 rows have no user_id.*'NA'.*data\.missing"):
        read_interactions(path)
    assert len(read_interactions(path, ONLY_EMPTY)) == 18
    with pytest.raises(DataError, match="user_id is 'DE'"):
        read_interactions(path, TableFormat(missing=("DE",)))


def test_categories_leave_out_the_listed_texts_alone(tmp_path):
    table = pq.read_table(write_items(tmp_path))
    assert check_items(table, None, "items")["categories"].to_pylist()[:3] == [["x"], [], ["?", "y"]]
    own = check_items(table, TableFormat(missing=("?", "")), "items")["categories"].to_pylist()
    assert own[:3] == [["NA", "x"], ["None"], ["y"]]


def test_items_may_be_called_as_the_list_allows():
    items = pa.table({"item_id": ["NA", "b"]})
    with pytest.raises(DataError, match="item_id is 'NA'"):
        check_items(items, None, "items")
    assert check_items(items, ONLY_EMPTY, "items")["item_id"].to_pylist() == ["NA", "b"]


def test_the_same_files_are_profiled_anew_for_another_list(tmp_path):
    path, items = write_log(tmp_path), write_items(tmp_path)
    assert read_profile(path, items, ONLY_EMPTY).users == 3
    with pytest.raises(DataError, match="'NA'"):
        read_profile(path, items)


def test_sequences_on_disk_and_the_sample_of_a_driver_follow_the_list(tmp_path):
    path, items = write_log(tmp_path), write_items(tmp_path)
    table, _ = read_sample(path, items, ONLY_EMPTY, {})
    assert "NA" in table["user_id"].to_pylist()
    with pytest.raises(DataError, match="'NA'"):
        read_sample(path, items, {}, {})
    options = BuildOptions(path, items=items, split=SPLIT, missing=("",))
    seq, kept = open_sequences(prepare_sequences(options, tmp_path / "work").folder)
    assert (len(seq), kept["categories"].to_pylist()[0]) == (3, ["NA", "x"])


def test_a_list_is_part_of_what_a_preparation_is_named_after_where_it_is_not_the_default():
    usual = BuildOptions("a")
    assert "missing" not in usual.to_fingerprint()
    assert "missing" not in BuildOptions("a", missing=MISSING[::-1]).to_fingerprint()
    assert BuildOptions("a", missing=("b", "a")).to_fingerprint()["missing"] == [
        "a",
        "b",
    ]


def test_both_tables_are_read_by_one_format(tmp_path):
    interactions, items = read_tables(write_log(tmp_path), write_items(tmp_path), ONLY_EMPTY)
    assert (len(interactions), items["categories"].to_pylist()[1]) == (18, ["None"])


@pytest.mark.parametrize("missing", ["NA", [1], 5, [None]])
def test_a_list_of_anything_but_texts_is_refused(missing):
    with pytest.raises(ConfigError, match=r"data\.missing is .*list of texts"):
        TableFormat.from_options({}, missing)


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_text_files_are_imported_by_the_list(tmp_path, form):
    rows = [
        (user, place, 1_600_000_000 + 3600 * place, "?" if place else "7.5")
        for user in ("NA", "DE")
        for place in range(4)
    ]
    names = ("user_id", "item_id", "timestamp", "price")
    path = tmp_path / f"visits.{form}"
    if form == "csv":
        path.write_text("\n".join([",".join(names), *(",".join(map(str, row)) for row in rows)]) + "\n")
    else:
        import json

        path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"4 of 8 rows have no user_id.*--missing"):
        import_csv(path, tmp_path / "usual")
    assert import_csv(path, tmp_path / "own", missing=("?", ""))["users"] == 2
    if form == "csv":  # texts of the list are no numbers, and do not make the column text
        prices = pq.read_table(tmp_path / "own/interactions.parquet")["price"].to_pylist()
        assert prices == [7.5, None, None, None] * 2
