"""Whatever a table keeps on a device, in memory or on disk: it is the host store alone, bit for bit."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from nonet.embedding.slices import SliceMap
from nonet.embedding.tables.bulk import take
from nonet.embedding.tables.factory import make_table
from nonet.embedding.tables.numpy_table import NumPyTable
from nonet.embedding.tables.protocol import SparseTable
from nonet.embedding.tables.spec import TableSpec
from nonet.embedding.tiers.tiered_table import TieredTable, report
from nonet.embedding.tiers.tiers import TierSettings
from nonet.embedding.training.sharded_tables import ShardedTables
from nonet.errors import ConfigError, DataError
from nonet.random import rng

OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "ftrl"]
WHOLE = {"clip": 2.0, "weight_decay": 0.05, "lr": 0.1}


def suite(name):
    """Return the tests of another module, whose tables are made by `table`."""
    place = Path(__file__).parents[1] / "tables" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"tiers_{name}", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_tables, _policies = suite("test_numpy_table"), suite("test_policy")


@pytest.fixture(autouse=True)
def _tiers_everywhere(tmp_path):
    """Run the protocol's tests over two rows on the device, five in memory and the others on disk."""

    def all_three(optimizer="rowwise_adagrad", dim=4, seed=7, name="item", **settings):
        host = NumPyTable(name, dim, seed=seed, optimizer=optimizer, **settings)
        return TieredTable.from_host(
            host, TierSettings(device_rows=2, host_rows=5, folder=str(tmp_path / "cold"))
        )

    def with_policy(kind, dim=2, **settings):
        host = kind("item", dim, seed=7, **settings) if kind is NumPyTable else None
        host = host or make_table("item", TableSpec(dim, **settings), 7)
        return TieredTable.from_host(host, TierSettings(device_rows=64))

    _tables.table, _policies.table = all_three, with_policy


for _module in (_tables, _policies):
    for _name, _test in list(vars(_module).items()):
        if _name.startswith("test_"):
            globals()[f"{_name}_over_tiers"] = _test


def both(folder, rows=40, host_rows=0, dim=8, policy="lfu", **settings):
    spec = TableSpec(dim, **settings)
    tiers = TierSettings(
        device_rows=rows, host_rows=host_rows, folder=str(folder) if host_rows else "", policy=policy
    )
    return TieredTable.from_host(make_table("item", spec, 7), tiers), make_table("item", spec, 7)


def batches(count, dim, keys, size=120):
    source = rng(7, "tiers", count)
    for step in range(1, count + 1):
        some = keys[(source.random(source.integers(0, size)) ** 3 * len(keys)).astype(int)]
        yield step, some, torch.from_numpy(source.standard_normal((len(some), dim)).astype(np.float32))


KEYS = rng(7, "tiers", "keys").integers(-(2**63), 2**63 - 1, 400)


def assert_same(table, alone):
    assert len(table) == len(alone)
    assert table.hash_state() == alone.hash_state()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_over_three_tiers_gives_the_bits_of_the_host_store_alone(optimizer, dtype, tmp_path):
    extra = {"l1": 0.01, "l2": 0.1} if optimizer == "ftrl" else {}
    table, alone = both(tmp_path, 40, 130, 24, optimizer=optimizer, dtype=dtype, **WHOLE, **extra)
    for step, keys, grads in batches(40, 24, KEYS):
        assert torch.equal(table.lookup(keys, train=True), alone.lookup(keys, train=True))
        for made in (table, alone):
            made.apply(keys, grads, step)
    assert_same(table, alone)
    found = report(table)
    assert min(found["demoted"], found["promoted"], found["written"], found["cold_rows"]) > 50
    assert found["device_rows"] == 40
    assert found["host_rows"] <= 130
    assert torch.equal(table.lookup(KEYS, train=False), alone.lookup(KEYS, train=False))


