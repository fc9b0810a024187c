"""Labels that come later than their events."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.errors import DataError
from nonet.samples.sequences.labels import LabelSetup, labelled
from nonet.workers.roles.tokenizer import DataSetup

DAY = 86_400


def table(rows, text=False):
    user, item, time = zip(*rows, strict=True)
    name = (lambda value: f"u{value}") if text else int
    return pa.table({"user_id": list(map(name, user)), "item_id": list(item), "timestamp": list(time)})


def by_hand(log, labels, within):
    """What `labelled` says, event by event."""
    end = max(time for _, _, time in log + labels)
    values = [float("nan") if end - time < within else 0.0 for _, _, time in log]
    for user, item, time in labels:
        before = [(t, i) for i, (u, it, t) in enumerate(log) if (u, it) == (user, item) and t <= time]
        if before and time - max(before)[0] <= within:
            values[max(before)[1]] = 1.0
    return values


@pytest.mark.parametrize("text", [False, True])
def test_a_label_is_that_of_the_newest_event_before_it_and_late_ones_count_for_nothing(text):
    log = [(1, 7, 0), (1, 7, 50), (1, 8, 60), (2, 7, 70), (2, 9, 400)]
    labels = [(1, 7, 90), (1, 8, 300), (2, 8, 80), (3, 7, 90), (1, 7, 20)]
    made = labelled(table(log, text), table(labels, text), LabelSetup("x", 100, "bought"))
    assert made["bought"].to_pylist()[:4] == [1.0, 1.0, 0.0, 0.0]
    assert np.isnan(made["bought"][4].as_py())


@pytest.mark.parametrize("seed", range(5))
def test_random_logs_get_the_labels_that_counting_by_hand_gives(seed):
    draw = np.random.default_rng(seed)
    log = [tuple(row) for row in draw.integers(0, (5, 4, 300), (200, 3)).tolist()]
    labels = [tuple(row) for row in draw.integers(0, (6, 5, 350), (80, 3)).tolist()]
    made = labelled(table(log), table(labels), LabelSetup("x", 40, "bought"))
    np.testing.assert_array_equal(made["bought"].to_numpy(), np.array(by_hand(log, labels, 40), np.float32))
    left = labelled(table(log), table(labels), LabelSetup("x", 40, "bought", drop_unknown=True))
    assert len(left) == np.isfinite(by_hand(log, labels, 40)).sum()


def test_a_run_learns_from_events_whose_label_came_and_from_none_that_is_still_open(tmp_path):
    rows = [(user, item, DAY * item) for user in range(6) for item in range(6)]
    bought = [(user, 1, DAY + 60) for user in range(3)]
    pq.write_table(table(rows), tmp_path / "events.parquet")
    pq.write_table(table(bought), tmp_path / "bought.parquet")
    setup = DataSetup(
        str(tmp_path / "events.parquet"),
        None,
        {},
        {},
        None,
        {"use": "leave_last_out", "test": 1},
        {"finetune": "bought == 1"},
        {"use": "rq_kmeans"},
        str(tmp_path),
        7,
        labels=LabelSetup(str(tmp_path / "bought.parquet"), 2 * DAY, "bought"),
    )
    seq, _ = setup.build()
    assert not setup.on_disk()
    assert seq.targets["finetune"].sum() == 3
    assert np.isnan(seq.columns["bought"][seq.time > 3 * DAY]).all()


def test_labels_that_cannot_be_are_one_line():
    log, setup = table([(1, 7, 0), (1, 8, 5)]), LabelSetup("x", 10, "bought", drop_unknown=True)
    with pytest.raises(DataError, match="no event is older than the window of 10 s"):
        labelled(log, table([(1, 9, 6)]), setup)
    with pytest.raises(DataError, match="user_id is string, and int64 in the interactions"):
        labelled(log, table([(1, 7, 3)], text=True), setup)
    with pytest.raises(DataError, match="have a column 'item_id' already"):
        labelled(log, table([(1, 7, 3)]), LabelSetup("x", 10, "item_id"))
