"""Workers that raise, hang, die, come back, and what the caller is told."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import nonet
from nonet.deadlines import Deadlines
from nonet.errors import ConfigError, DeadlineExceeded, PlacementError, StaleVersion, WorkerFailed, WorkerLost
from nonet.workers.runtime.actors import ActorGroup, WorkerResources
from nonet.workers.runtime.worker import RoleSpec


class Fragile(nonet.DistributeWorker):
    def __init__(self):
        self.known, self.calls = None, 0

    @nonet.method(remember=True)
    def learn(self, value):
        self.known = value

    @nonet.method(idempotent=True)
    def recall(self, folder=None, dies=0):
        """(known, pid); dies the first `dies` times it is asked, counted in a folder."""
        if folder:
            marks = list(Path(folder).glob(f"{self.rank}-*"))
            if len(marks) < dies and self.rank == 1:
                (Path(folder) / f"{self.rank}-{len(marks)}").touch()
                os._exit(1)
        return self.known, os.getpid()

    @nonet.method()
    def die(self, rank):
        if self.rank == rank:
            os._exit(1)

    @nonet.method()
    def unsendable(self):
        return threading.Lock()

    @nonet.method(rows=nonet.Shard, collect="concat")
    def echo(self, rows):
        return rows

    @nonet.method(rows=nonet.Shard, collect="concat")
    def broken(self, rows):
        raise ValueError("no such film")

    @nonet.method(collect="stream")
    def count_to(self, n):
        for i in range(n):
            yield 10 * self.rank + i

    @nonet.method(collect="stream")
    def stuck(self):
        yield 0
        time.sleep(30)

    @nonet.method()
    def nap(self, seconds):
        time.sleep(seconds)

    @nonet.method()
    def total(self):
        t = torch.full((2,), float(self.rank))
        torch.distributed.all_reduce(t, group=self.process_group)
        return t, torch.distributed.get_backend(self.process_group), self.local_rank


def make(workers=2, **options):
    return nonet.WorkerGroup(Fragile, workers=workers, cpus=0.1, threads=0, **options)


@pytest.fixture(scope="module")
def pair(ray_local):
    group = make()
    yield group
    group.stop()


class Unmakeable(nonet.DistributeWorker):
    def __init__(self, budget_bytes):
        raise ConfigError(f"a budget of {budget_bytes} bytes holds no row")

    @nonet.method()
    def idle(self): ...


class Unready(nonet.DistributeWorker):
    def setup(self):
        raise ValueError("no such model")

    @nonet.method()
    def idle(self): ...


def test_a_worker_that_cannot_be_made_says_why_and_is_not_taken_for_a_dead_one(ray_local):
    for spec, said in (
        (RoleSpec(Unmakeable, (10,)), "a budget of 10 bytes holds no row"),
        (RoleSpec(Unready), "setup raised ValueError: no such model"),
    ):
        hosts = ActorGroup({"role": spec}, name="role")
        try:
            with pytest.raises(WorkerFailed, match=said):  # asked before anybody waited for the group
                nonet.WorkerGroup.from_actors(hosts, "role").idle().get(300)
            assert hosts.find_dead_ranks() == []
        finally:
            hosts.kill()


class Slow(nonet.DistributeWorker):
    def setup(self):
        time.sleep(60)


@pytest.mark.parametrize(
    ("cpus", "said"),
    [
        (
            0.1,
            r"1 of 1 workers did not start within 0.5 s: role-0@.* is in role.setup for \d+ s at .*test_failure.py:\d+",
        ),
        (99.0, r"role-0 has no process that answers; the cluster has CPU 4, free are CPU 4\. Ask for fewer"),
    ],
)
def test_a_late_start_says_what_the_process_is_doing_or_what_it_waits_for(ray_local, cpus, said):
    deadlines = Deadlines.model_validate({"start": 0.5})
    hosts = ActorGroup(
        {"role": RoleSpec(Slow)}, name="role", seat=WorkerResources(cpus=cpus, threads=0), deadlines=deadlines
    )
    try:
        until = time.monotonic() + 60
        while cpus < 1 and hosts.describe_activities()[0].call != "role.setup" and time.monotonic() < until:
            time.sleep(0.05)
        with pytest.raises(PlacementError, match=said):
            hosts.wait_until_ready()
    finally:
        hosts.kill()


def test_lost_worker_is_restarted_and_told_again_what_it_knew(ray_local, tmp_path):
    group = make(restarts=5)
    group.learn("seven").get(300)
    before = [pid for _, pid in group.recall().get(300)]
    after = group.recall(str(tmp_path), dies=1, retries=1).get(300)
    assert [known for known, _ in after] == ["seven", "seven"]
    assert after[0][1] == before[0]
    assert after[1][1] != before[1]
    group.stop()


def test_without_retries_the_loss_is_told_and_the_next_call_finds_the_group_whole(ray_local):
    group = make(restarts=5)
    group.learn(3).get(300)
    with pytest.raises(WorkerLost, match="fragile-1 died during die") as caught:
        group.die(1).get(300)
    assert (caught.value.role, caught.value.rank) == ("fragile", 1)
    assert [known for known, _ in group.recall().get(300)] == [3, 3]
    group.stop()


@pytest.mark.slow
def test_group_without_restarts_stays_lost(ray_local):
    group = make()
    with pytest.raises(WorkerLost):
        group.die(0).get(300)
    with pytest.raises(WorkerLost, match=r"fragile-0 died during die"):
        group.recall(retries=3).get(300)
    group.stop()


def test_retries_need_an_idempotent_method(pair):
    with pytest.raises(
        ConfigError,
        match=r"retries=1 is only allowed for methods declared with @nonet.method\(idempotent=True\)",
    ):
        pair.nap(0, retries=1)


def test_deadline_of_the_call_holds_for_get_and_iteration(pair):
    future = pair.nap(1.0, timeout_s=0.2)
    with pytest.raises(DeadlineExceeded, match=r"nap: no answer within 0.2 s from rank 0, 1 of 2"):
        future.get()
    with pytest.raises(DeadlineExceeded):
        list(future)


def test_result_that_cannot_be_sent_is_an_error_that_says_so(pair):
    with pytest.raises(WorkerFailed, match=r"fragile-[01]: unsendable: .*cannot pickle"):
        pair.unsendable().get(300)


def test_failed_upstream_is_named_by_the_downstream(pair, ray_local):
    three = make(3)
    for group in (pair, three):
        with pytest.raises(WorkerFailed, match=r"fragile-[01]@\w+: broken raised ValueError: no such film"):
            group.echo(pair.broken([1, 2, 3])).get(300)
    three.stop()


def test_stream_gives_values_as_they_are_made(pair):
    assert pair.count_to(3).get() == [[0, 1, 2], [10, 11, 12]]
    seen = list(pair.count_to(2))
    assert sorted(seen) == [(0, 0), (0, 1), (1, 10), (1, 11)]
    assert [value for rank, value in seen if rank == 1] == [10, 11]


def test_stream_that_stops_flowing_meets_its_deadline(ray_local):
    group = make(1)
    with pytest.raises(DeadlineExceeded, match=r"stuck: the stream of rank 0 did not end within 1 s"):
        group.stuck(timeout_s=1).get()
    group.stop()


def test_unequal_futures_are_cut_by_the_receivers(pair, ray_local):
    three = make(3)
    for n in (0, 1, 2, 5, 9):
        data = np.arange(3 * n).reshape(n, 3)
        assert np.array_equal(three.echo(pair.echo(data)).get(300), data)
        assert np.array_equal(pair.echo(three.echo(pair.echo(data))).get(300), data)
    three.stop()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_cross_with_their_type(pair, dtype):
    value = torch.arange(7).to(dtype)
    back = pair.echo(value).get(300)
    assert back.dtype == dtype
    assert torch.equal(back, value)
    back[0] = 1  # the caller's own copy, not Ray's shared memory


def test_ranks_meet_in_a_process_group_of_their_own(pair):
    for total, backend, local in pair.total().get(300):
        assert torch.equal(total, torch.ones(2))
        assert backend == "gloo"
        assert local in (0, 1)


def test_late_call_of_an_older_epoch_is_refused(ray_local):
    group = make(1)
    group.recall().get(300)
    group.hosts.begin_epoch(1)
    assert group.recall().get(300)[0][0] is None
    group.hosts.epoch = 0
    with pytest.raises(StaleVersion, match="in epoch 1; a call of epoch 0 arrived too late"):
        group.recall().get(300)
    group.stop()


def test_parameters_may_not_take_the_names_of_call_options():
    with pytest.raises(ConfigError, match="has a parameter 'retries'"):

        class Wrong(nonet.DistributeWorker):
            @nonet.method()
            def m(self, retries):
                pass
