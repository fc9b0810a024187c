"""What a ledger's fingerprint covers: everything that decides which rows a step reads."""

from __future__ import annotations

import json
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.errors import CheckpointError
from nonet.samples.sources import SampleRequest
from nonet.samples.sources.parquet import FileWindows
from nonet.samples.streams import read


@pytest.fixture
def file(tmp_path):
    rng = np.random.default_rng(0)
    pq.write_table(
        pa.table({"user_id": np.arange(400), "rating": rng.integers(1, 6, 400)}),
        tmp_path / "a.parquet",
        row_group_size=100,
    )
    return str(tmp_path / "a.parquet")


def same(rows):
    return rows


OTHER = {
    "where": lambda file: read(file, where="rating >= 2").shuffle(7).open(rows=10),
    "map": lambda file: read(file, where="rating >= 4").shuffle(7).map(same).open(rows=10),
    "filter": lambda file: (
        read(file, where="rating >= 4").shuffle(7).map(same).filter("rating == 5").open(rows=10)
    ),
    "rows of a step": lambda file: read(file, where="rating >= 4").shuffle(7).open(rows=10, step_rows=20),
    "seed": lambda file: read(file, where="rating >= 4").shuffle(8).open(rows=10),
    "stage": lambda file: read(file, where="rating >= 4").shuffle(7).open(rows=10, name="finetune"),
    "take": lambda file: read(file, where="rating >= 4").shuffle(7).take(100).open(rows=10),
}


def first_step(feed):
    ledger = feed.make_ledger()
    for part in feed.get_slices(0):
        ledger.lease(part)
    ledger.apply_step(0)
    return ledger


@pytest.mark.parametrize("what", OTHER)
def test_a_ledger_is_restored_by_the_same_stream_alone(file, what):
    def stream():
        return read(file, where="rating >= 4").shuffle(7).open(rows=10)

    body, bitmaps = first_step(stream()).snapshot()
    stream().make_ledger().restore(body, bitmaps)
    with pytest.raises(
        CheckpointError, match=r"read the same data in another order \(seed, stage, filters, maps"
    ):
        OTHER[what](file).make_ledger().restore(body, bitmaps)


def test_what_only_cuts_a_step_into_slices_changes_no_fingerprint(file):
    body, bitmaps = first_step(read(file).shuffle(7).open(rows=10, step_rows=40)).snapshot()
    ledger = read(file).shuffle(7).prefetch(0).open(rows=20, step_rows=40).make_ledger()
    ledger.restore(body, bitmaps)
    assert ledger.count_rows()["done"] == 40


def windows(file, stage):
    ids = pa.table({"item_id": np.arange(401)})
    sids = np.zeros((401, 2), np.int32)
    ask = SampleRequest(stage, 7, "users", 20, 8, None, 1 << 16, (), lambda: None, lambda: ids, sids)
    return FileWindows(ask, {"path": file})


@pytest.fixture
def sequences(tmp_path):
    rows = {"user_id": np.arange(100), "item_id": [[i, i + 1] for i in range(100)]}
    pq.write_table(pa.table(rows), tmp_path / "s.parquet", row_group_size=30)
    return str(tmp_path / "s.parquet")


def items_of(source, steps):
    read_items = []
    for step in steps:
        read_items += [make().item.values.tolist() for make in source.batch(step, 0, 1)]
        source.ledger.apply_step(step)
    return read_items


def test_stages_read_files_in_orders_of_their_own(sequences):
    pretrain, finetune = (items_of(windows(sequences, stage), range(5)) for stage in ("pretrain", "finetune"))
    assert pretrain != finetune
    assert pretrain == items_of(windows(sequences, "pretrain"), range(5))
    assert sorted(chain(*pretrain)) == sorted(chain(*finetune))


@pytest.mark.parametrize(
    ("changes", "shown"), [({"format": 4}, 4), ({"format": 1}, 1), ({"format": 2, "rules": 1}, 1)]
)
def test_a_ledger_of_another_format_or_with_its_order_is_refused(sequences, changes, shown):
    source = windows(sequences, "pretrain")
    body, bitmaps = source.ledger.snapshot()
    other = json.dumps({**json.loads(body), **changes}).encode()
    with pytest.raises(CheckpointError, match=f"the ledger has format {shown}; this version reads 2, 3"):
        source.ledger.restore(other, bitmaps)
