"""A rank that hangs while another waits for it in a collective is named; a rank that died is a WorkerLost wherever it is met."""

from __future__ import annotations

import os
import time

import pytest
import torch

import nonet
from nonet.controller.groups.watchdog import Watchdog
from nonet.errors import DeadlineExceeded, WorkerLost


class Ring(nonet.DistributeWorker):
    @nonet.method()
    def total(self, stuck=-1):
        if self.rank == stuck:
            self.dawdle()
        t = torch.ones(1)
        torch.distributed.all_reduce(t, group=self.process_group)
        return float(t)

    def dawdle(self):
        time.sleep(60)

    @nonet.method()
    def die(self, rank):
        if self.rank == rank:
            os._exit(1)


def test_the_rank_that_hangs_is_named_with_the_line_it_is_in_and_who_waits_for_it(ray_local, tmp_path):
    group = nonet.WorkerGroup(Ring, workers=2, cpus=0.1, threads=0)
    try:
        assert group.total().get(60) == [2.0, 2.0]
        group.hosts.watchdog = Watchdog(tmp_path, {})
        pending = group.total(1)
        until = time.monotonic() + 60
        while [one.waits for one in group.hosts.describe_activities()] != [
            True,
            False,
        ] and time.monotonic() < until:
            time.sleep(0.05)
        with pytest.raises(DeadlineExceeded) as caught:
            pending.get(0.1)
    finally:
        group.hosts.kill()
    hangs, waits, *_ = str(caught.value).split("; ")
    assert "ring.total: no answer within 0.1 s from rank 0, 1 of 2" in hangs
    assert "ring-1@" in hangs
    assert "test_hang.py" in hangs
    assert " dawdle and waits for nobody" in hangs
    assert "ring-0@" in waits
    assert "waits for it" in waits
    (stacks,) = tmp_path.glob("stacks-*.txt")
    assert str(stacks) in str(caught.value)
    assert "dawdle" in stacks.read_text()


@pytest.mark.slow  # a collective gives up after 20 s
def test_when_a_collective_gives_up_the_rank_it_waited_for_is_named(ray_local, tmp_path):
    group = nonet.WorkerGroup(Ring, workers=2, cpus=0.1, threads=0, deadline_s=10.0)
    try:
        assert group.total().get(120) == [2.0, 2.0]
        group.hosts.watchdog = Watchdog(tmp_path, {})
        with pytest.raises(DeadlineExceeded) as caught:
            group.total(1).get(240)
    finally:
        group.hosts.kill()
    text = str(caught.value)
    assert "ring-0@" in text.partition("gave up waiting for other ranks")[0]
    assert "raise the group's deadline_s" in text
    assert "ring-1@" in text.partition("deadline_s")[2].partition(" dawdle and waits for nobody")[0]


def test_a_rank_that_died_is_lost_when_a_gang_epoch_begins(ray_local):
    group = nonet.WorkerGroup(Ring, workers=2, cpus=0.1, threads=0)
    try:
        with pytest.raises(WorkerLost):
            group.die(1).get(60)
        with pytest.raises(WorkerLost, match="ring-1 died during advance"):
            group.hosts.begin_epoch(1)
    finally:
        group.hosts.kill()