@pytest.mark.parametrize("dim", [1, 3, 16, 40])
def test_every_width_gives_the_same_bits(dim, tmp_path):
    for optimizer in OPTIMIZERS:
        table, alone = both(tmp_path, 30, 100, dim, optimizer=optimizer, clip=0.5)
        for step, keys, grads in batches(12, dim, KEYS):
            for made in (table, alone):
                made.lookup(keys, train=True)
                made.apply(keys, grads, step)
        assert_same(table, alone)


@pytest.mark.parametrize("policy", ["lfu", "lru"])
@pytest.mark.parametrize("depth", [1, 3])
def test_prefetching_the_coming_batches_changes_no_bit(depth, policy, tmp_path):
    table, alone = both(tmp_path, 90, 200, policy=policy, optimizer="adam")
    coming = list(batches(50, 8, KEYS, size=60))
    for at, (step, keys, grads) in enumerate(coming):
        for ahead, wanted, _ in coming[at : at + depth]:
            table.announce_batch(wanted, ahead)
        later, wanted, _ = coming[min(at + depth, len(coming)) - 1]
        table.prefetch(wanted, later)
        assert torch.equal(table.lookup(keys, train=True), alone.lookup(keys, train=True))
        for made in (table, alone):
            made.apply(keys, grads, step)
    assert_same(table, alone)
    assert table.traffic.hit_rate > 0.3


def test_batches_in_flight_that_together_need_more_than_the_device_holds_lose_nothing(tmp_path):
    table, alone = both(tmp_path, 10, 30)
    coming = list(batches(20, 8, KEYS, size=80))
    for at, (step, keys, grads) in enumerate(coming):
        for ahead, wanted, _ in coming[at : at + 4]:
            table.prefetch(wanted, ahead)
        assert torch.equal(table.lookup(keys, train=True), alone.lookup(keys, train=True))
        for made in (table, alone):
            made.apply(keys, grads, step)
    assert_same(table, alone)


@pytest.mark.parametrize("words", [{"evict": "lru"}, {"evict": "lfu"}, {"evict": "lru", "ttl_steps": 8}])
def test_a_device_changes_nothing_of_what_a_table_admits_and_forgets(words, tmp_path):
    table, alone = both(tmp_path, 60, budget_rows=150, admit_count=2, **words)
    for step, keys, grads in batches(60, 8, KEYS):
        assert torch.equal(table.lookup(keys, train=True), alone.lookup(keys, train=True))
        for made in (table, alone):
            made.apply(keys, grads, step)
    assert_same(table, alone)
    assert len(alone.deleted) > 0
    assert (table.refused, table.dropped) == (alone.refused, alone.dropped)
    for since in (None, 30):
        ours, theirs = ([part.to_pydict() for part in made.export(since=since)] for made in (table, alone))
        assert _joined(ours) == _joined(theirs)


def _joined(parts):
    columns = ("key", "row", "state", "step", "op")
    return {column: [value for part in parts for value in part[column]] for column in columns}


def test_what_changed_since_a_step_is_told_from_all_tiers(tmp_path):
    table, alone = both(tmp_path, 20, 60)
    for step, keys, grads in batches(30, 8, KEYS):
        for made in (table, alone):
            made.lookup(keys, train=True)
            made.apply(keys, grads, step)
    for since in (0, 15, 29):
        ours, theirs = ([part.to_pydict() for part in made.export(since=since)] for made in (table, alone))
        assert _joined(ours) == _joined(theirs)
        assert table.list_touched_since(since).tolist() == alone.list_touched_since(since).tolist()


def test_rows_with_their_state_are_taken_by_key_from_whichever_tier_has_them(tmp_path):
    table, alone = both(tmp_path, 20, 60, optimizer="adam")
    for step, keys, grads in batches(30, 8, KEYS):
        for made in (table, alone):
            made.lookup(keys, train=True)
            made.apply(keys, grads, step)
    asked = np.concatenate([KEYS, [-5, -6]])
    ours, theirs = take(table, asked), take(alone, asked)
    assert ours.deleted.tolist() == theirs.deleted.tolist()
    for column in ("row", "state", "step"):
        held = ~theirs.deleted
        assert np.array_equal(getattr(ours, column)[held], getattr(theirs, column)[held])


