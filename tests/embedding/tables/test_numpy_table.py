import numpy as np
import pytest
import torch

from nonet.embedding.slices import SliceMap
from nonet.embedding.tables.numpy_table import NumPyTable
from nonet.embedding.tables.protocol import SparseTable
from nonet.embedding.tables.spec import TableSpec
from nonet.errors import ConfigError, DataError

KEYS = np.array([5, -9, 2**62, 0, 17, 4_000_000_000, -1, 33], dtype=np.int64)
OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "adam"]


def table(optimizer="rowwise_adagrad", dim=4, seed=7, name="item", **settings):
    return NumPyTable(name, dim, seed=seed, optimizer=optimizer, **settings)


def steps(count=12, dim=4, seed=1):
    """Batches of keys with duplicates, of which some rows are absent for a while, and their gradients."""
    source = np.random.default_rng(seed)
    for step in range(1, count + 1):
        keys = KEYS[source.integers(0, len(KEYS), 6)]
        yield step, keys, torch.from_numpy(source.standard_normal((6, dim)).astype(np.float32))


def trained(optimizer, count=12, **settings):
    made = table(optimizer, **settings)
    for step, keys, grads in steps(count):
        made.lookup(keys, train=True)
        made.apply(keys, grads, step)
    return made


def torch_optimizer(name, rows, lr, weight_decay):
    if name == "sgd":
        return torch.optim.SGD(rows, lr=lr)
    if name == "adagrad":
        return torch.optim.Adagrad(rows, lr=lr)
    return torch.optim.AdamW(rows, lr=lr, weight_decay=weight_decay, foreach=False)


def test_the_numpy_table_speaks_the_protocol():
    assert isinstance(table(), SparseTable)


