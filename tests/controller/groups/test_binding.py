from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # Ray's workers import this file too

from views import scenario

from nonet.errors import PlacementError
from nonet.workers.runtime.worker import DistributeWorker, RoleSpec


class Idle(DistributeWorker):
    """Does nothing, without torch."""


def made_groups() -> list[str]:
    """Names of the placement groups that stand or wait."""
    from ray.util.placement_group import placement_group_table

    return sorted(g["name"] for g in placement_group_table().values() if g["state"] != "REMOVED")


@pytest.fixture
def taken(ray_local):
    """Reserve CPUs under a name, and release them all at the end."""
    from ray.util.placement_group import placement_group, remove_placement_group

    held = []

    def take(name: str, cpus: float) -> None:
        group = placement_group([{"CPU": cpus}], name=name)
        assert group.wait(10)
        held.append(group)

    yield take
    for group in held:
        remove_placement_group(group)
    deadline = time.monotonic() + 60
    while made_groups() and time.monotonic() < deadline:
        time.sleep(0.05)


SPECS = {role: RoleSpec(Idle) for role in ("trainer", "rollout", "embedding", "evaluator", "tokenise")}
WIDE = scenario(roles={"trainer": {"workers": 14}})  # 3.5 of the 4 CPUs, and a quarter for the evaluator


def test_at_plan_time_what_is_held_is_named_with_its_holder_and_nothing_is_asked_for(taken):
    from nonet.controller.groups.binding import plan_live

    taken("feed-20261120/trainer", 3.0)
    before = made_groups()
    with pytest.raises(PlacementError) as caught:
        plan_live(WIDE)
    text = str(caught.value)
    assert re.search(
        r"group 'trainer' \(pool cpu\) needs 3\.5 CPU, the cluster has 4 in 1 of 1 nodes, 1 free", text
    )
    assert "Held by feed-20261120/trainer 3." in text
    assert "lower roles.trainer.workers to 4" in text
    assert made_groups() == before


def test_when_the_room_is_taken_between_plan_and_bind_the_error_comes_soon_and_nothing_stays(
    taken,
):
    from nonet.controller.groups import binding as placement
    from nonet.controller.groups.binding import GroupBinding, plan_live
    from nonet.deadlines import Deadlines

    assert placement.NO_ROOM_PATIENCE_S + placement._SETTLE_PATIENCE_S < 2, "what it waits for by itself"
    made = plan_live(WIDE)
    taken("quick-thief", 2.0)
    before = made_groups()
    with pytest.raises(PlacementError) as caught:
        GroupBinding(
            made, SPECS, deadlines=Deadlines(start=1e9)
        )  # it does not wait for Ray to give up, but for its word
    text = str(caught.value)
    assert "group 'trainer' (pool cpu) was planned 3.5 CPU on 1 nodes" in text
    assert re.search(r"has 2 free of 4; in all nodes 2 of 4 CPU are free\. Held by quick-thief 2\.", text)
    assert made_groups() == before


def test_actors_outside_placement_groups_are_holders_too(ray_local):
    import ray

    from nonet.controller.groups.binding import read_live_view

    @ray.remote(num_cpus=2)
    class Keeper:
        def here(self) -> bool:
            return True

    keeper = Keeper.options(name="keeper").remote()  # type: ignore[attr-defined]
    assert ray.get(keeper.here.remote())
    try:
        held = [h for h in read_live_view().held if h.by.startswith("actor keeper")]
        assert [(h.resource, h.amount) for h in held] == [("CPU", 2.0)]
    finally:
        ray.kill(keeper)


def test_collocated_groups_sit_in_the_bundles_of_their_host(taken):
    from nonet.controller.groups.binding import GroupBinding, plan_live
    from nonet.workers.runtime.orphan_guard import GroupLifetime

    made = plan_live(scenario(roles={"rollout": {"collocate": "trainer"}, "evaluator": {"fuse": "trainer"}}))
    binding = GroupBinding(made, SPECS, GroupLifetime(run="r1"))
    try:
        assert made_groups() == ["r1: trainer"]
        nodes = {
            name: [found["node"] for found in hosts.wait_until_ready()]
            for name, hosts in binding.hosts.items()
        }
        assert set(nodes) == {"trainer", "rollout"}
        assert nodes["trainer"] == nodes["rollout"]
    finally:
        binding.stop()
    assert made_groups() == []


def test_a_re_plan_that_finds_its_room_taken_is_refused_and_leaves_no_group_of_the_run(taken):
    from nonet.controller.groups.binding import GroupBinding, plan_live

    wide = {"epochs": 1, "roles": {"trainer": {"workers": 14}}}
    made = plan_live(scenario(stages={"pretrain": {"epochs": 1}, "finetune": wide}))
    binding = GroupBinding(made, SPECS, stage="pretrain")
    assert [len(hosts.wait_until_ready()) for hosts in binding.hosts.values()] == [1, 1]
    taken("quick-thief", 2.0)
    (change,) = made.changes
    assert (change.stage, change.stops) == ("finetune", ("trainer",))
    with pytest.raises(
        PlacementError, match=r"group 'trainer' .* was planned 3\.5 CPU.*Held by quick-thief 2\."
    ):
        binding.change(change.stops, change.starts)
    assert binding.hosts == {}
    assert made_groups() == ["quick-thief"]


@pytest.mark.slow
def test_a_re_plan_ends_and_starts_what_changes_and_leaves_the_rest_where_it_is(taken):
    from nonet.controller.groups.binding import GroupBinding, plan_live

    own = {"epochs": 1, "roles": {"rollout": {"workers": 2}}}
    made = plan_live(scenario(stages={"pretrain": {"epochs": 1}, "finetune": own, "last": {"epochs": 1}}))
    binding = GroupBinding(made, SPECS, stage="pretrain")
    hosts = binding.hosts
    try:
        before = {name: [found["pid"] for found in each.wait_until_ready()] for name, each in hosts.items()}
        for change, roles in zip(
            made.changes, (("trainer", "embedding"), ("trainer", "rollout", "embedding")), strict=True
        ):
            binding.change(change.stops, change.starts)
            after = {
                name: [found["pid"] for found in each.wait_until_ready()] for name, each in hosts.items()
            }
            assert binding.hosts is hosts
            assert after["evaluator"] == before["evaluator"]
            assert after["trainer"] != before["trainer"]
            assert tuple(hosts["trainer"].specs) == roles
            assert [g.name for g in binding.groups if g.name != "evaluator"] == [
                g.name for g in change.starts
            ]
            before = after
        assert [group.roles for group in made.list_groups("last")] == [
            group.roles for group in (made.groups[-1], *made.groups[:-1])
        ]
    finally:
        binding.stop()
    assert made_groups() == []
