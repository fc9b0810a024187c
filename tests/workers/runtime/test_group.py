from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import ray

import nonet
from nonet.errors import ConfigError, DeadlineExceeded, WorkerFailed, WorkerLost
from nonet.types import Jagged


class Score(nonet.DistributeWorker):
    @nonet.method(rows=nonet.Shard, collect="concat")
    def double(self, rows):
        return [2 * row for row in rows]

    @nonet.method(table=nonet.Shard, collect="concat")
    def same(self, table):
        return table

    @nonet.method(collect="concat")
    def make(self, mib):
        return np.zeros((mib, 1 << 20), np.uint8)

    @nonet.method(table=nonet.Shard, collect="sum")
    def length(self, table):
        return len(table)

    @nonet.method(collect="list")
    def where(self, value=None):
        return (self.rank, self.world, value)

    @nonet.method(collect="sum")
    def total(self, value):
        return value * (self.rank + 1)

    @nonet.method(collect="list")
    def fail(self, rank):
        if self.rank == rank:
            raise RuntimeError("a wrong turn")
        return self.rank

    @nonet.method(collect="list")
    def sleep(self, seconds):
        time.sleep(seconds if self.rank else 0)

    @nonet.method(collect="list", concurrent=True)
    def meet(self):
        barrier = self.__dict__.setdefault("barrier", threading.Barrier(2))
        return barrier.wait(60) in (0, 1)

    @nonet.method(collect="list")
    def die(self):
        os._exit(1)


class TorchState(nonet.DistributeWorker):
    @nonet.method(collect="list")
    def read(self):
        import torch

        modules = ("torch._dynamo" in sys.modules, "torch._inductor" in sys.modules)
        return (os.environ["OMP_WAIT_POLICY"], torch.are_deterministic_algorithms_enabled(), modules)


@pytest.fixture(scope="module")
def groups(ray_local):
    four = nonet.WorkerGroup(Score, workers=4, cpus=0.2, threads=0)
    three = nonet.WorkerGroup(Score, workers=3, cpus=0.2, threads=0)
    yield four, three
    four.stop()
    three.stop()


def test_threads_of_torch_wait_without_spinning_and_its_compiler_is_not_imported(ray_local):
    group = nonet.WorkerGroup(TorchState, cpus=0.2, threads=1)
    assert group.read().get(timeout_s=60) == [("PASSIVE", True, (False, False))]
    group.stop()


def test_a_worker_sets_how_threads_wait_before_torch_is_imported():
    code = "import sys, nonet.workers.runtime.host; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_rows_are_cut_in_order_and_joined_again(groups):
    four, _ = groups
    for n in (0, 1, 3, 4, 5, 33):
        assert four.double(list(range(n))).get(timeout_s=30) == [2 * i for i in range(n)]


def test_calls_declared_beside_run_at_once_and_others_in_order(groups):
    four, _ = groups
    first, second = four.meet(), four.meet()
    assert first.get(90) == second.get(90) == [True] * 4


def test_marker_at_the_call_overrides(groups):
    four, _ = groups
    assert four.double(rows=nonet.PerRank([[1], [2], [3], [4]])).get(300) == [2, 4, 6, 8]
    assert four.double(rows=nonet.Replicate([1])).get(300) == [2, 2, 2, 2]


def test_unmarked_collection_is_refused_and_names_the_markers(groups):
    four, _ = groups
    with pytest.raises(ConfigError, match=r"Shard .* Replicate .* or PerRank"):
        four.where([1, 2, 3, 4])
    assert four.where("text").get(300) == [(rank, 4, "text") for rank in range(4)]


def test_arrays_dicts_and_jagged_keep_every_row(groups):
    four, _ = groups
    jagged = Jagged(np.arange(7), np.array([0, 0, 3, 3, 4, 7]))
    table = {"x": np.arange(10.0).reshape(5, 2), "j": jagged}
    back = four.same(table).get(300)
    assert np.array_equal(back["x"], table["x"])
    assert np.array_equal(back["j"].values, jagged.values)
    assert np.array_equal(back["j"].offsets, jagged.offsets)


