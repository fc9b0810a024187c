from __future__ import annotations

import pickle

import pytest
from views import RL, gpu_nodes, node, scenario

from nonet.controller.cluster.view import ClusterView
from nonet.controller.plan.packing import Capacity
from nonet.controller.plan.placement import change_groups
from nonet.controller.plan.planner import plan
from nonet.controller.plan.requests import make_group_requests
from nonet.controller.plan.resolved import resolve_run
from nonet.controller.scenario.scenario import load_scenario, make_scenario, to_document
from nonet.errors import ConfigError, PlacementError

MANY = ClusterView((node("n0", CPU=8, GPU=4), node("n1", CPU=8, GPU=4), node("n2", CPU=8, NPU=4)))


def names(**roles) -> dict[str, tuple[str, ...]]:
    return {
        request.name: request.roles for request in make_group_requests(resolve_run(scenario(roles=roles)))
    }


def replan(asked, view, groups):
    """Return what must stop and start so that these groups become those of the whole run."""
    capacity = Capacity(view, asked.placement)
    return change_groups(resolve_run(asked), None, groups, capacity, view, threads=0)[0]


def test_fusing_into_a_fused_role_lands_in_the_same_process():
    found = names(rollout={"fuse": "trainer"}, embedding={"fuse": "rollout"}, evaluator={"fuse": "embedding"})
    assert found == {"trainer": ("trainer", "rollout", "embedding", "evaluator", "tokenise")}


def test_a_role_that_is_fused_has_as_many_workers_as_its_host_also_in_the_controller_and_in_a_stored_scenario():
    made = scenario(roles={"trainer": {"workers": 2}, "embedding": {"fuse": "trainer"}})
    copies = pickle.loads(pickle.dumps(made)), make_scenario(to_document(made))
    for each in (made, *copies):
        (request,) = [one for one in make_group_requests(resolve_run(each)) if one.name == "trainer"]
        assert (request.least, request.most) == (2, 2)
    stated = scenario(roles={"trainer": {"workers": 2}, "embedding": {"fuse": "trainer", "workers": 1}})
    with pytest.raises(ConfigError, match=r"roles\.embedding\.workers is 1, but it shares with trainer"):
        make_group_requests(resolve_run(pickle.loads(pickle.dumps(stated))))


def test_circles_of_fuse_and_collocate_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"roles are fused in a circle \(rollout -> embedding -> rollout\)"):
        names(rollout={"fuse": "embedding"}, embedding={"fuse": "rollout"})
    with pytest.raises(ConfigError, match="is collocated with itself"):
        names(trainer={"collocate": "rollout"}, rollout={"collocate": "trainer"})


def test_sizes_and_pools_of_those_that_share_must_agree():
    with pytest.raises(
        ConfigError, match=r"roles\.rollout\.workers is 3, but it shares with trainer, whose workers is 2"
    ):
        names(trainer={"workers": 2}, rollout={"collocate": "trainer", "workers": 3})
    with pytest.raises(ConfigError, match=r"roles\.rollout\.pool is npu, .* whose pool is gpu"):
        names(trainer={"pool": "gpu"}, rollout={"fuse": "trainer", "pool": "npu"})


def test_k_groups_on_one_device_ask_a_kth_of_it_each_and_never_more_than_all():
    roles = {
        "trainer": {"pool": "gpu", "workers": 2},
        "rollout": {"collocate": "trainer"},
        "mine": {"use": "views:OWN_KIND", "collocate": "trainer"},
    }
    made = plan(scenario(roles=roles), MANY)
    groups = [made.find_group(role) for role in ("trainer", "rollout", "mine")]
    assert [group.devices for group in groups] == [0.3333] * 3
    assert len({group.nodes for group in groups}) == 1
    assert [group.bundle for group in groups] == [{"GPU": 1.0}, {}, {}]


def test_one_plan_mixes_collocated_fused_and_apart_over_three_kinds_of_device():
    roles = {
        "trainer": {"pool": "gpu", "workers": 4},
        "embedding": {"fuse": "trainer"},
        "rollout": {"pool": "npu", "workers": 2},
        "judge": {"use": "views:OWN_KIND", "collocate": "rollout"},
    }
    made = plan(scenario(roles=roles, stages={"rl": RL}), MANY)
    placed = {group.name: (group.resource, set(group.nodes)) for group in made.groups}
    assert placed["trainer"] == ("GPU", {"n0"})
    assert placed["rollout"] == placed["judge"] == ("NPU", {"n2"})
    assert placed["rl.reward.hit"][0] == placed["evaluator"][0] == "CPU"


def test_elastic_groups_leave_later_ones_what_they_need_at_least():
    pool = {"pool": "gpu"}
    roles = {
        "trainer": {**pool, "workers": 3},
        "rollout": {**pool, "workers": {"min": 1, "max": 64}},
        "mine": {"use": "views:OWN_KIND", **pool, "workers": {"min": 2, "max": 64}},
    }
    made = plan(scenario(roles=roles), MANY)
    assert [made.find_group(role).workers for role in ("trainer", "rollout", "mine")] == [3, 3, 2]


def test_evaluators_may_be_elastic_except_for_a_model_that_has_its_own():
    roles = {"evaluator": {"pool": "gpu", "workers": {"min": 1, "max": 64}}, "trainer": {"pool": "gpu"}}
    made = plan(scenario(roles=roles), MANY)
    free_gpus = sum(int(node.free.get("GPU", 0)) for node in MANY.nodes)
    assert made.find_group("evaluator").workers == free_gpus - 1 > 1
    clicks, _ = load_scenario("ctr", ["roles={evaluator: {workers: {min: 1, max: 2}}}"])
    with pytest.raises(ConfigError, match=r"roles\.evaluator\.workers above 1 with model\.use: deepfm"):
        plan(clicks, MANY)


