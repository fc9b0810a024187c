"""Text: groups are cut at the ends of lines, rows are counted as they are read, columns keep the types of the first group."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.errors import DataError
from nonet.samples.streams import formats
from nonet.samples.streams.stream import read
from nonet.samples.tables import pack_files


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(formats, "_GROUP_BYTES", 256)


def test_csv_is_read_in_groups_and_in_any_order(tmp_path):
    for name, first in (("a.csv", 0), ("b.csv", 100)):
        lines = "".join(f"{n},{n / 2},w{n}\n" for n in range(first, first + 100))
        (tmp_path / name).write_text("user,price,word\n" + lines + "\n")
    stream = read(str(tmp_path / "*.csv"))
    feed = stream.open()
    assert len(feed.manifest.group_rows) > 6
    assert feed.rows == 200
    batches = list(stream.shuffle(5).filter("price < 40"))
    found = [
        (user, price)
        for b in batches
        for user, price in zip(b["user"].tolist(), b["price"].tolist(), strict=True)
    ]
    assert sorted(found) == [(n, n / 2) for n in range(80)]


def test_a_line_a_user_is_a_list_of_items(tmp_path):
    lines = [f"{n} " + " ".join(str(n + i) for i in range(n % 4)) for n in range(100)]
    (tmp_path / "s.txt").write_text("\r\n".join(lines) + "\n\n")
    found = {}
    for batch in read(str(tmp_path / "s.txt")):
        items = batch["item_id"]
        found |= {user: items[at].tolist() for at, user in enumerate(batch["user_id"].tolist())}
    assert found == {n: [n + i for i in range(n % 4)] for n in range(100)}


def test_blank_lines_are_no_users(tmp_path):
    (tmp_path / "s.txt").write_text("\n1 2 3\n \t \n\r\n2 4\n  \r\n \t")
    (batch,) = read(str(tmp_path / "s.txt"))
    assert batch["user_id"].tolist() == [1, 2]
    assert [batch["item_id"][at].tolist() for at in range(2)] == [[2, 3], [4]]


def test_text_ids_stay_text(tmp_path):
    (tmp_path / "s.txt").write_text("ann a b\nbob c\n")
    (batch,) = read(str(tmp_path / "s.txt"))
    assert batch["user_id"].to_pylist() == ["ann", "bob"]
    assert batch["item_id"].to_pylist() == [["a", "b"], ["c"]]


def test_a_value_of_another_type_is_named_by_file_and_group(tmp_path):
    (tmp_path / "a.csv").write_text("user\n" + "".join(f"{n}\n" for n in range(100)) + "x\n")
    with pytest.raises(DataError, match=r"a.csv, row group 1: cannot be read: .*invalid value 'x'"):
        list(read(str(tmp_path / "a.csv")))


def test_files_of_unlike_columns_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("user\n1\n")
    (tmp_path / "b.csv").write_text("usr\n1\n")
    with pytest.raises(DataError, match=r"b.csv: its columns are usr, those of the first file user"):
        read(str(tmp_path / "*.csv")).open()


def test_packed_arrow_gives_the_rows_of_its_parquet_in_the_same_order(tmp_path):
    for name, rows in (("a", 90), ("b", 41)):
        items = [list(range(n % 5)) for n in range(rows)]
        table = pa.table({"user": np.arange(rows), "items": pa.array(items, pa.list_(pa.int64()))})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=20)
    pack_files(str(tmp_path), tmp_path / "packed")
    read_back = [
        [
            (batch["user"].tolist(), batch["items"].values.tolist(), batch["items"].offsets.tolist())
            for batch in stream.shuffle(3).open(rows=16).iterate_epoch(0)
        ]
        for stream in (read(str(tmp_path / "*.parquet")), read(str(tmp_path / "packed"), format="arrow"))
    ]
    assert read_back[0] == read_back[1]
    assert sum(len(users) for users, _, _ in read_back[0]) == 131


def test_a_packed_file_that_is_cut_short_or_written_anew_is_named(tmp_path):
    pq.write_table(pa.table({"user": np.arange(50)}), tmp_path / "a.parquet", row_group_size=20)
    (packed,) = pack_files(str(tmp_path / "a.parquet"), tmp_path / "packed")
    feed = read(str(packed)).open(rows=8)
    pq.write_table(pa.table({"user": np.arange(80)}), tmp_path / "a.parquet", row_group_size=20)
    pack_files(str(tmp_path / "a.parquet"), tmp_path / "packed")
    with pytest.raises(DataError, match=r"a.arrow: its content changed since it was listed"):
        list(feed.iterate_epoch(0))
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a.arrow: cannot be read, maybe truncated"):
        read(str(packed)).open(rows=8)


def test_a_mark_at_the_beginning_of_a_file_is_no_part_of_the_first_user_or_column(tmp_path):
    (tmp_path / "log.csv").write_text("user_id,item_id\n1,2\n", encoding="utf-8-sig")
    feed = read(str(tmp_path / "log.csv"), ids=[]).open(rows=2)
    assert [batch["user_id"].tolist() for batch in feed.iterate_epoch(0)] == [[1]]
    (tmp_path / "log.txt").write_text("1 2 3\n4 5\n", encoding="utf-8-sig")
    feed = read(str(tmp_path / "log.txt"), format="lines", ids=[]).open(rows=2)
    assert [batch["user_id"].tolist() for batch in feed.iterate_epoch(0)] == [[1, 4]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("user_id,item_id\n1,2\n".encode("utf-16"), "UTF-16 or binary"),
        ("user_id,item_id\n1,2\n".encode("utf-16-le"), "UTF-16 or binary"),
        (b"sep=;\nuser_id;item_id\n1;2\n", "its first line is 'sep=;'; remove that line"),
        (b'\xef\xbb\xbf"sep=,"\nuser_id,item_id\n1,2\n', "its first line is .*sep=,.*; remove that line"),
    ],
)
def test_a_file_of_a_spreadsheet_is_refused_with_what_to_change(tmp_path, content, message):
    (tmp_path / "log.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(str(tmp_path / "log.csv"), ids=[]).open()


@pytest.mark.parametrize("file_format", ["csv", "lines"])
def test_a_text_that_is_not_utf_8_is_refused_by_the_name_of_its_file(tmp_path, file_format):
    text = "user_id,item_id\nZoé,2\n" if file_format == "csv" else "Zoé 2\n"
    (tmp_path / "log.txt").write_bytes(text.encode("cp1252"))
    with pytest.raises(DataError, match=r"log\.txt.* a text is not UTF-8; save the file as UTF-8"):
        read(str(tmp_path / "log.txt"), format=file_format, ids=[]).open()
