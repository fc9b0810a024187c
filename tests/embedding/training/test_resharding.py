import threading

import numpy as np
import pytest
import torch

from nonet.embedding.reading.publisher import VersionPublisher
from nonet.embedding.reading.reader import ReplicaReader, join_updates, make_update
from nonet.embedding.reading.remote import PublishedVersion, RemoteReader
from nonet.embedding.slices import SliceMap, SliceMove, compute_slices
from nonet.embedding.storage.checkpoint import load, save
from nonet.embedding.tables.protocol import TableSpec
from nonet.embedding.training.resharding import reshard, spread_over
from nonet.embedding.training.sharded_tables import ShardedTables
from nonet.errors import ConfigError

SPECS = {"item": TableSpec(4, "adam", lr=0.1), "seen": TableSpec(2, "sgd", ttl_steps=6, admit_count=2)}
SHARDS = 5


def two_of_five():
    return spread_over(SliceMap(SHARDS), [0, 1])


def train(world, step, read=None):
    """Train the same for every world: the rows that are pulled decide the gradients."""
    for name, spec in SPECS.items():
        source = np.random.default_rng([step, spec.dim])
        keys = torch.from_numpy(source.zipf(1.3, 80) * 1_000_003)
        rows = world.pull(name, keys)
        world.push(name, keys, torch.sin(3 * rows) + 0.1 * step, step)


def contents(worlds):
    """Everything the shards hold, each key once, as one table would export it."""
    found = {}
    for world in worlds:
        for name, table in world.tables.items():
            for part in table.export():
                for row in part.to_pylist():
                    key = (name, row["key"], row["op"])
                    assert key not in found
                    assert world.slices.owners[compute_slices(np.array([row["key"]]))[0]] == world.shard
                    found[key] = repr(row)
    return found


def finish(trainer, threads):
    trainer.stop()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_two_shards_become_three_and_five_and_one_between_steps_with_the_bits_of_one(thread_worlds):
    single = ShardedTables(SPECS, seed=7)
    worlds, threads = thread_worlds.apart(SPECS, 1, SHARDS, slices=two_of_five())
    trainer, step = worlds[0], 0
    for shards in ([0, 1], [0, 1, 2], [0, 1, 2, 3, 4], [3]):
        for left in [*reshard(trainer, shards, max_slices=9000), 0]:
            step += 1
            train(trainer, step)
            train(single, step)
            assert left == 0 or left < 65_536
        assert set(trainer.slices.owners.tolist()) == set(shards)
    finish(trainer, threads)
    assert step > 15
    assert all(world.slices == trainer.slices for world in worlds)
    assert contents(worlds[1:]) == contents([single])
    assert len(worlds[4].tables["item"]) == len(single.tables["item"]) > 50


def test_readers_get_the_published_rows_while_rows_move_and_train(thread_worlds):
    specs = {"item": SPECS["item"]}
    worlds, threads = thread_worlds.apart(specs, 1, SHARDS, slices=two_of_five())
    trainer, publishers = worlds[0], [VersionPublisher(world) for world in worlds[1:]]
    keys = torch.arange(400) * 7_919
    versions, over, wrong, reads = {}, threading.Event(), [], []
    step, published = 0, None

    def one_step():
        nonlocal step
        step += 1
        some = keys[torch.from_numpy(np.random.default_rng(step).integers(0, 400, 150))]
        rows = trainer.pull("item", some)
        trainer.push("item", some, torch.sin(3 * rows) + 0.1 * step, step)

    def publish(version):
        nonlocal published
        versions[version] = trainer.pull(
            "item", keys, train=False
        )  # answered after the last push was applied
        for publisher in publishers:
            publisher.publish(version)
        shards = [publisher.read_rows for publisher in publishers]
        published = PublishedVersion(version, worlds[1].slices, shards)

    def read(reader):
        while not over.is_set():
            rows = reader.read_rows("item", keys)
            reads.append(1)
            if not torch.equal(rows, versions[reader.version]):
                wrong.append(reader.version)

    trainer.push("item", keys, trainer.pull("item", keys), 0)
    publish(1)
    readers = [RemoteReader(specs, lambda: published, cache_rows=0) for _ in range(2)]
    started = [threading.Thread(target=read, args=(reader,), daemon=True) for reader in readers]
    for thread in started:
        thread.start()
    replica = ReplicaReader(specs)
    replica.apply(join_updates([publisher.make_update() for publisher in publishers]))
    version = 1
    for shards in ([0, 1, 2], [0, 1, 2, 3, 4], [4, 2]):
        for number, _ in enumerate(reshard(trainer, shards, max_slices=6000)):
            one_step()
            if number % 2:
                version += 1
                publish(version)
                replica.apply(join_updates([publisher.make_update(version - 1) for publisher in publishers]))
                assert torch.equal(replica.read_rows("item", keys), versions[version])
            late = ReplicaReader(specs)  # joins while rows move and train
            late.apply(join_updates([publisher.make_update() for publisher in publishers]))
            assert torch.equal(late.read_rows("item", keys), versions[version])
    over.set()
    for thread in started:
        thread.join(30)
    finish(trainer, threads)
    assert not wrong
    assert len(reads) > 5
    assert sum(reader.absent for reader in readers) == 0
    assert version > 8


