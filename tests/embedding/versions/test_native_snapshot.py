import gc
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch

from nonet.embedding.tables.base import ALL_SLICES
from nonet.embedding.tables.bulk import join_rows
from nonet.embedding.tables.numpy_table import NumPyTable
from nonet.embedding.tables.protocol import TableSpec
from nonet.embedding.training.sharded_tables import ShardedTables
from nonet.embedding.versions.native_snapshot import NativeVersion, ReadBuffers
from nonet.embedding.versions.snapshot import StepLock

KEYS = np.concatenate([np.arange(3000), [-1, np.iinfo(np.int64).min, np.iinfo(np.int64).max]])


def worlds(**settings):
    """Make the same rows in the core and in NumPy."""
    spec = {"item": TableSpec(5, lr=0.1, **settings)}
    return ShardedTables(spec, seed=7), ShardedTables(spec, seed=7, make=NumPyTable.from_spec)


def train(world, step, seed, push=True):
    keys = torch.from_numpy(np.random.default_rng(seed).choice(KEYS, 700))
    rows = world.pull("item", keys)
    if push:
        world.push("item", keys, torch.cos(rows + step), step)


def columns(part):
    order = np.argsort(part.key, kind="stable")
    return [column[order].tolist() for column in (part.key, part.row, part.state, part.step)]


def parts(snapshot, slices, **options):
    return join_rows([snapshot.read_slices(block, **options) for block in slices], snapshot.spec)