def test_an_export_of_all_tiers_loads_into_any_number_of_tiered_shards(tmp_path):
    table, alone = both(tmp_path / "whole", 20, 60, optimizer="adam")
    for step, keys, grads in batches(30, 8, KEYS):
        for made in (table, alone):
            made.lookup(keys, train=True)
            made.apply(keys, grads, step)
    parts = [both(tmp_path / str(shard), 5, 12, optimizer="adam")[0] for shard in range(3)]
    merged = make_table("item", alone.spec, 7)
    for shard, part in enumerate(parts):
        part.load(table.export(), SliceMap(3).get_slices(shard))
        assert len(part.host) <= 12 < len(part)
        merged.load(part.export())
    assert merged.hash_state() == alone.hash_state()


def test_a_sparse_world_trains_saves_and_reads_on_tiered_tables(tmp_path):
    from nonet.embedding.storage.checkpoint import load, save

    spec = {"item": TableSpec(8, optimizer="adam")}
    tiers = TierSettings(device_rows=40, host_rows=120, folder=str(tmp_path / "cold"))

    def make_tiered(name, spec, seed):
        return TieredTable.from_host(make_table(name, spec, seed), tiers)

    world, alone = ShardedTables(spec, seed=7, make=make_tiered), ShardedTables(spec, seed=7)
    for step, keys, grads in batches(20, 8, KEYS):
        asked = torch.from_numpy(keys)
        assert torch.equal(world.pull("item", asked), alone.pull("item", asked))
        for made in (world, alone):
            made.push("item", asked, grads, step)
    saving = save(world, tmp_path / "saved")
    for step, keys, grads in batches(23, 8, KEYS):
        if step > 20:
            world.pull("item", torch.from_numpy(keys))
            world.push("item", torch.from_numpy(keys), grads, step)
    saving.wait()
    again = ShardedTables(spec, seed=7)
    load(again, tmp_path / "saved")
    assert again.tables["item"].hash_state() == alone.tables["item"].hash_state()
    assert world.tables["item"].hash_state() != alone.tables["item"].hash_state()


def test_gradients_for_keys_without_a_row_are_refused_and_change_nothing(tmp_path):
    table, _ = both(tmp_path, 20, 60)
    table.lookup(KEYS[:10], train=True)
    before = table.hash_state()
    with pytest.raises(DataError, match="1 keys that have no row"):
        table.apply(np.append(KEYS[:10], 5), torch.ones(11, 8), 1)
    assert table.hash_state() == before


def test_a_tiered_table_speaks_the_protocol(tmp_path):
    assert isinstance(both(tmp_path)[0], SparseTable)


@pytest.mark.parametrize(
    ("tiers", "spec", "message"),
    [
        ({"host_rows": 10}, {}, "needs host_rows and a folder"),
        ({"device_rows": 10, "host_rows": 20, "folder": "x"}, {}, "more than twice the 10 rows"),
        ({"host_rows": 20, "folder": "x"}, {"ttl_steps": 5}, "cannot have a cold tier"),
        ({"device_rows": 10, "policy": "mru"}, {}, "lfu or lru, got 10 and 'mru'"),
    ],
)
def test_tiers_that_cannot_be_are_refused_with_the_way_out(tiers, spec, message):
    with pytest.raises(ConfigError, match=message):
        TieredTable.from_host(make_table("item", TableSpec(4, **spec), 7), TierSettings(**tiers))


def test_tiers_work_where_there_is_no_core(tmp_path, monkeypatch):
    monkeypatch.setattr("nonet.embedding.tiers.slot_index.make_table", NumPyTable.from_spec)
    host, alone = (NumPyTable("item", 8, seed=7, optimizer="adam") for _ in range(2))
    table = TieredTable.from_host(host, TierSettings(device_rows=40, host_rows=130, folder=str(tmp_path)))
    for step, keys, grads in batches(20, 8, KEYS):
        assert torch.equal(table.lookup(keys, train=True), alone.lookup(keys, train=True))
        for made in (table, alone):
            made.apply(keys, grads, step)
    assert_same(table, alone)
    assert report(table)["cold_rows"] > 50
