import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nonet.embedding.exchange.header import PUSH, ExchangeHeader
from nonet.embedding.exchange.layout import RankLayout
from nonet.embedding.tables.protocol import TableSpec
from nonet.embedding.training.sharded_tables import ShardedTables
from nonet.errors import ConfigError, DataError

RANKS = Path(__file__).parents[1] / "world_ranks.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return the results of each of three ranks in every world; the processes start once for all tests."""
    folder = tmp_path_factory.mktemp("world")
    started = [
        subprocess.Popen([sys.executable, RANKS, str(rank), folder], stderr=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    try:
        for rank, process in enumerate(started):
            _, errors = process.communicate(timeout=800)
            assert process.returncode == 0, f"rank {rank} failed:\n{errors}"
    finally:
        for process in started:
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


def rows_of(results, table):
    """Return rows by key over the shards, of which no two have the same key."""
    merged = {}
    for result in results:
        held = result["rows"].get(table, {})
        assert not merged.keys() & held.keys()
        merged.update(held)
    return merged


def assert_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    # Gradients are summed per rank and then over ranks: another order of float32 additions over 6 steps.
    np.testing.assert_allclose(
        [ours[key] for key in sorted(ours)], [theirs[key] for key in sorted(ours)], rtol=0, atol=1e-5
    )


def test_one_trainer_and_one_shard_apart_equal_a_single_process_bit_for_bit(ranks):
    single, trainer, shard = ranks[0]["single"], ranks[0]["one_and_one"], ranks[1]["one_and_one"]
    assert shard["hash"] == single["hash"]
    assert trainer["hash"] == {}
    assert trainer["read"] == single["read"]


def test_one_trainer_and_two_shards_hold_the_rows_of_a_single_process_bit_for_bit(ranks):
    shards = [ranks[1]["one_and_two"], ranks[2]["one_and_two"]]
    for table in ("item", "user"):
        assert rows_of(shards, table) == ranks[0]["single"]["rows"][table]
        assert all(shard["rows"][table] for shard in shards)
    assert all(shard["owns_only_its_slices"] for shard in shards)


def test_two_fused_ranks_train_the_rows_of_a_single_process(ranks):
    both = [ranks[0]["fused"], ranks[1]["fused"]]
    for table in ("item", "user"):
        assert_close(rows_of(both, table), ranks[0]["single"]["rows"][table])
        assert all(rank["rows"][table] for rank in both)
    assert all(rank["owns_only_its_slices"] for rank in both)


def test_two_trainers_with_a_shard_apart_equal_two_fused_ranks_bit_for_bit(ranks):
    for table in ("item", "user"):
        fused = rows_of([ranks[0]["fused"], ranks[1]["fused"]], table)
        assert rows_of([ranks[2]["two_and_one"]], table) == fused


def test_reading_an_absent_key_over_ranks_gives_zeros_and_makes_no_row(ranks):
    for world in ("single", "fused", "one_and_one", "two_and_one"):
        known, unknown = ranks[0][world]["read"]
        assert any(known)
        assert unknown == [0.0] * 8
    assert "-5" not in rows_of([ranks[0]["fused"], ranks[1]["fused"]], "item")


def test_a_shard_serves_every_exchange_until_the_trainers_stop(ranks):
    assert ranks[1]["one_and_one"]["exchanges"] == 6 * 2 * 2 + 1
    assert ranks[2]["two_and_one"]["exchanges"] == 6 * 2 * 2 + 1


def test_trainers_that_ask_different_things_are_an_error_on_every_rank(ranks):
    for rank, table in ((0, "item"), (1, "user")):
        assert "NonetError: trainers of the sparse world differ" in ranks[rank]["disagree"]
        assert f"pull of '{table}'" in ranks[rank]["disagree"]


def test_a_rank_that_is_gone_makes_the_others_waits_end_in_a_named_error(ranks):
    assert ranks[0]["lose"].startswith("WorkerLost: rank 0 of 3 (trainer 0 of 2)")


def test_a_header_keeps_its_learning_rate_to_the_bit():
    for lr in (None, 0.0, 0.1, 3e-4):
        header = ExchangeHeader(PUSH, 1, 12, lr)
        assert ExchangeHeader.from_words(header.to_words()) == header


def test_a_single_process_needs_no_process_group_and_touches_its_own_table():
    world = ShardedTables({"item": TableSpec(2, "sgd", lr=1.0, init_scale=0.0)}, seed=1)
    keys = torch.tensor([4, 9])
    assert world.pull("item", keys).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    world.push("item", keys, torch.tensor([[1.0, 2.0], [0.0, -1.0]]), step=1)
    world.stop()
    assert world.pull("item", keys).tolist() == [[-1.0, -2.0], [0.0, 1.0]]
    assert len(world.owned) == 65_536


def test_misuse_is_named():
    world = ShardedTables({"item": TableSpec(2)}, seed=1)
    with pytest.raises(ConfigError, match="no sparse table 'itme'; there are: item"):
        world.pull("itme", torch.tensor([1]))
    with pytest.raises(DataError, match=r"wants gradients \(1, 2\), got \(1, 3\)"):
        world.push("item", torch.tensor([1]), torch.ones(1, 3), step=1)
    with pytest.raises(ConfigError, match="only a shard apart serves"):
        world.serve()
    with pytest.raises(ConfigError, match=r"needs torch\.distributed"):
        ShardedTables({"item": TableSpec(2)}, seed=1, layout=RankLayout.fused(0, 2))
    with pytest.raises(ConfigError, match="rank 3 is not in a sparse world of 3"):
        RankLayout.separate(3, 2, 1)
    with pytest.raises(ConfigError, match="dim must be at least 1, got 0"):
        TableSpec(0)
