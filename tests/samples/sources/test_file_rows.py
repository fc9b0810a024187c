"""Rows of users' own files: what is checked before they are learned from."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.controller.scenario import check_runnable, load_scenario
from nonet.errors import ConfigError, DataError
from nonet.samples.preparation import ItemIndex
from nonet.samples.sources import SampleRequest
from nonet.samples.sources._dense_rows import DenseRowConverter
from nonet.samples.sources._parquet_options import FileSourceOptions, check_files, detect_time_unit
from nonet.samples.sources.parquet import SPEC, FileWindows

DAY = 86_400
EVENTS = [[1, 2], [2, 3]]


def rows(**columns):
    return pa.RecordBatch.from_pydict({"user_id": [1, 2], "item_id": EVENTS, **columns})


def dense(time="t", **options):
    return DenseRowConverter("user_id", "item_id", time, ItemIndex(pa.array([1, 2, 3])), **options)


def source(path, **options):
    items = pa.table({"item_id": [1, 2, 3]})
    sids = np.zeros((3, 2), np.int32)
    ask = SampleRequest("pretrain", 7, "users", 2, 8, None, 1 << 16, (), lambda: None, lambda: items, sids)
    return FileWindows(ask, {"path": str(path), **options})


def written(path, times, kind=None, **columns):
    column = pa.array(times, kind or pa.list_(pa.int64()))
    pq.write_table(pa.table({"user_id": [1, 2], "item_id": EVENTS, "t": column, **columns}), path)
    return path


def test_every_list_of_a_row_must_be_as_long_as_its_items():
    with pytest.raises(
        DataError, match=r"2 of 2 rows have another number of 't' than of 'item_id'.*: 3 and 2"
    ):
        dense()(rows(t=[[100, 200, 300], [5]]))
    made = dense()(rows(t=[[100, 200], [5, 6]]))
    assert made["time"].to_pylist() == [[100, 200], [5, 6]]
    assert made["item"].to_pylist() == [[0, 1], [1, 2]]


def test_lists_of_a_slice_and_of_any_kind_keep_their_rows():
    whole = rows(t=pa.array([[100, 200], [5, 6]], pa.list_(pa.int64(), 2)))
    assert dense()(whole.slice(1))["time"].to_pylist() == [[5, 6]]
    assert dense()(whole.slice(1))["item"].to_pylist() == [[1, 2]]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_timestamps_of_any_unit_are_seconds(unit):
    per = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    times = [[1_700_000_000 * per, 1_700_000_001 * per], [5 * per, 6 * per]]
    typed = pa.array(times, pa.list_(pa.timestamp(unit)))
    expected = [[1_700_000_000, 1_700_000_001], [5, 6]]
    assert dense()(rows(t=typed))["time"].to_pylist() == expected
    assert dense(unit=unit)(rows(t=[times[0], times[0]]))["time"].to_pylist() == [expected[0]] * 2


def test_the_unit_of_plain_numbers_is_that_of_the_files_and_another_one_is_refused(tmp_path):
    millis = 1_700_000_000_000
    path = written(tmp_path / "a.parquet", [[millis, millis + 1000], [millis, millis + 1]])
    options = FileSourceOptions(path=str(path), time="t")
    assert detect_time_unit(options) == "ms"
    with pytest.raises(DataError, match=r"values look like s and the others like ms.*Say data.source.unit"):
        dense(unit="ms")(rows(t=[[1_700_000_000, 1_700_000_001], [millis, millis]]))
    mapped = options.model_copy(update={"map": ["own:map"]})
    with pytest.raises(
        DataError, match=r"cannot be told, since data.source.map may make it; say data.source.unit"
    ):
        detect_time_unit(mapped)


def test_times_that_go_back_inside_a_row_are_refused():
    with pytest.raises(DataError, match="1 values of 't' are before the one in front of them in their row"):
        dense()(rows(t=[[200, 100], [5, 6]]))


def test_missing_times_and_items_are_one_line():
    with pytest.raises(DataError, match="1 values of 't' are missing"):
        dense()(rows(t=[[100, None], [5, 6]]))
    with pytest.raises(DataError, match="'t' is int64; it must be a list"):
        dense()(rows(t=[1, 2]))
    with pytest.raises(DataError, match="item ids are string here and int64 in the items table"):
        dense(None)(pa.RecordBatch.from_pydict({"user_id": [1], "item_id": [["a"]]}))


def test_events_after_the_cut_in_time_are_counted_and_refused_before_the_run_and_in_it(tmp_path):
    path = written(tmp_path / "a.parquet", [[DAY, 2 * DAY], [DAY, 4 * DAY]])
    options = SPEC.until({"path": str(path), "time": "t"}, 3 * DAY)
    with pytest.raises(DataError, match=f"1 of 4 events are of {3 * DAY} unix seconds or later"):
        check_files(options)
    with pytest.raises(DataError, match=r"1 of 2 events are of|1 of 4 events are of"):
        source(path, time="t", until=3 * DAY).batch(0, 0, 1)
    check_files(SPEC.until({"path": str(path), "time": "t"}, 5 * DAY))
    check_files(SPEC.until({"path": str(path), "time": "t"}, None))
    with pytest.raises(
        ConfigError, match=r"has no `time`, so nothing keeps events after data.split.test out"
    ):
        SPEC.until({"path": str(path)}, 3 * DAY)


def test_a_missing_value_in_a_column_that_is_not_read_is_harmless(tmp_path):
    path = written(tmp_path / "a.parquet", [[1, 2], [3, 4]], age=pa.array([None, 30], pa.int64()))
    makes = source(path).batch(0, 0, 1)
    assert sum(len(make().item.values) for make in makes) == 4
    bad = tmp_path / "b.parquet"
    pq.write_table(pa.table({"user_id": pa.array([None, 2], pa.int64()), "item_id": EVENTS}), bad)
    with pytest.raises(DataError, match="column 'user_id' has no id"):
        source(bad).batch(0, 0, 1)


@pytest.mark.parametrize("key", ["weight={buy: 5}", "propensity={column: p}"])
def test_weights_that_files_cannot_carry_are_refused_before_the_run(tmp_path, key):
    (tmp_path / "s.yaml").write_text(
        "name: x\nseed: 7\ndata: {interactions: i.parquet, source: {use: parquet, path: /data/x.parquet}}\n"
        "tokenizer: {use: rq_kmeans, vectors: [cooccurrence]}\nmodel: {use: sid_decoder}\n"
        "stages: {pretrain: {steps: 2, batch: {users: 8}, lr: 1e-3}}\nevaluate: {metrics: [recall@10]}\n"
    )
    scenario, _ = load_scenario(tmp_path / "s.yaml", [f"stages.pretrain.{key}"])
    with pytest.raises(ConfigError, match=rf"stages.pretrain.{key.split('=')[0]} with data.source: parquet"):
        check_runnable(scenario)


def test_an_index_finds_texts_sparse_numbers_and_close_numbers_and_says_what_it_lacks():
    for ids in (pa.array(["b", "a", "10"]), pa.array([10**15, -5, 7]), pa.array([3, 1, 2])):
        index = ItemIndex(ids)
        assert index.find(ids).tolist() == [0, 1, 2]
        absent = pa.array(["zz" if pa.types.is_string(ids.type) else 99, ids[1].as_py()])
        assert index.find(absent).tolist() == [-1, 1]


def many_rows(path, rows_a_step: int) -> FileWindows:
    users = np.arange(200)
    lists = pa.array([[1 + user % 3, 2] for user in users.tolist()], pa.list_(pa.int64()))
    pq.write_table(pa.table({"user_id": users, "item_id": lists}), path, row_group_size=50)
    items = pa.table({"item_id": [1, 2, 3]})
    sids = np.zeros((3, 2), np.int32)
    ask = SampleRequest(
        "pretrain", 7, "users", rows_a_step, 8, None, 1 << 16, (), lambda: None, lambda: items, sids
    )
    return FileWindows(ask, {"path": str(path)})


def test_a_step_is_read_in_one_slice_per_trainer(tmp_path):
    for world in (1, 2, 5):
        made = many_rows(tmp_path / "a.parquet", 40)
        made.batch(0, 0, world)
        assert [len(made.feed.get_slices(0, rank, world)) for rank in range(world)] == [1] * world


@pytest.mark.parametrize("world", [2, 3, 8])
def test_the_rows_of_a_step_do_not_depend_on_the_number_of_trainers(tmp_path, monkeypatch, world):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def users_of(step: int, ranks: list[FileWindows]) -> list[int]:
        batches = [each.batch(step, rank, len(ranks)) for rank, each in enumerate(ranks)]
        return sorted(u for parts in batches for make in parts for u in make().context["user"].tolist())

    alone = [many_rows(tmp_path / "a.parquet", 48)]
    together = [many_rows(tmp_path / "a.parquet", 48) for _ in range(world)]
    for step in range(7):  # into a second epoch, over a step that is short
        assert users_of(step, together) == users_of(step, alone)
        for each in (*alone, *together):
            each.ledger.apply_step(step)


def test_the_catalogue_is_hashed_once_for_all_steps(tmp_path, monkeypatch):
    built, build = [], ItemIndex.__init__
    monkeypatch.setattr(ItemIndex, "__init__", lambda self, *given: built.append(1) or build(self, *given))
    made = many_rows(tmp_path / "a.parquet", 40)
    for step in range(5):
        assert [make() for make in made.batch(step, 0, 1)]
        made.ledger.apply_step(step)
    assert len(built) == 1
