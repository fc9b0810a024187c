"""Labels that come later than their events."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.errors import DataError
from nonet.samples.batches import ClickRows
from nonet.samples.preparation import BuildOptions
from nonet.samples.sequences import TEST, TRAIN, Compress, Sequences, build_sequences, compress_log
from nonet.samples.sequences.labels import (
    LABEL_END,
    LABEL_TIME,
    NEVER,
    LabelCounts,
    Labels,
    add_labels,
    attach_label,
    drop_unlabelled_events,
    name_task,
)
from nonet.samples.sequences.user_file import UserFile
from nonet.samples.tables import read_interactions
from nonet.samples.tables.table_format import TableFormat
from nonet.workers.roles.artifacts import DataSetup, make_sequences, read_preparation_facts

DAY = 86_400


def table(rows, text=False):
    user, item, time = zip(*rows, strict=True)
    name = (lambda value: f"u{value}") if text else int
    return pa.table({"user_id": list(map(name, user)), "item_id": list(item), "timestamp": list(time)})


def test_a_compressed_event_has_the_labels_of_all_its_rows():
    views = table([(1, 1, 9 * 3600), (1, 1, 9 * 3600 + 600), (1, 2, 9 * 3600), (2, 1, 5 * DAY)])
    purchases = table([(1, 1, 9 * 3600 + 1200)])
    options = Labels(path="bought", within=DAY, name="bought")
    log, counts = attach_label(views, purchases, options, observed_until=5 * DAY)
    events = compress_log(log, DAY, "item").events
    assert events["item_id"].to_pylist() == [1, 2, 1]
    assert events["bought"].to_pylist()[:2] == [1, 0]
    assert np.isnan(events["bought"][2].as_py())  # its window is open
    assert events[f"{LABEL_TIME}bought"].to_pylist() == [9 * 3600 + 1200, 9 * 3600 + DAY, NEVER]
    assert counts.no_event == 0


def test_a_label_of_the_moment_of_its_event_finds_it_whether_times_are_floats_or_whole_milliseconds(tmp_path):
    ms = 1_700_000_000_000 + 7 * np.arange(300)
    ids = {"user_id": np.arange(300), "item_id": np.zeros(300, int)}
    tables = {}
    for name, times in (("log", ms / 1000), ("bought", ms)):
        pq.write_table(pa.table({**ids, "timestamp": times}), tmp_path / f"{name}.parquet")
        tables[name] = read_interactions(str(tmp_path / f"{name}.parquet"), TableFormat(keeps_fractions=True))
    counts = attach_label(*tables.values(), Labels(path="bought", within=100))[1]
    assert counts == LabelCounts(rows=300, no_event=0, too_late=0, unknown=300)


def test_windows_before_1970_are_open_as_later_ones_are():
    options = Labels(path="bought", within=400, name="bought")
    log, _ = attach_label(table([(1, 1, -500), (1, 2, -900)]), table([(1, 1, -450)]), options)
    assert np.isnan(log["bought"][0].as_py())
    assert log["bought"][1].as_py() == 0


def test_a_compressed_event_without_a_label_waits_for_the_window_of_its_last_row():
    views = table([(1, 1, 0), (1, 1, 600), (1, 2, 5 * DAY)])
    options = Labels(path="bought", within=DAY, name="bought")
    log, _ = attach_label(views, table([(1, 3, 1)]), options, observed_until=9 * DAY)
    events = compress_log(log, DAY, "item").events
    assert events["bought"].to_pylist() == [0, 0]
    assert events[f"{LABEL_TIME}bought"].to_pylist() == [600 + DAY, 6 * DAY]


def by_hand(log, labels, within):
    """Label event by event by the definition; return the labels, and how many rows have no event and come too late."""
    end = max(time for _, _, time in labels)
    values, no_event, too_late = [0.0] * len(log), 0, 0
    for user, item, time in labels:
        before = [(t, i) for i, (u, it, t) in enumerate(log) if (u, it) == (user, item) and t <= time]
        if not before:
            no_event += 1
        elif time - max(before)[0] > within:
            too_late += 1
        else:
            values[max(before)[1]] = 1.0
    is_open = [end - time < within for _, _, time in log]
    return (
        [float("nan") if not_over else v for v, not_over in zip(values, is_open, strict=True)],
        no_event,
        too_late,
    )


@pytest.mark.parametrize("text", [False, True])
def test_a_label_is_that_of_the_newest_event_before_it_and_late_ones_count_for_nothing(text):
    log = [(1, 7, 0), (1, 7, 50), (1, 8, 60), (2, 7, 70), (2, 9, 400)]
    labels = [(1, 7, 90), (1, 8, 300), (2, 8, 80), (3, 7, 90), (1, 7, 20)]
    made = add_labels(table(log, text), table(labels, text), Labels(path="x", within=100, name="bought"))
    assert made["bought"].to_pylist()[:4] == [1.0, 1.0, 0.0, 0.0]
    assert np.isnan(made["bought"][4].as_py())


@pytest.mark.parametrize("seed", range(5))
def test_random_logs_get_the_labels_that_counting_by_hand_gives(seed):
    draw = np.random.default_rng(seed)
    log = [tuple(row) for row in draw.integers(0, (5, 4, 300), (200, 3)).tolist()]
    labels = [tuple(row) for row in draw.integers(0, (6, 5, 250 + 25 * seed), (80, 3)).tolist()]
    made, counts = attach_label(table(log), table(labels), Labels(path="x", within=40, name="bought"))
    values, no_event, too_late = by_hand(log, labels, 40)
    np.testing.assert_array_equal(made["bought"].to_numpy(), np.array(values, np.float32))
    assert counts == LabelCounts(80, no_event, too_late, int(np.isnan(values).sum()))
    left = drop_unlabelled_events(made, [Labels(path="x", within=40, name="bought")])
    assert len(left) == np.isfinite(values).sum()


def test_an_event_whose_window_is_not_over_is_unknown_even_if_its_label_came():
    log, labels = [(1, 7, 0), (1, 8, 70), (1, 9, 80)], [(1, 8, 75), (1, 7, 10), (2, 7, 160)]
    made = add_labels(table(log), table(labels), Labels(path="x", within=90, name="bought"))
    np.testing.assert_array_equal(made["bought"].to_numpy(), np.array([1, 1, np.nan], np.float32))
    made = add_labels(table(log), table(labels[:2]), Labels(path="x", within=90, name="bought"))
    assert np.isnan(made["bought"].to_numpy()).all()
    assert made[LABEL_TIME + "bought"].to_pylist() == [NEVER] * 3


def test_the_newest_events_have_the_same_rate_of_labels_as_all_others():
    draw = np.random.default_rng(1)
    time, day = draw.integers(0, 100, 40_000) * DAY, DAY
    log = pa.table({"user_id": np.arange(40_000), "item_id": np.zeros(40_000, int), "timestamp": time})
    later = time + draw.integers(0, 10, 40_000) * day  # of a tenth of the events
    labels = log.set_column(2, "timestamp", pa.array(later)).filter(
        pa.array((draw.random(40_000) < 0.1) & (later < 100 * day))
    )
    bought = add_labels(log, labels, Labels(path="x", within=10 * day, name="bought"))["bought"].to_numpy()
    newest = bought[time >= 85 * day]
    assert 0.08 < np.nanmean(newest) < 0.12  # a binomial with 2,000 events has a standard deviation of 0.007


def test_a_run_learns_from_events_whose_label_came_and_from_none_that_is_still_open(tmp_path):
    rows = [(user, item, DAY * item) for user in range(6) for item in range(6)]
    bought = [(user, 1, DAY + 60) for user in range(3)] + [(7, 7, 4 * DAY)]
    pq.write_table(table(rows), tmp_path / "events.parquet")
    pq.write_table(table(bought), tmp_path / "bought.parquet")
    options = BuildOptions(
        str(tmp_path / "events.parquet"),
        split={"use": "leave_last_out", "test": 1},
        targets={"finetune": "bought == 1"},
    )
    setup = DataSetup(
        options=options,
        tokenizer={"use": "rq_kmeans"},
        folder=str(tmp_path),
        seed=7,
        labels=(Labels(path=str(tmp_path / "bought.parquet"), within=2.0 * DAY, name="bought"),),
    )
    seq, _ = setup.build()
    assert not setup.is_prepared_on_disk()
    assert seq.targets["finetune"].sum() == 3
    assert np.isnan(seq.columns["bought"][seq.time > 3 * DAY]).all()


def make_shop(folder, **options):
    """Clicks and carts of one item per user, and orders that follow the carts; labels belong to events that `where` keeps."""
    rows = [(user, item, DAY * item + 60 * kind) for user in range(4) for item in range(5) for kind in (0, 1)]
    events = table(rows).append_column("event", pa.array(["click", "cart"] * 20))
    orders = [(user, 1, DAY + 3600) for user in range(3)] + [(9, 9, 9 * DAY), (0, 2, 2 * DAY - 1)]
    pq.write_table(events, folder / "events.parquet")
    pq.write_table(table(orders), folder / "orders.parquet")
    build = BuildOptions(
        str(folder / "events.parquet"),
        split={"use": "leave_last_out", "test": 1},
        targets={"finetune": "bought == 1"},
        **options,
    )
    labels = (Labels(path=str(folder / "orders.parquet"), within=2.0 * DAY, name="bought"),)
    return DataSetup(options=build, tokenizer={}, folder=str(folder), seed=7, labels=labels)


@pytest.mark.parametrize("prepare", ["memory", "disk"])
def test_a_label_belongs_to_the_newest_event_that_where_keeps(tmp_path, prepare):
    setup = make_shop(tmp_path, where="event == 'click'")
    seq, items, artifact = make_sequences(replace(setup, prepare=prepare), tmp_path / "out")
    assert seq.event_names == ("click",)
    assert seq.targets["finetune"].sum() == 3
    assert set(items["item_id"].take(seq.item[seq.targets["finetune"]]).to_pylist()) == {1}
    facts = read_preparation_facts(tmp_path / "out")
    assert facts["label_files"] == {"bought": {"rows": 5, "no_event": 2, "too_late": 0, "unknown": 0}}
    assert Sequences.load(artifact["path"]).late_labels


def test_where_may_read_a_label_of_all_events(tmp_path):
    setup = make_shop(tmp_path, where="bought == 1 or item_id > 2")
    seq, items = setup.build()
    assert sorted(items["item_id"].take(seq.item).to_pylist()) == [1] * 3 + [3] * 8 + [4] * 8


@pytest.mark.parametrize("prepare", ["memory", "disk"])
def test_a_where_that_leaves_nothing_is_named_also_with_labels(tmp_path, prepare):
    setup = replace(make_shop(tmp_path, where="event == 'order'"), prepare=prepare, drop_unlabelled=True)
    with pytest.raises(DataError, match=r"data\.where: \"event == 'order'\" matches no interaction"):
        make_sequences(setup, tmp_path / "out")


@pytest.mark.parametrize("prepare", ["memory", "disk"])
def test_sequences_with_late_labels_have_a_format_of_their_own_and_others_keep_theirs(tmp_path, prepare):
    setup = replace(make_shop(tmp_path), prepare=prepare)
    late, _, artifact = make_sequences(setup, tmp_path / "late")
    options = replace(setup.options, targets={})
    plain, _, other = make_sequences(replace(setup, options=options, labels=()), tmp_path / "plain")
    assert (late.late_labels, plain.late_labels) == (True, False)
    numbers = [Sequences.load(made["path"]).late_labels for made in (artifact, other)]
    assert numbers == [True, False]
    assert [read_format(made["path"]) for made in (artifact, other)] == (
        [4, 2] if prepare == "memory" else [8, 4]
    )


def read_format(folder):
    """Return the number of the format of sequences in a folder."""
    if (Path(folder) / "meta.json").exists():
        return json.loads((Path(folder) / "meta.json").read_text())["format"]
    return UserFile.read(Path(folder) / "part-0.parquet").metadata["format"]


def bought_later(log, labels, split, *, drop_unknown=True):
    """Clicks whose label is `bought`, of a log with labels that come later."""
    options = Labels(path="x", within=7 * DAY, name="bought")
    log = add_labels(table(log), table(labels), options)
    log = drop_unlabelled_events(log, [options]) if drop_unknown else log
    seq, items = build_sequences(log, None, split=split, targets={"click": "bought == 1"})
    return ClickRows.from_target(seq, items, "click", ["liked", "disliked", "taste"], 50)


def test_a_purchase_is_a_feature_from_its_own_time_on_and_a_refusal_from_the_end_of_its_window():
    log = [(1, 10, 0), (1, 11, 3600), (1, 12, 3 * DAY), (1, 13, 8 * DAY), (2, 10, 0)]
    clicks = bought_later(log, [(1, 10, 2 * DAY), (2, 10, 40 * DAY)], {"use": "leave_last_out"})
    bags = clicks.batch(np.arange(4))
    liked = [len(bags["liked"][row]) for row in range(4)]
    disliked = [len(bags["disliked"][row]) for row in range(4)]
    assert (liked, disliked) == ([0, 0, 1, 1], [0, 0, 0, 1])


def test_stored_sequences_know_which_labels_are_known(tmp_path):
    log = [(1, 10, 0), (1, 11, 3600), (1, 12, 3 * DAY), (2, 10, 0), (2, 11, 9 * DAY)]
    clicks = bought_later(
        log, [(1, 10, 2 * DAY), (2, 10, 8 * DAY)], {"use": "leave_last_out"}, drop_unknown=False
    )
    seq = replace(clicks.seq, targets=clicks.seq.targets | {"any": np.ones(5, bool)})
    seq.save(tmp_path)
    stored = Sequences.load(tmp_path)
    assert stored.find_labelled("click").tolist() == seq.find_labelled("click").tolist()
    assert stored.find_labelled("click").sum() == 3
    assert stored.find_labelled("any").all()


def test_what_is_observed_ends_with_the_label_file():
    log = table([(1, 10, 0), (1, 11, 10 * DAY), (2, 10, 8 * DAY)])
    made = add_labels(log, table([(2, 10, DAY)]), Labels(path="x", within=7 * DAY, name="bought"))
    assert np.isnan(made["bought"].to_numpy()).all()
    assert made[LABEL_TIME + "bought"].to_pylist() == [NEVER] * 3


def test_no_label_from_after_the_cut_in_time_reaches_training():
    log = [(1, 10, 0), (1, 11, 20 * DAY), (2, 10, 0), (2, 11, 30 * DAY), (3, 10, -DAY), (3, 11, DAY)]
    labels, cut = [(1, 10, 5 * DAY), (2, 10, DAY // 2), (3, 10, 0), (2, 11, 60 * DAY)], "1970-01-07"
    clicks = bought_later(log, labels, {"use": "time", "test": cut}, drop_unknown=False)
    assert clicks.seq.split.tolist() == [TRAIN, TEST, TRAIN, TEST, TRAIN, TRAIN]
    assert clicks.seq.targets["click"].tolist() == [True, False, True, False, True, False]
    assert clicks.find_rows(TRAIN).tolist() == []
    assert clicks.seq.find_targets("click").tolist() == [False] * 6
    a_day_later = bought_later(
        log, labels, {"use": "time", "test": "1970-01-07T00:00:01Z"}, drop_unknown=False
    )
    assert a_day_later.find_rows(TRAIN).tolist() == [4]
    assert a_day_later.seq.find_targets("click").tolist() == [False] * 4 + [True, False]


def test_a_purchase_that_is_too_late_for_training_is_a_feature_of_later_events():
    log = [(1, 10, 0), (1, 11, DAY), (1, 12, 9 * DAY), (2, 10, 9 * DAY)]
    clicks = bought_later(log, [(1, 10, 2 * DAY), (2, 10, 40 * DAY)], {"use": "time", "test": "1970-01-04"})
    assert not len(clicks.find_rows(TRAIN))
    bags = clicks.batch(np.arange(3))
    assert [len(bags["liked"][row]) for row in range(3)] == [0, 0, 1]
    assert [len(bags["disliked"][row]) for row in range(3)] == [0, 0, 1]


def simulate_shop(views_per_user=1):
    """Return 4,000 views of 40 days, and the carts and purchases after them, which end at day 45."""
    dice = np.random.default_rng(5)
    time = np.sort(dice.integers(0, 40 * DAY, 4000)).tolist()
    views = [
        (index // views_per_user, index // views_per_user % 7, second) for index, second in enumerate(time)
    ]

    def follow(rate, within):
        rows = [(u, i, t + int(dice.random() * within)) for u, i, t in views if dice.random() < rate]
        return [row for row in rows if row[2] < 45 * DAY] + [(-1, -1, 45 * DAY)]

    return views, {"carted": (follow(0.4, 2 * DAY), 2 * DAY), "bought": (follow(0.2, 9 * DAY), 9 * DAY)}


OUTCOMES = {
    "bought == 1": lambda carted, bought: bought,
    "carted == 1 or bought == 1": lambda carted, bought: carted or bought,
    "carted == 1 and bought == 0": lambda carted, bought: carted and not bought,
}
UNTIL_DAY_30, UNTIL_THE_END = {"use": "time", "test": "1970-01-31"}, {"use": "leave_last_out", "test": 0}


@pytest.mark.parametrize("split", [UNTIL_DAY_30, UNTIL_THE_END], ids=["time", "leave_last_out"])
@pytest.mark.parametrize("condition", OUTCOMES)
def test_the_newest_events_that_are_trained_have_the_true_rate_of_positives(condition, split):
    views, labels = simulate_shop()
    log = table(views)
    for name, (rows, within) in labels.items():
        log = add_labels(log, table(rows), Labels(path="x", within=within, name=name))
    seq, items = build_sequences(log, None, split=split, targets={"click": condition})
    clicks = ClickRows.from_target(seq, items, "click", ["item"], 5)
    trained = clicks.find_rows(TRAIN)
    last = seq.time[trained].max()
    assert (trained == np.flatnonzero(seq.time <= last)).all()
    newest = trained[seq.time[trained] > last - 4 * DAY]
    carted, bought = ({user for user, _, _ in rows} for rows, _ in labels.values())
    truth = [OUTCOMES[condition](user in carted, user in bought) for user in seq.user_id[newest].tolist()]
    assert 300 < len(newest) < 500
    assert clicks.label[newest].tolist() == truth


@pytest.mark.parametrize("split", [UNTIL_DAY_30, UNTIL_THE_END], ids=["time", "leave_last_out"])
def test_whether_a_compressed_event_is_trained_depends_on_its_period_alone(split):
    views, labels = simulate_shop(views_per_user=3)
    rows, within = labels["bought"]
    options = Labels(path="x", within=within + DAY // 2, name="bought")
    log = compress_log(add_labels(table(views), table(rows), options, period_s=DAY), DAY, "item").events
    seq, items = build_sequences(log, None, split=split, targets={"click": "bought == 1"}, strict=True)
    trained = ClickRows.from_target(seq, items, "click", ["item"], 5).find_rows(TRAIN)
    assert 1000 < len(seq.item) < 3000
    last_day = seq.time[trained].max() // DAY
    assert set(trained) == set(np.flatnonzero(seq.time // DAY <= last_day))


def test_an_event_whose_label_is_not_known_yet_is_no_positive_of_a_negated_target():
    log = add_labels(
        table([(1, 10, 0), (1, 11, 50), (1, 12, 60)]),
        table([(1, 10, 60)]),
        Labels(path="x", within=55, name="bought"),
    )
    targets = {"refused": "bought != 1", "either": "bought == 1 or item_id == 12"}
    seq, _ = build_sequences(log, None, split={"use": "leave_last_out"}, targets=targets)
    assert seq.targets["refused"].tolist() == [True, False, False]
    assert seq.targets["either"].tolist() == [False, False, True]
    assert seq.get_label_times("either").tolist() == [55, NEVER, 60]
    assert LABEL_TIME + "either" not in seq.feature_columns


def test_an_event_is_left_out_only_if_none_of_its_labels_is_known():
    log = table([(1, 10, 0), (1, 11, 50), (1, 12, 95)])
    bought, shared = (Labels(path="x", within=within, name=name) for within, name in ((60, "b"), (20, "s")))
    for options in (bought, shared):
        log = add_labels(log, table([(1, 10, 100)]), options)
    assert drop_unlabelled_events(log, [bought, shared])["item_id"].to_pylist() == [10, 11]


def test_a_task_has_no_label_where_a_column_that_decides_it_is_missing():
    log = add_labels(
        table([(1, 10, 0), (1, 11, 50), (1, 12, 60), (1, 13, 65)]),
        table([(1, 10, 60), (9, 9, 65)]),
        Labels(path="x", within=65, name="bought"),
    )
    log = log.append_column("stars", pa.array([5.0, None, np.nan, 1.0]))
    task, other = name_task("click", "loved"), name_task("click", "kept")
    targets = {"click": "stars > 3", task: "stars > 3", other: "bought == 1 and stars > 3"}
    seq, _ = build_sequences(log, None, split={"use": "leave_last_out"}, targets=targets)
    assert seq.get_label_times("click").tolist() == [0, 50, 60, 65]
    assert seq.get_label_times(task).tolist() == [0, NEVER, NEVER, 65]
    assert seq.get_label_times(other).tolist() == [60, NEVER, NEVER, 65]
    assert seq.targets[task].tolist() == seq.targets[other].tolist() == [True, False, False, False]


def test_labels_that_cannot_be_are_one_line():
    log, options = table([(1, 7, 0), (1, 8, 5)]), Labels(path="x", within=10, name="bought")
    with pytest.raises(DataError, match="no event is older than the window of 10 s"):
        drop_unlabelled_events(add_labels(log, table([(1, 9, 6)]), options), [options], required=True)
    with pytest.raises(DataError, match="user_id is string, and int64 in the interactions"):
        add_labels(log, table([(1, 7, 3)], text=True), options)
    with pytest.raises(DataError, match="have a column 'item_id' already"):
        add_labels(log, table([(1, 7, 3)]), Labels(path="x", within=10, name="item_id"))


@pytest.mark.parametrize("prepare", ["memory", "disk"])
def test_a_purchase_does_not_belong_to_an_event_that_is_newer_by_less_than_a_second(tmp_path, prepare):
    events = table([(1, 1, 9_500), (1, 1, 10_900), (1, 2, 20_000), (2, 1, 10_100), (2, 1, 10_300)])
    bought = table([(1, 1, 10_200), (2, 1, 10_200), (1, 2, 20_000), (9, 9, 90_000)])
    for name, rows in (("events", events), ("orders", bought)):
        rows = rows.rename_columns(["user_id", "item_id", "moment_ms"])
        pq.write_table(rows, tmp_path / f"{name}.parquet")
    options = BuildOptions(
        str(tmp_path / "events.parquet"),
        columns={"time": "moment_ms"},
        split={"use": "leave_last_out", "test": 1},
        targets={"finetune": "bought == 1"},
    )
    labels = (Labels(path=str(tmp_path / "orders.parquet"), within=30.0, name="bought"),)
    setup = DataSetup(
        options=options, tokenizer={}, folder=str(tmp_path), seed=7, labels=labels, prepare=prepare
    )
    seq, *_ = make_sequences(setup, tmp_path / "out")
    assert seq.user_id.tolist() == [1, 2]
    assert seq.targets["finetune"].tolist() == [True, False, True, True, False]
    assert list(seq.columns) == ["bought", "label time:finetune", "label end:finetune"]


def test_no_event_reads_a_label_of_its_own_second():
    log = [(1, 10, 0), (1, 11, 2 * DAY), (1, 12, 2 * DAY + 1), (2, 10, 0)]
    clicks = bought_later(log, [(1, 10, 2 * DAY), (2, 10, 40 * DAY)], {"use": "leave_last_out"})
    assert [len(clicks.batch(np.arange(4))["liked"][row]) for row in range(3)] == [0, 0, 1]


@pytest.mark.parametrize("prepare", ["memory", "disk"])
def test_an_empty_label_file_is_named_as_such(tmp_path, prepare):
    setup = make_shop(tmp_path)
    pq.write_table(pq.read_table(tmp_path / "orders.parquet").slice(0, 0), tmp_path / "orders.parquet")
    with pytest.raises(
        DataError, match=r"^data\.labels: \S*/orders\.parquet: the table is empty .*Give a table"
    ):
        make_sequences(replace(setup, prepare=prepare), tmp_path / "out")


def test_earlier_formats_choose_trained_events_by_the_times_of_labels(tmp_path, monkeypatch):
    clicks = bought_later(
        [(1, 10, 0), (1, 11, 3600), (2, 10, 0), (2, 11, 9 * DAY)],
        [(1, 10, 2 * DAY), (2, 10, 8 * DAY)],
        {"use": "leave_last_out"},
        drop_unknown=False,
    )
    columns = {name: values for name, values in clicks.seq.columns.items() if not name.startswith(LABEL_END)}
    monkeypatch.setattr("nonet.samples.sequences.sequences._FORMAT_WITH_LATE_LABELS", 3)
    replace(clicks.seq, columns=columns).save(tmp_path)
    monkeypatch.undo()
    assert read_format(tmp_path) == 3
    earlier = Sequences.load(tmp_path)
    assert earlier.late_labels
    assert earlier.find_labelled("click").tolist() == [True, True, True, False]
    assert earlier.find_targets("click").tolist() == clicks.seq.targets["click"].tolist()


@pytest.mark.parametrize(("compress", "written", "earlier"), [(None, 8, 6), (Compress(compress=DAY), 9, 7)])
def test_earlier_formats_on_disk_open(tmp_path, compress, written, earlier):
    setup = replace(make_shop(tmp_path), prepare="disk", compress=compress)
    seq, _, artifact = make_sequences(setup, tmp_path / "out")
    meta = json.loads((Path(artifact["path"]) / "meta.json").read_text())
    assert meta["format"] == written
    (Path(artifact["path"]) / "meta.json").write_text(json.dumps(meta | {"format": earlier}))
    opened = Sequences.load(artifact["path"])
    assert (
        (opened.late_labels, opened.strict) == (seq.late_labels, seq.strict) == (True, compress is not None)
    )


def test_a_task_trains_on_no_event_that_lacks_a_column_of_it_even_if_the_windows_of_all_labels_are_over():
    log = pa.table(
        {"user_id": [1] * 3, "item_id": [1, 2, 3], "timestamp": [1, 2, 3], "rating": pa.array([5, None, 5])}
    )
    log = add_labels(log, table([(1, 2, 4), (9, 1, 99)]), Labels(path="x", within=5, name="bought"))
    task = name_task("train", "liked")
    targets = {"train": "bought == 1", task: "bought == 1 and rating > 2"}
    seq, _ = build_sequences(
        log, None, split={"use": "leave_last_out", "test": 1, "valid": 0}, targets=targets
    )
    assert seq.find_labelled(task).tolist() == [True, False, True]