BLOCKS = [range(start, start + 8192) for start in range(0, 1 << 16, 8192)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("since", [None, 3])
def test_a_version_read_by_the_core_is_the_one_that_numpy_reads_while_steps_go_on(dtype, since):
    found = []
    for world in worlds(dtype=dtype):
        for step in range(1, 6):
            train(world, step, step)
        train(world, 6, 60, push=False)  # rows that are made and not trained yet
        snapshot = world.histories["item"].open()
        assert (snapshot._pieces is None) == isinstance(world.tables["item"], NumPyTable)
        got = []
        for number, block in enumerate(BLOCKS):
            train(world, 6 + number, 100 + number)
            got.append(snapshot.read_slices(block, since))
        found.append(columns(join_rows(got, snapshot.spec)))
        assert snapshot.kept_rows > 0
        snapshot.close()
    assert found[0] == found[1]
    assert len(set(found[0][0])) == len(found[0][0]) > 500


def _waits(part):
    return part.deleted if part.waiting is None else part.waiting


EVICTING = {
    "lru": {"evict": "lru", "budget_rows": 900},
    "lfu": {"evict": "lfu", "budget_rows": 900},
    "ttl": {"ttl_steps": 3},
    "lru, ttl and admission": {"evict": "lru", "budget_rows": 900, "ttl_steps": 4, "admit_count": 2},
}


@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.parametrize("since", [None, 4])
def test_a_version_of_a_table_that_evicts_is_the_one_that_numpy_copies_when_it_is_opened(policy, since):
    found, asked = [], []
    for world in worlds(**EVICTING[policy]):
        for step in range(1, 8):
            train(world, step, step)
        train(world, 8, 80, push=False)  # rows that are made and not trained yet
        history, evicted = world.histories["item"], 0
        snapshot, published = history.open(), history.open()
        assert snapshot._copied == isinstance(world.tables["item"], NumPyTable)
        got = []
        for number, block in enumerate(BLOCKS):
            train(world, 8 + number, 100 + number, push=number % 3 < 2)  # some are only looked up
            evicted = len(world.tables["item"].deleted)
            asked.append(published.read_rows(KEYS))
            got.append(snapshot.read_slices(block, since))
        assert evicted > 0
        every = join_rows(got, snapshot.spec)
        order = np.lexsort((every.key, _waits(every)))
        words = [getattr(every, name)[order].tolist() for name in ("seen", "uses")]
        found.append([*columns(every.select(order)), *words])
        changes = published.read_changes(since)
        assert columns(changes.select(~changes.deleted)) == columns(every.select(~_waits(every)))
        for one in (snapshot, published):
            one.close()
    assert found[0] == found[1]
    assert len(found[0][0]) > 300
    for (rows, there), (expected, known) in zip(asked[: len(BLOCKS)], asked[len(BLOCKS) :], strict=True):
        assert np.array_equal(there, known)
        assert torch.equal(rows, expected)


def test_a_table_that_evicts_tells_nobody_once_the_version_is_closed_or_gone():
    world = worlds(**EVICTING["lru"])[0]
    for step in range(1, 5):
        train(world, step, step)
    history = world.histories["item"]
    history.open().close()
    forgotten = NativeVersion.create(world.tables["item"], 4, np.zeros(1 << 16, dtype=bool))
    memory = forgotten.memory
    del forgotten
    gc.collect()
    for step in range(5, 20):
        train(world, step, step)
    assert len(history._spare) == len(memory) == 0


def test_rows_of_a_version_come_by_slice_and_key_whether_or_not_they_changed_since():
    still, moving = worlds()[0], worlds()[0]
    for world in (still, moving):
        for step in (1, 2, 3):
            train(world, step, step)
    snapshots = [world.histories["item"].open() for world in (still, moving)]
    for step in (4, 5, 6):
        train(moving, step, step)
    first, second = (parts(snapshot, BLOCKS) for snapshot in snapshots)
    for name in ("key", "row", "state", "step"):
        assert np.array_equal(getattr(first, name), getattr(second, name)), name


def test_changes_of_a_version_leave_its_slices_to_be_asked_for():
    world = worlds()[0]
    for step in (1, 2, 3):
        train(world, step, step)
    snapshot = world.histories["item"].open()
    train(world, 4, 4)
    changed = columns(snapshot.read_changes(2))
    assert changed == columns(snapshot.read_changes(2))
    assert set(changed[3]) == {3}
    assert columns(parts(snapshot, BLOCKS, since=2)) == changed


def test_a_room_grows_by_what_is_there_and_is_used_again():
    world = worlds()[0]
    for start in range(0, 20_000, 5000):
        world.pull("item", torch.arange(start, start + 5000))
    world.push("item", torch.arange(20_000), torch.ones(20_000, 5), 1)
    snapshot, room = world.histories["item"].open(), ReadBuffers(world.specs["item"])
    pieces = NativeVersion.create(world.tables["item"], 1, np.zeros(1 << 16, dtype=bool))
    for slices in (range(30_000), range(30_000, 1 << 16)):
        pieces.read(slices, None, room)
    every = room.take_rows()
    assert sorted(every.key) == list(range(20_000))
    assert np.array_equal(every.row, world.tables["item"].lookup(every.key, train=False).numpy())
    assert room.used == 0
    pieces.read(ALL_SLICES, 1, room)
    assert len(room.take_rows().key) == 0
    snapshot.close()


def test_a_step_waits_for_one_holder_and_not_for_a_queue_of_them():
    lock, over, held, turn = StepLock(), threading.Event(), [], 0

    def reads():
        while not over.is_set():
            with lock.hold_patiently():
                held.append((lock._waiting_count, turn))
                time.sleep(0.002)

    reader = threading.Thread(target=reads)
    reader.start()
    while turn < 20 or len(held) < 10:
        turn += 1
        time.sleep(0.003)
        with lock, lock:  # re-entrant
            pass
    over.set()
    reader.join()
    # One may have begun just before this thread said that it waits; none begins after that.
    began_while_a_step_waits = Counter(at for waiting, at in held if waiting)
    assert max(began_while_a_step_waits.values(), default=0) <= 1


def test_a_snapshot_keeps_its_rows_in_the_memory_of_the_one_that_was_closed_before_it():
    world, _ = worlds()
    train(world, 1, 1)
    history = world.histories["item"]
    first = history.open()
    train(world, 2, 2)
    assert first.kept_rows > 0
    first.close()
    second = history.open()
    assert second._pieces.memory is first._pieces.memory
    assert second.kept_rows == 0
    before = columns(second.read_changes())
    train(world, 3, 3)
    assert columns(second.read_changes()) == before
    second.close()


def test_a_table_that_has_grown_much_gets_memory_of_its_size():
    world, _ = worlds()
    train(world, 1, 1)
    history = world.histories["item"]
    small = history.open()
    small.close()
    world.pull("item", torch.arange(20_000))
    large = history.open()
    assert large._pieces.memory is not small._pieces.memory
    large.close()
    again = history.open()
    assert again._pieces.memory is large._pieces.memory
    again.close()
