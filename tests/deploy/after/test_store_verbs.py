"""`nonet pack`, `nonet store put`, `get` and `stats` write and read a store of features."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.deploy.verbs import data
from nonet.errors import ConfigError


def test_packed_rows_are_read_by_key_and_counted(tmp_path, capsys):
    rows = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"item": [1, 2, 3], "price": [1.5, 2.5, 3.5]}), rows)
    place = str(tmp_path / "prices")
    data.pack(str(rows), place, key="item")
    assert "wrote 3 rows; it holds 3 keys" in capsys.readouterr().out
    data.get(place, ["2", "9"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["key"] for line in found] == ["2", "9"]
    assert found[0]["row"]["price"] == 2.5
    assert found[1]["row"] is None
    data.show_store_stats(place)
    stats = json.loads(capsys.readouterr().out)
    assert (stats["keys"], stats["columns"]) == (3, {"price": "double"})


def test_rows_put_into_a_store_replace_those_with_the_same_key(tmp_path, capsys):
    first, later = tmp_path / "first.parquet", tmp_path / "later.parquet"
    pq.write_table(pa.table({"item": [1, 2], "price": [1.5, 2.5]}), first)
    pq.write_table(pa.table({"item": [2, 3], "price": [20.0, 30.0]}), later)
    place = f"lmdb:{tmp_path / 'prices'}"
    data.pack(str(first), place, key="item")
    data.put(place, str(later), key="item")
    assert "wrote 2 rows; it holds 3 keys" in capsys.readouterr().out
    data.get(place, ["1", "2", "3"])
    found = [json.loads(line)["row"]["price"] for line in capsys.readouterr().out.splitlines()]
    assert found == [1.5, 20.0, 30.0]


def test_the_time_of_a_version_is_shown_and_a_text_or_seconds_say_as_of_when(tmp_path, capsys):
    rows = tmp_path / "rows.parquet"
    table = {"sku": ["A", "A"], "price": [1.5, 2.5], "at": [1_690_000_000_000, 1_704_000_000_000]}  # ms
    pq.write_table(pa.table(table), rows)
    place = str(tmp_path / "prices")
    data.pack(str(rows), place, key="sku", time="at")
    capsys.readouterr()
    data.get(place, ["A", "B"])
    assert capsys.readouterr().out.splitlines() == [
        '{"key": "A", "time": "2023-12-31T05:20:00Z", "row": {"price": 2.5}}',
        '{"key": "B", "row": null}',
    ]
    for as_of in ("1700000000", "2023-11-14T22:13:20Z"):
        data.get(place, ["A"], as_of=as_of)
        assert json.loads(capsys.readouterr().out)["time"] == "2023-07-22T04:26:40Z"
    with pytest.raises(ConfigError, match="--as-of is 1700000000000; it must be unix seconds"):
        data.get(place, ["A"], as_of="1700000000000")
