import threading
import time

import pytest
import torch

from nonet.embedding.tables.protocol import TableSpec
from nonet.embedding.training.in_flight import FetchPlanner, InFlightRows
from nonet.embedding.training.pipeline import PrefetchPipeline
from nonet.embedding.training.sharded_tables import ShardedTables
from nonet.errors import ConfigError, DeadlineExceeded


@pytest.fixture(scope="module")
def ranks(forked):
    return forked("pipeline_scenarios.py", 3)


def hashes(ranks, case):
    return [found[case].get("hash") for found in ranks if case in found]


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_batches_in_flight_give_the_bits_of_one_after_the_other(ranks, depth):
    assert ranks[0][f"1x2/{depth}"]["carries"]
    assert ranks[0][f"1x2/{depth}"]["results"] == ranks[0]["1x2/1"]["results"]
    assert hashes(ranks, f"1x2/{depth}") == hashes(ranks, "1x2/1")


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_two_trainers_with_batches_in_flight_give_the_bits_of_one_after_the_other(ranks, depth):
    assert not ranks[0][f"2x1/{depth}"]["carries"]
    for trainer in (0, 1):
        assert ranks[trainer][f"2x1/{depth}"]["results"] == ranks[trainer]["2x1/1"]["results"]
    assert hashes(ranks, f"2x1/{depth}") == hashes(ranks, "2x1/1")


def test_a_wire_of_half_precision_rounds_carried_rows_as_the_wire_does(ranks):
    assert ranks[0]["fp16/3"]["results"] == ranks[0]["fp16/1"]["results"]
    assert hashes(ranks, "fp16/3") == hashes(ranks, "fp16/1")


SPECS = {"item": TableSpec(4, "adagrad")}


def pipeline(world, compute, **options):
    keys = {"item": torch.tensor([1, 2, 2, 9])}
    return PrefetchPipeline(world, lambda number: number, lambda data: keys, compute, **options)


def ones(number, data, rows):
    return {"item": torch.ones_like(rows["item"])}, number


def test_a_single_process_pipelines_its_own_table():
    plain, deep = ShardedTables(SPECS, seed=1), ShardedTables(SPECS, seed=1)
    assert (
        pipeline(plain, ones, depth=1).run(0, 6) == pipeline(deep, ones, depth=4).run(0, 6) == list(range(6))
    )
    assert plain.tables["item"].hash_state() == deep.tables["item"].hash_state()


class CountedWire(ShardedTables):
    """Says how many batches were fetched and pushed, to those who wait for it."""

    def __init__(self):
        super().__init__(SPECS, seed=1)
        self.fetched = self.pushed = 0
        self.moved = threading.Condition()

    def take(self, table, plan):
        answer = super().take(table, plan)
        with self.moved:
            self.fetched += 1
            self.moved.notify_all()
        return answer

    def push_summed(self, table, plan, grads, step, lr=None):
        super().push_summed(table, plan, grads, step, lr)
        with self.moved:
            self.pushed += 1
            self.moved.notify_all()


def test_the_next_batch_is_fetched_and_the_last_one_pushed_while_one_is_computed():
    world, steps = CountedWire(), 20

    def compute(number, data, rows):
        with world.moved:
            assert world.moved.wait_for(lambda: world.fetched >= min(number + 2, steps), timeout=800)
            assert world.moved.wait_for(lambda: world.pushed >= number, timeout=800)
        return ones(number, data, rows)

    assert pipeline(world, compute, depth=3).run(0, steps) == list(range(steps))


@pytest.mark.parametrize("where", ["read", "keys", "compute", "push"])
def test_an_error_in_any_stage_ends_the_run_with_that_error(where):
    def fail(*_):
        raise ValueError(f"in {where}")

    world = ShardedTables(SPECS, seed=1)
    running = pipeline(world, fail if where == "compute" else ones, depth=3, timeout_s=20)
    if where == "push":
        world.push_summed = fail  # type: ignore[method-assign]
    elif where != "compute":
        setattr(running, f"_{where}", fail)
    with pytest.raises(ValueError, match=f"in {where}"):
        running.run(0, 8)
    until = time.monotonic() + 5
    while (
        any(thread.name.startswith("sparse-_") for thread in threading.enumerate())
        and time.monotonic() < until
    ):
        time.sleep(0.01)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("sparse-_")]


