import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.errors import ConfigError, DataError
from nonet.samples.stores import StoreFiller, get_rows, open_store


@pytest.fixture
def rows(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    for part in range(3):
        table = pa.table(
            {
                "item_id": [3 * part + i for i in range(3)] + [0],
                "price": [1.5 * part + i for i in range(3)] + [100.0 + part],
                "at_ms": [1000 * (10 * part + i) for i in range(3)] + [1000 * (5 + 10 * part)],
            }
        )
        pq.write_table(table, folder / f"part-{part}.parquet")
    return folder


@pytest.mark.parametrize("use", ["{}/s", "lmdb:{}/s"])
def test_a_folder_of_parquet_becomes_a_store_of_versions(rows, tmp_path, use):
    use = use.format(tmp_path)
    store, count = StoreFiller(rows, "item_id", "at_ms").pack(use)
    assert count == 12
    assert store.collect_stats()["keys"] == 9
    assert get_rows(open_store(use), ["0", "8", "77"], 16) == [{"price": 101.0}, None, None]
    assert get_rows(open_store(use), ["0", "8"]) == [{"price": 102.0}, {"price": 5.0}]


def test_a_store_that_is_there_is_put_into(rows, tmp_path):
    keys = pa.table({"item_id": [1, 2], "price": [7.0, 8.0]})
    pq.write_table(keys, tmp_path / "more.parquet")
    use = f"lmdb:{tmp_path / 's'}"
    StoreFiller(rows, "item_id", columns=["price"]).pack(use)
    StoreFiller(tmp_path / "more.parquet", "item_id").put(open_store(use))
    assert get_rows(open_store(use), ["1", "4"]) == [{"price": 7.0}, {"price": 2.5}]


@pytest.mark.parametrize("use", ["{}/s", "lmdb:{}/s"])
@pytest.mark.parametrize("name", ["key", "time"])
def test_a_column_with_the_name_of_a_store_s_own_column_is_refused_before_anything_is_written(
    tmp_path, use, name
):
    pq.write_table(pa.table({"item_id": [1], name: [2.0], "at": [3]}), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=f"'{name}' is the store's own column of {name}s"):
        StoreFiller(tmp_path / "rows.parquet", "item_id", "at").pack(use.format(tmp_path))
    assert not (tmp_path / "s").exists()


def test_what_cannot_be_packed_is_one_line(rows, tmp_path):
    with pytest.raises(ConfigError, match=r"no column 'item'.*Did you mean 'item_id'"):
        StoreFiller(rows, "item").pack(str(tmp_path / "s"))
    with pytest.raises(DataError, match="keys are whole numbers or text, got double"):
        StoreFiller(rows, "price").pack(str(tmp_path / "s"))
    with pytest.raises(ConfigError, match="wants --column NAME="):
        StoreFiller(rows, "item_id").pack("hbase://127.0.0.1:1/t")
    pq.write_table(pa.table({"item_id": [1, None], "price": [1.0, 2.0]}), tmp_path / "gap.parquet")
    with pytest.raises(DataError, match="column 'item_id' has 1 rows without a key"):
        StoreFiller(tmp_path / "gap.parquet", "item_id").pack(str(tmp_path / "gap.store"))
    StoreFiller(rows, "item_id", "at_ms").pack(str(tmp_path / "s"))
    with pytest.raises(DataError, match="keys are whole numbers, got seven"):
        get_rows(open_store(str(tmp_path / "s")), ["seven"])


@pytest.mark.parametrize("use", ["{}/s", "lmdb:{}/s"])
def test_of_several_rows_within_a_second_the_newest_one_stays(tmp_path, use):
    use, prices = use.format(tmp_path), [52.0, 51.0, 50.0, 7.0]
    rows = pa.table({"item_id": [1, 1, 1, 2], "price": prices, "at_ms": [5200, 5100, 5100, 5100]})
    pq.write_table(rows, tmp_path / "rows.parquet")
    _, written = StoreFiller(tmp_path / "rows.parquet", "item_id", "at_ms").pack(use)
    assert written == 2
    assert get_rows(open_store(use), ["1", "2"]) == [{"price": 52.0}, {"price": 7.0}]
