"""A shard by itself: what it tells replicas and readers, and what it need not keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nonet.embedding.reading.reader import ReplicaReader, join_updates
from nonet.errors import ConfigError, StaleVersion
from nonet.workers.roles.embedding import EmbeddingShard
from nonet.workers.roles.settings import RunSetup

TABLES = {"item": {"dim": 4, "ttl_steps": 4, "default": 0.5}}


def shard_of(**more):
    return EmbeddingShard(
        RunSetup(seed=7, history=8, model={}, tables=TABLES, features={"item": "item"}, **more)
    )


def step_on(shard, keys, step):
    wanted = torch.tensor(keys)
    shard.sparse.pull("item", wanted)
    shard.sparse.push("item", wanted, torch.ones(len(keys), 4), step)


def rows_of(reader):
    return reader.read_rows("item", torch.arange(12)).numpy()


def test_a_delta_holds_what_was_touched_and_what_went_and_no_other_row(tmp_path):
    shard, replica = shard_of(), ReplicaReader(shard_of().specs)
    step_on(shard, list(range(10)), 1)
    assert replica.apply(join_updates(shard.export(1))) == 1
    for step in range(2, 9):
        step_on(shard, [0, 11], step)
    shard.save(str(tmp_path))
    (update,) = shard.export(2, 1)
    sent = {key for part in update["tables"]["item"] for key in part["key"].to_pylist()}
    assert sent == {0, 11, *range(1, 10)}  # two rows changed, nine went
    assert replica.apply(update) == 2
    assert np.array_equal(rows_of(replica), shard.sparse.tables["item"].lookup(np.arange(12), train=False))
    assert (rows_of(replica)[5] == 0.5).all()
    shard.save(str(tmp_path))
    assert len(shard.sparse.tables["item"].deleted) == 0  # no replica needs to hear of them again
    told = shard.get_update_counts()
    assert (told["full"]["updates"], told["delta"]["updates"]) == (1, 1)
    assert told["delta"]["bytes"] > 0


def test_a_replica_of_a_forgotten_version_is_sent_everything():
    shard = shard_of()
    step_on(shard, [1, 2], 1)
    shard.export(1)
    shard.export(2, 1)
    assert [update["base"] for have in (None, 1, 3) for update in shard.export(3, have)] == [None, None, 3]


def test_rows_read_by_key_are_those_of_the_published_version():
    shard = shard_of()
    keys = np.arange(4)
    with pytest.raises(StaleVersion, match="no published version; publish one"):
        shard.read("item", keys, 1, "fp32")
    step_on(shard, [1, 2], 1)
    shard.publish(1)
    before = shard.read("item", keys, 1, "fp32")
    step_on(shard, [2, 3], 2)
    again = shard.read("item", keys, 1, "fp32")
    assert np.array_equal(before.data, again.data)
    assert again.there.tolist() == [False, True, True, False]
    shard.publish(2)
    assert shard.read("item", keys, 2, "fp32").there.tolist() == [False, True, True, True]
    shard.unpublish()
    assert not shard.sparse.histories["item"].snapshots  # which would keep rows
    with pytest.raises(StaleVersion, match="no published version; publish one"):
        shard.read("item", keys, 2, "fp32")
    shard.publish(3)
    assert shard.read("item", keys, 3, "fp32").there.tolist() == [False, True, True, True]


def test_tiers_that_cannot_be_are_named_before_anything_starts():
    shard = shard_of(tiers={"item": {"host_rows": 10, "folder": "/tmp"}})
    with pytest.raises(ConfigError, match=r"sparse.tables.item.tiers: a table that evicts rows"):
        shard.setup()
