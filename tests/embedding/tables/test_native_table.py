"""The C++ core against its NumPy twin: whatever one does, the other does to the bit."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from nonet.embedding.slices import SliceMap, splitmix64
from nonet.embedding.tables.bulk import count_packed_bytes, put_packed, take_packed
from nonet.embedding.tables.factory import get_core_status
from nonet.embedding.tables.numpy_table import NumPyTable
from nonet.embedding.tables.protocol import SparseTable
from nonet.embedding.tables.spec import TableSpec
from nonet.errors import ConfigError, DataError

pytestmark = pytest.mark.skipif(not get_core_status().native, reason=f"no core: {get_core_status().reason}")

ODD = np.array([0, -1, -(2**63), 2**63 - 1, 1, -2], dtype=np.int64)
OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "ftrl"]
WHOLE = {"clip": 2.0, "weight_decay": 0.05, "lr": 0.1}


def native(dim=8, seed=7, name="item", **settings):
    from nonet.embedding.tables.native_table import NativeTable

    return NativeTable(name, dim, seed=seed, **settings)


def twins(dim=8, isa="", **settings):
    return native(dim, isa=isa, **settings), NumPyTable("item", dim, seed=7, **settings)


def batches(count, dim, keys, seed=1, size=200):
    source = np.random.default_rng(seed)
    for step in range(1, count + 1):
        some = keys[source.integers(0, len(keys), source.integers(0, size))]
        yield step, some, torch.from_numpy(source.standard_normal((len(some), dim)).astype(np.float32))


def train(tables, count, keys, seed=1, size=200):
    for step, some, grads in batches(count, tables[0].dim, keys, seed, size):
        rows = [table.lookup(some, train=True) for table in tables]
        assert torch.equal(rows[0], rows[1])
        for table in tables:
            table.apply(some, grads, step)


def unmixed(hashes):
    """Return the keys whose SplitMix64 gives these hashes."""
    values = np.atleast_1d(hashes).astype(np.uint64)
    values = values ^ (values >> np.uint64(31)) ^ (values >> np.uint64(62))
    values = values * np.uint64(0x319642B2D24D8EC3)
    values = values ^ (values >> np.uint64(27)) ^ (values >> np.uint64(54))
    values = values * np.uint64(0x96DE1B173F119089)
    values = values ^ (values >> np.uint64(30)) ^ (values >> np.uint64(60))
    return (values - np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def assert_equal(core, twin):
    assert len(core) == len(twin)
    assert core.hash_state() == twin.hash_state()
    exported, expected = (pa.concat_tables(table.export()) for table in (core, twin))
    assert exported.equals(expected)


def test_the_native_table_speaks_the_protocol():
    assert isinstance(native(), SparseTable)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_with_duplicates_gives_the_twins_bits(optimizer, dtype):
    extra = {"l1": 0.01, "l2": 0.1} if optimizer == "ftrl" else {}
    core, twin = twins(24, optimizer=optimizer, dtype=dtype, **WHOLE, **extra)
    keys = np.concatenate([ODD, np.random.default_rng(3).integers(-(2**63), 2**63 - 1, 300)])
    train((core, twin), 25, keys)
    assert_equal(core, twin)


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize("dim", [1, 3, 16, 32, 40, 64, 128, 256, 4096])
def test_every_width_and_instruction_set_gives_the_twins_bits(dim, isa):
    for optimizer, dtype in (("rowwise_adagrad", "fp32"), ("adam", "bf16"), ("adagrad", "fp16")):
        core, twin = twins(dim, isa=isa, optimizer=optimizer, dtype=dtype, clip=1.0)
        train((core, twin), 4, np.arange(-9, 9) * 10**17, size=40)
        assert_equal(core, twin)
        some = np.arange(-12, 12) * 10**17  # some of which have no row
        assert torch.equal(core.lookup(some, train=False), twin.lookup(some, train=False))


def test_four_thousand_steps_of_adam_stay_on_the_twins_bits():
    core, twin = twins(1, optimizer="adam")
    key, grad = np.array([5]), torch.full((1, 1), 0.3)
    for step in range(1, 4200):  # past the corrections that are kept in a list
        for table in (core, twin):
            table.lookup(key, train=True)
            table.apply(key, grad, step)
    assert_equal(core, twin)


def test_a_table_that_grows_through_splits_and_deletes_agrees_with_a_dict():
    source = np.random.default_rng(11)
    core, oracle = native(1, optimizer="sgd", lr=1.0, init_scale=0.0), {}
    for step in range(1, 60):
        keys = np.unique(source.integers(-(2**62), 2**62, 1500) >> source.integers(0, 50))
        core.lookup(keys, train=True)
        core.apply(keys, torch.full((len(keys), 1), -float(step)), step)
        for key in keys.tolist():
            oracle[key] = oracle.get(key, 0.0) + step
        gone = np.array(list(oracle))[source.integers(0, len(oracle), 700)]
        core.load([deletes(gone, step)])
        for key in gone.tolist():
            oracle.pop(key, None)
    keys = np.array(list(oracle))
    assert len(core) == len(oracle) > 30_000
    assert core.lookup(keys, train=False)[:, 0].tolist() == list(oracle.values())
    assert core.absent == 0
    assert sorted(core.keys.tolist()) == sorted(oracle)


def deletes(keys, step, dim=1):
    zeros = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(len(keys) * dim, np.float32)), dim)
    columns = {"key": pa.array(keys), "row": zeros, "step": pa.array(np.full(len(keys), step))}
    return pa.table({**columns, "op": pa.array(["delete"] * len(keys))})


def test_keys_of_one_bucket_and_of_one_prefix_are_found_and_forgotten():
    same_low = unmixed((np.arange(3000, dtype=np.uint64) << np.uint64(40)) | np.uint64(77))
    same_high = unmixed(
        (np.uint64(0xABCDEF0123) << np.uint64(24)) + np.arange(9000, dtype=np.uint64) * np.uint64(3)
    )
    assert len(set((splitmix64(same_low) & np.uint64(0xFFFFFFFFFF)).tolist())) == 1
    for keys in (same_low, same_high):
        core, twin = twins(4, optimizer="sgd")
        train((core, twin), 8, keys, size=len(keys))
        for table in (core, twin):
            table.load([deletes(keys[::3], 9, 4)])
        assert core.lookup(keys[::3], train=False).abs().sum() == 0
        assert_equal(core, twin)
        # 13 bytes a place for a key; a directory that followed the shared bits down would take gigabytes.
        assert core.resident_bytes < 40 << 20


@pytest.mark.parametrize("isa", ["baseline", ""])
@pytest.mark.parametrize(("dim", "dtype"), [(16, "fp32"), (64, "bf16"), (6, "fp32")])
def test_a_lookup_of_any_number_of_keys_gives_each_its_row(dim, dtype, isa):
    core, twin = twins(dim, isa=isa, dtype=dtype)
    # All of one line, which has room for five.
    crowd = unmixed((np.arange(40, dtype=np.uint64) << np.uint64(50)) | np.uint64(5))
    known, unknown = np.concatenate([np.arange(500) * 7, crowd[:30]]), np.concatenate([[-5, 3], crowd[30:]])
    for table in (core, twin):
        table.lookup(known, train=True)
    source = np.random.default_rng(4)
    for count in [*range(75), 400, 3000]:
        keys = source.permutation(
            np.concatenate([source.choice(some, count) for some in (known, crowd, unknown)])
        )[:count]
        before = core.absent
        assert torch.equal(core.lookup(keys, train=False), twin.lookup(keys, train=False))
        assert core.absent - before == np.isin(keys, unknown).sum()


def test_a_freed_row_is_used_again():
    core = native(64)
    keys = np.arange(50_000)
    core.lookup(keys, train=True)
    taken = core.resident_bytes
    for turn in range(1, 6):
        core.load([only_deletes(core)])
        assert len(core) == 0
        core.lookup(keys + turn * 100_000, train=True)
    assert core.resident_bytes <= taken * 1.1


def only_deletes(table):
    exported = pa.concat_tables(table.export())
    return exported.set_column(exported.column_names.index("op"), "op", pa.array(["delete"] * len(exported)))


def test_loads_and_exports_cross_between_the_twins_at_any_number_of_shards():
    core, twin = twins(6, optimizer="adam")
    train((core, twin), 10, np.arange(5000) * 977)
    for count in (2, 3):
        made = [twins(6, optimizer="adam")[shard % 2] for shard in range(count)]
        for shard, part in enumerate(made):
            part.load(core.export(), SliceMap(count).get_slices(shard))
        again = native(6, optimizer="adam")
        for part in made:
            again.load(part.export())
        assert_equal(again, twin)
    assert core.list_touched_since(9).tolist() == twin.list_touched_since(9).tolist()
    assert pa.concat_tables(core.export(since=9)).equals(pa.concat_tables(twin.export(since=9)))


def test_an_apply_of_other_keys_than_the_last_lookup_finds_them_itself():
    core, twin = twins(4)
    for table in (core, twin):
        table.lookup(np.arange(10), train=True)
        table.lookup(np.arange(5, 20), train=True)
        table.apply(np.array([3, 3, 12]), torch.ones(3, 4), 1)
        table.apply(np.array([12, 3, 3]), torch.ones(3, 4), 2)
    assert_equal(core, twin)


def test_negative_zero_gradients_leave_the_twins_bits():
    core, twin = twins(4, optimizer="sgd", init_scale=0.0)
    for table in (core, twin):
        table.lookup(np.arange(4), train=True)
        table.apply(np.arange(4), -torch.zeros(4, 4), 1)
    assert_equal(core, twin)


def test_empty_batches_pass_and_misuse_is_named():
    core = native(4)
    assert core.lookup(torch.empty(0, dtype=torch.int64), train=True).shape == (0, 4)
    core.apply(torch.empty(0, dtype=torch.int64), torch.empty(0, 4), 1)
    with pytest.raises(DataError, match=r"int64 \[n\], got int32 \[2\]"):
        core.lookup(torch.zeros(2, dtype=torch.int32), train=True)
    with pytest.raises(DataError, match=r"int64 \[n\], got int64 \[2, 2\]"):
        core.lookup(torch.zeros(2, 2, dtype=torch.int64), train=False)
    core.lookup(np.arange(2), train=True)
    with pytest.raises(DataError, match=r"needs gradients of shape \[2, 4\], got \[2, 5\]"):
        core.apply(np.arange(2), torch.ones(2, 5), 1)
    with pytest.raises(DataError, match="needs `out` as contiguous float32"):
        core.lookup(np.arange(2), train=False, out=torch.ones(2, 4, dtype=torch.float64))
    with pytest.raises(DataError, match=r"2 keys that have no row, for example \[5, 6\]"):
        core.apply(np.array([6, 5, 6]), torch.ones(3, 4), 1)
    with pytest.raises(ConfigError, match="applied at step 1 and then at step 0"):
        core.apply(np.arange(2), torch.ones(2, 4), 0)


def test_a_strided_batch_and_strided_gradients_are_read_right():
    core, twin = twins(4)
    keys, grads = torch.arange(40)[::2], torch.arange(160.0).reshape(4, 40).T[::2]
    for table in (core, twin):
        table.lookup(keys, train=True)
        table.apply(keys, grads, 1)
    assert_equal(core, twin)


def test_a_lookup_writes_where_it_is_told():
    core, out = native(4), torch.full((3, 4), 9.0)
    assert core.lookup(np.arange(3), train=True, out=out) is out
    assert torch.equal(out, core.lookup(np.arange(3), train=False))


def test_clearing_forgets_rows_and_steps():
    core, twin = twins(4)
    train((core, twin), 5, np.arange(100))
    core.clear()
    assert (len(core), core.step) == (0, 0)
    core.load(twin.export())
    assert_equal(core, twin)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_as_bytes_are_the_twins_and_come_back_whole(optimizer, dtype):
    spec = TableSpec(7, optimizer, dtype=dtype, lr=0.1)
    tables, copies = ([make(spec) for make in (of_core, of_numpy)] for _ in range(2))
    keys = np.concatenate([ODD, np.arange(400)])
    train(tables, 5, keys)
    asked = np.unique(np.concatenate([keys[::2], np.arange(1000, 1040)]))  # the last ones are made
    ours, theirs = (take_packed(table, asked) for table in tables)
    assert torch.equal(ours, theirs)
    for copy in copies:
        put_packed(copy, asked[:300], theirs[:300])
        put_packed(copy, asked, theirs)
    assert [len(copy) for copy in copies] == [len(asked)] * 2
    assert copies[0].hash_state() == copies[1].hash_state()
    assert [copy.step for copy in copies] == [6, 6]  # rows made after step 5 carry the next one
    again = [copy.lookup(asked, train=True) for copy in copies]
    for copy, rows in zip(copies, again, strict=True):
        copy.apply(asked, rows, 7)
    assert copies[0].hash_state() == copies[1].hash_state()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_numbers_are_the_same_bits_by_every_instruction_set_and_nearest_to_what_came(dtype):
    source = np.random.default_rng(5)
    every = np.arange(1 << 16, dtype=np.uint16)
    halves = torch.from_numpy(every.view(np.int16)).view(torch.bfloat16 if dtype == "bf16" else torch.float16)
    # Every half number, those about halfway between two, and any bits at all: denormals, infinities and NaNs too.
    given = np.concatenate(
        [halves.float().numpy(), source.integers(0, 1 << 32, 1 << 16, dtype=np.uint32).view(np.float32)]
    )
    with np.errstate(invalid="ignore", over="ignore"):
        given = np.concatenate([given, given * np.float32(1 + 2**-9), given * np.float32(1 - 2**-12)])
    rows = np.resize(given, (len(given) // 13, 13)).astype(np.float32)  # 13: whole vectors and a rest
    keys = np.arange(len(rows))
    record = torch.zeros(len(rows), 4 * 13 + 16, dtype=torch.uint8)
    record[:, : 4 * 13] = torch.from_numpy(rows.view(np.uint8))
    read = []
    for isa in ("baseline", "avx2", ""):
        table = native(13, isa=isa, dtype=dtype, optimizer="sgd")
        put_packed(table, keys, record)
        read.append(table.lookup(keys, train=False))
    assert all(torch.equal(read[0].view(torch.int32), other.view(torch.int32)) for other in read[1:])
    wanted = torch.from_numpy(rows).to(halves.dtype).float()
    assert torch.equal(read[0].isnan(), wanted.isnan())
    assert torch.equal(read[0].nan_to_num(), wanted.nan_to_num())


def test_a_key_that_is_not_let_in_travels_as_absent():
    for make in (of_core, of_numpy):
        table, copy = make(TableSpec(4, admit_count=2)), make(TableSpec(4))
        for step in (1, 2):
            table.lookup(np.array([5, 6]), train=True, step=step)
        data = take_packed(table, np.array([5, 7, 6]))
        put_packed(copy, np.array([5, 7, 6]), data)
        assert sorted(copy.keys) == [5, 6]


def test_a_key_whose_row_comes_as_bytes_waits_no_more():
    for make in (of_core, of_numpy):
        table, other = make(TableSpec(4, admit_count=2)), make(TableSpec(4))
        table.lookup(np.array([5, 6]), train=True)
        put_packed(table, np.array([5]), take_packed(other, np.array([5])))
        assert table._list_waiting()[0].tolist() == [6]


def test_no_rows_as_bytes_are_no_bytes():
    nothing = np.empty(0, dtype=np.int64)
    for make in (of_core, of_numpy):
        table = make(TableSpec(4, "adam"))
        data = take_packed(table, nothing)
        assert tuple(data.shape) == (0, count_packed_bytes(table.spec))
        put_packed(table, nothing, data)
        assert (len(table), table.step) == (0, 0)


def of_core(spec):
    from nonet.embedding.tables.native_table import NativeTable

    return NativeTable.from_spec("item", spec, 7)


def of_numpy(spec):
    return NumPyTable.from_spec("item", spec, 7)


def test_what_cannot_be_a_step_is_refused_and_moves_nothing():
    for table in twins(4, optimizer="sgd"):
        table.lookup(np.arange(5), train=True)
        before = table.hash_state()
        for keys, grads, error in (
            (np.arange(9), torch.ones(9, 4), DataError),
            (np.arange(5), torch.ones(5, 4, dtype=torch.complex64), DataError),
            ([1, 2], torch.ones(2, 4), DataError),
        ):
            with pytest.raises(error):
                table.apply(keys, grads, 3)
            assert (table.step, table.hash_state()) == (0, before)
    for table in twins(4, optimizer="ftrl"):
        table.lookup(np.arange(5), train=True)
        with pytest.raises(ConfigError, match="above 0"):
            table.apply(np.arange(5), torch.ones(5, 4), 1, 0.0)
