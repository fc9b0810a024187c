import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nonet.background import seal_files
from nonet.embedding.reading.publisher import VersionPublisher
from nonet.embedding.reading.reader import ReplicaReader, make_update
from nonet.embedding.slices import SliceMap
from nonet.embedding.storage import segments
from nonet.embedding.storage.checkpoint import load, load_update, save
from nonet.embedding.storage.segments import _to_json, compute_checksum, compute_checksum_numpy, read_footer
from nonet.embedding.tables.bulk import join_rows
from nonet.embedding.tables.numpy_table import NumPyTable
from nonet.embedding.tables.protocol import TableSpec
from nonet.embedding.training.sharded_tables import ShardedTables
from nonet.embedding.versions.snapshot import TableHistory
from nonet.errors import CheckpointError, ConfigError, StaleVersion

SPECS = {
    "item": TableSpec(8, "adam", lr=0.05),
    "item-x": TableSpec(1, "sgd"),
    "wide": TableSpec(4096, "rowwise_adagrad"),
}


class Shard:
    """A shard as a checkpoint sees one: its tables, histories and slices, without a process group."""

    def __init__(self, number, shards, specs=SPECS, make=None):
        world = ShardedTables(specs, seed=7, **({"make": make} if make else {}))
        self.tables, self.histories, self.shard = world.tables, world.histories, number
        self.slices = SliceMap(shards)
        self.ranges = self.slices.get_ranges(number)


def trained(steps=4, world=None, first=1):
    world = world or ShardedTables(SPECS, seed=7)
    for step in range(first, first + steps):
        for name, spec in SPECS.items():
            source = np.random.default_rng([step, spec.dim])
            keys = torch.from_numpy(source.zipf(1.2, 5 if name == "wide" else 300) * 7_919)
            world.pull(name, keys)
            world.push(
                name,
                keys,
                torch.from_numpy(source.standard_normal((len(keys), spec.dim)).astype(np.float32)),
                step,
            )
    return world


def hashes(world):
    return {name: table.hash_state() for name, table in world.tables.items()}


def of_shards(whole, shards, folder):
    """Distribute the rows of a world over shards, and save each."""
    for number in range(shards):
        part = Shard(number, shards)
        for name, table in part.tables.items():
            for block in part.ranges:
                table.load(whole.tables[name].export(block), block)
            table.step = whole.tables[name].step
        save(part, folder).wait()


@pytest.mark.parametrize("written", [1, 2, 3])
@pytest.mark.parametrize("read", [1, 2, 3, 5, 8])
def test_rows_saved_by_any_number_of_shards_load_into_any_number_bit_for_bit(tmp_path, written, read):
    whole = trained()
    of_shards(whole, written, tmp_path)
    merged = ShardedTables(SPECS, seed=7)
    held = 0
    for number in range(read):
        part = Shard(number, read)
        load(part, tmp_path)
        for name, table in part.tables.items():
            held += len(table)
            assert table.step == whole.tables[name].step
            merged.tables[name].load(table.export())
    assert held == sum(len(table) for table in whole.tables.values())
    assert hashes(merged) == hashes(whole)


def test_a_save_holds_the_version_at_which_it_began_while_training_goes_on(tmp_path):
    world = trained()
    world.pull("item", torch.tensor([123_456_789]))  # made, not trained yet: part of the version
    before = hashes(world)
    snapshots = {name: history.open() for name, history in world.histories.items()}
    parts = {name: [] for name in SPECS}
    for turn, start in enumerate(range(0, 65_536, 8192)):
        for name, snapshot in snapshots.items():
            parts[name].append(snapshot.read_slices(range(start, start + 8192)))
        trained(1, world, first=5 + turn)  # new rows, changed rows, rows of slices given and not given
    assert hashes(world) != before
    assert sum(snapshot.kept_rows for snapshot in snapshots.values()) > 100
    from nonet.embedding.tables.bulk import put_rows

    again = ShardedTables(SPECS, seed=7)
    for name, table in again.tables.items():
        put_rows(table, join_rows(parts[name], table.spec))
    assert hashes(again) == before


def test_a_background_save_of_a_table_in_use_loads_as_it_was(tmp_path):
    world = trained(30)
    before = hashes(world)
    saving = save(world, tmp_path)
    for step in range(31, 60):
        trained(1, world, first=step)
    written = saving.wait(60)
    assert written == seal_files(tmp_path, tmp_path.rglob("*.seg")), "hashed as it was written"
    assert len(written) == len(SPECS)
    again = ShardedTables(SPECS, seed=7)
    load(again, tmp_path)
    assert hashes(again) == before
    assert not any(history._open for history in world.histories.values())


