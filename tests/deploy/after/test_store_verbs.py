"""`nonet pack`, `nonet store put`, `get` and `stats` write and read a store of features."""

import json

import pyarrow as pa
import pyarrow.parquet as pq

from nonet.deploy.verbs import data


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
