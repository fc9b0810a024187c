from __future__ import annotations

from pathlib import Path

import pytest

from nonet.controller.cluster.view import read_local_view, read_view
from nonet.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "clusters").glob("*.yaml"))


def view_of(tmp_path, text: str):
    file = tmp_path / "view.yaml"
    file.write_text(text)
    return read_view(file)


def test_counted_nodes_fill_their_number_into_id_and_labels(tmp_path):
    found = view_of(
        tmp_path,
        'nodes: [{id: "n{i:02}", count: 5, resources: {CPU: 4, GPU: 2, memory: 1GiB}, used: {GPU: 1},'
        ' labels: {rack: "r{i//2}", slot: "{i%2}"}, devices: {GPU: {memory: 80GB, domain: 2}}}]',
    )
    last = found.nodes[-1]
    assert (last.id, last.labels) == ("n04", {"rack": "r2", "slot": "0"})
    assert (last.total["memory"], last.free["GPU"]) == (2.0**30, 1.0)
    assert (last.devices["GPU"].memory_bytes, last.devices["GPU"].domain) == (80 * 10**9, 2)
    assert (found.get_total("GPU"), found.get_free("GPU")) == (10.0, 5.0)


def test_views_that_cannot_be_are_refused_with_the_key(tmp_path):
    with pytest.raises(ConfigError, match=r"used\.GPU is 3, its resources have 2"):
        view_of(tmp_path, "nodes: [{id: n, resources: {GPU: 2}, used: {GPU: 3}}]")
    with pytest.raises(ConfigError, match="node id 'n' occurs twice"):
        view_of(tmp_path, "nodes: [{id: n, resources: {CPU: 2}}, {id: n, resources: {CPU: 2}}]")
    with pytest.raises(ConfigError, match="expected a size such as"):
        view_of(tmp_path, "nodes: [{id: n, resources: {memory: lots}}]")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_shipped_view_loads_and_its_holders_hold_what_is_used(path):
    found = read_view(path)
    for held in found.held:
        node = found.get_node(held.node)
        assert node.total[held.resource] - node.free[held.resource] >= held.amount


def test_this_machine_has_cores_and_memory():
    node = read_local_view().nodes[0]
    assert node.total["CPU"] >= 1
    assert node.total["memory"] > 1e9


def test_a_node_that_ray_drains_is_not_in_the_view(monkeypatch):
    from nonet.controller.cluster import live

    records = [
        {"NodeID": name, "Alive": name != "dead", "Resources": {"CPU": 2.0}} for name in ("a", "dead", "b")
    ]
    monkeypatch.setattr(live.ray, "nodes", lambda: records)
    monkeypatch.setattr(live, "_list_holdings", lambda: iter(()))
    monkeypatch.setattr(live.ray_state, "available_resources_per_node", dict)
    monkeypatch.setattr(live.ray_state.state, "get_draining_nodes", lambda: {"b": 0})
    assert [node.id for node in live.read_live_view().nodes] == ["a"]