def test_an_elastic_group_short_of_its_minimum_says_what_would_fit():
    roles = {"rollout": {"pool": "npu", "workers": {"min": 6, "max": 8}}}
    with pytest.raises(
        PlacementError,
        match=r"group 'rollout' \(pool npu\) needs 6 NPU.*lower roles\.rollout\.workers\.min to 4",
    ):
        plan(scenario(roles=roles), MANY)


def test_free_devices_behind_other_labels_are_pointed_out():
    pools = {"gpu": {"device": "cuda", "labels": {"zone": "b"}}}
    view = ClusterView(
        (node("a", {}, {"zone": "a"}, CPU=4, GPU=4), node("b", {}, {"zone": "b"}, CPU=4, GPU=2))
    )
    with pytest.raises(
        PlacementError,
        match=r"with labels .*'zone': 'b'.*widen pools\.gpu\.labels \(4 more GPU are free elsewhere\)",
    ):
        plan(scenario(pools=pools, roles={"trainer": {"pool": "gpu", "workers": 4}}), view)


def test_a_group_without_labels_leaves_the_only_node_that_a_group_with_labels_fits():
    pools = {"any": {"device": "cuda"}, "near": {"device": "cuda", "labels": {"zone": "b"}}}
    view = ClusterView(
        (node("a", {}, {"zone": "a"}, CPU=4, GPU=4), node("b", {}, {"zone": "b"}, CPU=4, GPU=2))
    )
    roles = {"trainer": {"pool": "any", "workers": 2}, "rollout": {"pool": "near"}}
    made = plan(scenario(pools=pools, roles=roles), view)
    assert made.find_group("rollout").nodes == ("b",)
    assert made.find_group("trainer").nodes == ("a", "a")


def test_a_stage_with_roles_of_its_own_is_planned_again_and_the_rest_stays_where_it_is():
    stages = {
        "pretrain": {"epochs": 1, "batch": {"users": 64}},
        "rl": {**RL, "roles": {"trainer": {"pool": "gpu", "workers": 6}}},
        "finetune": {"epochs": 1, "batch": {"users": 64}},
    }
    roles = {"trainer": {"pool": "gpu", "workers": 2}, "rollout": {"pool": "npu", "workers": 2}}
    made = plan(scenario(roles=roles, stages=stages), MANY)
    assert [(c.stage, c.stops, [(g.name, g.workers) for g in c.starts]) for c in made.changes] == [
        ("rl", ("trainer",), [("trainer", 6)]),
        ("finetune", ("trainer",), [("trainer", 2)]),
    ]
    assert {stage.name: stage.derived.get("users a trainer") for stage in made.stages}["finetune"] == 32
    assert "before rl: stop trainer; start" in made.format_text()


def test_a_lost_node_moves_only_the_groups_that_were_on_it():
    asked = scenario(
        roles={"trainer": {"pool": "gpu", "workers": 2}, "rollout": {"pool": "npu", "workers": 2}}
    )
    made = plan(asked, MANY)
    lost = made.find_group("trainer").nodes[0]
    held = dict.fromkeys(("n0", "n1", "n2"), 0.0)
    for group in made.groups:
        for name in group.nodes:
            held[name] += group.bundle.get("NPU", 0.0)
    left = tuple(
        node(n.id, {"NPU": n.total["NPU"] - held[n.id]} if "NPU" in n.total else {}, **n.total)
        for n in MANY.nodes
        if n.id != lost
    )
    change = replan(asked, ClusterView(left), made.groups)
    moved = {group.name: set(group.nodes) for group in change.starts}
    assert "rollout" not in moved
    assert moved["trainer"] == {"n1" if lost == "n0" else "n0"}


def test_a_new_node_changes_nothing_that_stands():
    asked = scenario(roles={"trainer": {"pool": "gpu", "workers": 2}})
    made = plan(asked, gpu_nodes(1))
    change = replan(asked, gpu_nodes(3), made.groups)
    assert (change.stops, change.starts) == ((), ())


def test_a_group_whose_bundle_must_hold_another_beside_it_starts_anew():
    stages = {
        "pretrain": {"epochs": 1},
        "finetune": {"epochs": 1, "roles": {"rollout": {"collocate": "trainer"}}},
    }
    apart = scenario(roles={"rollout": {"workers": 1}}, stages=stages)
    made = plan(apart, gpu_nodes(1))
    (change,) = made.changes
    assert set(change.stops) == {"trainer", "rollout"}, "0.25 CPU of a bundle have no room for two processes"
    (trainer,) = (group for group in made.list_groups("finetune") if group.name == "trainer")
    assert trainer.bundle == {"CPU": 0.5}


def test_a_group_gets_the_labels_of_its_own_pool():
    pools = {
        "gpu": {"device": "cuda", "labels": {"zone": "a"}},
        "far": {"device": "cpu", "labels": {"rack": "r1"}},
    }
    stages = {"rl": {**RL, "rewards": {"hit": {"pool": "far"}}}}
    asked = scenario(pools=pools, roles={"trainer": {"pool": "gpu"}}, stages=stages)
    labels = {each.name: dict(each.labels) for each in make_group_requests(resolve_run(asked))}
    assert labels["trainer"] == {"zone": "a"}
    assert labels["rl.reward.hit"] == {"rack": "r1"}
