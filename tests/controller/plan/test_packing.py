from __future__ import annotations

from dataclasses import replace

import pytest
from views import gpu_nodes, node

from nonet.controller.cluster import Topology
from nonet.controller.cluster.placement import Placement
from nonet.controller.cluster.view import ClusterView
from nonet.controller.plan.packing import Capacity, PlacementRequest
from nonet.errors import ConfigError
from nonet.random import rng


def ask(
    workers: int,
    *,
    least: int = 0,
    gang: bool = True,
    require: tuple = (),
    prefer: tuple = (),
    resource: str = "GPU",
):
    topology = Topology(require=list(require), prefer=list(prefer))
    return PlacementRequest(resource, 1.0, least or workers, workers, {}, topology, gang)


def put(capacity: Capacity, wanted: PlacementRequest) -> tuple[dict[str, int], str] | None:
    """Choose and take; counts by node and the level."""
    found = capacity.choose(wanted)
    if found is None:
        return None
    for place, count in found[0]:
        capacity.take(place.id, wanted.resource, count * wanted.each)
    return {place.id: count for place, count in found[0]}, found[1]


def test_four_small_groups_share_a_node_and_three_whole_nodes_stay_whole():
    capacity = Capacity(gpu_nodes(4))
    small = [put(capacity, ask(1)) for _ in range(4)]
    assert {name for found, _ in small for name in found} == {"n000"}
    assert [put(capacity, ask(4)) for _ in range(3)] == [({f"n00{i}": 4}, "") for i in (1, 2, 3)]


def test_two_whole_node_groups_share_a_rack_so_that_a_rack_gang_still_fits():
    capacity = Capacity(gpu_nodes(4, racks=2))
    assert [put(capacity, ask(4)) for _ in range(2)] == [({"n000": 4}, ""), ({"n001": 4}, "")]
    assert put(capacity, ask(8, require=("rack",))) == ({"n002": 4, "n003": 4}, "rack")


def test_a_gang_takes_the_fewest_nodes_and_lone_workers_fill_broken_ones():
    view = ClusterView((node("a", {"GPU": 2}, GPU=8), node("b", {"GPU": 1}, GPU=8), node("c", GPU=8)))
    assert put(Capacity(view), ask(5)) == ({"c": 5}, "")
    assert put(Capacity(view), ask(5, gang=False)) == ({"a": 2, "b": 1, "c": 2}, "")


def test_workers_that_belong_together_are_on_one_node_if_they_fit():
    """Six workers in pairs leave a device of each node with three free, and are packed as before where only odd ones are left."""
    view = ClusterView(tuple(node(name, {"GPU": 3}, GPU=4) for name in "abc"))
    pairs = replace(ask(6), together=2)
    assert put(Capacity(view), ask(6)) == ({"a": 3, "b": 3}, "")
    assert put(Capacity(view), pairs) == ({"a": 2, "b": 2, "c": 2}, "")
    odd = ClusterView(tuple(node(name, {"GPU": 1}, GPU=4) for name in "abcdef"))
    assert put(Capacity(odd), pairs) == (dict.fromkeys("abcdef", 1), "")


def test_preferred_topology_widens_and_required_topology_does_not():
    view = gpu_nodes(4, racks=2)
    assert put(Capacity(view), ask(3, prefer=("host", "rack"))) == ({"n000": 3}, "host")
    assert put(Capacity(view), ask(8, prefer=("host", "rack"))) == ({"n000": 4, "n001": 4}, "rack")
    wide = put(Capacity(view), ask(12, prefer=("host", "rack")))
    assert wide == ({"n000": 4, "n001": 4, "n002": 4}, "")
    assert put(Capacity(view), ask(12, require=("rack",))) is None


def test_the_narrowest_preferred_domain_that_fits_is_the_fullest():
    capacity = Capacity(gpu_nodes(4, racks=2))
    put(capacity, ask(2))
    assert put(capacity, ask(6, prefer=("rack",))) == ({"n000": 2, "n001": 4}, "rack")


def test_nodes_of_unknown_rack_are_no_candidates_for_a_rack_but_for_anything_else():
    view = ClusterView((node("x", GPU=4), node("y", GPU=4), node("z", {}, {"rack": "r"}, GPU=4)))
    assert put(Capacity(view), ask(8, require=("rack",))) is None
    assert put(Capacity(view), ask(4, require=("rack",))) == ({"z": 4}, "rack")
    found = put(Capacity(view), ask(8, prefer=("rack",)))
    assert found is not None
    assert (sum(found[0].values()), found[1]) == (8, "")


