from __future__ import annotations

import pytest

from nonet.controller.cluster.view import ClusterView, Node, read_view
from nonet.controller.plan.planner import plan
from nonet.controller.scenario.scenario import load_scenario
from nonet.errors import ConfigError, PlacementError


def view(*cpus: float) -> ClusterView:
    return ClusterView(tuple(Node(f"n{i}", {"CPU": c}, {"CPU": c}) for i, c in enumerate(cpus)))


def test_by_default_trainer_rollout_and_embedding_are_fused_and_rewards_apart():
    scenario, _ = load_scenario("quickstart")
    groups = {group.name: group.roles for group in plan(scenario, view(2.0)).groups}
    assert groups["trainer"] == ("trainer", "rollout", "embedding")
    assert groups["evaluator"] == ("evaluator", "tokenise")
    assert {"rl.reward.hit", "rl.reward.novelty"} < set(groups)


def test_every_role_can_have_its_own_process_and_the_threads_stay_the_same():
    fused = plan(load_scenario("quickstart")[0], view(2.0))
    apart = plan(
        load_scenario("quickstart", ["roles={rollout: {workers: 1}, embedding: {workers: 1}}"])[0], view(2.0)
    )
    assert {"trainer", "rollout", "embedding", "evaluator"} < {group.name for group in apart.groups}
    assert {group.threads for group in (*fused.groups, *apart.groups)} == {0, 1}


def test_cores_are_shared_by_the_trainers_and_the_evaluator_beside_them():
    for workers, cores, threads in ((1, 2.0, 1), (1, 8.0, 4), (2, 12.0, 4), (2, 2.0, 1)):
        made = plan(
            load_scenario("quickstart", [f"roles={{trainer: {{workers: {workers}}}}}"])[0], view(cores)
        )
        assert made.find_group("trainer").threads == threads
        assert made.find_group("trainer").nodes == ("n0",) * workers


def test_best_fit_keeps_whole_nodes_whole():
    made = plan(load_scenario("quickstart")[0], view(8.0, 1.0))
    assert {node for group in made.groups for node in group.nodes} == {"n1"}


def test_what_does_not_fit_names_group_resource_asked_and_total():
    scenario, _ = load_scenario("nightly-feed")
    with pytest.raises(
        PlacementError, match=r"group 'trainer' \(pool gpu\) needs 32 GPU .* the cluster has 0"
    ):
        plan(scenario, view(64.0))


def test_view_file_counts_nodes_and_refuses_what_it_does_not_know(tmp_path):
    good = tmp_path / "view.yaml"
    good.write_text("nodes: [{id: n, resources: {CPU: 4}, count: 3}]")
    assert [node.id for node in read_view(good).nodes] == ["n-0", "n-1", "n-2"]
    bad = tmp_path / "bad.yaml"
    bad.write_text("nodes: [{id: n, cpus: 4}]")
    with pytest.raises(ConfigError, match="wanted nodes"):
        read_view(bad)