def test_a_reader_of_a_snapshot_sees_one_version(tmp_path):
    for make in (None, NumPyTable.from_spec):
        world = ShardedTables({"item": TableSpec(4)}, seed=7, **({"make": make} if make else {}))
        keys = torch.arange(50)
        world.pull("item", keys)
        world.push("item", keys, torch.ones(50, 4), 1)
        world.pull("item", torch.tensor([60]))
        snapshot = world.histories["item"].open()
        asked = torch.tensor([3, 60, 49, 70, 3])
        before, there = snapshot.read_rows(asked.numpy())
        assert there.tolist() == [True, True, True, False, True]
        for step in (2, 3, 5):
            changed = torch.tensor([3, 60, 70, step])
            world.pull("item", changed)
            world.push("item", changed, torch.ones(4, 4), step)
            again, still = snapshot.read_rows(asked.numpy())
            assert torch.equal(again, before)
            assert still.tolist() == there.tolist()
        snapshot.close()


@pytest.mark.parametrize("make", [None, NumPyTable.from_spec], ids=["best", "numpy"])
def test_rows_that_went_are_gone_from_commits_and_replicas(tmp_path, make):
    specs = {"item": TableSpec(4, ttl_steps=3, admit_count=2)}
    world = ShardedTables(specs, seed=7, **({"make": make} if make else {}))

    def step(number, keys):
        keys = torch.tensor(keys)
        world.pull("item", keys)
        world.push("item", keys, torch.ones(len(keys), 4), number)

    for number in (1, 2, 3):
        step(number, [1, 2, 3])
    assert len(world.tables["item"]) == 3
    for number in range(4, 14):
        step(number, [1, 9])
    save(world, tmp_path / "b").wait()
    again = ShardedTables(specs, seed=7, **({"make": make} if make else {}))
    load(again, tmp_path / "b")
    assert sorted(again.tables["item"].keys.tolist()) == [1, 9]
    assert again.tables["item"].hash_state() == world.tables["item"].hash_state()
    replica = ReplicaReader({"item": 4})
    replica.apply(load_update(tmp_path / "b", specs))
    assert torch.equal(
        replica.read_rows("item", torch.tensor([9, 1])), world.pull("item", torch.tensor([9, 1]), train=False)
    )
    assert replica.read_rows("item", torch.tensor([2])).abs().sum() == 0


def test_changes_since_a_step_are_not_told_once_it_is_forgotten_what_went():
    world = ShardedTables({"item": TableSpec(4, ttl_steps=2)}, seed=7)
    publisher, keys = VersionPublisher(world), torch.tensor([[1, 2], [1, 3], [1, 3], [1, 3], [1, 4]])
    for step, asked in enumerate(keys, 1):
        world.pull("item", asked)
        world.push("item", asked, torch.ones(2, 4), step)
        if step == 1:
            publisher.publish(1)
    table = world.tables["item"]
    table.deleted.forget(1)  # whoever has step 1 has all of that
    publisher.publish(2)
    assert publisher.make_update(1)["base"] == 1
    table.deleted.forget(table.step)
    publisher.publish(3)
    assert [publisher.make_update(have)["base"] for have in (1, 2, 3)] == [None, 2, 3]
    with pytest.raises(StaleVersion, match="after step 1 are not known: deletes up to step 5"):
        make_update(world.tables, 4, base=1, since=1)
    table.clear()
    assert len(make_update(world.tables, 4, base=1, since=1)["tables"]["item"]) == 0


def test_truncated_and_corrupted_files_are_refused_by_name(tmp_path):
    world = trained()
    save(world, tmp_path).wait()
    path = tmp_path / "sparse" / "wide" / "0-0.seg"
    whole = path.read_bytes()
    segment = read_footer(path).segments[0]
    for cut in (0, 5, 30, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"wide/0-0\.seg is truncated or corrupted"):
            load(world, tmp_path)
    for at in (segment.offset, segment.offset + 9, segment.offset + 8 * segment.rows + 4096):
        torn = bytearray(whole)
        torn[at] ^= 1
        path.write_bytes(torn)
        slices = f"slices {segment.start} to {segment.stop - 1}"
        with pytest.raises(CheckpointError, match=rf"wide/0-0\.seg: the segment of {slices} is corrupted"):
            load(world, tmp_path)
        assert len(world.tables["wide"]) == 0
    torn = bytearray(whole)
    torn[-60] ^= 1
    path.write_bytes(torn)
    with pytest.raises(CheckpointError, match="its footer does not match its checksum"):
        load(world, tmp_path)


def test_a_shard_whose_file_is_missing_is_noticed(tmp_path):
    of_shards(trained(), 2, tmp_path)
    (tmp_path / "sparse" / "item" / "1-0.seg").unlink()
    with pytest.raises(CheckpointError, match="no file holds slices 0 to 65535 of table 'item' completely"):
        load(ShardedTables(SPECS, seed=7), tmp_path)
    load(Shard(0, 2, {"item": SPECS["item"]}), tmp_path)