def test_a_save_begun_before_a_move_holds_the_version_before_it(thread_worlds, tmp_path):
    specs = {"item": SPECS["item"]}
    worlds, threads = thread_worlds.apart(specs, 1, SHARDS, slices=two_of_five())
    trainer = worlds[0]
    keys = torch.arange(3000) * 7_919
    trainer.push("item", keys, torch.ones(3000, 4) + trainer.pull("item", keys), 1)
    before = trainer.pull("item", keys, train=False)
    savings = [save(world, tmp_path) for world in worlds[1:]]
    for step, _ in enumerate(reshard(trainer, [2, 3, 4], max_slices=8000), 2):
        trainer.push("item", keys, torch.ones(3000, 4) + trainer.pull("item", keys), step)
    for saving in savings:
        saving.wait(60)
    finish(trainer, threads)
    again = ShardedTables(specs, seed=7)
    load(again, tmp_path)
    assert len(again.tables["item"]) == 3000
    assert torch.equal(again.pull("item", keys, train=False), before)


def test_a_shard_that_gave_slices_away_tells_nothing_more_of_their_keys(thread_worlds):
    specs = {"item": TableSpec(4, "sgd", ttl_steps=2), "slow": TableSpec(2, "sgd", admit_count=3)}
    worlds, threads = thread_worlds.apart(specs, 1, 2, slices=spread_over(SliceMap(2), [1]))
    trainer, (target, source) = worlds[0], worlds[1:]
    key, other, replica = torch.tensor([5]), torch.tensor([1_000_003]), ReplicaReader(specs)

    def step(keys, number):
        trainer.push("item", keys, torch.ones(1, 4) + trainer.pull("item", keys), number)

    step(key, 1)
    for number in range(2, 10):
        step(other, number)
    assert source.tables["item"].deleted.list_since(0)[0].tolist() == key.tolist()
    trainer.pull("slow", key)
    updates = [make_update(world.tables, 1) for world in (target, source)]
    replica.apply(join_updates(updates))
    step(key, 10)  # it is back
    trainer.move([SliceMove(0, 1 << 16, 1, 0)])
    finish(trainer, threads)
    assert [len(world.tables["slow"]._list_waiting()[0]) for world in (target, source)] == [1, 0]
    updates = [make_update(world.tables, 2, base=1, since=3) for world in (target, source)]
    replica.apply(join_updates(updates))  # it went after step 3, says the shard that had it then
    assert torch.equal(replica.read_rows("item", key), target.tables["item"].lookup(key, train=False))
    assert len(source.tables["item"].deleted) == 0


def test_moves_that_do_not_fit_are_refused_before_anything_moves():
    world = ShardedTables({"item": SPECS["item"]}, seed=7)
    with pytest.raises(ConfigError, match="does not fit slice map 0 of 1 shards"):
        world.move([SliceMove(0, 10, 0, 3)])
    with pytest.raises(ConfigError, match=r"distinct shards 0 to 4, got \[0, 5\]; start more shards first"):
        spread_over(SliceMap(5), [0, 5])
