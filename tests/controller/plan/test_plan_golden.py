"""Golden plans: what a person reads, kept as files.

After an intended change rewrite them with `python tests/controller/plan/test_plan_golden.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nonet.controller.cluster.view import ClusterView, Node, read_view
from nonet.controller.plan.planner import plan
from nonet.controller.scenario.scenario import load_scenario

HERE = Path(__file__).parents[1]
BIG = HERE.parent.parent / "examples" / "clusters" / "64x8.yaml"
SMALL = ClusterView((Node("local", {"CPU": 2.0, "memory": 16e9}, {"CPU": 2.0, "memory": 16e9}),))
APART = "roles={rollout: {workers: 2}, embedding: {collocate: rollout}}"
CASES = {
    "nightly-feed-64x8": lambda: plan(load_scenario("nightly-feed")[0], read_view(BIG)),
    "nightly-feed-grows-64x8": lambda: plan(
        load_scenario("nightly-feed", ["stages.rl.roles={trainer: {pool: gpu, workers: 64}}"])[0],
        read_view(BIG),
    ),
    "quickstart": lambda: plan(load_scenario("quickstart")[0], SMALL),
    "quickstart-apart": lambda: plan(load_scenario("quickstart", [APART])[0], SMALL),
}


@pytest.mark.parametrize("name", CASES)
def test_a_shipped_scenario_has_the_plan_in_its_golden_file(name):
    assert CASES[name]().format_text() + "\n" == (HERE / "golden" / f"{name}.txt").read_text(encoding="utf-8")


if __name__ == "__main__":
    for case, make in CASES.items():
        (HERE / "golden" / f"{case}.txt").write_text(make().format_text() + "\n", encoding="utf-8")
