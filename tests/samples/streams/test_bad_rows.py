"""Bad input: the error names file, row group, row and column; what is skipped is counted and never done."""

from __future__ import annotations

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.errors import DataError
from nonet.samples.streams.stream import read


@pytest.fixture
def copies(files, tmp_path):
    for file in files.iterdir():
        shutil.copy(file, tmp_path)
    return tmp_path


def drained(stream):
    feed = stream.open(rows=50)
    ledger, found = feed.make_ledger(), []
    for batch in feed.iterate_batches(
        (part for step in range(feed.steps.steps_per_epoch) for part in feed.get_slices(step)), ledger
    ):
        found += batch["user"].tolist()
        feed.apply_batch(batch, ledger)
    return found, ledger


def spoiled(folder, column, value, row):
    table = pq.read_table(folder / "part-1.parquet")
    values = table[column].to_pylist()
    values[row] = value
    kind = pa.uint64() if value and not isinstance(value, list) else table.schema.field(column).type
    at = table.column_names.index(column)
    table = table.set_column(at, pa.field(column, kind), pa.array(values, kind))
    pq.write_table(table, folder / "part-1.parquet", row_group_size=110)


@pytest.mark.parametrize(("column", "value"), [("user", None), ("items", None), ("items", [3, None])])
def test_a_missing_id_is_named_or_skipped(copies, column, value):
    spoiled(copies, column, value, 223)
    with pytest.raises(
        DataError, match=rf"part-1.parquet, row group 2, row 223: column '{column}' has no id"
    ):
        drained(read(str(copies)))
    found, ledger = drained(read(str(copies), on_bad_rows="skip").shuffle(3))
    assert sorted(found) == sorted({*range(900)} - {523})
    assert ledger.count_rows() == {"epochs": 1, "done": 899, "skipped": 1, "filtered": 0, "leased": 0}


def test_an_id_beyond_two_to_63_is_named(tmp_path):
    pq.write_table(pa.table({"user": pa.array([1, 2**63 + 5], pa.uint64())}), tmp_path / "a.parquet")
    with pytest.raises(
        DataError, match=r"a.parquet, row group 0, row 1: column 'user' has no id, or one above 2"
    ):
        list(read(str(tmp_path)))


def test_a_schema_that_changes_between_files_is_named(copies):
    spoiled(copies, "user", 7, 3)
    with pytest.raises(
        DataError, match=r"part-1.parquet: column 'user' is uint64, in .*part-0.parquet it is int64"
    ):
        read(str(copies)).open()


def test_a_truncated_file_is_named(copies):
    path = copies / "part-2.parquet"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"part-2.parquet: cannot be read, maybe truncated"):
        read(str(copies)).open()


def test_an_unreadable_row_group_is_named_or_skipped(copies):
    path = copies / "part-0.parquet"
    start = pq.read_metadata(path).row_group(1).column(0).dictionary_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 40] = bytes(40)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"part-0.parquet, row group 1: cannot be read"):
        drained(read(str(copies)))
    found, ledger = drained(read(str(copies), on_bad_rows="skip"))
    assert sorted(found) == sorted({*range(900)} - {*range(110, 220)})
    assert ledger.count_rows()["skipped"] == 110


def test_a_file_that_vanishes_or_changes_after_it_was_listed_is_named(copies):
    feed = read(str(copies)).open(rows=50)
    (copies / "part-2.parquet").unlink()
    with pytest.raises(DataError, match=r"part-2.parquet, row group 0: the file is gone"):
        list(feed.iterate_epoch(0))
    shutil.copy(copies / "part-0.parquet", copies / "part-2.parquet")
    with pytest.raises(DataError, match=r"part-2.parquet: its content changed since it was listed"):
        list(feed.iterate_epoch(0))


def test_a_manifest_saves_the_footers_and_refuses_other_files(copies):
    stream = read(str(copies)).shuffle(3)
    feed = stream.open(rows=50)
    again = stream.open(rows=50, manifest=feed.manifest)
    assert again.order == feed.order
    assert np.array_equal(
        again.compute_row_ids(again.get_slices(3)[0]), feed.compute_row_ids(feed.get_slices(3)[0])
    )
    path = copies / "part-2.parquet"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(DataError, match=r"not those of the manifest: .*part-2.parquet has another size"):
        stream.open(manifest=feed.manifest)
