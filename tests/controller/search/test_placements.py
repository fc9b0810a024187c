"""The search: its rankings as files that a person reads, and its choice.

After an intended change rewrite them with `python tests/controller/search/test_placements.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nonet.controller.cluster.view import ClusterView, Node, read_view
from nonet.controller.plan.planner import plan
from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.search.placements import list_variants, search_placements
from nonet.controller.search.text import format_search, make_search_records

HERE = Path(__file__).parents[1]
SMALL = ClusterView((Node("local", {"CPU": 2.0, "memory": 16e9}, {"CPU": 2.0, "memory": 16e9}),))
VIEWS = {
    "search-2-cores": lambda: SMALL,
    "search-64x8": lambda: read_view(HERE.parent.parent / "examples" / "clusters" / "64x8.yaml"),
}


def found(view=SMALL, *changes: str):
    return search_placements(load_scenario("quickstart", list(changes))[0], view)


@pytest.mark.parametrize("name", VIEWS)
def test_a_search_ranks_as_in_its_golden_file(name):
    golden = (HERE / "golden" / f"{name}.txt").read_text(encoding="utf-8")
    assert format_search(found(VIEWS[name]())) + "\n" == golden


def test_every_way_is_among_the_variants():
    names = [name for name, _ in list_variants(load_scenario("quickstart")[0], SMALL)]
    for way in ("rollout fused,", "rollout apart x2,", "rollout collocated,"):
        assert any(way in name for name in names)
    assert len(set(names)) == len(names)


def test_the_ranking_is_by_bytes_held_then_moved_then_processes_and_the_choice_is_the_first_that_runs():
    ranked = found(VIEWS["search-64x8"]())
    keys = [(v.held_bytes, v.moved_bytes, v.processes) for v in ranked.found if v.plan]
    assert keys == sorted(keys)
    assert len(set(keys)) > 10
    assert ranked.choice is next(v for v in ranked.found if v.plan)
    moved = {v.name: v.moved_bytes for v in ranked.found}
    fused = "trainer x1, rollout fused, embedding fused, evaluator fused"
    assert moved[fused] < moved["trainer x2, rollout fused, embedding fused, evaluator fused"]


def test_what_the_choice_says_to_set_gives_its_plan():
    ranked = found(VIEWS["search-64x8"]())
    changes = ranked.list_changes(ranked.choice)
    assert changes
    changed, _ = load_scenario("quickstart", changes)
    assert plan(changed, VIEWS["search-64x8"]()).groups == ranked.choice.plan.groups


def test_a_scenario_with_roles_of_its_own_is_told_how_to_drop_them():
    ranked = found(SMALL, "roles={rollout: {workers: 2}}")
    fused = next(variant for variant in ranked.found if not variant.roles)
    assert ranked.list_changes(fused) == ["roles={}"]
    assert found().list_changes(fused) == []


def test_programs_get_the_same_ranking():
    rows = json.loads(json.dumps(make_search_records(found())))
    assert [row["choice"] for row in rows].count(True) == 1
    assert {"held_bytes", "moved_bytes", "processes"} <= set(rows[0])


if __name__ == "__main__":
    for case, view in VIEWS.items():
        (HERE / "golden" / f"{case}.txt").write_text(format_search(found(view())) + "\n", encoding="utf-8")
