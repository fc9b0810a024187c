"""The tier on disk: no row is lost, no byte is kept for long after its row has gone."""

import subprocess
import sys

import numpy as np
import pytest

from nonet.embedding.tables.rows import RowColumns
from nonet.embedding.tables.spec import TableSpec
from nonet.embedding.tiers.disk_tier import DiskTier
from nonet.errors import NonetError
from nonet.random import rng

ODD = np.array([0, -1, -(2**63), 2**63 - 1], dtype=np.int64)


def rows_of(keys, value, dim=3, state=1):
    numbers = np.asarray(value, dtype=np.float32).reshape(-1, 1)
    return RowColumns(
        keys, np.repeat(numbers, dim, axis=1), np.repeat(-numbers, state, axis=1),
        np.asarray(value, dtype=np.int64), np.zeros(len(keys), bool),
    )  # fmt: skip


def tier(folder, segment_bytes=4096, **settings):
    return DiskTier(folder, TableSpec(3, **settings), segment_bytes=segment_bytes)


def held(cold):
    return sorted(np.concatenate([*cold.iterate_keys(), np.empty(0, np.int64)]).tolist())


@pytest.mark.parametrize("seed", range(4))
def test_after_any_sequence_of_operations_every_row_reads_as_a_dict_has_it(seed, tmp_path):
    source, cold, oracle = rng(seed, "cold"), tier(tmp_path), {}
    known = np.concatenate([ODD, source.integers(-(2**63), 2**63 - 1, 900)])
    for turn in range(1, 300):
        keys = source.choice(known, source.integers(0, 120), replace=False)
        op = source.random()
        if op < 0.5:
            values = turn * 200 + np.arange(len(keys))
            cold.put(rows_of(keys, values))
            oracle |= dict(zip(keys.tolist(), values.tolist(), strict=True))
        elif op < 0.9:
            cold.drop(keys)
            for key in keys.tolist():
                oracle.pop(key, None)
        found = cold.read(keys)
        assert found.deleted.tolist() == [key not in oracle for key in keys.tolist()]
        expected = [oracle.get(key, 0) for key in keys.tolist()]
        assert found.row[:, 2].tolist() == expected
        assert found.state[:, 0].tolist() == [-value for value in expected]
        assert found.step.tolist() == expected
        assert cold.nbytes <= 2 * cold.live_bytes + 2 * 4096
    assert held(cold) == sorted(oracle)
    assert len(cold) == len(oracle)
    assert cold.moved > 300  # compaction did work


def test_compaction_moves_no_more_rows_than_have_died(tmp_path):
    source, cold = rng(3, "cold"), tier(tmp_path)
    keys, died = np.arange(2000), 0
    cold.put(rows_of(keys, keys))
    for _ in range(200):
        some = source.choice(keys, 100, replace=False)
        cold.put(rows_of(some, some))
        died += 100
    assert cold.moved <= died
    assert cold.read(keys).row[:, 0].tolist() == keys.tolist()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_rows_take_half_the_room_and_keep_their_bits(dtype, tmp_path):
    cold, whole = tier(tmp_path, dtype=dtype), tier(tmp_path)
    rows = rows_of(np.arange(64), np.arange(64) * 0.25)
    for made in (cold, whole):
        made.put(rows)
    assert np.array_equal(cold.read(rows.key).row, rows.row)
    assert whole.nbytes - cold.nbytes == 64 * 3 * 2


def test_a_row_without_state_is_kept_too(tmp_path):
    cold = tier(tmp_path, optimizer="sgd")
    cold.put(rows_of(ODD, np.arange(4), state=0))
    assert cold.read(ODD).row[:, 0].tolist() == [0, 1, 2, 3]


def test_a_write_that_fails_names_the_folder_and_loses_nothing(tmp_path, monkeypatch):
    cold = tier(tmp_path)
    cold.put(rows_of(np.arange(10), np.arange(10)))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        with pytest.raises(NonetError, match=r"cold-\w+ cannot write 5 rows \(No space left on device\)"):
            cold.put(rows_of(np.arange(5), np.arange(5) + 100))
    assert cold.read(np.arange(10)).row[:, 0].tolist() == list(range(10))
    cold.put(rows_of(np.arange(5), np.arange(5) + 100))
    assert cold.read(np.arange(10)).row[:, 0].tolist() == [100, 101, 102, 103, 104, 5, 6, 7, 8, 9]


def test_its_folder_goes_with_the_tier_and_what_a_killed_process_left_is_swept(tmp_path):
    code = (
        "import os, sys; from nonet.embedding.tiers.disk_tier import DiskTier; from nonet.embedding.tables import TableSpec\n"
        "cold = DiskTier(sys.argv[1], TableSpec(3)); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=800)
    (left,) = tmp_path.iterdir()
    cold, other = tier(tmp_path), tier(tmp_path)
    assert not left.exists()
    assert sorted(tmp_path.iterdir()) == sorted([cold.folder, other.folder])
    del cold
    assert list(tmp_path.iterdir()) == [other.folder]


def test_a_file_that_somebody_changed_or_cut_is_an_error_and_never_another_row(tmp_path):
    cold, keys = tier(tmp_path), np.arange(20)
    cold.put(rows_of(keys, 1.0))
    (path,) = cold.folder.glob("*.rows")
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.write(b"\x7f" * 8)
    with pytest.raises(NonetError, match=r"1 rows of the cold tier .* not where they were written"):
        cold.read(keys)
    with path.open("r+b") as file:
        file.write(whole[:8])
    assert held(cold) == keys.tolist()
    cold.read(keys)
    path.open("r+b").truncate(100)
    with pytest.raises(NonetError, match="was truncated by another process"):
        cold.read(keys)


def test_a_file_that_cannot_be_made_names_it(tmp_path):
    cold = tier(tmp_path)
    cold.folder.rmdir()
    with pytest.raises(NonetError, match=r"cannot create .*00000000\.rows: No such file"):
        cold.put(rows_of(np.arange(3), 1.0))
