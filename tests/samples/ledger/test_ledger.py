"""The ledger: a row counts once, what is not done returns, and a commit of other data is refused in words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nonet.errors import CheckpointError
from nonet.samples.ledger.ledger import SampleLedger, has_ledger, write_notes, write_snapshot
from nonet.samples.ledger.manifest import DataFile, DataManifest
from nonet.samples.ledger.order import EpochSteps, OrderSlice

FILES = (DataFile("a.parquet", 10, (50, 50), "aa"), DataFile("b.parquet", 20, (100,), "bb"))
STEPS = EpochSteps(200, 40, 10)


def ledger(files=FILES, order="order"):
    return SampleLedger(DataManifest(files), order, 200)


def learned(account, steps):
    for step in steps:
        for part in STEPS.cut_slices(step):
            account.lease(part)
        account.apply_step(step)
    return account


def test_a_row_that_is_leased_or_done_cannot_be_leased_again():
    account = ledger()
    account.lease(OrderSlice(0, 0, 0, 0, 10))
    with pytest.raises(
        CheckpointError, match=r"places 5 to 8 of epoch 0 .* were leased before; each row counts once"
    ):
        account.lease(OrderSlice(0, 1, 0, 5, 8))
    account.apply_step(0)
    with pytest.raises(CheckpointError, match=r"were learned from before"):
        account.lease(OrderSlice(3, 0, 0, 9, 12))


def test_a_slice_that_is_not_leased_cannot_be_done():
    with pytest.raises(CheckpointError, match=r"slice 0 of step 4 is not leased"):
        ledger().apply(OrderSlice(4, 0, 0, 0, 10))


def test_what_is_only_leased_is_not_in_a_snapshot():
    account = learned(ledger(), [0, 1])
    account.lease(STEPS.cut_slices(2)[0])
    again = ledger()
    again.restore(*account.snapshot())
    assert again.count_rows() == {"epochs": 0, "done": 80, "skipped": 0, "filtered": 0, "leased": 0}
    assert again.get_done_places(0).tolist() == list(range(80))
    learned(again, [2, 3, 4])
    assert again.count_rows()["epochs"] == 1
    learned(again, [5])


def test_skipped_rows_are_not_done_and_filtered_ones_are():
    account = ledger()
    for part in STEPS.cut_slices(0):
        account.lease(part)
        account.apply(part, filtered=4, skipped=[part.start + 1])
    assert account.count_rows() == {"epochs": 0, "done": 36, "skipped": 4, "filtered": 16, "leased": 0}
    assert 1 not in account.get_done_places(0)
    assert account.is_done(STEPS.cut_slices(0)[0])
    learned(account, range(1, 5))
    assert account.count_rows()["done"] == 196
    assert account.get_done_places(0).tolist() == sorted({*range(200)} - {1, 11, 21, 31})


def test_notes_of_other_ranks_come_together_at_rank_0(tmp_path):
    mine, other = learned(ledger(), [0]), learned(ledger(), [0])
    other.note(OrderSlice(0, 1, 0, 10, 20), filtered=3, skipped=[11, 12])
    write_snapshot(mine.snapshot(), tmp_path)
    write_notes(other.dump_notes(), 1, tmp_path)
    assert has_ledger(tmp_path)
    first, second = ledger(), ledger()
    first.load(tmp_path, 0)
    second.load(tmp_path, 1)
    assert first.count_rows() | {"leased": 0} == {
        "epochs": 0,
        "done": 38,
        "skipped": 2,
        "filtered": 3,
        "leased": 0,
    }
    assert second.count_rows()["skipped"] == second.count_rows()["filtered"] == 0


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ((FILES[0], replace(FILES[1], bytes=21)), "file 1, b.parquet: 20 bytes then, 21 now"),
        ((FILES[0], replace(FILES[1], groups=(99,))), "file 1, b.parquet: 100 rows then, 99 now"),
        (
            (FILES[0], replace(FILES[1], fingerprint="xx")),
            "file 1, b.parquet: other content of the same size",
        ),
        ((replace(FILES[0], groups=(60, 40)), FILES[1]), "file 0, a.parquet: other row groups"),
        ((FILES[1],), r"2 files then, 1 now \(missing a.parquet\)"),
        ((*FILES, DataFile("c", 1, (1,), "cc")), r"2 files then, 3 now \(new c\)"),
    ],
)
def test_a_commit_of_other_data_says_what_changed_and_is_refused(files, said):
    with pytest.raises(CheckpointError, match=r"was trained on other data: " + said):
        ledger(files).restore(*learned(ledger(), [0]).snapshot())


def test_data_may_be_moved():
    moved = tuple(replace(file, path=f"/elsewhere/{file.path}") for file in FILES)
    account = ledger(moved)
    account.restore(*learned(ledger(), [0]).snapshot())
    assert account.count_rows()["done"] == 40


def test_a_commit_of_another_order_is_refused():
    with pytest.raises(CheckpointError, match=r"read the same data in another order"):
        ledger(order="other").restore(*learned(ledger(), [0]).snapshot())


def test_a_file_that_is_listed_twice_has_rows_of_its_own():
    twice = DataManifest((FILES[0], FILES[0]))
    assert twice.rows == 200
    ids = np.concatenate([twice.compute_row_ids(group, np.arange(50)) for group in range(4)])
    assert len(set(ids.tolist())) == 200
    assert twice.describe_row(int(ids[160])) == "a.parquet, row group 1, row 60"


def test_a_billion_rows_in_order_take_a_quarter_of_a_megabyte():
    account = SampleLedger(DataManifest.from_rows("x", 1 << 30), "order", 1 << 30)
    for step, start in enumerate(range(0, 10**9, 10**8)):
        part = OrderSlice(step, 0, 0, start, start + 10**8)
        account.lease(part)
        account.apply(part)
    assert sum(map(len, account.snapshot())) < 1 << 18
