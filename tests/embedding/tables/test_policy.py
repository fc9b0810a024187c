"""Admission and eviction: what the words mean, and that the core and the NumPy twin decide alike."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from nonet.embedding.slices import SliceMap
from nonet.embedding.tables.factory import get_core_status, make_table
from nonet.embedding.tables.numpy_table import NumPyTable
from nonet.embedding.tables.policy import find_expired
from nonet.embedding.tables.spec import TableSpec
from nonet.errors import ConfigError

KINDS = [
    NumPyTable,
    pytest.param(
        "native",
        marks=pytest.mark.skipif(not get_core_status().native, reason=f"no core: {get_core_status().reason}"),
    ),
]
needs_core = pytest.mark.skipif(not get_core_status().native, reason=f"no core: {get_core_status().reason}")


def table(kind, dim=2, **settings):
    if kind == "native":
        from nonet.embedding.tables.native_table import NativeTable

        kind = NativeTable
    return kind("item", dim, seed=7, **settings)


def step_on(made, keys, step):
    keys = np.asarray(keys, dtype=np.int64)
    rows = made.lookup(keys, train=True)
    made.apply(keys, torch.ones(len(keys), made.dim), step)
    return rows


def held(made):
    return sorted(made.keys.tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_gets_its_row_in_the_step_that_asks_for_it_the_third_time(kind):
    made = table(kind, admit_count=3, default=0.25)
    rows = [step_on(made, [5, 5, 8] if step < 3 else [5], step) for step in (1, 2, 3)]
    assert (rows[0] == 0.25).all()
    assert (rows[1] == 0.25).all()
    assert (rows[2] != 0.25).all()
    assert held(made) == [5]
    # Both steps refused three positions and dropped their gradients; twice in one step counts once.
    assert (made.refused, made.dropped) == (6, 6)
    assert (made.lookup(np.array([8]), train=False) == 0.25).all()
    assert made.absent == 1


@pytest.mark.parametrize("kind", KINDS)
def test_admission_by_chance_draws_anew_in_every_step_and_lets_everything_in_at_last(kind):
    made, keys = table(kind, admit_probability=0.25), np.arange(4000)
    counts = []
    for step in range(1, 41):
        step_on(made, keys, step)
        counts.append(len(made))
    # 4,000 draws of 1/4: three standard errors are 82; after 40 steps 4000 * 0.75^40 = 0.04 keys are left out.
    assert abs(counts[0] - 1000) < 82
    assert abs(counts[1] - 1750) < 95
    assert counts[-1] >= 3999


@pytest.mark.parametrize("kind", KINDS)
def test_rows_unseen_for_longer_than_their_time_go_and_are_told_as_deletes(kind):
    made = table(kind, ttl_steps=8)
    step_on(made, range(100), 1)
    for step in range(2, 9):
        step_on(made, range(50), step)
    assert len(made) == 100
    for step in range(9, 13):
        step_on(made, range(50), step)
    assert held(made) == list(range(50))
    assert (made.lookup(np.array([70]), train=False) == 0).all()
    told = pa.concat_tables(made.export(since=8))
    gone = told.filter(pa.compute.equal(told["op"], "delete"))
    assert gone["key"].to_pylist() == list(range(50, 100))
    assert set(told["op"].to_pylist()) == {"delete", "upsert"}
    replica = table(kind, ttl_steps=8)
    replica.load(made.export())
    assert replica.hash_state() == made.hash_state()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("lru", range(14, 100)),
        ("lfu", [*range(10), *range(24, 100)]),
    ],
)
def test_a_full_group_gives_up_its_least_rows(kind, policy, kept):
    made = table(kind, evict=policy, budget_rows=98)
    for step in (1, 2):
        step_on(made, range(10), step)
    for key in range(10, 96):
        step_on(made, [key], key)
    step_on(made, range(96, 100), 96)
    assert held(made) == list(kept)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_a_later_step_has_asked_for_stay_while_they_are_in_flight(kind):
    made = table(kind, evict="lru", budget_rows=10)
    made.lookup(np.arange(8), train=True, step=1)
    made.lookup(np.arange(100, 120), train=True, step=2)
    made.apply(np.arange(8), torch.ones(8, 2), 1)
    assert held(made) == list(range(100, 120))
    made.apply(np.arange(100, 120), torch.ones(20, 2), 2)
    assert len(made) == 9
    assert made.dropped == 0


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_rows_that_have_gone_are_dropped_and_counted_never_an_error(kind):
    made = table(kind, evict="lru", budget_rows=8)
    step_on(made, range(30), 1)
    made.apply(np.arange(30), torch.ones(30, 2), 2)
    assert made.dropped == 30 - 7


@needs_core
@pytest.mark.parametrize(
    "policy",
    [
        {"admit_count": 2},
        {"admit_probability": 0.3, "admit_count": 2},
        {"ttl_steps": 7},
        {"ttl_steps": 5, "admit_count": 3},
        {"evict": "lru", "budget_rows": 300},
        {"evict": "lfu", "budget_rows": 2100},
        {"evict": "lfu", "budget_bytes": 60_000, "ttl_steps": 6},
        {"evict": "lru", "budget_rows": 4100, "admit_probability": 0.8, "dtype": "bf16"},
    ],
)
def test_the_core_decides_as_the_twin_does(policy):
    core, twin = (
        table("native", 4, optimizer="adagrad", **policy),
        table(NumPyTable, 4, optimizer="adagrad", **policy),
    )
    source = np.random.default_rng(5)
    for step in range(1, 41):
        keys = source.zipf(1.2, 600) % 9000 * 1_000_003
        grads = torch.from_numpy(source.standard_normal((600, 4)).astype(np.float32))
        assert torch.equal(core.lookup(keys, train=True), twin.lookup(keys, train=True)), step
        core.apply(keys, grads, step)
        twin.apply(keys, grads, step)
        assert (len(core), core.refused, core.dropped) == (len(twin), twin.refused, twin.dropped), step
    assert core.hash_state() == twin.hash_state()
    for since in (None, 30):
        assert pa.concat_tables(core.export(since=since)).equals(pa.concat_tables(twin.export(since=since)))
    assert core.refused or "admit_count" not in policy
    assert len(core.deleted) or not core.spec.evicts


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_admits_and_evicts_goes_on_from_its_export_bit_for_bit(kind):
    policy = {"admit_count": 2, "ttl_steps": 9, "evict": "lfu", "budget_rows": 2500}
    whole, source = table(kind, **policy), np.random.default_rng(8)
    stream = [source.zipf(1.2, 500) % 6000 for _ in range(30)]
    for step in range(1, 16):
        step_on(whole, stream[step - 1], step)
    again = table(kind, **policy)
    again.load(whole.export())
    again.step = whole.step
    for step in range(16, 31):
        assert torch.equal(step_on(again, stream[step - 1], step), step_on(whole, stream[step - 1], step))
    assert again.hash_state() == whole.hash_state()


def test_four_shards_admit_and_evict_what_one_table_does():
    spec = TableSpec(2, admit_count=2, ttl_steps=9, evict="lru", budget_rows=5000)
    whole, shards = make_table("item", spec, 7), [make_table("item", spec, 7) for _ in range(4)]
    source = np.random.default_rng(8)
    for step in range(1, 31):
        keys = source.integers(0, 20_000, 900)
        step_on(whole, keys, step)
        owner = SliceMap(4).find_owners(keys)
        for shard, made in enumerate(shards):
            step_on(made, keys[owner == shard], step)
    merged = make_table("item", spec, 7)
    for made in shards:
        merged.load(made.export())
    assert merged.hash_state() == whole.hash_state()
    assert sum(map(len, shards)) == len(whole) <= 5000


def test_a_policy_that_contradicts_itself_is_refused():
    with pytest.raises(ConfigError, match="set both evict and budget_rows or budget_bytes"):
        TableSpec(4, evict="lru")
    with pytest.raises(ConfigError, match="set both evict and budget_rows or budget_bytes"):
        TableSpec(4, budget_rows=10)
    with pytest.raises(ConfigError, match="evict must be one of lru, lfu, got 'fifo'"):
        TableSpec(4, evict="fifo", budget_rows=10)
    with pytest.raises(ConfigError, match="dtype must be one of fp32, bf16, fp16, got 'int8'"):
        TableSpec(4, dtype="int8")
    with pytest.raises(ConfigError, match="admit_probability must be in"):
        TableSpec(4, admit_probability=0.0)
    with pytest.raises(ConfigError, match="a budget of 20 bytes holds no row: one takes 48 bytes"):
        TableSpec(4, budget_bytes=20, evict="lru")


def test_a_row_goes_in_the_step_after_its_time_to_live_and_not_in_its_last():
    keys, seen = np.arange(4), np.array([1, 2, 3, 10])
    spec = TableSpec(4, ttl_steps=8)
    # Two steps are a quarter of the time: every slice is looked at. Row 1 was last seen exactly 8 steps ago.
    assert find_expired(spec, keys, seen, 8, 10).tolist() == [0]
