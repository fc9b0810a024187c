"""Reads that are repeated, and what may be skipped."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.samples.streams import formats, read
from nonet.samples.tables import paths, retries
from nonet.samples.tables.retries import CorruptDataError, UnreachableDataError, read_with_retries


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    monkeypatch.setattr(retries, "PAUSES_S", (0.0, 0.0, 0.0))


@pytest.fixture
def file(tmp_path):
    pq.write_table(pa.table({"user_id": [1, 2], "item_id": [3, 4]}), tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


def broken(times, function, error):
    """Wrap the function so that its first calls raise the error."""
    calls = []

    def call(*args, **kwargs):
        calls.append(1)
        if len(calls) <= times:
            raise error
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    "error", [OSError("connection reset by peer"), TimeoutError(110, "timed out"), OSError(5, "I/O error")]
)
def test_a_place_that_does_not_answer_for_a_while_costs_no_row(file, monkeypatch, error):
    feed = read(str(file), on_bad_rows="skip").open()
    monkeypatch.setattr(formats, "_open_parquet", broken(2, formats._open_parquet, error))
    assert [(len(batch), batch.skipped) for batch in feed.iterate_batches(feed.get_slices(0))] == [(2, ())]


def test_what_cannot_be_reached_is_never_skipped(file, monkeypatch):
    feed = read(str(file), on_bad_rows="skip").open()
    monkeypatch.setattr(
        formats, "_open_parquet", broken(99, formats._open_parquet, OSError("connection reset by peer"))
    )
    with pytest.raises(
        UnreachableDataError, match="row group 0: cannot be read after 4 attempts: connection reset"
    ):
        list(feed.iterate_batches(feed.get_slices(0)))
    monkeypatch.undo()
    feed = read(str(file), on_bad_rows="skip").open()
    file.unlink()
    with pytest.raises(UnreachableDataError, match="the file is gone"):
        list(feed.iterate_batches(feed.get_slices(0)))


def test_a_connection_that_breaks_while_rows_are_decoded_is_opened_again(file, monkeypatch):
    feed = read(str(file), on_bad_rows="skip").open()

    class Breaks:
        def read_row_group(self, *args, **kwargs):
            raise OSError("AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 28")

    opened = formats._open_parquet
    answers = iter([Breaks(), Breaks()])
    monkeypatch.setattr(formats, "_open_parquet", lambda *args: next(answers, None) or opened(*args))
    assert [len(batch) for batch in feed.iterate_batches(feed.get_slices(0))] == [2]


def test_corrupt_content_is_reported_at_once():
    calls = []

    def read_corrupt():
        calls.append(1)
        raise OSError("Corrupt snappy compressed data.")

    with pytest.raises(CorruptDataError, match="x: cannot be read: Corrupt snappy"):
        read_with_retries(read_corrupt, "x", lambda error: True)
    assert len(calls) == 1


def test_tables_are_read_again_too(file, monkeypatch):
    opened = paths.pq.ParquetFile
    monkeypatch.setattr(paths.pq, "ParquetFile", broken(2, opened, OSError(104, "connection reset")))
    assert paths.count_rows(file, "interactions") == 2
