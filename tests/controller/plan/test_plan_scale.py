from __future__ import annotations

import cProfile
import json
import subprocess
import sys
from pathlib import Path

from nonet.controller.cluster.view import ClusterView, DeviceFacts, Node
from nonet.controller.plan.planner import plan
from nonet.controller.scenario.scenario import Scenario, make_scenario

ROOT = Path(__file__).parents[3]


def big_view(nodes: int = 1000) -> ClusterView:
    """`nodes` nodes of 8 GPUs, 8 to a rack, two zones."""
    total = {"CPU": 128.0, "GPU": 8.0, "memory": 2e12}
    return ClusterView(
        tuple(
            Node(
                f"n{i:04}",
                total,
                dict(total),
                {"zone": "ab"[i // 8 % 2], "rack": f"r{i // 8}"},
                {"GPU": DeviceFacts(80 * 10**9, 8)},
            )
            for i in range(nodes)
        )
    )


def fifty_groups() -> Scenario:
    """Make 51 groups: a trainer of 2,048, an elastic rollout, eight roles of 16, rewards of 1 to 40 workers."""
    own_role = {
        "use": "views:OWN_KIND",
        "pool": "gpu",
        "workers": 16,
        "topology": {"prefer": ["host", "rack"]},
    }
    own = {f"own{i}": own_role for i in range(8)}
    roles = {
        "trainer": {"pool": "gpu", "workers": 2048, "topology": {"prefer": ["rack"]}},
        "rollout": {"pool": "gpu", "workers": {"min": 8, "max": 4096}},
        "evaluator": {"pool": "gpu", "workers": 2},
        **own,
    }
    rewards = {f"r{i}": {"use": "hit", "pool": "gpu", "workers": 1 + i * 3 % 40} for i in range(40)}
    stages = {
        "pretrain": {"epochs": 1, "batch": {"users": 4096}},
        "rl": {"steps": 10, "users": 8192, "rewards": rewards},
    }
    pools = {"gpu": {"device": "cuda"}}
    return make_scenario(
        {"name": "big", "data": {"interactions": "x"}, "pools": pools, "roles": roles, "stages": stages}
    )


def calls_of(scenario: Scenario, view: ClusterView) -> int:
    profile = cProfile.Profile()
    profile.enable()
    plan(scenario, view)
    profile.disable()
    return sum(entry.callcount for entry in profile.getstats())


def test_the_work_of_a_plan_grows_no_faster_than_its_nodes():
    scenario = fifty_groups()
    few, many = (calls_of(scenario, big_view(nodes)) for nodes in (500, 1000))
    assert many <= 3 * few
    assert many <= 2_000_000  # about a second


def test_fifty_groups_on_a_thousand_nodes_are_planned_and_none_overlap():
    scenario, view = fifty_groups(), big_view()
    made = plan(scenario, view)
    assert len(made.groups) >= 50
    used: dict[str, float] = {}
    for group in made.groups:
        for name in group.nodes:
            used[name] = used.get(name, 0.0) + group.bundle["GPU"]
    assert max(used.values()) <= 8
    broken = sum(0 < count < 8 for count in used.values())
    assert broken <= 1, "best fit leaves at most one node in pieces"
    for i in range(8):
        spots = made.find_group(f"own{i}").count_by_node()
        assert len(spots) == 2
        assert len({view.get_node(name).labels["rack"] for name in spots}) == 1


def test_the_plan_is_the_same_bytes_every_time_whatever_the_order_of_the_view_or_the_hash_seed():
    scenario, view = fifty_groups(), big_view(200)
    scenario = scenario.model_copy(update={"roles": {**scenario.roles, "trainer": scenario.roles["own0"]}})
    first = json.dumps(plan(scenario, view).as_dict())
    mixed = ClusterView(tuple(sorted(view.nodes, key=lambda node: hash(node.id))))
    assert json.dumps(plan(scenario, mixed).as_dict()) == first
    code = (
        "import json; from nonet.controller.plan import plan; from nonet.controller.scenario import load_scenario; "
        "from nonet.controller.cluster import read_view; from pathlib import Path; "
        "print(json.dumps(plan(load_scenario('nightly-feed')[0], read_view(Path('examples/clusters/64x8.yaml'))).as_dict()))"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "src"},
            cwd=ROOT,
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(answers) == 1
