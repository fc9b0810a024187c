"""Who hangs is named, with what it does and who waits for it. No Ray: threads of this process stand for workers."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from nonet.controller.groups.watchdog import Watchdog, describe_hang
from nonet.controller.session import Session
from nonet.errors import WorkerFailed, WorkerLost
from nonet.workers.activity import WorkerActivity, describe_activity, is_peer_timeout
from nonet.workers.runtime.dispatch import format_task_name
from nonet.workers.runtime.host import WorkerActor


class Threads:
    """Threads that stay in a function until they are let go; `at(f)` is one that is in f(wait)."""

    def __init__(self):
        self.over, self._made = threading.Event(), []

    def at(self, function, name="worker"):
        thread = threading.Thread(target=function, args=(self.over.wait,), name=name, daemon=True)
        thread.start()
        self._made.append(thread)
        assert thread.ident
        while function.__code__ not in _codes(thread.ident):
            time.sleep(0.001)
        return thread.ident

    def end(self):
        self.over.set()
        for thread in self._made:
            thread.join(10)


def _codes(ident):
    frame = sys._current_frames().get(ident)
    return {found.f_code for found, _ in traceback.walk_stack(frame)} if frame else set()


@pytest.fixture
def threads():
    made = Threads()
    yield made
    made.end()


def slow_read(wait):
    wait()


def in_a_file(place):
    """Make a function that waits, as if it were defined in this file of torch or of the package."""
    code = compile("def f(wait):\n    wait()\n", place, "exec")
    scope: dict = {}
    exec(code, scope)
    return scope["f"]


def test_a_worker_says_which_of_its_own_lines_it_is_in(threads):
    seen = describe_activity("trainer-1@n", "trainer.train", 130.0, threads.at(slow_read))
    assert seen.at.startswith("groups/test_watchdog.py:")
    assert seen.at.endswith(" slow_read")
    assert not seen.waits
    assert "slow_read" in seen.stacks
    assert describe_activity("trainer-1@n", "", 0.0, 0).call == ""


@pytest.mark.parametrize(
    "place", ["/lib/torch/distributed/distributed_c10d.py", "/x/nonet/embedding/exchange/shared_memory.py"]
)
def test_a_worker_in_a_collective_or_an_exchange_waits_for_others(threads, place):
    assert describe_activity("trainer-0", "trainer.train", 9.0, threads.at(in_a_file(place))).waits


def test_behind_a_pipelines_queue_the_helper_that_is_stuck_is_told(threads):
    from nonet.embedding.training import pipeline

    work = compile("def _next(wait):\n    wait()\n", pipeline.__file__, "exec")
    scope: dict = {}
    exec(work, scope)
    with ThreadPoolExecutor(1, "sparse-save-1") as saves:
        saves.submit(int).result()  # it rests now, which tells nothing
        queued = threads.at(scope["_next"])
        threads.at(in_a_file("/x/nonet/embedding/exchange/shared_memory.py"), "sparse-_run_wire")
        waits = describe_activity("trainer-0", "trainer.train", 9.0, queued)
        assert waits.waits, "the wire waits for other ranks"
        threads.at(slow_read, "sparse-_route")
        stuck = describe_activity("trainer-0", "trainer.train", 9.0, queued)
        assert not stuck.waits, "reading is stuck here"
        assert "test_watchdog.py" in stuck.at


HANGS = WorkerActivity("trainer-1@b", "trainer.train", 130.0, "workers/roles/trainer.py:310 _lease")
WAITS = WorkerActivity(
    "trainer-0@a", "trainer.train", 130.0, "workers/runtime/rendezvous/process_group.py:55 total", waits=True
)
SERVES = WorkerActivity(
    "embedding-0@c", "embedding.serve", 131.0, "embedding/exchange/all_to_all.py:70 ask", waits=True
)


def test_who_hangs_is_named_first_and_who_waits_for_it_after():
    told = describe_hang([WAITS, HANGS], [SERVES])
    first, *rest = told.split("; ")
    assert first == (
        "trainer-1@b is in trainer.train for 130 s at workers/roles/trainer.py:310 _lease and waits for nobody: "
        "it hangs, or needs longer"
    )
    assert [each.split(" is in ")[0] for each in rest] == ["trainer-0@a", "embedding-0@c"]
    assert all(each.endswith(" and waits for it") for each in rest)


def test_a_shard_that_hangs_is_named_though_the_trainer_is_late():
    shard = WorkerActivity(
        "embedding-0@c", "embedding.serve", 131.0, "embedding/training/sharded_tables.py:310 _lookup"
    )
    assert describe_hang([WAITS], [shard]).startswith("embedding-0@c is in embedding.serve")


def test_where_all_ranks_of_a_group_gave_up_the_one_they_waited_for_is_named():
    shard = WorkerActivity(
        "embedding-0@c", "embedding.serve", 131.0, "embedding/training/sharded_tables.py:310 _lookup"
    )
    assert describe_hang([], [WorkerActivity("trainer-0@a"), shard]).startswith(
        "embedding-0@c is in embedding.serve"
    )
    assert describe_hang([], [WorkerActivity("trainer-0@a")]) == "nobody seems to hang now"


def test_a_collective_that_gave_up_is_told_from_other_errors():
    def raised(place, text):
        scope: dict = {}
        exec(compile(f"def f():\n    raise RuntimeError({text!r})\n", place, "exec"), scope)
        with pytest.raises(RuntimeError) as caught:
            scope["f"]()
        return is_peer_timeout(caught.value)

    gloo, wire = "/lib/torch/distributed/distributed_c10d.py", "/x/nonet/embedding/exchange/shared_memory.py"
    assert raised(gloo, "[unbound_buffer.cc:81] Timed out waiting 240000ms for recv operation to complete")
    assert raised(wire, "no message from rank 1 in 240 s")
    assert not raised(gloo, "Connection closed by peer"), "it died"
    assert not raised("/x/own.py", "timed out"), "an error of the worker's own"


def test_a_connection_that_closed_within_a_collective_is_the_loss_of_a_worker_and_other_errors_are_not():
    def convert(place: str, text: str) -> Exception:
        scope: dict = {}
        exec(compile(f"def f():\n    raise RuntimeError({text!r})\n", place, "exec"), scope)
        cls = WorkerActor.__ray_metadata__.modified_class  # type: ignore[attr-defined]
        worker = cls.__new__(cls)
        worker._place = SimpleNamespace(rank=0, role="trainer", device="cpu", deadline_s=1.0)
        worker._location = SimpleNamespace(devices=(), node="a")
        try:
            scope["f"]()
        except RuntimeError as error:
            return worker._to_worker_error(format_task_name("trainer", "update", 0), error)
        raise AssertionError

    gloo = "/lib/torch/distributed/distributed_c10d.py"
    lost = convert(gloo, "[pair.cc:553] Connection closed by peer [127.0.0.1]:38211")
    assert isinstance(lost, WorkerLost)
    assert str(lost).startswith("trainer-0@a: update lost the connection to another rank: [pair.cc:553]")
    assert isinstance(convert("/x/own.py", "Connection closed by peer"), WorkerFailed)
    assert isinstance(convert(gloo, "tensors have different shapes"), WorkerFailed)


def test_a_lost_connection_is_a_loss_though_all_workers_live_and_dead_ones_are_named():
    session = Session.__new__(Session)
    session.dead_workers = []
    lost = WorkerLost("trainer-0: update lost the connection to another rank")
    assert session.describe_loss(lost) == str(lost)
    assert session.describe_loss(WorkerFailed("no")) is None
    session.dead_workers = ["trainer-1"]
    assert session.describe_loss(lost) == f"trainer-1 died: {lost}"


def test_a_rank_that_does_not_even_answer_is_named():
    told = describe_hang([WAITS, WorkerActivity("trainer-1", silent=True)])
    assert told.startswith("trainer-1 does not even answer")
    assert "trainer-0@a is in trainer.train" in told


def test_a_late_rank_that_is_idle_is_said_to_be_and_busy_strangers_are_not_blamed():
    stranger = WorkerActivity(
        "embedding-0@c", "embedding.save", 3.0, "embedding/storage/checkpoint.py:9 save"
    )
    assert describe_hang([WorkerActivity("rollout-0@a")], [stranger]) == (
        "rollout-0@a is idle: the call, or what it is to work on, has not reached it"
    )
    assert "waits for other ranks, all of them" in describe_hang([WAITS, SERVES])


def test_ranks_that_train_together_are_looked_at_together_and_their_stacks_are_kept(tmp_path):
    def group(name, *seen, roles):
        return SimpleNamespace(name=name, specs=dict.fromkeys(roles), describe_activities=lambda: list(seen))

    trainer = group("trainer", WAITS, HANGS, roles=["trainer"])
    shards = group("embedding", SERVES, roles=["embedding"])
    reward = group("rl.reward.hit", HANGS, roles=["rl.reward.hit"])
    watchdog = Watchdog(tmp_path, {each.name: each for each in (trainer, shards, reward)})  # type: ignore[misc]
    told = watchdog.describe_late(trainer, [0, 1])  # type: ignore[arg-type]
    assert told.startswith("trainer-1@b is in")
    assert "embedding-0@c" in told
    (stacks,) = tmp_path.glob("stacks-*.txt")
    assert str(stacks) in told
    text = stacks.read_text()
    assert all(f"# {who} is in" in text for who in ("trainer-1@b", "trainer-0@a", "embedding-0@c"))
    assert "embedding" not in watchdog.describe_late(reward, [0])  # type: ignore[arg-type]
