"""Where the files of a table are: one rule for folders, globs and URIs."""

from __future__ import annotations

import math
from urllib.parse import quote

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from nonet.errors import DataError
from nonet.samples.preparation import EventLog
from nonet.samples.sources._parquet_options import pin_files
from nonet.samples.streams import read
from nonet.samples.tables import files, find_files, read_interactions, read_parquet_schema
from nonet.samples.tables.paths import read_parquet

EVENT = {"item_id": [1], "timestamp": [1_700_000_000]}


def write(path, user, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"user_id": [user], **EVENT, **columns}), path)


@pytest.fixture
def log(tmp_path):
    folder = tmp_path / "log"
    write(folder / "dt=2026-11-01" / "part-0.parquet", 1)
    write(folder / "dt=2026-11-02" / "part-0.parquet", 2)
    for left in ("_temporary/0/part-0", "_spark_metadata/0001", ".hidden/x", "dt=2026-11-02/_part"):
        write(folder / f"{left}.parquet", 9)
    return folder


def names(found, folder):
    return [file.removeprefix(f"{folder}/") for file in found.files]


DATA = ["dt=2026-11-01/part-0.parquet", "dt=2026-11-02/part-0.parquet"]


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize(
    "tail", ["", "/*/*.parquet", "/**/*.parquet", "/dt=*", "/dt=2026-11-0[12]/part-?.parquet"]
)
def test_a_folder_a_glob_and_a_uri_find_the_same_data_and_none_that_is_hidden(log, scheme, tail):
    assert names(find_files(f"{scheme}{log}{tail}", "rows"), log) == DATA


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_star_stays_inside_one_part_and_a_hidden_name_must_be_written_out(log, scheme):
    with pytest.raises(DataError, match=r"no file matches this pattern|no .parquet file is there"):
        find_files(f"{scheme}{log}/*.parquet", "rows")
    assert names(find_files(f"{scheme}{log}/dt=2026-11-02/_*.parquet", "rows"), log) == [
        "dt=2026-11-02/_part.parquet"
    ]


def test_parts_without_an_ending_are_data_where_their_content_is_parquet(tmp_path):
    write(tmp_path / "000000_0", 1)
    (tmp_path / "README").write_text("no data")
    (tmp_path / "_SUCCESS").write_text("")
    assert names(find_files(tmp_path, "rows"), tmp_path) == ["000000_0"]
    assert read(str(tmp_path)).open().rows == 1


def test_folders_named_key_value_are_columns_for_tables_logs_and_streams(log):
    table = read_parquet(log, "rows")
    assert table["dt"].to_pylist() == ["2026-11-01", "2026-11-02"]
    assert "dt" in read_parquet_schema(log, "rows").names
    feed = read(str(log), where="dt == '2026-11-02'").open()
    assert [batch["user_id"].tolist() for batch in feed.iterate_epoch(0)] == [[2]]
    assert feed.leaves[0].pruned_rows == 1
    events = EventLog(str(log), None)
    read_back = [events.read(part, events.names)[0].to_pylist() for part in events.slices]
    assert [rows[0]["dt"] for rows in read_back] == ["2026-11-01", "2026-11-02"]
    assert read_interactions(str(log))["dt"].to_pylist() == ["2026-11-01", "2026-11-02"]


def test_values_of_folders_are_whole_numbers_where_all_are_and_missing_where_hive_says_so(tmp_path):
    write(tmp_path / "day=1" / "shop=a%2Fb" / "x.parquet", 1)
    write(tmp_path / "day=12" / "shop=__HIVE_DEFAULT_PARTITION__" / "x.parquet", 2)
    rows = read_parquet(tmp_path, "rows").sort_by("user_id").to_pylist()
    assert [(row["day"], row["shop"]) for row in rows] == [(1, "a/b"), (12, None)]


def test_a_key_of_some_folders_is_missing_in_the_others_wherever_the_table_is_read(tmp_path):
    write(tmp_path / "day=1" / "event=buy" / "x.parquet", 1)
    write(tmp_path / "day=0" / "x.parquet", 2)
    write(tmp_path / "x.parquet", 3)
    rows = read_parquet(tmp_path, "rows").sort_by("user_id").to_pylist()
    assert [(row["day"], row["event"]) for row in rows] == [(1, "buy"), (0, None), (None, None)]
    assert {"day", "event"} <= set(read_parquet_schema(tmp_path, "rows").names)
    assert read(str(tmp_path), where="event == 'buy'", ids=[]).open().leaves[0].pruned_rows == 0
    feed = read(str(tmp_path), where="event == 'buy'", ids=[]).open()
    assert [batch["user_id"].tolist() for batch in feed.iterate_epoch(0)] == [[1]]
    with pytest.raises(DataError, match="2 of 3 rows have no event"):
        read_interactions(str(tmp_path))


