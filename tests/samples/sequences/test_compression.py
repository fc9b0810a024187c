import numpy as np
import pyarrow as pa
import pytest

from nonet.errors import DataError
from nonet.samples.batches import (
    ClickRows,
    cut_target_windows,
    gather_seen_items,
    make_prompt_batch,
    make_window_batch,
)
from nonet.samples.sequences import build_sequences, compress_log, compute_label_times, expand_log
from nonet.samples.sequences.labels import NEVER, REPEAT_EVENTS, _compute_outcomes, name_task
from nonet.samples.tables import as_numbers

DAY = 86400


def log_of(users: int, seed: int, *, least: int = 3, most: int = 12) -> pa.Table:
    """Make a log per user: few items and few moments, so that repeats, ties and ends of periods are common; any row order."""
    rng = np.random.default_rng(seed)
    user = rng.permutation(np.repeat(np.arange(users), rng.integers(least, most, users)))
    moments = np.array([0, 1, 5, DAY - 1, DAY, DAY + 1, DAY + 7, 2 * DAY - 1, 2 * DAY])
    return pa.table(
        {
            "user_id": user,
            "item_id": rng.integers(0, 4, len(user)),
            "timestamp": moments[rng.integers(0, len(moments), len(user))],
            "event": pa.array(np.array(["buy", "click", "view"])[rng.integers(0, 3, len(user))]),
            "rating": rng.random(len(user), dtype=np.float32),
        }
    )


def visible_pairs(batch, samples) -> tuple[np.ndarray, ...]:
    """Return (sequence, time of its sample, context event) of everything that a sample of the batch sees.

    samples: (sequence, place or None for a prompt, time).
    """
    parts = []
    for row, place, time in samples:
        first, last = int(batch.item.offsets[row]), int(batch.item.offsets[row + 1])
        events = np.arange(first, last if place is None else place)
        parts.append(np.stack([np.full(len(events), row), np.full(len(events), time), events]))
    return tuple(np.concatenate(parts, axis=1))


def leaks(log: pa.Table, by: str = "item") -> tuple[int, int]:
    """(values at or after their sample's time, values looked at) over all prompts and all training targets of a log."""
    items = pa.table({"item_id": np.arange(4), "categories": [["a"], ["a"], ["b"], []]})
    compressed = compress_log(log, DAY, by, items)
    seq, there = build_sequences(
        compressed.events, items, split={"use": "leave_last_out", "test": 1, "valid": 0, "rl": 0}, strict=True
    )
    sids = np.zeros((len(there), 1), np.int32)
    wrong = looked = 0
    users = np.repeat(np.arange(len(seq)), seq.lengths)
    positions = np.arange(len(seq.item)) - seq.offsets[users]
    prompts = make_prompt_batch(seq, sids, users, positions, history=20, stage="s")
    asked = [(row, None, time) for row, time in enumerate(seq.time.tolist())]
    windows = cut_target_windows(seq, np.arange(len(seq)), history=4, stage="s", epoch=0, seed=1, target=None)
    taught = make_window_batch(seq, sids, windows, stage="s", epoch=0, target=None)
    row_of = np.repeat(np.arange(len(taught.item)), np.diff(taught.item.offsets.numpy()))
    targets = np.flatnonzero(taught.loss_mask.values.numpy())
    learned = [(row_of[at], at, int(taught.time.values[at])) for at in targets.tolist()]
    for batch, samples, owner in ((prompts, asked, users), (taught, learned, windows[0])):
        row, time, event = visible_pairs(batch, samples)
        first = batch.time.values.numpy()[event]
        span, count = (
            batch.context["span"].values.numpy()[event],
            batch.context["count"].values.numpy()[event],
        )
        wrong += int((first >= time).sum() + (first + span >= time).sum())
        older = _before(
            log, items, by, seq.user_id[owner[row]], batch.item.values.numpy()[event], first, time
        )
        wrong += int((count != older).sum() if batch is prompts else (count > older).sum())
        looked += 3 * len(event)
    history = gather_seen_items(seq, users, positions)
    cuts = np.repeat(np.arange(len(users)), np.diff(history.offsets))
    assert len(cuts) == len(visible_pairs(prompts, asked)[0])
    return wrong, looked


def _before(log: pa.Table, items: pa.Table, by: str, user, item, first, time) -> np.ndarray:
    """How many rows of the log one event may stand for, by hand: of its user, item and day, before the sample's time."""
    same = np.array([0, 1, 2, 3]) if by == "item" else np.array([0, 0, 2, 3])
    day = log["timestamp"].to_numpy() // DAY
    group = (log["user_id"].to_numpy() * 4 + same[log["item_id"].to_numpy()]) * 8 + day
    rows = group * (4 * DAY) + log["timestamp"].to_numpy()
    rows.sort()
    asked = (user * 4 + same[item]) * 8 + first // DAY
    return np.searchsorted(rows, asked * (4 * DAY) + np.minimum(time, 4 * DAY - 1)) - np.searchsorted(
        rows, asked * (4 * DAY)
    )


