"""Plans of a run in progress whose number of workers changes."""

from __future__ import annotations

import pytest

from nonet.controller.cluster.view import ClusterView, Node
from nonet.controller.plan.planner import Plan, RunningGroups, plan
from nonet.controller.plan.resolved import scale_roles
from nonet.controller.scenario.scenario import Scenario, load_scenario
from nonet.errors import ConfigError, PlacementError

APART = "roles={rollout: {workers: 2}, embedding: {workers: 1}}"
ELASTIC = "roles={rollout: {workers: {min: 1, max: 4}, pool: x}, embedding: {fuse: trainer}}"
GPU = "pools={x: {device: cuda}}"


def load(*changes: str) -> Scenario:
    return load_scenario("quickstart", list(changes))[0]


def count_workers(made: Plan, stage: str) -> dict[str, int]:
    return {group.name: group.workers for group in made.list_groups(stage)}


def make_node(name: str, cpus: float, gpus: float = 0.0) -> Node:
    total = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
    return Node(name, total, dict(total))


def hold(view: ClusterView, made: Plan) -> ClusterView:
    """Return the view of a cluster on which the groups of a plan run."""
    free = {node.id: dict(node.free) for node in view.nodes}
    for group in made.groups:
        for node in group.nodes:
            for resource, amount in group.bundle.items():
                free[node][resource] -= amount
    nodes = (Node(node.id, node.total, free[node.id], node.labels) for node in view.nodes)
    return ClusterView(tuple(nodes))


def test_a_scaled_role_is_placed_again_and_all_other_groups_stay():
    scenario, view = load(APART), ClusterView((make_node("a", 4.0), make_node("b", 4.0)))
    before = plan(scenario, view)
    scaled = scale_roles(scenario, {"rollout": 5, "novelty": 2})
    after = plan(scaled, hold(view, before), running=RunningGroups("rl", before.groups))
    assert count_workers(after, "rl") == count_workers(before, "rl") | {"rollout": 5, "rl.reward.novelty": 2}
    nodes = {group.name: group.nodes for group in after.groups}
    scaled_groups = ("rollout", "rl.reward.novelty")
    assert all(nodes[group.name] == group.nodes for group in before.groups if group.name not in scaled_groups)


def test_roles_that_share_workers_follow_the_role_that_has_them():
    scaled = scale_roles(
        load("roles={trainer: {workers: 2}, evaluator: {fuse: trainer, workers: 2}}"), {"trainer": 3}
    )
    assert scaled.roles["trainer"].workers == scaled.roles["evaluator"].workers == 3
    made = plan(scaled, ClusterView((make_node("a", 8.0),)))
    assert count_workers(made, "rl")["trainer"] == 3


def test_a_role_of_one_stage_is_scaled_where_it_has_workers_of_its_own():
    scenario = load("stages.rl.roles={rollout: {workers: 2}}")
    scaled = scale_roles(scenario, {"rollout": 3})
    view = ClusterView((make_node("a", 8.0),))
    before = plan(scenario, view)
    after = plan(scaled, hold(view, before), running=RunningGroups("pretrain", before.groups))
    assert "rollout" not in count_workers(after, "pretrain")
    assert count_workers(after, "rl")["rollout"] == 3


def test_a_change_within_a_stage_of_its_own_roles_keeps_them_and_plans_the_way_back():
    scenario = load("stages.finetune.roles={rollout: {workers: 1}}")
    view = ClusterView((make_node("a", 8.0),))
    before = plan(scenario, view)
    running = RunningGroups("finetune", before.list_groups("finetune"))
    after = plan(scale_roles(scenario, {"trainer": 2}), view, running=running)
    assert count_workers(after, "finetune") | {"rollout": 1, "trainer": 2} == count_workers(after, "finetune")
    assert "rollout" not in count_workers(after, "rl")


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ({"rollout": 2}, "rollout shares the workers of trainer; change those: trainer=2"),
        ({"rolout": 2}, r"there is no role or reward 'rolout' \(did you mean 'rollout'\?\)"),
        ({"trainer": 0}, "trainer=0: the number of workers must be at least 1"),
    ],
)
def test_a_number_that_no_role_can_have_is_refused(workers, words):
    with pytest.raises(ConfigError, match=words):
        scale_roles(load(), workers)


def test_an_elastic_role_is_scaled_within_its_bounds_only():
    scenario = load(ELASTIC, GPU)
    assert scale_roles(scenario, {"rollout": 4}).roles["rollout"].workers == 4
    with pytest.raises(ConfigError, match=r"roles\.rollout\.workers is between 1 and 4"):
        scale_roles(scenario, {"rollout": 5})


def test_an_elastic_role_grows_onto_a_node_that_joins_and_leaves_one_that_is_drained():
    scenario = load(ELASTIC, GPU)
    head, small = make_node("a", 8.0), make_node("b", 1.0, gpus=2.0)
    view = ClusterView((head, small))
    before = plan(scenario, view)
    assert count_workers(before, "rl")["rollout"] == 2
    running = RunningGroups("rl", before.groups, grows=True)
    same = plan(scenario, hold(view, before), running=running)
    assert count_workers(same, "rl") == count_workers(before, "rl")
    joined = ClusterView((*hold(view, before).nodes, make_node("c", 1.0, gpus=2.0)))
    grown = plan(scenario, joined, running=running)
    assert count_workers(grown, "rl")["rollout"] == 4
    drained = ClusterView(tuple(node for node in joined.nodes if node.id != "b"))
    moved = plan(scenario, drained, running=RunningGroups("rl", before.groups))
    assert set(moved.find_group("rollout").nodes) == {"c"}
    with pytest.raises(PlacementError, match="rollout"):
        plan(scenario, ClusterView((head,)), running=RunningGroups("rl", before.groups))