def test_a_file_that_is_no_whole_table_of_the_commit_is_refused(tmp_path, monkeypatch):
    of_shards(trained(), 2, tmp_path)
    later = Shard(1, 2)
    for table in later.tables.values():
        table.step = 9
    save(later, tmp_path).wait()
    with pytest.raises(CheckpointError, match="holds changes from step None to 9, the others all rows of"):
        load(ShardedTables(SPECS, seed=7), tmp_path)
    monkeypatch.setattr(segments, "_to_json", lambda footer: _to_json(replace(footer, since=3)))
    save(trained(), tmp_path / "changes").wait()
    with pytest.raises(CheckpointError, match="holds changes from step 3 to 4"):
        load(ShardedTables(SPECS, seed=7), tmp_path / "changes")


def test_rows_of_another_width_or_optimizer_are_refused(tmp_path):
    save(trained(), tmp_path).wait()
    other = ShardedTables({"item": TableSpec(8, "sgd")}, seed=7)
    with pytest.raises(CheckpointError, match="needs 8 and 0; was it saved with another dim or optimizer"):
        load(other, tmp_path)


def test_a_save_that_fails_says_so_when_it_is_waited_for(tmp_path):
    (tmp_path / "sparse").write_text("in the way")
    with pytest.raises(CheckpointError, match="sparse rows could not be written to"):
        save(trained(1), tmp_path).wait()


def test_a_change_in_the_snapshots_own_step_is_refused():
    table = NumPyTable("item", 2, seed=1)
    history = TableHistory(table)
    keys = np.array([1])
    table.lookup(keys, train=True)
    table.apply(keys, torch.ones(1, 2), 3)
    history.open()
    with (
        pytest.raises(ConfigError, match="changes at step 3 while a snapshot of step 3 is open"),
        history.hold_for_update(keys, 3),
    ):
        pass


def test_one_flipped_bit_changes_the_checksum_and_both_twins_agree():
    source = np.random.default_rng(3)
    for size in (0, 1, 7, 8, 9, 1000, 4099):
        data = source.integers(0, 256, size).astype(np.uint8)
        whole = compute_checksum(data)
        assert whole == compute_checksum_numpy(data)
        for at in range(0, size, 37):
            torn = data.copy()
            torn[at] ^= 1 << (at % 8)
            assert compute_checksum(torn) != whole
        assert compute_checksum(np.append(data, np.uint8(0))) != whole
    words = np.arange(64, dtype=np.int64)
    assert compute_checksum(words[::-1].copy()) != compute_checksum(words)


def test_rows_load_again_once_a_save_has_ended(tmp_path):
    world = trained()
    save(world, tmp_path / "old").wait()
    trained(2, world, 5)
    expected = hashes(world)
    save(world, tmp_path / "new").wait()
    load(world, tmp_path / "old")
    assert {table.step for table in world.tables.values()} == {4}
    load(world, tmp_path / "new")
    assert hashes(world) == expected


def test_a_published_version_forbids_loading_whatever_else_happens(tmp_path):
    world = trained()
    save(world, tmp_path).wait()
    before, snapshot = hashes(world), world.histories["item"].open()
    with pytest.raises(ConfigError, match="'item' cannot be loaded while a save or a published version"):
        load(world, tmp_path)
    assert hashes(world) == before
    snapshot.close()
    load(world, tmp_path)


def test_a_load_that_fails_leaves_every_table_empty(tmp_path):
    save(trained(), tmp_path).wait()
    broken = tmp_path / "sparse" / "item-x" / "0-0.seg"
    data = bytearray(broken.read_bytes())
    data[100] ^= 1
    broken.write_bytes(data)
    other = trained(2)
    with pytest.raises(CheckpointError):
        load(other, tmp_path)
    assert {name: (len(table), table.step) for name, table in other.tables.items()} == dict.fromkeys(
        SPECS, (0, 0)
    )


@pytest.mark.parametrize("make", [None, NumPyTable.from_spec], ids=["best", "numpy"])
def test_a_row_that_was_made_and_not_trained_does_not_move_the_step_on(tmp_path, make):
    world = ShardedTables({"item": TableSpec(4)}, seed=7, **({"make": make} if make else {}))
    keys = torch.arange(10)
    world.pull("item", keys)
    world.push("item", keys, torch.ones(10, 4), 5)
    world.pull("item", torch.arange(20))
    save(world, tmp_path).wait()
    again = ShardedTables({"item": TableSpec(4)}, seed=7)
    load(again, tmp_path)
    assert again.tables["item"].step == world.tables["item"].step == 5
    assert hashes(again) == hashes(world)
    snapshot = again.histories["item"].open()
    again.push("item", keys, torch.ones(10, 4), 6)
    snapshot.close()


def test_a_disk_that_loses_what_was_not_synced_keeps_every_segment(tmp_path, monkeypatch):
    """As after a power cut: of each file there is what it held when it was synced last."""
    kept: dict[Path, bytes] = {}
    right = os.fsync

    def fsync(handle):
        right(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_file():
            kept[path] = path.read_bytes()

    monkeypatch.setattr(os, "fsync", fsync)
    world = trained()
    written = save(world, tmp_path).wait()
    assert written
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= len(SPECS)
    for path in files:
        assert kept.get(path) == path.read_bytes(), path.name
