import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.errors import DataError
from nonet.samples.tables.paths import read_parquet, write_parquet


@pytest.fixture
def folder(tmp_path):
    for day, rows in (("02", [3, 4]), ("01", [1, 2])):
        write_parquet(pa.table({"n": rows}), tmp_path / f"dt=2026-11-{day}" / "part.parquet")
    (tmp_path / "dt=2026-11-01" / "_SUCCESS").write_text("")
    return tmp_path


@pytest.mark.parametrize("pattern", ["", "*/*.parquet", "dt=2026-11-0[12]/part.parquet", "**/*.parquet"])
def test_files_are_read_in_the_order_of_their_names(folder, pattern):
    assert read_parquet(folder / pattern, "interactions")["n"].to_pylist() == [1, 2, 3, 4]


@pytest.mark.parametrize("tail", ["", "/dt=2026-11-*/*.parquet", "/dt=2026-11-01/part.parquet"])
def test_uris_are_read_through_arrow_filesystems(folder, tail):
    wanted = [1, 2] if "01" in tail else [1, 2, 3, 4]
    assert read_parquet(f"file://{folder}{tail}", "interactions")["n"].to_pylist() == wanted


def test_one_file_is_read_by_its_name_even_with_wild_characters_in_it(tmp_path):
    write_parquet(pa.table({"n": [5]}), tmp_path / "odd[1].parquet")
    assert read_parquet(tmp_path / "odd[1].parquet", "items")["n"].to_pylist() == [5]


def test_columns_of_several_files_are_united(tmp_path):
    pq.write_table(pa.table({"n": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"n": [2], "m": ["x"]}), tmp_path / "b.parquet")
    assert read_parquet(tmp_path, "items").to_pylist() == [{"n": 1, "m": None}, {"n": 2, "m": "x"}]


def test_files_with_unlike_columns_are_refused(tmp_path):
    pq.write_table(pa.table({"n": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"n": [["x"]]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="its 2 files have unlike columns"):
        read_parquet(tmp_path, "items")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("gone.parquet", "items .*gone.parquet: no such file or folder"),
        ("gone/*.parquet", "no file matches this pattern"),
        ("empty", "the folder holds no .parquet file"),
        ("log.csv", "not a Parquet file.*nonet import csv SRC DST"),
        ("short.parquet", "not a Parquet file"),
    ],
)
def test_what_cannot_be_read_is_one_line_that_names_it(tmp_path, path, says):
    (tmp_path / "empty").mkdir()
    (tmp_path / "log.csv").write_text("user_id,item_id\n1,2\n")
    (tmp_path / "short.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=says) as caught:
        read_parquet(tmp_path / path, "items")
    assert "\n" not in str(caught.value)


def test_remote_places_without_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"no \.parquet file is there"):
        read_parquet(f"file://{tmp_path}/*.parquet", "items")
    with pytest.raises(DataError, match="cannot be listed"):
        read_parquet("nosuch://bucket/x.parquet", "items")


def test_failed_write_leaves_neither_the_file_nor_its_part(tmp_path, monkeypatch):
    target = write_parquet(pa.table({"n": [1]}), tmp_path / "out.parquet")

    def torn(table, path, **_):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", torn)
    with pytest.raises(OSError, match="disk full"):
        write_parquet(pa.table({"n": [2]}), target)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["out.parquet"]
    assert pq.read_table(target)["n"].to_pylist() == [1]
