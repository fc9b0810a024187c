"""The nodes and devices that a run does not use: when they are isolated, probed again and readmitted."""

from __future__ import annotations

import json

import pytest

from nonet.controller.cluster import health
from nonet.controller.cluster.health import HealthRecord, read_isolations
from nonet.controller.cluster.probes import ClusterProbes
from nonet.errors import ConfigError


@pytest.fixture
def clock():
    return [1000.0]


@pytest.fixture
def record(tmp_path, clock):
    return HealthRecord(tmp_path, lambda: clock[0])


def test_an_isolated_node_is_probed_after_pauses_that_double_up_to_ten_minutes(record, clock):
    entry = record.record_failure("a" * 56, "the disk is full")
    assert entry is not None
    assert entry.describe() == "node aaaaaaaa is isolated: the disk is full"
    pauses = []
    for _ in range(8):
        pauses.append(entry.next_probe - clock[0])
        assert not record.is_due(entry)
        clock[0] = entry.next_probe
        assert record.is_due(entry)
        assert record.record_failure("a" * 56, "the disk is still full") is None, "it is no new isolation"
    assert pauses == [15, 30, 60, 120, 240, 480, 600, 600]
    assert [(e.why, e.failures) for e in record.list_isolated()] == [("the disk is still full", 10)]


def test_a_node_that_passes_is_readmitted_and_stays_in_the_history(record, clock, tmp_path):
    record.record_failure("a", "the disk is full")
    record.record_failure("a", "it computed a wrong product", "cuda 3")
    clock[0] += 40
    assert record.record_success("a") is not None
    assert record.record_success("a") is None
    assert [(e.device, e.describe()) for e in record.list_isolated()] == [
        ("cuda 3", "cuda 3 of node a is isolated: it computed a wrong product")
    ]
    again = HealthRecord(tmp_path, lambda: clock[0])
    assert [e.device for e in again.list_isolated()] == ["cuda 3"], "a resumed run knows"
    assert [(e.device, e.until) for e in read_isolations(tmp_path)] == [("", 1040.0), ("cuda 3", None)]
    again.record_failure("a", "the disk is full again")
    assert len(json.loads((tmp_path / "health.json").read_text())) == 3


def test_isolations_of_nodes_that_have_left_end(record):
    record.record_failure("a", "the disk is full")
    record.record_failure("b", "the disk is full")
    record.end_lost({"b", "c"})
    assert [e.node for e in record.list_isolated()] == ["b"]
    record.end_lost({"b"})


def test_a_run_without_failures_writes_no_file(record, tmp_path):
    assert record.record_success("a") is None
    record.end_lost(())
    assert list(tmp_path.iterdir()) == []


def test_a_node_that_passes_the_second_of_two_probes_is_used(tmp_path, monkeypatch):
    notes, results = (
        [],
        [{"a": "the disk is full", "b": "the disk is full"}, {"a": "", "b": "the disk is full"}],
    )
    probes = ClusterProbes(tmp_path, {}, 1.0, notes.append)
    monkeypatch.setattr(probes, "_probe_nodes", lambda nodes: results.pop(0) if nodes else {})
    probes._check_nodes(["a", "b"])
    assert results == []
    assert [entry.node for entry in probes.list_isolated()] == ["b"]
    assert notes == ["warning: node b is isolated: the disk is full; it is probed again"]


@pytest.mark.parametrize("content", ["{", "{}x", "[3]", '[{"node": "a", "x": 1}]'])
def test_damaged_isolations_are_one_line_that_names_the_file(tmp_path, content):
    (tmp_path / health._FILE).write_text(content)
    with pytest.raises(ConfigError, match=rf"{health._FILE} is damaged") as refused:
        read_isolations(tmp_path)
    assert "\n" not in str(refused.value)