def test_racks_of_the_same_name_in_two_zones_are_two_racks():
    view = ClusterView(
        (node("x", {}, {"zone": "a", "rack": "1"}, GPU=4), node("y", {}, {"zone": "b", "rack": "1"}, GPU=4))
    )
    assert put(Capacity(view), ask(8, require=("rack",))) is None


def test_six_and_two_free_devices_of_two_domains_hold_no_gang_of_eight():
    sixteen = gpu_nodes(1, gpus=16, domain=8)
    capacity = Capacity(sixteen)
    assert put(capacity, ask(8, require=("device_domain",))) == ({"n000": 8}, "device_domain")
    capacity = Capacity(sixteen)
    put(capacity, ask(2))
    assert put(capacity, ask(8, require=("device_domain",))) is None
    assert put(capacity, ask(6, require=("device_domain",))) == ({"n000": 6}, "device_domain")


def test_a_node_whose_free_device_ids_are_unknown_offers_no_device_domain():
    whole = gpu_nodes(1, gpus=16, domain=8).nodes[0]
    used = ClusterView((type(whole)(whole.id, whole.total, {**whole.free, "GPU": 8.0}, {}, whole.devices),))
    assert put(Capacity(used), ask(4, require=("device_domain",))) is None
    assert put(Capacity(used), ask(4)) == ({"n000": 4}, "")


def test_cpu_groups_leave_device_nodes_alone_while_others_suffice():
    view = ClusterView((node("a", CPU=2, GPU=4), node("z", CPU=4)))
    assert put(Capacity(view), ask(3, resource="CPU")) == ({"z": 3}, "")
    assert put(Capacity(view), ask(5, resource="CPU")) == ({"a": 1, "z": 4}, "")


@pytest.mark.parametrize("seed", range(20))
def test_any_choice_has_the_workers_asked_for_and_never_more_than_a_node_has(seed):
    random = rng(seed, "fit")
    nodes = []
    for i in range(int(random.integers(1, 12))):
        total = float(random.integers(1, 9))
        labels = {"rack": f"r{random.integers(0, 3)}"} if random.random() < 0.8 else {}
        nodes.append(node(f"n{i:02}", {"GPU": float(random.integers(0, total + 1))}, labels, GPU=total))
    view = ClusterView(tuple(nodes))
    capacity = Capacity(view)
    for _ in range(8):
        most = int(random.integers(1, 14))
        wanted = ask(
            most,
            least=int(random.integers(1, most + 1)),
            gang=bool(random.integers(0, 2)),
            require=("rack",) if random.random() < 0.3 else (),
            prefer=("host", "rack") if random.random() < 0.3 else (),
        )
        whole = sum(int(capacity.get_free(n.id, "GPU")) for n in nodes)
        found = put(capacity, wanted)
        if found is None:
            assert whole < wanted.least or wanted.topology.require
            continue
        assert wanted.least <= sum(found[0].values()) <= wanted.most
        assert all(capacity.get_free(n.id, "GPU") >= -1e-9 for n in nodes)
        racks = {n.labels.get("rack") for n in nodes if n.id in found[0]}
        assert found[1] != "rack" or (len(racks) == 1 and None not in racks)


OWN = """
from nonet.plug import PlacementPolicy

def widest(slots, count, gang, options):
    return [(slot, 1) for slot in sorted(slots, key=lambda slot: -slot.order)[:count]]

WIDEST = PlacementPolicy(widest)
SHORT = PlacementPolicy(lambda slots, count: [])
NONE = PlacementPolicy(lambda slots, count, gang, options: [])
FULL = PlacementPolicy(lambda slots, count, gang, options: [(slots[0], 99)])
"""


def place_by(tmp_path, name):
    (tmp_path / "own.py").write_text(OWN)
    return Capacity(gpu_nodes(4), Placement(use=f"{tmp_path}/own.py:{name}"))


def test_a_policy_from_a_file_chooses_the_nodes(tmp_path):
    assert put(place_by(tmp_path, "WIDEST"), ask(3)) == ({"n001": 1, "n002": 1, "n003": 1}, "")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NONE", "the policy places 0 workers; it must place 3"),
        ("FULL", "the policy puts 99 workers on node n000, where 4 fit"),
    ],
)
def test_a_policy_that_places_too_few_or_too_many_workers_is_refused(tmp_path, name, said):
    with pytest.raises(ConfigError, match=said):
        put(place_by(tmp_path, name), ask(3))


def test_a_policy_that_breaks_its_contract_is_refused_where_the_scenario_is_read(tmp_path):
    with pytest.raises(ValueError, match=r"own.py\): pack does not accept .*; see docs/how-to/extend.md"):
        place_by(tmp_path, "SHORT")
