import numpy as np
import pytest
import torch

from nonet.embedding.reading.reader import LocalReader, ReplicaReader, join_updates, make_update
from nonet.embedding.slices import SliceMap
from nonet.embedding.tables.numpy_table import NumPyTable
from nonet.errors import ConfigError, StaleVersion

KEYS = torch.arange(40) * 7 - 90


def trained(step, keys=KEYS, table=None):
    table = table or NumPyTable("item", 3, seed=7)
    table.lookup(keys, train=True)
    table.apply(keys, torch.ones(len(keys), 3), step)
    return table


def test_a_local_reader_reads_the_live_rows():
    table = trained(1)
    reader = LocalReader({"item": table}, version=4)
    trained(2, table=table)
    assert torch.equal(reader.read_rows("item", KEYS), table.lookup(KEYS, train=False))
    assert reader.version == 4
    reader.read_rows("item", torch.tensor([999, 1000]))
    assert reader.absent == 2


def test_a_replica_follows_full_and_delta_updates_of_two_shards():
    whole = trained(1)
    shards = [NumPyTable("item", 3, seed=7) for _ in range(2)]

    def update(version, **since):
        for number, shard in enumerate(shards):
            shard.clear()
            shard.load(whole.export(), SliceMap(2).get_slices(number))
        return join_updates(make_update({"item": shard}, version, **since) for shard in shards)

    replica = ReplicaReader({"item": 3})
    assert replica.apply(update(1)) == 1
    assert torch.equal(replica.read_rows("item", KEYS), whole.lookup(KEYS, train=False))
    trained(2, keys=torch.tensor([-90, 5000]), table=whole)
    delta = update(2, base=1, since=1)
    assert sum(part.num_rows for part in delta["tables"]["item"]) == 2
    assert replica.apply(delta) == replica.version == 2
    keys = torch.cat([KEYS, torch.tensor([5000])])
    assert torch.equal(replica.read_rows("item", keys), whole.lookup(keys, train=False))


def test_a_replica_refuses_an_update_from_another_base_and_keeps_its_rows():
    whole = trained(1)
    replica = ReplicaReader({"item": 3})
    replica.apply(make_update({"item": whole}, 1))
    before = replica.read_rows("item", KEYS)
    trained(3, table=whole)
    with pytest.raises(StaleVersion, match="has version 1, the update starts from 2"):
        replica.apply(make_update({"item": whole}, 3, base=2, since=2))
    assert replica.version == 1
    assert torch.equal(replica.read_rows("item", KEYS), before)


def test_a_torn_update_leaves_a_replica_as_it_was():
    whole = trained(1)
    replica = ReplicaReader({"item": 3})
    replica.apply(make_update({"item": whole}, 1))
    before = replica.read_rows("item", KEYS)
    trained(2, table=whole)
    torn = make_update({"item": whole}, 2)
    torn["tables"]["unheard_of"] = []
    with pytest.raises(ConfigError, match="no sparse table 'unheard_of'; there are: item"):
        replica.apply(torn)
    assert replica.version == 1
    assert torch.equal(replica.read_rows("item", KEYS), before)


def test_an_absent_key_reads_zeros_from_a_replica_and_is_counted():
    replica = ReplicaReader({"item": 3})
    assert replica.read_rows("item", KEYS[:2]).tolist() == [[0.0] * 3] * 2
    replica.apply(make_update({"item": trained(1)}, 1))
    rows = replica.read_rows("item", torch.tensor([10**12, int(KEYS[0]), -(10**12)]))
    assert rows[[0, 2]].abs().sum() == 0
    assert rows[1].abs().sum() > 0
    assert replica.absent == 4


def test_a_deleted_row_leaves_a_replica():
    update = make_update({"item": trained(1)}, 1)
    replica = ReplicaReader({"item": 3})
    replica.apply(update)
    (rows,) = update["tables"]["item"]
    import pyarrow as pa

    gone = rows.slice(0, 1)
    gone = gone.append_column("op", pa.array(["delete"]))
    replica.apply({"version": 2, "base": 1, "tables": {"item": [gone]}})
    key = torch.from_numpy(np.array(gone["key"].to_pylist()))
    assert replica.read_rows("item", key).abs().sum() == 0
    assert replica.absent == 1


def test_shards_at_different_versions_cannot_be_joined():
    shard = {"item": trained(1)}
    with pytest.raises(StaleVersion, match="None->1 and None->2"):
        join_updates([make_update(shard, 1), make_update(shard, 2)])
