import threading

import numpy as np
import pytest
import torch

from nonet.embedding.reading.publisher import VersionPublisher
from nonet.embedding.reading.reader import ReplicaReader, join_updates
from nonet.embedding.reading.remote import PublishedVersion, RemoteReader
from nonet.embedding.slices import SliceMap
from nonet.embedding.tables.protocol import TableSpec
from nonet.embedding.training.sharded_tables import ShardedTables
from nonet.errors import ConfigError, StaleVersion

SPECS = {"item": TableSpec(4, "adam", lr=0.1, default=0.25)}
KEYS = torch.arange(60) * 7_919 - 200_000


class Shards:
    """Several shards in one process that see the same training, each with its own slices."""

    def __init__(self, count, specs=SPECS):
        self.slices = SliceMap(count)
        self.worlds = [ShardedTables(specs, seed=7) for _ in range(count)]
        for number, world in enumerate(self.worlds):
            world.slices = self.slices
            world.__class__ = _of_shard(number)
        self.publishers = [VersionPublisher(world) for world in self.worlds]
        self.step = 0

    def train(self, keys):
        """One step on these keys; the sum over shards is what one table would hold."""
        self.step += 1
        owner = torch.from_numpy(self.slices.find_owners(keys.numpy()))
        for number, world in enumerate(self.worlds):
            mine = keys[owner == number]
            rows = world.tables["item"].lookup(mine, train=True)
            world.local_tables.apply("item", mine.numpy(), torch.sin(rows) + 0.1 * self.step, self.step, None)

    def publish(self, version):
        for publisher in self.publishers:
            publisher.publish(version)

    def published(self):
        return PublishedVersion(
            self.publishers[0].version, self.slices, [publisher.read_rows for publisher in self.publishers]
        )

    def live(self, keys):
        owner = self.slices.find_owners(keys.numpy())
        rows = [world.tables["item"].lookup(keys, train=False) for world in self.worlds]
        return torch.stack([rows[shard][at] for at, shard in enumerate(owner)])


def _of_shard(number):
    return type(
        "ShardWorld", (ShardedTables,), {"ranges": property(lambda self: self.slices.get_ranges(number))}
    )


@pytest.fixture
def shards():
    made = Shards(3)
    made.train(KEYS)
    made.publish(1)
    return made


def test_a_remote_reader_asks_each_key_once_and_each_shard_once_a_batch(shards):
    reader = RemoteReader(SPECS, shards.published)
    asked = torch.cat([KEYS, KEYS[:20], KEYS[:20]])
    assert torch.equal(reader.read_rows("item", asked), shards.live(asked))
    assert (reader.calls, reader.asked) == (3, 60)
    assert torch.equal(reader.read_rows("item", asked), shards.live(asked))
    assert reader.calls == 3
    assert torch.equal(reader.read_rows("item", torch.empty(0, dtype=torch.int64)), torch.empty(0, 4))


def test_a_remote_reader_sees_one_version_while_training_goes_on(shards):
    reader = RemoteReader(SPECS, shards.published, cache_rows=0)
    before = shards.live(KEYS)
    for _ in range(3):
        shards.train(torch.cat([KEYS[::2], torch.tensor([10**9])]))
        assert torch.equal(reader.read_rows("item", KEYS), before)
    assert not torch.equal(shards.live(KEYS), before)
    shards.publish(2)
    assert torch.equal(
        reader.read_rows("item", KEYS), before
    )  # a batch under way may finish at the version before
    assert reader.refresh() == 2
    assert torch.equal(reader.read_rows("item", KEYS), shards.live(KEYS))
    for version in (3, 4):
        shards.train(KEYS)
        shards.publish(version)
    assert torch.equal(
        reader.read_rows("item", KEYS), shards.live(KEYS)
    )  # version 2 is closed: it moves by itself
    assert reader.version == 4


def test_absent_keys_read_the_default_are_counted_and_asked_once(shards):
    reader = RemoteReader(SPECS, shards.published)
    missing = torch.tensor([5, 6, 5])
    for count in (3, 6):
        assert reader.read_rows("item", missing).tolist() == [[0.25] * 4] * 3
        assert reader.absent == count
    assert reader.asked == 2


@pytest.mark.parametrize(("wire", "error"), [("fp16", 2e-3), ("bf16", 2e-2), ("int8", 1e-2)])
def test_rows_may_travel_in_fewer_bits(shards, wire, error):
    reader = RemoteReader(SPECS, shards.published, wire=wire)
    # Rows are below 2 in size; int8 keeps 1/254 of a row's largest value, bf16 8 bits.
    assert torch.allclose(reader.read_rows("item", KEYS), shards.live(KEYS), atol=error)


def test_a_replica_follows_deltas_and_a_late_joiner_gets_everything_while_training_goes_on(shards):
    replica = ReplicaReader(SPECS)
    replica.apply(join_updates([publisher.make_update(None) for publisher in shards.publishers]))
    assert torch.equal(replica.read_rows("item", KEYS), shards.live(KEYS))
    shards.train(KEYS[:3])
    shards.publish(2)
    wanted = shards.live(KEYS)
    shards.train(KEYS[2:9])  # not published: nobody may see it
    update = join_updates([publisher.make_update(1) for publisher in shards.publishers])
    assert update["base"] == 1
    assert sum(part.num_rows for part in update["tables"]["item"]) == 3
    late = ReplicaReader(SPECS)
    with pytest.raises(StaleVersion, match="has version None, the update starts from 1"):
        late.apply(update)
    late.apply(join_updates([publisher.make_update(late.version) for publisher in shards.publishers]))
    replica.apply(update)
    for reader in (replica, late):
        assert torch.equal(reader.read_rows("item", KEYS), wanted)
        assert reader.version == 2