def test_nothing_changes_after_the_caller_has_the_error():
    world, late, pushed = ShardedTables(SPECS, seed=1), threading.Event(), []
    push = world.push_summed

    def slow_push(*given):
        late.wait(20)
        push(*given)
        pushed.append(world.tables["item"].step)

    def compute(number, data, rows):
        if number == 2:
            threading.Timer(0.2, late.set).start()
            raise ValueError("in compute, while the wire has the update of batch 0")
        return ones(number, data, rows)

    world.push_summed = slow_push  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="in compute"):
        pipeline(world, compute, depth=3).run(0, 6)
    assert pushed == [1]
    assert not [thread.name for thread in threading.enumerate() if thread.name == "sparse-_run_wire"]


def test_rows_in_flight_are_not_read_while_others_enter(monkeypatch):
    world = ShardedTables(SPECS, seed=1)
    window, planner = InFlightRows("item", SPECS["item"], world.codec), FetchPlanner(1)
    plan = planner.plan(world.make_route(torch.arange(50)))
    data = world.take("item", plan.fetch)
    window.enter(plan, data)
    rows, seen, waited = window.read_rows(plan.route), [], []
    reader = threading.Thread(target=lambda: seen.append(window.read_rows(plan.route)))
    delete = window._table._delete

    def while_read(leaving):
        delete(leaving)
        reader.start()
        reader.join(0.2)
        waited.append(reader.is_alive())

    monkeypatch.setattr(window._table, "_delete", while_read)
    plan.leave = plan.fetch.keys
    window.enter(plan, data)
    reader.join(20)
    assert waited == [True]
    assert torch.equal(seen[0], rows)


def test_a_stage_that_hangs_is_a_deadline_that_names_what_is_missing():
    let_go = threading.Event()
    running = pipeline(ShardedTables(SPECS, seed=1), ones, depth=2, timeout_s=0.3)
    running._read = lambda number: let_go.wait(20)
    with pytest.raises(DeadlineExceeded, match=r"batch 0 did not come within 0\.3 s"):
        running.run(0, 3)
    let_go.set()


def test_a_pipeline_of_no_depth_is_refused():
    with pytest.raises(ConfigError, match="wants depth >= 1, got 0"):
        pipeline(ShardedTables(SPECS, seed=1), ones, depth=0)


def test_rows_in_flight_stay_in_a_table_that_evicts():
    world = ShardedTables({"item": TableSpec(4, evict="lru", budget_rows=128)}, seed=1)

    def keys(number):
        return {"item": torch.arange(number * 40, number * 40 + 40)}

    def compute(number, data, rows):
        return {"item": torch.ones(40, 4)}, None

    PrefetchPipeline(world, lambda n: n, keys, compute, depth=3).run(0, 30)
    assert world.tables["item"].evicted > 500
    assert world.tables["item"].dropped == 0


@pytest.mark.parametrize("wire", ["fp32", "fp16", "int8"])
def test_a_world_of_one_has_no_wire_to_round_rows_for(wire):
    def trained(depth):
        world = ShardedTables({"item": TableSpec(8)}, seed=1, wire=wire)
        seen = []

        def compute(number, data, rows):
            seen.append(rows["item"].clone())
            return {"item": torch.sin(rows["item"] * 100 + number)}, None

        keys = lambda number: {"item": torch.arange(number % 3, number % 3 + 20)}  # noqa: E731
        PrefetchPipeline(world, lambda n: n, keys, compute, depth=depth).run(0, 8)
        return torch.stack(seen), world.tables["item"].hash_state()

    (alone, alone_hash), (ahead, ahead_hash) = trained(1), trained(3)
    assert torch.equal(alone, ahead)
    assert alone_hash == ahead_hash
