from __future__ import annotations

from nonet.controller.cluster import Topology
from nonet.controller.cluster.topology import find_domain, list_levels
from nonet.controller.cluster.view import Node


def levels(**keys: list[str]) -> list[str]:
    return list(list_levels(Topology(**keys)))  # type: ignore[arg-type]


def test_levels_go_from_the_narrowest_wanted_outwards():
    assert levels() == [""]
    assert levels(prefer=["host", "rack"]) == ["host", "rack", "zone", ""]
    assert levels(prefer=["device_domain", "rack"]) == ["device_domain", "rack", "zone", ""]
    assert levels(require=["rack"]) == ["rack"]
    assert levels(require=["zone"], prefer=["host"]) == ["host", "rack", "zone"]
    assert levels(require=["host"], prefer=["rack"]) == ["host"]


def test_a_host_is_the_node_unless_a_label_says_otherwise():
    plain, shared = Node("n1", {}, {}), Node("n2", {}, {}, {"host": "h"})
    assert find_domain(plain, "host") == ("host", "n1")
    assert find_domain(shared, "host") == ("host", "h")
    assert find_domain(plain, "rack") is None
    assert find_domain(Node("n", {}, {}, {"ray.io/availability-zone": "a"}), "zone") == ("zone", "a")