@pytest.mark.parametrize("by", ["item", "category"])
def test_ten_thousand_random_logs_with_ties_leak_nothing(by):
    wrong, looked = leaks(log_of(10_000, seed=3), by)
    assert wrong == 0
    assert looked > 100_000


def test_the_leak_test_finds_a_leak():
    log = log_of(200, seed=5)
    assert leaks(log)[0] == 0
    ahead = log.set_column(2, "timestamp", pa.array(np.sort(log["timestamp"].to_numpy())))
    compressed = compress_log(ahead, DAY, "item")
    whole = len(compressed.repeats)
    assert (
        compressed.events["count"].to_numpy().sum() - len(compressed.events) < whole
    )  # some repeats came too late to be counted


@pytest.mark.parametrize("by", ["item", "category"])
@pytest.mark.parametrize("seed", range(5))
def test_expanding_gives_back_every_row(by, seed):
    log = log_of(300, seed)
    items = pa.table({"item_id": np.arange(4), "categories": [["a"], ["a"], [], ["b"]]})
    compressed = compress_log(log, DAY, by, items)
    assert len(compressed.events) < len(log)
    assert expand_log(compressed).equals(log.combine_chunks())


def test_one_event_says_how_many_it_stands_for_as_of_the_next():
    log = pa.table(
        {
            "user_id": [1, 1, 1, 1, 1],
            "item_id": [7, 7, 8, 7, 7],
            "timestamp": [10, 30, 50, 60, DAY + 1],
            "event": ["view", "click", "view", "buy", "view"],
        }
    )
    events = compress_log(log, DAY, "item").events
    assert events["timestamp"].to_pylist() == [10, 50, DAY + 1]
    assert events["count"].to_pylist() == [2, 1, 1]  # the one at 60 came after the user's next event
    assert events["span"].to_pylist() == [20, 0, 0]
    assert events["kinds"].to_pylist() == ["click|view", "view", "view"]


def test_a_strict_prompt_sees_nothing_of_its_own_second():
    log = pa.table({"user_id": [1, 1, 1, 1], "item_id": [1, 2, 3, 4], "timestamp": [5, 9, 9, 9]})
    split = {"use": "leave_last_out", "test": 1, "valid": 0, "rl": 0}
    for strict, lengths in ((False, [0, 1, 2, 3]), (True, [0, 1, 1, 1])):
        seq, items = build_sequences(log, None, split=split, strict=strict)
        batch = make_prompt_batch(
            seq, np.zeros((len(items), 1), np.int32), np.zeros(4, int), np.arange(4), history=9, stage="s"
        )
        assert np.diff(batch.item.offsets.numpy()).tolist() == lengths


def test_what_cannot_be_compressed_is_one_line():
    log = pa.table({"user_id": [1], "item_id": [1], "timestamp": [5], "count": [1]})
    with pytest.raises(DataError, match="have a column 'count' already"):
        compress_log(log, DAY, "item")
    with pytest.raises(DataError, match=r"by: category wants data\.items"):
        compress_log(log.drop_columns(["count"]), DAY, "category")


def interleaved() -> pa.Table:
    """One user who returns to item 1 in between other items, within one day; the times are ten seconds apart."""
    kinds = ["view", "view", "click", "view", "buy", "view", "view"]
    times = np.arange(7) * 10
    return pa.table(
        {"user_id": [1] * 7, "item_id": [1, 2, 1, 1, 1, 3, 1], "timestamp": times, "event": kinds}
    )


def sequences_of(log: pa.Table):
    split = {"use": "leave_last_out", "test": 1, "valid": 0, "rl": 0}
    return build_sequences(compress_log(log, DAY, "item").events, None, split=split, strict=True)[0]


def columns_of_prompt(seq, position: int) -> dict[str, list[int]]:
    batch = make_prompt_batch(seq, np.zeros((3, 1), np.int32), [0], [position], history=9, stage="s")
    return {name: batch.context[name].values.tolist() for name in ("count", "span", "kinds")}


def test_a_prompt_counts_the_interleaved_returns_that_are_older_than_itself():
    seq = sequences_of(interleaved())
    assert seq.item.tolist() == [0, 1, 2]  # items 1, 2 and 3, each once
    asked = columns_of_prompt(seq, 2)
    assert asked["count"] == [4, 1]  # the return at 60 s came after item 3
    assert asked["span"] == [40, 0]
    assert asked["kinds"] == as_numbers(np.array(["buy|click|view", "view"])).tolist()
    assert columns_of_prompt(seq, 1)["count"] == [1]


def test_a_request_after_all_events_counts_every_return():
    seq = sequences_of(interleaved())
    assert seq.get_history_columns(0, 3)["count"].tolist() == [5, 1, 1]
    assert seq.get_history_columns(0, 3)["span"].tolist() == [60, 0, 0]


def test_saved_sequences_count_returns_as_those_in_memory(tmp_path):
    seq = sequences_of(log_of(40, seed=2))
    seq.save(tmp_path)
    users, positions = np.flatnonzero(seq.lengths > 1), np.ones((seq.lengths > 1).sum(), int)
    sids = np.zeros((4, 1), np.int32)
    batches = [
        make_prompt_batch(one, sids, users, positions, history=9, stage="s")
        for one in (seq, type(seq).load(tmp_path), seq.slice_users(0, len(seq)))
    ]
    counts = [batch.context["count"].values.tolist() for batch in batches]
    assert counts[0] == counts[1] == counts[2]
    assert max(counts[0]) > 1