def test_future_goes_on_unfetched_to_groups_of_any_size(groups):
    four, three = groups
    assert four.double(four.double([1, 2, 3, 4, 5])).get(300) == [4, 8, 12, 16, 20]
    assert three.double(four.double([1, 2, 3, 4, 5])).get(300) == [4, 8, 12, 16, 20]


def test_dict_of_futures_is_cut_for_each_rank(groups):
    four, three = groups
    scores = {"a": four.double([1, 2, 3, 4, 5]), "b": three.double([10, 20, 30, 40, 50])}
    assert three.same(scores).get(300) == {"a": [2, 4, 6, 8, 10], "b": [20, 40, 60, 80, 100]}


def test_future_can_be_awaited_and_iterated(groups):
    four, _ = groups

    async def both():
        return await four.total(1)

    assert asyncio.run(both()) == 10
    assert sorted(four.where(3)) == [(rank, (rank, 4, 3)) for rank in range(4)]


def test_error_names_role_rank_and_cause(groups):
    four, _ = groups
    with pytest.raises(WorkerFailed, match=r"score-2@\w+: fail raised RuntimeError: a wrong turn") as caught:
        four.fail(2).get(300)
    assert (caught.value.role, caught.value.rank) == ("score", 2)
    assert "in fail" in caught.value.traceback


def test_deadline_names_the_silent_ranks(groups):
    _, three = groups
    future = three.sleep(5.0)
    ray.wait([future.refs[0]], timeout=800)
    with pytest.raises(DeadlineExceeded, match=r"score.sleep: no answer within 0.3 s from rank 1, 2 of 3"):
        future.get(timeout_s=0.3)


def test_control_answers_while_a_rank_works(groups):
    _, three = groups
    pending, busy, until = three.sleep(5.0), "", time.monotonic() + 60
    while not busy and time.monotonic() < until:
        busy = three.hosts.call_control("ping", timeout_s=60)[1]
    assert busy == "score.sleep"
    assert "Thread" in three.hosts.call_control("describe_activity")[1].stacks
    pending.get(300)


def test_unknown_method_lists_the_group_methods(groups):
    four, _ = groups
    with pytest.raises(AttributeError, match=r"group methods: .*double"):
        four.tripple([1])


def test_a_beat_names_who_did_not_answer_the_one_before(ray_local):
    group = nonet.WorkerGroup(Score, workers=2, cpus=0.2, threads=0)
    hosts = group.hosts
    assert hosts.send_heartbeats() == []
    assert hosts.send_heartbeats() == [], "one that was never heard is being started"
    hosts.wait_until_ready()
    for _ in range(2):
        hosts.send_heartbeats()
        ray.wait(hosts._beats, num_returns=2, timeout=300)
    assert hosts.send_heartbeats() == []
    ray.kill(hosts.actors[1], no_restart=True)
    ray.wait(hosts._beats, num_returns=2, timeout=300)
    until, silent = time.monotonic() + 300, []
    while not silent and time.monotonic() < until:
        silent = hosts.send_heartbeats()
        ray.wait(hosts._beats, num_returns=2, timeout=300)
    assert silent == ["score-1"]
    group.stop()
    assert hosts.send_heartbeats() == [], "who was ended on purpose is not missed"


def test_dead_worker_is_worker_lost(ray_local):
    group = nonet.WorkerGroup(Score, workers=1, cpus=0.2, threads=0)
    with pytest.raises(WorkerLost, match="score-0 died during die: The actor died unexpectedly"):
        group.die().get(300)


def test_large_replicated_argument_is_put_once(groups, monkeypatch):
    import ray

    four, _ = groups
    puts, real = [], ray.put
    monkeypatch.setattr(ray, "put", lambda value: puts.append(1) or real(value))
    big = np.zeros(8 << 20, np.uint8)
    assert four.where(nonet.Replicate(big.nbytes)).get(300)[0][2] == 8 << 20
    assert not puts
    assert len(four.same(table=nonet.Replicate(big)).get(300)) == 4 * (8 << 20)
    assert len(puts) == 1


def test_references_move_without_growing_the_caller(groups):
    import psutil

    four, three = groups
    own = psutil.Process()
    four.length(three.make(1)).get(300)  # whatever is made once is made
    before, moved = own.memory_full_info().uss, 0
    while moved < 192:
        moved += four.length(three.make(8)).get(300)
    assert own.memory_full_info().uss - before < 5 << 20
