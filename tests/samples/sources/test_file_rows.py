"""Rows of users' own files: what is checked before they are learned from."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from nonet.controller.scenario import check_scenario, load_scenario
from nonet.controller.scenario.settings import describe_unknown_items
from nonet.errors import ConfigError, DataError
from nonet.samples.preparation import ItemIndex
from nonet.samples.sequences import build_sequences
from nonet.samples.sources import EventNeeds, SampleRequest
from nonet.samples.sources._dense_rows import DenseRowConverter
from nonet.samples.sources._parquet_options import FileSourceOptions, check_files, detect_time_unit
from nonet.samples.sources.parquet import SPEC, FileWindows, _read_joins
from nonet.samples.sources.shuffled import UserWindows
from nonet.samples.stores import Join, StoreFiller, StoreJoins

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


OWN = """
from nonet.plug import SampleSource

SOURCE = SampleSource(print, targets=False, weights=False)
"""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("stages.pretrain.weight={buy: 5}", "stages.pretrain.weight with data.source: own.py:SOURCE"),
        ("stages.pretrain.propensity={column: p}", "stages.pretrain.propensity with data.source"),
        ("stages.pretrain.target=rating >= 4", "stages.pretrain.target with data.source"),
        ("data.join.item={use: s.store, columns: [a]}", "data.join with data.source"),
    ],
)
def test_what_a_source_does_not_declare_is_refused_by_the_plan(tmp_path, change, says):
    (tmp_path / "own.py").write_text(OWN)
    path = tmp_path / "s.yaml"
    path.write_text(
        "name: x\nseed: 7\ndata: {interactions: i.parquet, source: {use: 'own.py:SOURCE'}}\n"
        "tokenizer: {use: rq_kmeans, vectors: [cooccurrence]}\nmodel: {use: sid_decoder}\n"
        "stages: {pretrain: {steps: 2, batch: {users: 8}, lr: 1e-3}}\nevaluate: {metrics: [recall@10]}\n"
    )
    with pytest.raises(ConfigError, match=f"no run supports .*{re.escape(says)}"):
        check_scenario(load_scenario(path, [change])[0])
    files = ["data.source={use: parquet, path: /data/x.parquet, time: t}"]
    check_scenario(load_scenario(path, [*files, change])[0])


def test_a_store_is_read_as_of_times_that_files_must_have(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(
        "name: x\nseed: 7\ndata: {interactions: i.parquet, source: {use: parquet, path: /data/x.parquet}}\n"
        "tokenizer: {use: rq_kmeans, vectors: [cooccurrence]}\nmodel: {use: sid_decoder}\n"
        "stages: {pretrain: {steps: 2, batch: {users: 8}, lr: 1e-3}}\nevaluate: {metrics: [recall@10]}\n"
    )
    join = "data.join.item={use: s.store, columns: [a]}"
    with pytest.raises(
        ConfigError, match=r"data.join.item reads .* has no `time`.* data.join.item.as_of: newest"
    ):
        check_scenario(load_scenario(path, [join])[0])
    check_scenario(load_scenario(path, [join, "data.join.item.as_of=newest"])[0])


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


@pytest.fixture(params=[False, True], ids=["integers", "texts"])
def twice(tmp_path, request):
    """The same events as interactions, as lists by user, and the versions of a column in a store of items."""
    dice, text = np.random.default_rng(0), request.param
    users = [f"u{user:02}" if text else user for user in range(20)]
    ids = [f"i{item}" if text else item for item in range(7)]
    lists = {"user_id": users, "item_id": [], "at": [], "stars": [], "event": [], "p": []}
    for _ in users:
        count = int(dice.integers(0, 12))
        lists["item_id"].append([ids[i] for i in dice.integers(0, 7, count)])
        lists["at"].append((1_700_000_000 + np.arange(count) * DAY).tolist())
        lists["stars"].append([float(i) for i in dice.integers(1, 6, count)])
        lists["event"].append(dice.choice(["buy", "view"], count).tolist())
        lists["p"].append(dice.random(count).astype(np.float32).tolist())
    kinds = {"event": pa.list_(pa.string()), "stars": pa.list_(pa.float64()), "p": pa.list_(pa.float32())}
    table = pa.table({name: pa.array(values, kinds.get(name)) for name, values in lists.items()})
    pq.write_table(table, tmp_path / "lists.parquet", row_group_size=6)
    counts = [len(row) for row in lists["item_id"]]
    names = ("item_id", "event", "at", "stars", "p")
    flat = {name: [value for row in lists[name] for value in row] for name in names}
    log = pa.table(
        {
            "user_id": [user for user, count in zip(users, counts, strict=True) for _ in range(count)],
            "item_id": flat["item_id"],
            "event": flat["event"],
            "timestamp": flat["at"],
            "rating": pa.array(flat["stars"], pa.float32()),
            "p": pa.array(flat["p"], pa.float32()),
        }
    )
    versions = {
        "item_id": ids * 2,
        "since": np.repeat([0, 1_700_000_000 + 5 * DAY], 7),
        "stock": np.arange(14),
    }
    pq.write_table(pa.table(versions), tmp_path / "versions.parquet")
    StoreFiller(str(tmp_path / "versions.parquet"), "item_id", "since", None, {}).pack(
        str(tmp_path / "stock.store"), lambda done, total: None
    )
    return log, ids, tmp_path


def _list_events(samples, steps=1):
    """What a step says of each event, apart from the order of rows and the names of samples."""
    rows = []
    for make in [make for step in range(steps) for make in samples.batch(step, 0, 1)]:
        batch = make()
        offsets = batch.item.offsets.tolist()
        names = ("rating", "p", "stock")
        columns = [batch.context[name].values.tolist() for name in names if name in batch.context]
        fields = [batch.item.values, batch.time.values, batch.event.values, batch.loss_mask.values]
        events = list(zip(*(field.tolist() for field in fields), *columns, strict=True))
        rows += [
            (batch.context["user"][row].item(), events[start:stop])
            for row, (start, stop) in enumerate(itertools.pairwise(offsets))
        ]
    return sorted(rows)


def test_targets_weights_features_and_joins_of_files_are_those_of_the_same_interactions(twice):
    log, ids, folder = twice
    items = pa.table({"item_id": ids})
    condition = "rating >= 3 and event == 'buy' and not item_id == 'i3'" if ids[0] == "i0" else "rating >= 3"
    seq, _ = build_sequences(
        log, items, split={"use": "leave_last_out", "test": 0}, targets={"pretrain": condition}
    )
    joins = StoreJoins({"item": Join(use=str(folder / "stock.store"), columns=["stock"])})
    sids = np.zeros((7, 2), np.int32)
    features = ("item", "user", "stock", "p")
    ask = SampleRequest(
        "pretrain", 7, "users", 20, 50, "pretrain", 1 << 16, features, lambda: seq, lambda: items, sids, joins
    )
    shown = seq.__class__(**{**vars(seq), "joined": partial(_read_joins, joins, np.array(ids))})
    in_log = UserWindows(replace(ask, events=lambda: shown))
    needs = EventNeeds(
        {"pretrain": condition, "other": "event == 'view'"}, ("p", "rating", "event"), ("item",)
    )
    options = {"path": str(folder / "lists.parquet"), "time": "at", "columns": {"rating": "stars"}}
    options = SPEC.needs(options, needs)
    SPEC.check(options)
    in_files = FileWindows(ask, options)
    assert set(features) <= set(in_files.schema)
    found = _list_events(in_files)
    assert found == _list_events(in_log)
    assert len(found) > 5
    assert any(mask for _, events in found for _, _, _, mask, *_ in events)
    assert not all(mask for _, events in found for _, _, _, mask, *_ in events)


@pytest.mark.parametrize(
    ("targets", "columns", "says"),
    [
        (
            {"pretrain": "ratng > 3"},
            (),
            "no list column 'ratng' for 'ratng'.*data.source.columns: {ratng: <column>}",
        ),
        (
            {"pretrain": "stars > 'a'"},
            (),
            r"stages.pretrain.target with data.source: parquet: .* column 'stars'",
        ),
        ({}, ("brand",), "no list column 'brand' for 'brand', which the run reads of each event"),
    ],
)
def test_a_condition_or_a_feature_that_files_lack_is_refused_before_the_run(twice, targets, columns, says):
    _, _, folder = twice
    options = {"path": str(folder / "lists.parquet"), "time": "at"}
    with pytest.raises(ConfigError, match=says):
        SPEC.check(SPEC.needs(options, EventNeeds(targets, columns)))


def test_events_of_unknown_items_are_left_out_of_files_and_counted(twice):
    log, ids, folder = twice
    known = pa.table({"item_id": ids[2:]})
    path = str(folder / "lists.parquet")
    left = log.filter(pc.is_in(log["item_id"], value_set=known["item_id"].combine_chunks()))
    split, targets = {"use": "leave_last_out", "test": 0}, {"pretrain": "event == 'buy'"}
    seq, _ = build_sequences(left.drop_columns(["rating"]), known, split=split, targets=targets)
    sids = np.zeros((5, 2), np.int32)
    ask = SampleRequest(
        "pretrain", 7, "users", 20, 50, "pretrain", 1 << 16, ("p",), lambda: seq, lambda: known, sids
    )
    needs = EventNeeds(targets, ("p", "event"))
    with pytest.raises(DataError, match=r"that data.items does not hold.* say data.unknown_items: drop"):
        FileWindows(ask, SPEC.needs({"path": path, "time": "at"}, needs)).batch(0, 0, 1)
    options = SPEC.needs({"path": path, "time": "at"}, replace(needs, drops_unknown=True))
    assert _list_events(FileWindows(ask, options)) == _list_events(UserWindows(ask))
    counts = SPEC.count_unknown(options, known["item_id"]).to_facts()
    assert counts == {"events": len(log) - len(left), "of": len(log), "items": 2}
    assert counts["events"] > 10
    said = describe_unknown_items({"unknown_items_in_source": counts})
    assert f"of {len(log)} events of data.source name one of 2 items that the run lacks" in said
    with pytest.raises(ConfigError, match="leave these events out in the map, and remove the key"):
        SPEC.needs({"path": path, "map": ["own:Map"]}, replace(needs, drops_unknown=True))


def test_a_kind_of_event_that_the_interactions_lack_is_refused(twice):
    log, ids, folder = twice
    seq, _ = build_sequences(
        log.filter(pc.field("event") == "buy"), None, split={"use": "leave_last_out", "test": 0}
    )
    items = pa.table({"item_id": ids})
    ask = SampleRequest(
        "pretrain",
        7,
        "users",
        20,
        8,
        None,
        1 << 16,
        (),
        lambda: seq,
        lambda: items,
        np.zeros((7, 2), np.int32),
    )
    options = SPEC.needs({"path": str(folder / "lists.parquet")}, EventNeeds({}, ("event",)))
    with pytest.raises(
        DataError, match="of a kind that the interactions lack, the first: 'view'; there are buy"
    ):
        FileWindows(ask, options).batch(0, 0, 1)