@pytest.mark.parametrize("users", [1, 7])
def test_a_part_of_the_users_keeps_their_returns(users):
    seq = sequences_of(log_of(30, seed=4))
    some = seq.slice_users(users, users + 9)
    first, last = int(seq.offsets[users]), int(seq.offsets[users + 9])
    whole = seq.get_history_columns(first, last)["count"]
    assert some.get_history_columns(0, last - first)["count"].tolist() == whole.tolist()


def test_a_click_row_does_not_know_that_its_event_will_be_repeated():
    log = interleaved().append_column("clicked", pa.array(np.ones(7)))
    split = {"use": "leave_last_out", "test": 0, "valid": 0, "rl": 0}
    events = compress_log(log, DAY, "item").events
    assert events["count"].to_pylist() == [1, 1, 1]
    late = log.set_column(1, "item_id", pa.array([1, 1, 1, 2, 2, 3, 3]))
    seq, items = build_sequences(
        compress_log(late, DAY, "item").events, None, split=split, strict=True, targets={"s": "clicked == 1"}
    )
    assert seq.columns["count"].tolist() == [3, 2, 2]
    bags = ClickRows.from_target(seq, items, "s", ["count"], 9).batch(np.arange(3))
    same = ClickRows.from_target(seq, items, "s", ["count"], 9).keys.get_keys("count", np.ones(3, np.int64))
    assert bags["count"].values.tolist() == same.tolist()


@pytest.mark.parametrize(
    "condition",
    ["event == 'buy'", "event != 'view'", "event in ('buy', 'click') and rating > 0.5", "rating > 0.5"],
)
def test_a_target_over_kinds_holds_for_an_event_of_which_one_row_has_such_a_kind(condition):
    log = log_of(40, 3)
    seq, _ = build_sequences(
        compress_log(log, DAY, "item").events, None, split={"test": 1}, targets={"t": condition}
    )
    rows = log.to_pandas()
    rows["day"] = rows["timestamp"] // DAY
    # A group has its first row's other columns; rows of one second are in the order of the log.
    rows = rows.sort_values(["user_id", "timestamp"], kind="stable")
    rating = rows.groupby(["user_id", "day", "item_id"], sort=False)["rating"].transform("first")
    event = rows["event"]
    holds = {
        "event == 'buy'": event == "buy",
        "event != 'view'": event != "view",
        "event in ('buy', 'click') and rating > 0.5": event.isin(["buy", "click"]) & (rating > 0.5),
        "rating > 0.5": rating > 0.5,
    }[condition]
    expected = holds.groupby([rows["user_id"], rows["day"], rows["item_id"]]).any()
    user = seq.user_id[np.repeat(np.arange(len(seq)), seq.lengths)]
    found = dict(zip(zip(user, seq.time // DAY, seq.item, strict=True), seq.targets["t"], strict=True))
    assert {key: bool(value) for key, value in found.items()} == expected.to_dict()
    assert 0 < sum(found.values()) < len(found)


def test_the_outcome_of_a_task_over_kinds_is_0_only_where_no_row_has_such_a_kind():
    log = pa.table(
        {
            "user_id": [1, 1, 1, 1, 1],
            "item_id": [1, 1, 2, 2, 3],
            "timestamp": [10, 20, 30, 40, 50],
            "event": ["view", "buy", "view", "view", "buy"],
        }
    )
    events = compress_log(log, DAY, "item").events
    task = name_task("t", "order")
    assert _compute_outcomes("event == 'buy'", events).tolist() == [1, 0, 1]
    assert (compute_label_times(events, {task: "event == 'buy'"})[f"label time:{task}"] < NEVER).all()


def test_a_kind_counts_for_an_event_only_until_the_end_of_its_part_of_the_split():
    """Each user has one event, with a row of an own kind at each later time."""
    times, first_times = np.array([10, 20, 29, 30, 39, 40, 49, 50, 60]), (10, 20, 30, 40, 50)
    time = np.concatenate([times[times >= first] for first in first_times])
    log = pa.table(
        {
            "user_id": np.cumsum(np.diff(time, prepend=0) < 0),
            "item_id": np.ones(len(time), np.int64),
            "timestamp": time,
            "event": time.astype(str),
        }
    )
    for starts in ((), (20, 40, 50), (30, 30, 50), (50, 50, 50)):
        ends = [min((start for start in starts if start > first), default=99) for first in first_times]
        events = compress_log(log, DAY, "item", part_starts=starts).events
        assert events[REPEAT_EVENTS].to_pylist() == [
            times[(times > first) & (times < end)].astype(str).tolist()
            for first, end in zip(first_times, ends, strict=True)
        ]
    assert REPEAT_EVENTS not in compress_log(log, DAY, "item", has_repeat_events=False).events.column_names