def test_keys_that_differ_only_in_case_are_one_column_unless_a_path_has_both(tmp_path):
    write(tmp_path / "a" / "Event=buy" / "x.parquet", 1)
    write(tmp_path / "a" / "event=view" / "x.parquet", 2)
    table = read_parquet(tmp_path / "a", "rows")
    assert table["event"].to_pylist() == ["buy", "view"]
    assert "Event" not in table.column_names
    write(tmp_path / "b" / "Event=1" / "event=view" / "x.parquet", 1)
    table = read_parquet(tmp_path / "b", "rows")
    assert (table["Event"].to_pylist(), table["event"].to_pylist()) == ([1], ["view"])
    write(tmp_path / "c" / "Event=buy" / "x.parquet", 1)
    assert read_parquet(tmp_path / "c", "rows")["Event"].to_pylist() == ["buy"]


LOGS = {
    "Delta": ("_delta_log/00000000000000000000.json", "part-0.parquet"),
    "Delta ": ("_delta_log/00000000000000000000.json", "dt=1/part-0.parquet"),
    "Iceberg": ("metadata/00000-4f1e.metadata.json", "data/dt=1/part-0.parquet"),
    "Iceberg ": ("metadata/v1.gz.metadata.json", "data/part-0.parquet"),
    "Hudi": (".hoodie/hoodie.properties", "dt=1/part-0.parquet"),
    "Hudi ": ("2026/11/.hoodie_partition_metadata", "2026/11/part-0.parquet"),
}


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize("table", LOGS)
def test_files_of_a_table_with_a_log_are_refused_by_the_name_of_its_format(tmp_path, table, scheme):
    log_file, part = LOGS[table]
    folder = tmp_path / "lake" / "events"
    write(folder / part, 1)
    (folder / log_file).parent.mkdir(parents=True, exist_ok=True)
    (folder / log_file).write_text("{}")
    parent = (folder / part).parent
    places = [folder, f"{folder}/**/*.parquet", f"{tmp_path}/lake/*", parent, f"{parent}/*.parquet"]
    for place in [*places, folder / part]:
        with pytest.raises(
            DataError, match=rf"events.* belongs to a {table.strip()} table .*Parquet copy"
        ) as error:
            find_files(f"{scheme}{place}", "interactions")
        assert "\n" not in str(error.value)
    with pytest.raises(DataError, match=f"{table.strip()} table"):
        read(f"{scheme}{folder}").open()


def test_a_folder_called_metadata_or_a_log_beside_a_plain_table_refuses_nothing(tmp_path):
    write(tmp_path / "plain" / "part-0.parquet", 1)
    (tmp_path / "plain" / "metadata").mkdir()
    (tmp_path / "plain" / "metadata" / "columns.json").write_text("{}")
    (tmp_path / "_delta_log").mkdir()
    assert len(find_files(tmp_path / "plain", "rows").files) == 1


def test_a_closed_folder_around_a_partition_is_not_asked_twice(tmp_path, monkeypatch):
    write(tmp_path / "dt=1" / "part-0.parquet", 1)

    class Closed(pafs.LocalFileSystem):
        def get_file_info(self, paths):
            if isinstance(paths, list) and f"{tmp_path}/_delta_log" in paths:
                raise OSError("AWS Error ACCESS_DENIED")
            return super().get_file_info(paths)

    monkeypatch.setattr(files.pafs, "LocalFileSystem", Closed)
    assert len(find_files(tmp_path / "dt=1", "rows").files) == 1
    with pytest.raises(DataError, match="ACCESS_DENIED"):
        find_files(tmp_path, "rows")


def test_a_column_of_the_file_wins_over_that_of_its_folder(tmp_path):
    write(tmp_path / "dt=1" / "x.parquet", 1, dt=["own"])
    assert read_parquet(tmp_path, "rows")["dt"].to_pylist() == ["own"]


def test_a_folder_of_csv_files_is_read(tmp_path):
    (tmp_path / "a.csv").write_text("user_id,item_id\n1,2\n")
    (tmp_path / "b.csv").write_text("user_id,item_id\n1,3\n")
    assert read(str(tmp_path)).open().rows == read(str(tmp_path), format="csv").open().rows == 2


UNITED = {
    "an empty part decides nothing": (pa.array([], pa.float64()), pa.array(["a"])),
    "a category beside text": (pa.array(["a"]).dictionary_encode(), pa.array(["b"])),
    "large text beside text": (pa.array(["a"], pa.large_string()), pa.array(["b"])),
    "a wider number": (pa.array([1], pa.int32()), pa.array([2], pa.int64())),
    "lists of wider numbers": (
        pa.array([[1]], pa.list_(pa.int16())),
        pa.array([[2]], pa.large_list(pa.int64())),
    ),
    "nothing but nulls": (pa.array([None]), pa.array(["b"])),
}


