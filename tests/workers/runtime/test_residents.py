"""Roles that share a process and a device: whose buffers wait in host memory, and who may work meanwhile."""

from __future__ import annotations

import pytest
import torch

import nonet
from nonet.errors import NotResident
from nonet.workers.runtime.residents import OffloadStats, RoleOffloader


class Holder(nonet.DistributeWorker):
    """Holds a block of its own, and may share another."""

    def __init__(self, size: int, *shared: torch.Tensor):
        self.block = torch.arange(size, dtype=torch.float32)
        self.shared = shared

    @nonet.method(while_offloaded=True)
    def name(self):
        return self.place.role

    @nonet.method(collect="list")
    def total(self) -> float:
        return float(self.block.sum())

    def device_tensors(self):
        return [self.block, *self.shared]


def bytes_of(worker: Holder) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in worker.device_tensors()]


def fused() -> tuple[RoleOffloader, Holder, Holder]:
    model = torch.ones(100)
    trainer, rollout = Holder(50, model), Holder(10, model)
    return RoleOffloader("trainer-0", {"trainer": trainer, "rollout": rollout}), trainer, rollout


def test_what_a_fused_role_alone_holds_goes_and_what_it_shares_stays():
    here, trainer, rollout = fused()
    assert here.offload_roles(["trainer"]) == OffloadStats(offload=200, resume=0, resident=440)
    assert bytes_of(trainer) == [0, 400]
    assert bytes_of(rollout) == [40, 400]
    assert here.offload_roles([]) == OffloadStats(offload=0, resume=200, resident=640)
    assert trainer.total() == sum(range(50))


def test_what_all_holders_leave_goes_and_comes_back_with_the_first_of_them():
    here, trainer, rollout = fused()
    assert here.offload_roles(["trainer", "rollout"]) == OffloadStats(640, 0, 0)
    assert here.offload_roles(["trainer"]) == OffloadStats(0, 440, 440)
    assert bytes_of(trainer) == [0, 400]
    assert here.offload_roles([]).resume == 200
    assert bytes_of(rollout) == [40, 400]
    assert torch.equal(rollout.shared[0], torch.ones(100))


def test_a_role_that_is_away_is_refused_and_the_others_are_not():
    here, *_ = fused()
    here.offload_roles(["trainer"])
    with pytest.raises(NotResident, match="trainer-0: the buffers of 'trainer' are offloaded to host memory"):
        here.require_resident("trainer")
    here.require_resident("rollout")
    here.offload_roles([])
    here.require_resident("trainer")


def test_a_role_without_buffers_on_the_device_works_while_it_is_away():
    here, *_ = fused()
    here._roles["tables"] = nonet.DistributeWorker()
    here.offload_roles(["trainer", "tables"])
    here.require_resident("tables")


def test_a_move_that_finds_everything_as_it_should_be_moves_nothing():
    here, *_ = fused()
    here.offload_roles(["trainer"])
    assert here.offload_roles(["trainer"]) == OffloadStats(0, 0, 440)


@pytest.mark.slow
def test_calls_of_an_offloaded_group_do_not_run_and_calls_before_the_move_do(ray_local):
    group = nonet.WorkerGroup(Holder, 1000, workers=2, role="holder", cpus=0.1)
    before = group.total()
    moved = group.hosts.offload_roles(["holder"], 60.0)
    assert [each.offload for each in moved] == [4000, 4000]
    assert before.get(300) == [499500.0] * 2
    with pytest.raises(NotResident, match="'holder' are offloaded to host memory"):
        group.total().get(300)
    assert group.name().get(300) == ["holder"] * 2, "it needs none of the buffers"
    assert [each.resume for each in group.hosts.offload_roles([], 60.0)] == [4000, 4000]
    assert group.total().get(300) == [499500.0] * 2
    spans = [span for _, spans in group.hosts.take_spans() for span in spans if span[0] in MOVES]
    assert [(name, size) for name, _, _, size in sorted(spans)] == [
        ("holder.offload", 4000),
        ("holder.offload", 4000),
        ("holder.resume", 4000),
        ("holder.resume", 4000),
    ]
    group.stop()


MOVES = ("holder.offload", "holder.resume")
