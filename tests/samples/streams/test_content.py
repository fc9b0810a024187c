"""Data with other rows are other data, however alike the files are: of equal size, and with equal footers."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.errors import CheckpointError, DataError
from nonet.samples.ledger import DataManifest
from nonet.samples.preparation import BuildOptions, EventLog
from nonet.samples.streams import read
from nonet.samples.tables import pack_files, retries

ROWS = 20_000


def make_table(order):
    """Return users, items and times, of which the items have this order."""
    items = np.arange(ROWS) % 500
    return pa.table({"user_id": np.arange(ROWS) % 90, "item_id": items[order], "timestamp": np.arange(ROWS)})


def write(folder, file_format, order):
    """Write the same file with other rows, and return its path."""
    table = make_table(order)
    if file_format == "csv":
        users, items = table["user_id"].to_pylist(), table["item_id"].to_pylist()
        lines = [f"{1000 + user},{1000 + item}" for user, item in zip(users, items, strict=True)]
        (folder / "log.csv").write_text("\n".join(["user_id,item_id", *lines, ""]))
        return str(folder / "log.csv")
    pq.write_table(table, folder / "log.parquet", compression="none", use_dictionary=False)
    if file_format == "parquet":
        return str(folder / "log.parquet")
    return str(pack_files(str(folder / "log.parquet"), folder / "packed")[0])


def permute():
    """Return an order of the rows that moves some in the middle alone, so that text files begin and end as before."""
    order = np.arange(ROWS)
    order[ROWS // 2 : ROWS // 2 + 100] = order[ROWS // 2 : ROWS // 2 + 100][::-1]
    return order


@pytest.fixture(params=["parquet", "arrow", "csv"])
def two_versions(request, tmp_path):
    """A file, and how to replace it by one with other rows."""
    path = write(tmp_path, request.param, np.arange(ROWS))
    return path, lambda: write(tmp_path, request.param, permute())


def open_feed(path, **options):
    return read(path).shuffle(7).open(rows=1000, **options)


def test_a_ledger_refuses_other_rows_of_the_same_size_and_statistics(two_versions):
    path, replace_rows = two_versions
    feed = open_feed(path)
    snapshot = feed.make_ledger().snapshot()
    before = feed.manifest.files[0]
    open_feed(path).make_ledger().restore(*snapshot)
    replace_rows()
    after = open_feed(path).manifest.files[0]
    assert (before.bytes, before.groups, before.fingerprint) == (after.bytes, after.groups, after.fingerprint)
    with pytest.raises(CheckpointError, match=r"was trained on other data: file 0, .*: other content of"):
        open_feed(path).make_ledger().restore(*snapshot)


def test_a_manifest_of_an_earlier_version_keeps_its_rule(two_versions):
    path, _ = two_versions
    ledger_json, bitmaps = open_feed(path).make_ledger().snapshot()
    saved = json.loads(ledger_json)
    assert saved["format"] == 3
    saved["format"] = 2
    for file in saved["manifest"]["files"]:
        del file["content"]
    old = DataManifest.from_json(saved["manifest"])
    open_feed(path).make_ledger().restore(json.dumps(saved).encode(), bitmaps)
    assert not old.describe_changes(open_feed(path).manifest)
    assert open_feed(path, manifest=old).manifest.digest == old.digest


def test_rows_in_memory_keep_the_format_of_their_ledger():
    manifest = DataManifest.from_rows("prompts", 5, "a")
    assert not manifest.has_content
    assert "content" not in manifest.as_json()["files"][0]


def test_a_stream_that_is_opened_with_a_manifest_refuses_other_content(two_versions):
    path, replace_rows = two_versions
    manifest = open_feed(path).manifest
    assert open_feed(path, manifest=manifest).manifest == manifest
    replace_rows()
    with pytest.raises(DataError, match=r"not those of the manifest: .* other content of the same size"):
        open_feed(path, manifest=manifest)


def test_a_storage_that_fails_for_a_moment_does_not_end_a_preparation(tmp_path, monkeypatch):
    path = write(tmp_path, "parquet", np.arange(ROWS))
    before = EventLog(path, {}).compute_hash(), BuildOptions(path, items=path).list_item_files()
    identify, failures = retries.identify_content, []

    def fail_once(system, file):
        failures.append(OSError("connection reset by peer"))
        if len(failures) % 2:
            raise failures[-1]
        return identify(system, file)

    monkeypatch.setattr(retries, "identify_content", fail_once)
    monkeypatch.setattr(retries, "PAUSES_S", (0.0, 0.0, 0.0))
    assert (EventLog(path, {}).compute_hash(), BuildOptions(path, items=path).list_item_files()) == before
    assert len(failures) > 2


def test_a_preparation_goes_on_only_with_the_same_rows(tmp_path):
    path = write(tmp_path, "parquet", np.arange(ROWS))
    before, items = EventLog(path, {}).compute_hash(), BuildOptions(path, items=path).list_item_files()
    write(tmp_path, "parquet", np.arange(ROWS))
    assert EventLog(path, {}).compute_hash() == before
    write(tmp_path, "parquet", permute())
    assert EventLog(path, {}).compute_hash() != before
    assert BuildOptions(path, items=path).list_item_files() != items