@pytest.mark.parametrize("kind", UNITED)
def test_types_that_differ_without_meaning_it_unite(tmp_path, kind):
    for name, column in zip(("a", "b"), UNITED[kind], strict=True):
        n = len(column)
        table = {"user_id": [1] * n, "item_id": [1] * n, "timestamp": [1_700_000_000] * n, "x": column}
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
    expected = [value for column in UNITED[kind] for value in column.to_pylist()]
    assert read_parquet(tmp_path, "rows")["x"].to_pylist() == expected
    events = EventLog(str(tmp_path), None)
    logged = [row["x"] for part in events.slices for row in events.read(part, events.names)[0].to_pylist()]
    assert logged == expected
    assert read(str(tmp_path), ids=[]).open().rows == len(expected)


def test_a_column_that_a_later_file_adds_is_missing_before_and_unlike_columns_name_both_files(tmp_path):
    write(tmp_path / "a.parquet", 1)
    write(tmp_path / "b.parquet", 2, price=[1.5])
    prices = [batch["price"].tolist() for batch in read(str(tmp_path)).open(rows=1).iterate_epoch(0)]
    assert math.isnan(prices[0][0])
    assert prices[1] == [1.5]
    write(tmp_path / "c.parquet", 3, price=["x"])
    assert read(str(tmp_path), columns=["user_id"]).open().rows == 3
    for reader in (lambda: read(str(tmp_path)).open(), lambda: read_parquet_schema(tmp_path, "rows")):
        with pytest.raises(
            DataError, match=r"c.parquet: column 'price' is string, in .*b.parquet it is double"
        ):
            reader()


class _OneBucket:
    """`open_filesystem`, whose `s3://bucket/` is a local folder; it notes the URIs that it is asked for."""

    def __init__(self, folder):
        self.asked, self._folder = [], str(folder)

    def __call__(self, uri):
        self.asked.append(uri)
        return pafs.LocalFileSystem(), uri.partition("?")[0].replace("s3://bucket", self._folder)


@pytest.mark.parametrize(
    "place", ["s3://bucket/day", "s3://bucket/day/*.parquet", "s3://bucket/day/?.parquet"]
)
def test_options_of_a_uri_reach_its_file_system_and_are_no_wildcard(tmp_path, monkeypatch, place):
    (tmp_path / "day").mkdir()
    write(tmp_path / "day" / "a.parquet", 1)
    bucket = _OneBucket(tmp_path)
    monkeypatch.setattr(files, "open_filesystem", bucket)
    options = "?scheme=http&endpoint_override=127.0.0.1:9000"
    assert find_files(place + options, "interactions").files == [str(tmp_path / "day" / "a.parquet")]
    assert bucket.asked == ["s3://bucket/day" + options]
    assert find_files(place, "interactions").files == [str(tmp_path / "day" / "a.parquet")]


BLANK = "été 100%25 #1"
"""The name of a folder that must be encoded in an address, and must not be decoded twice."""


def test_an_address_is_decoded_once_also_in_its_pattern_and_a_path_never(tmp_path):
    write(tmp_path / BLANK / "clicks [1].parquet", 1)
    expected = [str(tmp_path / BLANK / "clicks [1].parquet")]
    encoded = f"file://{tmp_path}/{quote(BLANK)}"
    places = [tmp_path / BLANK, f"{tmp_path}/{BLANK}/*.parquet", encoded]
    places += [f"{encoded}/*.parquet", f"file://{tmp_path}/*/{quote('clicks [1].parquet')}"]
    for place in places:
        assert find_files(place, "rows").files == expected, place


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("my data", r"write ' ' as %20, as in file:///.*/my%20data"),
        ("été", r"write 'é' as %C3%A9, as in file:///.*/%C3%A9t%C3%A9"),
        ("a#b", r"write '#' as %23, as in file:///.*/a%23b"),
        ("100%", r"write '%' as %25, as in file:///.*/100%25$"),
        ("100%25 a", r"write ' ' as %20, as in file:///.*/100%25%20a"),
    ],
)
def test_a_character_that_an_address_must_not_have_is_refused_with_its_encoded_form(tmp_path, name, advice):
    write(tmp_path / "a" / "x.parquet", 1)  # where `#b` would be cut off
    for place in (f"file://{tmp_path}/{name}", f"file://{tmp_path}/{name}/*.parquet"):
        with pytest.raises(DataError, match=advice if "*" not in place else advice.rstrip("$")):
            find_files(place, "rows")


def test_files_of_a_run_are_pinned_by_addresses_that_can_be_opened(tmp_path):
    write(tmp_path / BLANK / "x 1.parquet", 1)
    pinned = pin_files({"path": f"file://{tmp_path}/{quote(BLANK)}"})["path"]
    assert pinned == [f"file://{tmp_path}/{quote(BLANK)}/x%201.parquet"]
    assert find_files(pinned[0], "rows").files == [str(tmp_path / BLANK / "x 1.parquet")]
    assert pin_files({"path": str(tmp_path / BLANK)})["path"] == [str(tmp_path / BLANK / "x 1.parquet")]
