"""What is prepared on disk is what is built in memory."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from nonet.errors import ConfigError, DataError
from nonet.samples.preparation import BuildOptions, LogChanges, prepare_sequences
from nonet.samples.sequences import (
    RL,
    TEST,
    TRAIN,
    VALID,
    Compress,
    Labels,
    Sequences,
    build_sequences,
    name_task,
)
from nonet.samples.sequences.labels import REPEAT_EVENTS
from nonet.samples.tables import read_tables
from nonet.workers.roles.artifacts import DataSetup, make_sequences
from nonet.workers.roles.artifacts.sequences import open_sequences

SPLIT = {"use": "leave_last_out", "test": 2, "valid": 1, "rl": 1}
FIELDS = ("offsets", "item", "time", "event", "split", "user_key", "item_key", "train_lengths", "lengths")


def _log(seed: int, rows: int = 4000, *, text: bool = False, unit: str = "s", users: int = 150) -> pa.Table:
    """Many ties, users of very unlike lengths, columns of every kind."""
    dice = np.random.default_rng(seed)
    user = np.minimum(dice.geometric(0.02, rows), users) * 7919 - 300_000
    item = np.minimum(dice.geometric(0.03, rows), 200) * 31
    per_second = {"s": 1, "ms": 1000}[unit]
    time = (1_600_000_000 + dice.integers(0, 400, rows)) * per_second + dice.integers(0, per_second, rows)
    kinds = np.array(["view", "buy", "cart"])[dice.integers(0, 3, rows)]
    return pa.table(
        {
            "user_id": [f"u{each}é" for each in user] if text else user,
            "item_id": [f"i{each}" for each in item] if text else item,
            "timestamp": time,
            "event": kinds,
            "rating": pa.array(dice.integers(1, 6, rows), mask=dice.random(rows) < 0.1),
            "shop": pa.array([f"s{each}" for each in dice.integers(0, 9, rows)]),
            "tags": [[1, 2]] * rows,
        }
    )


def _written(folder, table: pa.Table, files: int = 3, group: int = 300) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        cut = slice(number * len(table) // files, (number + 1) * len(table) // files)
        part = table.slice(cut.start, cut.stop - cut.start)
        pq.write_table(part, folder / f"day-{number}.parquet", row_group_size=group)
    return str(folder / "day-*.parquet")


def _options(interactions: str, **more) -> BuildOptions:
    usual = {"keep": {"item_events": 5, "user_events": 3}, "split": SPLIT}
    return BuildOptions(interactions, **{**usual, **more})


def _both(ask: BuildOptions, root) -> tuple[Sequences, Sequences, pa.Table, pa.Table]:
    built, items = build_sequences(
        *read_tables(ask.interactions, ask.items, ask.columns),
        keep=ask.keep,
        split=ask.split,
        targets=ask.targets,
        where=ask.where,
        repeats=ask.repeats,
    )
    folder = prepare_sequences(ask, root, slice_rows=700, partition_rows=500, threads=2).folder
    prepared, there = open_sequences(folder)
    return built, prepared, items, there


def _same(built: Sequences, prepared: Sequences) -> None:
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(prepared, name), getattr(built, name), name)
    assert list(prepared.user_id[np.arange(len(prepared))]) == list(built.user_id)
    assert list(prepared.columns) == list(built.columns)
    for name, values in built.columns.items():
        assert prepared.columns[name].dtype == values.dtype
        np.testing.assert_array_equal(prepared.columns[name], values, name)
    assert list(prepared.targets) == list(built.targets)
    for name, values in built.targets.items():
        np.testing.assert_array_equal(prepared.targets[name], values, name)
    for name in ("event_names", "dropped", "repeats", "repeat_shares"):
        assert getattr(prepared, name) == getattr(built, name), name


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("text", [False, True])
def test_prepared_on_disk_is_row_by_row_what_is_built_in_memory(tmp_path, seed, text):
    path = _written(tmp_path / "log", _log(seed, text=text))
    ask = _options(
        path,
        targets={"finetune": "rating >= 4 and event in ('buy', 'cart')"},
        where="shop != 's3'" if seed % 2 else None,
    )
    built, prepared, items, there = _both(ask, tmp_path / "out")
    assert len(prepared) > 50
    _same(built, prepared)
    assert there.equals(items)


def test_what_is_prepared_on_disk_is_saved_and_lists_its_text_ids_like_what_is_built_in_memory(tmp_path):
    built, prepared, *_ = _both(_options(_written(tmp_path / "log", _log(7, text=True))), tmp_path / "out")
    assert prepared.user_id.tolist() == built.user_id.tolist()
    prepared.save(tmp_path / "saved")
    _same(built, Sequences.load(tmp_path / "saved"))


@pytest.mark.parametrize("unit", ["s", "ms"])
def test_events_of_a_second_keep_their_finer_order_and_ties_that_of_the_files(tmp_path, unit):
    ask = _options(_written(tmp_path / "log", _log(5, unit=unit)), keep={})
    built, prepared, *_ = _both(ask, tmp_path / "out")
    _same(built, prepared)


def test_a_split_in_time_and_a_table_of_items_are_as_in_memory(tmp_path):
    table = _log(6)
    items = pa.table({"item_id": np.unique(table["item_id"])[::-1].copy()}).append_column(
        "title", pa.array([f"t{i}" for i in range(len(np.unique(table["item_id"])))])
    )
    pq.write_table(items, tmp_path / "items.parquet")
    ask = _options(
        _written(tmp_path / "log", table),
        items=str(tmp_path / "items.parquet"),
        split={"use": "time", "test": "2020-09-13T12:32:00Z", "valid": "30s"},
    )
    built, prepared, wanted, there = _both(ask, tmp_path / "out")
    _same(built, prepared)
    assert there.equals(wanted)


BOUGHT = {
    "finetune": "bought == 1",
    "pretrain": "rating >= 4 and not bought == 1",
    "other": "event == 'buy'",
    "left": "again == 0 and bought == 1",
    "either": "again != bought or rating > 4",
}
TASKS = {
    name_task("finetune", "again"): "again == 1",
    name_task("other", "both"): "bought == 1 and rating > 2",
}
LAST_OUT = {"use": "leave_last_out", "test": 1, "valid": 1}
IN_TIME = {"use": "time", "test": "2020-09-13T12:32:00Z", "valid": "30s"}


def _list_labels(folder) -> tuple[Labels, ...]:
    """Labels of two files."""
    return (
        Labels(path=str(folder / "labels"), within=150, name="bought"),
        Labels(path=str(folder / "again"), within=90, name="again", columns={"user": "buyer", "time": "at"}),
    )


def _changed(tmp_path, changes: LogChanges, log: pa.Table, **more) -> tuple[BuildOptions, DataSetup]:
    """The options of a log with late labels, and how it is built in memory."""
    dice = np.random.default_rng(3)
    rows = log.take(pa.array(dice.integers(0, len(log), 900))).select(["user_id", "item_id", "timestamp"])
    delay = dice.integers(-20, 200, len(rows)) * (1000 if log["timestamp"][0].as_py() > 1e11 else 1)
    later = rows.set_column(2, "timestamp", pa.array(rows["timestamp"].to_numpy() + delay))
    users = np.array(later["user_id"].to_pylist())
    is_late = later["timestamp"].to_numpy() > np.quantile(later["timestamp"].to_numpy(), 0.3)
    has_no_late_label = (
        users > np.sort(users)[len(users) // 2]
    )  # so ranges of users see labels until other times
    later = later.filter(pa.array(~(is_late & has_no_late_label)))
    _written(tmp_path / "labels", later)
    again = later.filter(pa.array(np.arange(len(later)) % 3 > 0))
    _written(tmp_path / "again", again.rename_columns({"user_id": "buyer", "timestamp": "at"}))
    items = pa.table({"item_id": log["item_id"].combine_chunks().unique()})
    words = pa.array([[f"c{i % 7}"] if i % 5 else [] for i in range(len(items))])
    pq.write_table(items.append_column("categories", words), tmp_path / "items.parquet")
    options = _options(_written(tmp_path / "log", log), items=str(tmp_path / "items.parquet"), **more)
    setup = DataSetup(
        options=options,
        tokenizer={},
        folder="",
        seed=0,
        labels=changes.labels,
        compress=changes.compress,
        drop_unlabelled=changes.drop_unlabelled,
    )
    return options, setup


@pytest.mark.parametrize(
    ("labels", "drop", "compress", "by", "text", "unit", "split"),
    [
        (True, False, 0, "", False, "s", LAST_OUT),
        (True, True, 0, "", True, "ms", IN_TIME),
        (False, False, 60, "item", True, "ms", IN_TIME),
        (False, False, 100, "category", False, "s", LAST_OUT),
        (True, False, 100, "category", True, "s", IN_TIME),
    ],
)
def test_late_labels_and_compressed_events_are_on_disk_as_in_memory(
    tmp_path, labels, drop, compress, by, text, unit, split
):
    changes = LogChanges(
        _list_labels(tmp_path) if labels else (),
        drop,
        Compress(compress=compress, by=by) if compress else None,
    )
    more = {
        "targets": BOUGHT | TASKS if labels else {"finetune": "rating >= 4", "other": BOUGHT["other"]},
        "split": split,
        "where": "shop != 's3'",
    }
    options, setup = _changed(tmp_path, changes, _log(2, text=text, unit=unit), **more)
    in_memory = setup.build_with_facts()
    built, items, log = in_memory.sequences, in_memory.items, in_memory.log
    prepared = prepare_sequences(
        options, tmp_path / "out", changes=setup.changes, slice_rows=1400, partition_rows=1400, threads=2
    )
    seq, there = open_sequences(prepared.folder)
    _same(built, seq)
    assert there.equals(items)
    assert len(seq) > 50
    assert all(values.any() for values in seq.targets.values())
    assert prepared.labels == in_memory.labels
    assert all(0 < counts.no_event < counts.rows for counts in prepared.labels.values())
    assert seq.late_labels == built.late_labels == labels
    assert seq.strict == built.strict == bool(compress)
    assert (log is None) == (seq.folded is None) == (prepared.savings is None)
    if log is not None:
        for name in ("offsets", "time", "kinds"):
            np.testing.assert_array_equal(getattr(seq.folded, name), getattr(built.folded, name))
            assert getattr(seq.folded, name).dtype == np.int64
        counted = ("rows", "events", "repeats")
        assert [prepared.savings[name] for name in counted] == [
            log.measure_savings()[name] for name in counted
        ]
        repeats = pq.read_table(next((tmp_path / "out").glob("repeats-*"))).drop_columns(["row:", "tags"])
        order = [(name, "ascending") for name in repeats.column_names]
        assert repeats.sort_by(order).equals(log.repeats.select(repeats.column_names).sort_by(order))
    assert {path.name.split("-")[0] for path in (tmp_path / "out").iterdir()} <= {"sequences", "repeats"}


@pytest.mark.parametrize(("compress", "text"), [(0, True), (60, False)])
def test_events_of_unknown_items_are_left_out_and_counted_on_disk_as_in_memory(tmp_path, compress, text):
    changes = LogChanges(
        _list_labels(tmp_path) if text else (),
        compress=Compress(compress=compress) if compress else None,
    )
    more = {"where": "shop != 's3'", "drop_unknown_items": True}
    options, setup = _changed(tmp_path, changes, _log(2, text=text, unit="ms"), **more)
    table = pq.read_table(options.items)
    pq.write_table(table.filter(pa.array(np.arange(len(table)) % 5 > 0)), options.items)
    built = setup.build_with_facts()
    small = {"changes": changes, "slice_rows": 1400, "partition_rows": 1400, "threads": 2}
    prepared = prepare_sequences(options, tmp_path / "out", **small)
    seq, items = open_sequences(prepared.folder)
    _same(built.sequences, seq)
    assert items.equals(built.items)
    assert prepared.unknown == built.unknown.to_facts()
    log = pq.read_table(tmp_path / "log").filter(pc.field("shop") != "s3")
    unknown = log.filter(
        pc.is_in(log["item_id"], value_set=pq.read_table(options.items)["item_id"].combine_chunks())
    )
    assert prepared.unknown["of"] == len(log)
    assert prepared.unknown["events"] == len(log) - len(unknown) > 100
    with pytest.raises(
        DataError, match=r"Add those items, or leave these interactions out: data.unknown_items: drop"
    ):
        prepare_sequences(replace(options, drop_unknown_items=False), tmp_path / "no", **small)


@pytest.mark.parametrize("compress", [0, 60])
def test_a_log_none_of_whose_items_is_known_is_refused_in_one_line(tmp_path, compress):
    changes = LogChanges(compress=Compress(compress=compress) if compress else None)
    options, setup = _changed(tmp_path, changes, _log(2), drop_unknown_items=True)
    pq.write_table(pa.table({"item_id": [-5], "categories": [["a"]]}), options.items)
    message = r"drop leaves none of 4,000 interactions: .*such as 1023, 1054, 1085. Check data.columns.item"
    with pytest.raises(DataError, match=message):
        setup.build()
    with pytest.raises(DataError, match=message):
        prepare_sequences(options, tmp_path / "out", changes=changes)


def test_a_killed_preparation_of_a_compressed_log_goes_on_from_what_is_whole(tmp_path, monkeypatch):
    from nonet.samples.preparation import changes as changes_module

    labels = Labels(path=str(tmp_path / "labels"), within=150, name="bought")
    changes = LogChanges((labels,), False, Compress(compress=60))
    options, _ = _changed(tmp_path, changes, _log(2), targets={"finetune": "bought == 1"})
    small = {"changes": changes, "slice_rows": 1400, "partition_rows": 1400, "threads": 1}
    whole = prepare_sequences(options, tmp_path / "whole", **small).folder
    calls, real = [], changes_module.LogChanger.change_range

    def killed(self, number):
        calls.append(number)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(self, number)

    with monkeypatch.context() as patched:
        patched.setattr(changes_module.LogChanger, "change_range", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare_sequences(options, tmp_path / "out", **small)
    written = []
    monkeypatch.setattr(
        changes_module, "write_whole", lambda path, content: written.append(path) or path.write_bytes(content)
    )
    again = prepare_sequences(options, tmp_path / "out", **small).folder
    assert not [path.name for path in written if path.name in ("range-000000.json", "range-000001.json")]
    assert again.name == whole.name
    assert _files(again) == _files(whole)


def test_a_sample_has_the_columns_of_labels_and_compression_that_conditions_name(tmp_path):
    changes = LogChanges(_list_labels(tmp_path), False, Compress(compress=60))
    options, setup = _changed(tmp_path, changes, _log(2), targets={"finetune": "bought == 1 and count > 1"})
    sample, _ = setup.sample_tables()
    assert {"bought", "count", "span", "kinds"} <= set(sample.column_names)
    wrong = replace(setup, options=replace(options, targets={"finetune": "bougt == 1"}))
    with pytest.raises(ConfigError, match=r"^stages.finetune.target: .*'bougt'.* Did you mean 'bought'"):
        wrong.sample_tables()
    by_category = replace(
        setup, options=replace(options, items=None), compress=Compress(compress=60, by="category")
    )
    with pytest.raises(DataError, match=r"by: category wants data.items with a column categories"):
        by_category.sample_tables()


def test_a_label_file_whose_ids_have_another_type_is_refused(tmp_path):
    labels = Labels(path=str(tmp_path / "labels"), within=150)
    changes = LogChanges((labels,))
    options, _ = _changed(tmp_path, changes, _log(2))
    _written(tmp_path / "labels", _log(2, 50, text=True).select(["user_id", "item_id", "timestamp"]))
    with pytest.raises(DataError, match=r"data.labels: user_id is string, and int64 in the interactions"):
        prepare_sequences(options, tmp_path / "out", changes=changes)


def test_columns_of_both_tables_may_have_other_names_as_in_memory(tmp_path):
    table = _log(8)
    ids = np.unique(table["item_id"])
    items = pa.table({"item_id": ids, "name": [f"t{i}" for i in ids], "genre": [["a", "b"]] * len(ids)})
    pq.write_table(items, tmp_path / "items.parquet")
    ask = _options(
        _written(tmp_path / "log", table.rename_columns({"rating": "stars"})),
        items=str(tmp_path / "items.parquet"),
        columns={"title": "name", "categories": "genre", "rating": "stars"},
    )
    built, prepared, wanted, there = _both(ask, tmp_path / "out")
    _same(built, prepared)
    assert there.equals(wanted)
    assert {"title", "categories"} <= set(there.column_names)
    with pytest.raises(DataError, match=r"title: 'nam' is in neither table. Did you mean 'name'"):
        prepare_sequences(
            _options(ask.interactions, items=ask.items, columns={"title": "nam"}), tmp_path / "no"
        )


def _files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("step", ["scatter", "gather", "finish"])
def test_a_preparation_that_was_killed_goes_on_from_what_is_whole(tmp_path, monkeypatch, step):
    from nonet.samples.preparation import preparing

    options = _options(_written(tmp_path / "log", _log(7)), targets={"finetune": "rating >= 4"})
    small = {"slice_rows": 700, "partition_rows": 500, "threads": 1}
    whole = prepare_sequences(options, tmp_path / "whole", **small).folder
    place = {
        "scatter": (preparing.RunWriter, "write"),
        "gather": (preparing, "gather_partition"),
        "finish": (preparing.PartitionWriter, "write"),
    }
    calls, real = [], getattr(*place[step])

    def killed(*args):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(*place[step], killed)
        with pytest.raises(KeyboardInterrupt):
            prepare_sequences(options, tmp_path / "out", **small)
    done = sorted(
        (tmp_path / "out").rglob({"scatter": "run-*", "gather": "part-*", "finish": "done.json"}[step])
    )
    assert len(done) >= 3
    before = [path.stat().st_ino for path in done if path.is_dir()]
    seen = []
    monkeypatch.setattr(
        preparing.os, "replace", lambda a, b, real=preparing.os.replace: (seen.append(str(b)), real(a, b))[1]
    )
    again = prepare_sequences(options, tmp_path / "out", **small).folder
    assert not [path for path in done if path.is_dir() and str(path) in seen], "what was whole is made again"
    assert before or step == "finish"
    assert again.name == whole.name
    assert _files(again) == _files(whole)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [again.name]


def test_a_full_disk_says_how_much_was_needed_and_leaves_nothing_behind(tmp_path, monkeypatch):
    from nonet.samples.preparation import preparing

    options = _options(_written(tmp_path / "log", _log(8)))

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(preparing.PartitionWriter, "write", full)
    with pytest.raises(DataError, match=r"disk of .* is full: preparing 4,000 events takes about .* GB"):
        prepare_sequences(options, tmp_path / "out", slice_rows=700, partition_rows=500)
    assert not list((tmp_path / "out").iterdir())


def test_a_disk_with_too_little_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    from nonet.samples.preparation import preparing

    options = _options(_written(tmp_path / "log", _log(8)))
    monkeypatch.setattr(preparing, "_get_free_bytes", lambda place: 1000)
    with pytest.raises(DataError, match=r"4,000 events takes about .* are free"):
        prepare_sequences(options, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("compress", "copies"), [(None, 2), (Compress(compress=60), 3)])
def test_the_room_that_is_asked_for_is_that_of_the_page(tmp_path, monkeypatch, compress, copies):
    """56 bytes per event and 8 or 16 for each further column, or half as much again; 5 % more for what is not per event."""
    from nonet.samples.preparation import preparing

    log, found = _log(8).select(["user_id", "item_id", "timestamp", "event", "shop"]), {}
    monkeypatch.setattr(preparing, "_get_free_bytes", lambda place: 1000)
    monkeypatch.setattr(preparing, "_format_gb", lambda size: f"{size / 4000 / 1.05:.2f}")
    for columns in (3, 4, 5):
        options = _options(_written(tmp_path / str(columns), log.select(range(columns))))
        with pytest.raises(DataError, match=r"takes about [\d.]+ of disk") as refusal:
            prepare_sequences(options, tmp_path / "out", changes=LogChanges(compress=compress))
        found[columns] = float(str(refusal.value).partition("takes about ")[2].split()[0])
    steps = [found[3], found[4] - found[3], found[5] - found[4]]
    assert steps == pytest.approx([copies * 28, copies * 4, copies * 8], abs=0.1)


def test_a_row_without_an_id_is_named_by_file_row_group_and_row(tmp_path):
    table = _log(9, 1000)
    bad = table.set_column(0, "user_id", pa.array([*table["user_id"].to_pylist()[:-1], None]))
    path = _written(tmp_path / "log", bad, files=2, group=250)
    with pytest.raises(
        DataError, match=r"day-1.parquet, row groups 0 to 1 .*no user_id.*the first is row 499"
    ):
        prepare_sequences(_options(path), tmp_path / "out")


def test_progress_tells_rows_and_what_is_left(tmp_path):
    from nonet.samples.preparation.progress import PreparationProgress

    told = []
    progress = PreparationProgress(told.append, every_s=0)
    progress.start_phase("scatter", 100)
    progress.add_rows(25)
    assert (told[0].phase, told[0].rows, told[0].of) == ("scatter", 25, 100)
    assert told[0].left_s == pytest.approx(75 / told[0].rows_s)
    assert "25 of 100 rows (25%)" in told[0].format_line()


def test_a_phase_of_several_passes_says_which_it_is_in():
    from nonet.samples.preparation.progress import PreparationReport

    assert (
        PreparationReport("core", 250, 100, 50.0, 0.0).format_line()
        == "core: pass 3 of all 100 rows, 50 rows/s"
    )
    assert (
        PreparationReport("core", 50, 100, 50.0, 1.0).format_line()
        == "core: 50 of 100 rows (50%), 50 rows/s, 1 s left"
    )


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("rl", [0, 3])
def test_items_that_are_held_out_whole_are_on_disk_as_in_memory_and_never_trained_on(tmp_path, rl, text):
    split = {"use": "leave_last_out", "test": 2, "valid": 1, "rl": rl, "cold_items": 0.3}
    ask = _options(
        _written(tmp_path / "log", _log(8, text=text, users=400)), split=split, keep={"item_events": 5}
    )
    built, prepared, items, there = _both(ask, tmp_path / "out")
    _same(built, prepared)
    assert there.equals(items)
    whole, other_items = build_sequences(
        *read_tables(ask.interactions, None, ask.columns), keep=ask.keep, split={**split, "cold_items": 0}
    )
    assert there["item_id"].equals(other_items["item_id"])  # an item that is held out stays in the catalogue
    cold = np.setdiff1d(whole.item[whole.split < VALID], built.item[built.split < VALID])
    assert 0.2 < len(cold) / len(there) < 0.4
    assert not np.isin(built.item[built.split < VALID], cold).any()
    assert np.isin(built.item[built.split >= VALID], cold).mean() == pytest.approx(0.3, abs=0.1)
    keys = [
        set(zip(s.user_id[s.user].tolist(), s.item.tolist(), s.time.tolist(), strict=True))
        for s in (built, whole)
    ]
    assert keys[0] < keys[1]
    dropped = keys[1] - keys[0]
    assert {item for _, item, _ in dropped} <= set(cold.tolist())
    assert (built.split == TEST).sum() > 0.8 * (whole.split == TEST).sum()


def test_an_item_that_drops_a_user_who_drops_an_item_goes_on_disk_as_in_memory(tmp_path):
    rows = [
        (1, 10),
        (1, 11),
        (1, 12),
        (2, 10),
        (2, 11),
        (2, 13),
        (3, 13),
        (3, 14),
        (3, 10),
        (4, 12),
        (4, 10),
        (4, 11),
    ]
    rows += [
        (5, 14),
        (5, 15),
        (5, 10),
    ]  # 15 is rare, so user 5 goes, so 14 is rare, so user 3 goes, so 13 is rare
    user, item = zip(*rows, strict=True)
    table = pa.table(
        {"user_id": user, "item_id": item, "timestamp": range(1_600_000_000, 1_600_000_000 + len(rows))}
    )
    keep, split = {"item_events": 2, "user_events": 3}, {"use": "leave_last_out", "test": 1}
    ask = _options(_written(tmp_path / "log", table, group=4), keep=keep, split=split)
    built, prepared, items, there = _both(ask, tmp_path / "run")
    _same(built, prepared)
    assert there["item_id"].to_pylist() == items["item_id"].to_pylist() == [10, 11, 12]


@pytest.mark.parametrize(("shift", "kind"), [(0, "int32"), (10**9, "int64")])
def test_times_take_32_bits_on_disk_where_all_fit_and_read_as_64(tmp_path, shift, kind):
    log = _log(5)
    log = log.set_column(2, "timestamp", pa.array(log["timestamp"].to_numpy() + shift))
    built, prepared, *_ = _both(_options(_written(tmp_path / "log", log)), tmp_path / "out")
    (file,) = (tmp_path / "out").glob("sequences-*/time.npy")
    assert np.load(file, mmap_mode="r").dtype == kind
    _same(built, prepared)
    places = np.array([3, 1, 2])
    for read in (prepared.time[places], prepared.time[5:9], np.asarray(prepared.slice_users(1, 3).time)):
        assert read.dtype == np.int64
    assert prepared.slice_users(1, 3).time[:2].tolist() == built.slice_users(1, 3).time[:2].tolist()


def test_a_click_model_sees_the_first_kind_of_a_compressed_event_and_others_all_that_training_may_know():
    log = pa.table({"user_id": [1, 1], "item_id": [1, 1], "timestamp": [10, 20], "event": ["view", "buy"]})
    changes = LogChanges((), False, Compress(compress=60), (20, 30, 40))
    lists, clicks = changes, replace(changes, drop_unlabelled=True)
    whole = replace(changes, part_starts=())
    kinds = {}
    for name, each in (("lists", lists), ("clicks", clicks), ("whole", whole)):
        events = each.compress_events(log, None, None).events
        kinds[name] = events[REPEAT_EVENTS].to_pylist() if REPEAT_EVENTS in events.column_names else None
    assert kinds == {"lists": [[]], "clicks": None, "whole": [["buy"]]}
    later = replace(changes, part_starts=(20, 31, 40))
    prints = [json.dumps(each.to_fingerprint([])) for each in (lists, clicks, whole, later, LogChanges())]
    assert len(set(prints)) == 5


@pytest.mark.parametrize("prepare", ["memory", "disk"])
def test_a_target_does_not_see_rows_of_a_later_part_of_a_split_in_time(tmp_path, prepare):
    """Of each part an event, viewed and ordered three days later: only the orders of users 0, 2, 4 and 6 are of the same part."""
    first_days, day_s = [0, 9, 10, 19, 20, 24, 26], 86_400
    time = np.concatenate([[day_s * day, day_s * (day + 3)] for day in first_days])
    log = pa.table(
        {
            "user_id": np.repeat(np.arange(7), 2),
            "item_id": np.repeat(np.arange(7) % 2, 2),
            "timestamp": time + 10_000 * day_s,
            "event": ["view", "order"] * 7,
        }
    )
    start = np.datetime64("1970-01-01") + 10_000
    split = {"use": "time", "test": f"{start + 26}T00:00:00Z", "valid": "6d", "rl": "10d"}
    options = _options(
        _written(tmp_path / "log", log), keep={}, split=split, targets={"t": "event == 'order'"}
    )
    compress = Compress(compress="10000d")
    setup = DataSetup(options=options, tokenizer={}, folder="", seed=0, compress=compress, prepare=prepare)
    seq, _, _ = make_sequences(setup, tmp_path / "out")
    assert np.asarray(seq.split).tolist() == [TRAIN, TRAIN, RL, RL, VALID, VALID, TEST]
    assert np.asarray(seq.targets["t"]).tolist() == [True, False, True, False, True, False, True]
