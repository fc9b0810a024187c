"""What the preparation of a click model tells of labels: of its targets by split, and of label files."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from likes_world import change_scenario, make_likes
from ring_world import Prepared

from nonet.controller.scenario import load_scenario
from nonet.controller.scenario.settings import describe_lost_labels, has_many_lost_labels
from nonet.deploy.report.verdicts import collect_findings


@pytest.mark.parametrize("has_files", [False, True])
def test_counts_of_targets_and_of_label_files_are_apart(tmp_path: Path, has_files: bool):
    make_likes(tmp_path)
    table = pq.read_table(tmp_path / "interactions.parquet")
    pq.write_table(table.select(["user_id", "item_id", "timestamp"]), tmp_path / "train.parquet")
    files = {"labels": {"path": "train.parquet", "within": "1h", "name": "train"}} if has_files else {}
    path = change_scenario(tmp_path, data=files)
    data = Prepared(path, tmp_path / "prepared").facts["data"]
    assert set(data["labels"]) == {"train"}
    assert set(data["labels"]["train"]) >= {"training", "test"}
    assert set(data.get("label_files", ())) == ({"train"} if has_files else set())
    text = describe_lost_labels(data)
    assert "found no event" not in text
    waiting = (data.get("label_files") or {}).get("train", {}).get("unknown", 0)
    assert text == (
        f"Events whose label is not known, because its window has not ended: {waiting} of train."
        if has_files
        else ""
    )
    assert bool(waiting) == has_files
    assert not has_many_lost_labels(data)
    scenario, _ = load_scenario(path)
    list(scenario.model.spec.list_data_notes(scenario, data))
    assert collect_findings({"stages": {"train": {"auc": 0.7}}, "data": data})