def test_readers_in_threads_never_see_two_versions_in_one_batch(shards):
    versions = {1: shards.live(KEYS)}
    replica = ReplicaReader(SPECS)
    replica.apply(join_updates([publisher.make_update() for publisher in shards.publishers]))
    readers = [RemoteReader(SPECS, shards.published, cache_rows=0) for _ in range(2)] + [replica]
    torn, over, reads = [], threading.Event(), []

    def read(reader):
        while not over.is_set():
            rows = reader.read_rows("item", KEYS)
            reads.append(1)
            if not any(torch.equal(rows, known) for known in list(versions.values())):
                torn.append(rows)

    threads = [threading.Thread(target=read, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    for version in range(2, 12):
        shards.train(KEYS)
        versions[version] = shards.live(KEYS)
        shards.publish(version)
        replica.apply(join_updates([publisher.make_update(version - 1) for publisher in shards.publishers]))
    over.set()
    for thread in threads:
        thread.join(20)
    assert not torn
    assert len(reads) > 10


def test_a_version_stays_open_until_the_last_call_that_reads_it_ends(shards, monkeypatch):
    publisher, keys = shards.publishers[0], KEYS[shards.slices.find_owners(KEYS.numpy()) == 0]
    (snapshot,) = publisher._world.histories["item"].snapshots
    before, read = shards.live(keys), snapshot.read_rows

    def while_versions_pass(asked):
        for version in (2, 3, 4):
            shards.train(KEYS)
            shards.publish(version)
        return read(asked)

    monkeypatch.setattr(snapshot, "read_rows", while_versions_pass)
    answer = publisher.read_rows("item", keys.numpy(), 1)
    assert torch.equal(torch.from_numpy(answer.data).view(torch.float32), before)
    with pytest.raises(StaleVersion, match="read after it was closed"):
        read(keys.numpy())
    assert snapshot not in publisher._world.histories["item"].snapshots
    with pytest.raises(StaleVersion, match="version 1 of table 'item' was asked for, version 4 is published"):
        publisher.read_rows("item", keys.numpy(), 1)


def test_a_publish_that_fails_leaves_no_version_open(monkeypatch):
    world = ShardedTables(SPECS | {"user": SPECS["item"]}, seed=7)
    publisher, user = VersionPublisher(world), world.histories["user"]

    def no_memory():
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(user, "open", no_memory)
        with pytest.raises(MemoryError):
            publisher.publish(1)
    assert not any(history.snapshots for history in world.histories.values())
    publisher.publish(1)
    assert publisher.version == 1


def test_what_cannot_be_read_is_named(shards):
    with pytest.raises(StaleVersion, match="nothing is published yet"):
        VersionPublisher(ShardedTables(SPECS, seed=1)).make_update()
    with pytest.raises(ConfigError, match="version 1 cannot be published after version 1"):
        shards.publish(1)
    with pytest.raises(StaleVersion, match="keys of table 'item' live on other shards by slice map 0"):
        shards.publishers[0].read_rows("item", KEYS.numpy(), 1)
    with pytest.raises(ConfigError, match="no sparse table 'user'"):
        RemoteReader(SPECS, shards.published).read_rows("user", KEYS)


def test_a_reader_that_is_refreshed_while_others_read_answers_every_one(shards):
    shards.train(KEYS)
    shards.publish(shards.published().version + 1)
    reader, stop, errors = RemoteReader(SPECS, shards.published), threading.Event(), []
    expected = shards.live(KEYS)

    def read():
        while not stop.is_set():
            try:
                assert torch.equal(reader.read_rows("item", KEYS), expected)
            except Exception as error:
                errors.append(error)
                return

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    for _ in range(2000):
        reader.refresh()
    stop.set()
    for thread in readers:
        thread.join()
    reader.close()
    assert errors == []


def test_after_an_eviction_between_two_versions_a_replica_holds_exactly_the_live_keys():
    """An update says which keys went: else a replica answers for ever with rows that training has forgotten."""
    specs = {"item": TableSpec(4, "sgd", lr=0.1, ttl_steps=4)}
    world, replica = ShardedTables(specs, seed=7), ReplicaReader(specs)
    publisher = VersionPublisher(world)
    old, new = torch.arange(50), torch.arange(100, 130)

    def train(keys, step):
        rows = world.tables["item"].lookup(keys, train=True)
        world.local_tables.apply("item", keys.numpy(), torch.sin(rows) + 0.1, step, None)

    train(old, 1)
    publisher.publish(1)
    replica.apply(publisher.make_update())
    for step in range(2, 20):
        train(new, step)
    publisher.publish(2)
    update = publisher.make_update(1)
    assert update["base"] == 1, "a delta, which says what changed"
    replica.apply(update)
    keys = torch.cat([old, new])
    live = world.tables["item"].lookup(keys, train=False)
    there = replica._live["item"]._contains(keys.numpy())
    held = world.histories["item"].open().read_rows(keys.numpy())[1]
    assert not held[: len(old)].any(), "all old rows were evicted"
    np.testing.assert_array_equal(there, held)
    torch.testing.assert_close(replica.read_rows("item", keys)[len(old) :], live[len(old) :])
