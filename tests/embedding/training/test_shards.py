import numpy as np
import pytest
import torch

from nonet.embedding.tables.protocol import TableSpec
from nonet.embedding.training.sharded_tables import ShardedTables

RANKS = 5


@pytest.fixture(scope="module")
def ranks(forked):
    """Return the results of five ranks in worlds of one or two trainers and one to four shards."""
    return forked("shards_scenarios.py", RANKS)


def rows_of(ranks, world):
    trainers, shards = map(int, world.split("x"))
    merged = {}
    for rank in range(trainers, trainers + shards):
        held = ranks[rank][world]["rows"]
        assert not merged.keys() & held.keys()
        assert held
        merged.update(held)
    return merged


@pytest.mark.parametrize("world", ["1x1", "1x2", "1x4"])
def test_any_number_of_shards_holds_the_rows_of_a_single_process_bit_for_bit(ranks, world):
    assert rows_of(ranks, world) == ranks[0]["single"]["rows"]
    assert ranks[0][world]["read"] == ranks[0]["single"]["read"]


@pytest.mark.parametrize("world", ["2x2", "2x3"])
def test_two_trainers_with_several_shards_equal_two_trainers_with_one(ranks, world):
    assert rows_of(ranks, world) == rows_of(ranks, "2x1")
    assert [ranks[rank][world]["read"] for rank in (0, 1)] == [ranks[rank]["2x1"]["read"] for rank in (0, 1)]


def test_a_pull_and_a_push_cost_two_collectives_each_once_batches_are_of_one_size(ranks):
    calls = 5 * 3 * 2 + 2  # pulls and pushes of three tables, another pull, the stop
    assert ranks[2]["1x2"]["exchanges"] == calls - 1
    # Batches here grow with the step, so some blocks overflow: at most one more collective an exchange.
    assert 2 * (calls - 1) <= ranks[0]["1x2"]["collectives"] <= 3 * (calls - 1) + 1


def test_half_precision_on_the_wire_trains_close_to_full(ranks):
    exact, half = ranks[0]["1x2"]["read"], ranks[0]["fp16"]["read"]
    # fp16 keeps 11 bits: 5e-4 of each of up to 1,600 values under 1 that are summed.
    assert half == pytest.approx(exact, rel=2e-3, abs=0.1)
    assert half != exact


def test_a_shard_killed_mid_step_is_an_error_on_every_rank_that_names_it(ranks):
    for rank in range(RANKS - 1):
        lost = ranks[rank]["killed"]
        assert lost["error"].startswith(f"WorkerLost: rank {rank} of 5"), lost
        assert "(no response from rank 4):" in lost["error"]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_fused_ranks_read_and_train_the_rows_of_a_single_process(thread_worlds, world):
    specs = {"item": TableSpec(3, "sgd", lr=0.5, init_scale=0.5)}
    single = ShardedTables(specs, seed=7)
    ranks = thread_worlds.fused(specs, world)
    keys = [
        torch.from_numpy(np.random.default_rng([1, rank]).zipf(1.3, 50 * rank) * 7_919)
        for rank in range(world)
    ]

    def steps(rank):
        read = []
        for step in (1, 2, 3):
            rows = ranks[rank].pull("item", keys[rank])
            read.append(rows)
            # Halves and quarters: sums of these are exact in any order, so every rank's share can be compared bit for bit.
            ranks[rank].push("item", keys[rank], torch.full_like(rows, 0.25 * step), step)
        return read

    found = thread_worlds.together([lambda rank=rank: steps(rank) for rank in range(world)])
    every = torch.cat(keys)
    for step in (1, 2, 3):
        rows = single.pull("item", every)
        assert torch.equal(torch.cat([found[rank][step - 1] for rank in range(world)]), rows)
        single.push("item", every, torch.full_like(rows, 0.25 * step), step)
    assert sum(len(rank.tables["item"]) for rank in ranks) == len(single.tables["item"])
