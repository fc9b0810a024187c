"""The search: its rankings as files that a person reads, and its choice.

After an intended change rewrite them with `python tests/controller/predict/test_plan_search.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nonet.controller.cluster.view import ClusterView, Node, read_view
from nonet.controller.plan.planner import plan
from nonet.controller.predict.calibration import NOMINAL
from nonet.controller.predict.plan_search import search, variants
from nonet.controller.predict.prediction import DataFacts
from nonet.controller.predict.text import search_dict, search_text
from nonet.controller.scenario.scenario import load_scenario

HERE = Path(__file__).parents[1]
FACTS = DataFacts(671, 82691, 1.66, {"finetune": 0.48}, items=3496, asked=4026)
SMALL = ClusterView((Node("local", {"CPU": 2.0, "memory": 16e9}, {"CPU": 2.0, "memory": 16e9}),))
VIEWS = {
    "search-2-cores": lambda: SMALL,
    "search-64x8": lambda: read_view(HERE.parent.parent / "examples" / "clusters" / "64x8.yaml"),
}


def found(view=SMALL, *changes: str):
    return search(load_scenario("quickstart", list(changes))[0], view, FACTS, NOMINAL)


@pytest.mark.parametrize("name", VIEWS)
def test_a_search_ranks_as_in_its_golden_file(name):
    golden = (HERE / "golden" / f"{name}.txt").read_text(encoding="utf-8")
    assert search_text(found(VIEWS[name]())) + "\n" == golden


def test_every_way_is_among_the_variants_and_stale_only_where_rollout_has_a_process():
    names = [name for name, _, _ in variants(load_scenario("quickstart")[0], SMALL)]
    for way in (
        "rollout fused,",
        "rollout apart x2,",
        "rollout collocated,",
        "rollout collocated with staleness 1",
    ):
        assert any(way in name for name in names)
    assert not any("fused with staleness" in name for name in names)
    assert len(set(names)) == len(names)


def test_the_ranking_is_by_time_and_the_choice_is_the_fastest_that_runs():
    ranked = found(VIEWS["search-64x8"]())
    times = [variant.wall_s for variant in ranked.found]
    assert times == sorted(times)
    assert ranked.choice is not None
    assert ranked.choice.wall_s == min(variant.wall_s for variant in ranked.found if variant.runs)
    assert ranked.choice.staleness == 1, "rollout beside the update is the fastest, and it runs"
    assert ranked.choice.plan.group_of("rollout") != ranked.choice.plan.group_of("trainer")
    assert ranked.beyond is None


def test_what_the_choice_says_to_set_gives_its_plan():
    ranked = found(VIEWS["search-64x8"]())
    changes = ranked.changes(ranked.choice)
    assert changes
    changed, _ = load_scenario("quickstart", changes)
    assert plan(changed, VIEWS["search-64x8"]()).groups == ranked.choice.plan.groups
    stale = next(v for v in ranked.found if v.staleness)
    changed, _ = load_scenario("quickstart", ranked.changes(stale))
    assert changed.stages["rl"].rollout.options()["staleness"] == 1


def test_a_scenario_with_roles_of_its_own_is_told_how_to_drop_them():
    ranked = found(SMALL, "roles={rollout: {workers: 2}}")
    fused = next(variant for variant in ranked.found if not variant.roles)
    assert ranked.changes(fused) == ["roles={}"]
    assert found().changes(fused) == []


def test_a_choice_that_cannot_run_is_never_taken_and_is_said_to_be_planned_only():
    ranked = found(SMALL, "storage=s3://runs")
    assert ranked.choice is None
    text = search_text(ranked)
    assert "take the best" not in text
    assert "planned only: " in text
    assert "storage" in text


def test_programs_get_the_same_ranking():
    rows = json.loads(json.dumps(search_dict(found())))
    assert [row["choice"] for row in rows].count(True) == 1
    assert {row["staleness"] for row in rows} == {0, 1}
    stale = next(row for row in rows if row["staleness"])
    assert stale["runs"]
    assert "stages.rl.rollout.staleness=1" in stale["set"]


def test_of_equally_fast_variants_the_one_with_the_fewest_processes_comes_first():
    costs = replace(NOMINAL, exchange=replace(NOMINAL.exchange, call_s=0.0, unit_s=0.0))
    ranked = search(load_scenario("quickstart")[0], VIEWS["search-64x8"](), FACTS, costs)
    same = [v for v in ranked.found if v.wall_s == ranked.found[0].wall_s]
    assert [v.workers for v in same] == sorted(v.workers for v in same)


if __name__ == "__main__":
    for case, view in VIEWS.items():
        (HERE / "golden" / f"{case}.txt").write_text(search_text(found(view())) + "\n", encoding="utf-8")
