import numpy as np

from nonet.embedding.tables.numpy_table import KeyIndex


def test_an_index_agrees_with_a_dict_over_many_batches_of_any_64_bit_keys():
    source = np.random.default_rng(11)
    index, oracle = KeyIndex(), {}
    for _ in range(30):
        keys = np.unique(
            np.concatenate([source.integers(-(2**63), 2**63 - 1, 200), source.integers(-50, 50, 40)])
        )
        rows = index.find(keys)
        assert rows.tolist() == [oracle.get(key, -1) for key in keys.tolist()]
        fresh = keys[rows < 0]
        for key, row in zip(fresh.tolist(), index.add(fresh).tolist(), strict=True):
            oracle[key] = row
    assert len(index) == len(oracle)
    assert dict(zip(index.keys.tolist(), range(len(index)), strict=True)) == oracle


def test_no_key_value_is_reserved():
    odd = np.array([-1, 0, -(2**63), 2**63 - 1])
    index = KeyIndex()
    assert index.find(odd).tolist() == [-1, -1, -1, -1]
    index.add(odd)
    assert index.find(odd[::-1]).tolist() == [3, 2, 1, 0]


def test_kept_keys_are_numbered_anew_and_the_others_are_forgotten():
    index = KeyIndex()
    index.add(np.arange(100))
    index.keep_rows(np.array([90, 7]))
    assert index.find(np.array([90, 7, 8])).tolist() == [0, 1, -1]