@pytest.mark.parametrize(
    ("optimizer", "weight_decay"), [("sgd", 0.0), ("adagrad", 0.0), ("adam", 0.0), ("adam", 0.1)]
)
def test_sparse_steps_equal_torchs_optimizer_that_skips_untouched_rows(optimizer, weight_decay):
    sparse = table(optimizer, lr=0.05, weight_decay=weight_decay)
    initial = sparse.lookup(KEYS, train=True)
    rows = {int(key): torch.nn.Parameter(row.clone()) for key, row in zip(KEYS, initial, strict=True)}
    dense = torch_optimizer(optimizer, list(rows.values()), 0.05, weight_decay)
    for step, keys, grads in steps():
        dense.zero_grad(set_to_none=True)
        for key, grad in zip(keys.tolist(), grads, strict=True):
            before = rows[key].grad
            rows[key].grad = grad.clone() if before is None else before + grad
        dense.step()
        sparse.apply(keys, grads, step)
    expected = torch.stack([rows[int(key)].detach() for key in KEYS])
    # 12 steps of float32 in another association: a few units in the last place.
    assert torch.allclose(sparse.lookup(KEYS, train=False), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(initial, expected, atol=1e-3)


def test_rowwise_adagrad_keeps_the_sum_of_mean_squares_and_moves_as_computed_by_hand():
    sparse = table(dim=2, lr=0.5, init_scale=0.0)
    key = np.array([3])
    sparse.lookup(key, train=True)
    sparse.apply(key, torch.tensor([[3.0, 1.0]]), step=1)  # mean square 5
    sparse.apply(key, torch.tensor([[2.0, 0.0]]), step=2)  # mean square 2, sum 7
    expected = [-0.5 * 3 / 5**0.5 - 0.5 * 2 / 7**0.5, -0.5 * 1 / 5**0.5]
    assert sparse.lookup(key, train=False)[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_gradients_of_equal_keys_are_summed_in_position_order_before_one_step():
    source = np.random.default_rng(5)
    keys = source.integers(0, 9, 4000)
    grads = torch.from_numpy(source.standard_normal((4000, 4)) * 10.0 ** source.integers(-4, 5, (4000, 1)))
    grads = grads.to(torch.float32)
    one = table("sgd", lr=1.0, init_scale=0.0)
    one.lookup(keys, train=True)
    one.apply(keys, grads, step=1)
    sums = np.zeros((9, 4), dtype=np.float32)
    for key, grad in zip(keys, grads.numpy(), strict=True):
        sums[key] += grad
    assert np.array_equal(one.lookup(np.arange(9), train=False).numpy(), -sums)


def test_first_values_depend_on_seed_table_and_key_and_on_nothing_else():
    together = table().lookup(KEYS, train=True)
    other_order = table()
    alone = torch.cat([other_order.lookup(KEYS[[at]], train=True) for at in (7, 2, 5, 0, 1, 6, 4, 3)])
    assert torch.equal(alone, together[[7, 2, 5, 0, 1, 6, 4, 3]])
    assert not torch.equal(table(seed=8).lookup(KEYS, train=True), together)
    assert not torch.equal(table(name="user").lookup(KEYS, train=True), together)


def test_first_values_are_spread_evenly_around_zero():
    rows = table(dim=16, init_scale=0.5).lookup(np.arange(20_000), train=True)
    assert rows.min() >= -0.5
    assert rows.max() < 0.5
    assert len(rows.unique()) > 300_000
    # Uniform: standard deviation 0.5 / sqrt(3); 320,000 draws put the mean within 5 standard errors, 0.0026.
    assert abs(float(rows.mean())) < 0.0026
    assert float(rows.std()) == pytest.approx(0.5 / 3**0.5, abs=0.003)
    correlation = np.corrcoef(rows.numpy().T)
    assert np.abs(correlation - np.eye(16)).max() < 0.04


def test_an_absent_key_reads_zeros_is_counted_and_makes_no_row():
    made = table()
    made.lookup(KEYS[:2], train=True)
    rows = made.lookup(KEYS[[1, 4, 4]], train=False)
    assert rows[0].abs().sum() > 0
    assert rows[1:].abs().sum() == 0
    assert (made.absent, len(made)) == (2, 2)


def test_a_lookup_is_a_copy_that_later_steps_do_not_change():
    made = table()
    before = made.lookup(KEYS, train=True)
    kept = before.clone()
    made.apply(KEYS, torch.ones(len(KEYS), 4), step=1)
    assert torch.equal(before, kept)


def test_a_learning_rate_given_to_a_step_overrides_the_tables_own():
    slow, fast = table("sgd", lr=0.5, init_scale=0.0), table("sgd", lr=0.01, init_scale=0.0)
    for made, lr in ((slow, None), (fast, 0.5)):
        made.lookup(KEYS, train=True)
        made.apply(KEYS, torch.ones(len(KEYS), 4), step=1, lr=lr)
    assert slow.hash_state() == fast.hash_state()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("shards", [1, 3])
def test_rows_exported_from_two_shards_load_into_any_number_and_train_on_bit_for_bit(optimizer, shards):
    whole = trained(optimizer, count=8)
    halves = [table(optimizer) for _ in range(2)]
    for shard, half in enumerate(halves):
        half.load(whole.export(), SliceMap(2).get_slices(shard))
    parts = [table(optimizer) for _ in range(shards)]
    for shard, part in enumerate(parts):
        for half in halves:
            part.load(half.export(), SliceMap(shards).get_slices(shard))
    for step, keys, grads in list(steps(12))[8:]:
        for made in (whole, *parts):
            owned = SliceMap(shards).find_owners(keys) == (parts.index(made) if made in parts else 0)
            mine = np.ones(len(keys), dtype=bool) if made is whole else owned
            made.lookup(keys[mine], train=True)
            made.apply(keys[mine], grads[torch.from_numpy(mine)], step)
    merged = table(optimizer)
    for part in parts:
        merged.load(part.export())
    assert sum(map(len, parts)) == len(whole)
    assert merged.hash_state() == whole.hash_state()


def test_an_export_survives_parquet_and_does_not_depend_on_the_order_of_arrival(tmp_path):
    import pyarrow.parquet as parquet

    for optimizer in OPTIMIZERS:
        made, backwards = table(optimizer), table(optimizer)
        made.lookup(KEYS, train=True)
        backwards.lookup(KEYS[::-1].copy(), train=True)
        (exported,) = made.export()
        assert exported.equals(next(backwards.export()))
        parquet.write_table(exported, tmp_path / "rows.parquet")
        again = table(optimizer)
        again.load([parquet.read_table(tmp_path / "rows.parquet")])
        assert again.hash_state() == made.hash_state()


def test_an_export_since_a_step_holds_the_rows_made_or_changed_after_it():
    made = table()
    made.lookup(KEYS[:4], train=True)
    made.apply(KEYS[:4], torch.ones(4, 4), step=3)
    made.apply(KEYS[:1], torch.ones(1, 4), step=4)
    made.lookup(KEYS[5:6], train=True)
    changed = next(made.export(since=3))["key"].to_pylist()
    assert sorted(changed) == sorted(KEYS[[0, 5]].tolist())
    assert made.list_touched_since(3).tolist() == sorted(changed)
    assert next(made.export(since=4))["key"].to_pylist() == [KEYS[5]]
    assert list(made.export(since=5)) == []


def test_loading_a_delete_forgets_the_row():
    import pyarrow as pa

    made = trained("adam")
    (exported,) = made.export()
    before = made.lookup(KEYS[1:], train=False)
    gone = exported.filter(pa.compute.equal(exported["key"], int(KEYS[0])))
    made.load([gone.set_column(gone.column_names.index("op"), "op", pa.array(["delete"]))])
    assert len(made) == len(exported) - 1
    assert torch.equal(made.lookup(KEYS[1:], train=False), before)
    assert made.lookup(KEYS[:1], train=False).abs().sum() == 0


def test_rows_saved_with_another_width_or_optimizer_are_refused():
    saved = list(trained("adam").export())
    with pytest.raises(DataError, match="needs column row with 8 float32"):
        table("adam", dim=8).load(saved)
    with pytest.raises(DataError, match="needs column state with 4 float32"):
        table("adagrad").load(saved)


def test_a_gradient_for_a_key_without_a_row_is_refused():
    with pytest.raises(DataError, match="2 keys that have no row, for example \\[5, 6\\]"):
        table().apply(np.array([6, 5]), torch.ones(2, 4), step=1)


def test_steps_that_go_back_are_refused():
    made = trained("sgd")
    with pytest.raises(ConfigError, match="applied at step 12 and then at step 3"):
        made.apply(KEYS[:1], torch.ones(1, 4), step=3)


def test_keys_that_are_not_int64_are_refused():
    with pytest.raises(DataError, match="int64 \\[n\\], got int32 \\[2\\]"):
        table().lookup(np.array([1, 2], dtype=np.int32), train=True)


def test_an_unknown_optimizer_is_refused_with_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"optimizer 'adamax' .*does not exist; choose one of: adagrad, adam"
    ):
        table("adamax")


@pytest.mark.parametrize("name", ["dim", "budget_rows", "budget_bytes", "ttl_steps", "admit_count"])
def test_counts_that_are_no_whole_numbers_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"{name} must be a whole number, got 5.5"):
        TableSpec(**{"dim": 4, name: 5.5})


def test_ftrl_without_a_rate_is_refused():
    with pytest.raises(ConfigError, match="ftrl divides by its lr"):
        TableSpec(4, "ftrl", lr=0.0)
