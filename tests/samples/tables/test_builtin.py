import pyarrow.parquet as pq
import pytest

from nonet.errors import DataError
from nonet.samples.sequences.sequences import build_sequences
from nonet.samples.tables.files import get_builtin_path, get_licence_notice
from nonet.samples.tables.tables import read_tables

LOG, ITEMS = "builtin:movielens-small/interactions.parquet", "builtin:movielens-small/items.parquet"


def test_movielens_small_has_the_published_size_and_types():
    log, items = read_tables(LOG, ITEMS)
    assert items is not None
    assert (len(log), len(items), len(log["user_id"].unique())) == (100_004, 9_125, 671)
    assert [str(field.type) for field in log.schema] == ["int64", "int64", "int64", "float"]
    first = items.slice(0, 1).to_pylist()[0]
    assert first["title"] == "Toy Story (1995)"
    assert first["year"] == 1995
    assert first["categories"] == ["Adventure", "Animation", "Children", "Comedy", "Fantasy"]
    assert sum(not genres for genres in items["categories"].to_pylist()) == 18
    assert "(no genres listed)" not in {
        genre for genres in items["categories"].to_pylist() for genre in genres
    }


def test_quickstart_split_of_movielens_small():
    log, items = read_tables(LOG, ITEMS)
    seq, table = build_sequences(log, items, keep={"item_events": 5}, split={"test": 5, "valid": 1, "rl": 5})
    assert len(table) == 3_496
    counts = seq.count_events()
    assert [counts[name] for name in ("users", "train", "rl", "valid", "test")] == [
        671,
        82_691,
        3_355,
        671,
        3_355,
    ]


def test_licence_is_named_and_lies_beside_the_tables():
    line = get_licence_notice(LOG)
    assert line is not None
    assert "GroupLens" in line
    assert "no commercial use without permission" in line
    assert "\n" not in line
    terms = get_builtin_path(LOG).with_name("README.txt")
    assert str(terms) in line
    assert "without first obtaining permission" in terms.read_text(encoding="utf-8")
    assert get_licence_notice("/some/where/interactions.parquet") is None


@pytest.mark.parametrize("name", ["builtin:movielens-smal/items.parquet", "builtin:../split.py", "builtin:"])
def test_unknown_builtin_lists_what_there_is(name):
    with pytest.raises(DataError, match=r"there are builtin:movielens-small/interactions\.parquet, builtin:"):
        get_builtin_path(name)


def test_builtin_tables_are_plain_parquet():
    assert pq.ParquetFile(get_builtin_path(LOG)).schema_arrow.metadata is None
