import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from nonet.errors import ConfigError
from nonet.models.generation.corpus import add_joins
from nonet.samples import read
from nonet.samples.batches import cut_target_windows, make_prompt_batch, make_window_batch
from nonet.samples.sequences import build_sequences
from nonet.samples.stores import Join, PackedStore, StoreJoins

USERS, ITEMS = 30, 40


def stored(folder, name: str, keys: int, seed: int) -> str:
    """Make a store whose value is the time at which it was written, five versions per key; one key in four has none."""
    rng = np.random.default_rng(seed)
    store = PackedStore.create(
        folder / name, pa.schema([(f"{name}_at", pa.int64())]), key=pa.int64(), versions=True
    )
    pairs = np.unique(
        np.stack([rng.integers(0, keys * 3 // 4, 5 * keys), rng.integers(0, 1000, 5 * keys)]), axis=1
    )
    store.put(pairs[0], pa.table({f"{name}_at": pairs[1]}), pairs[1])
    return str(folder / name)


def sequences():
    rng = np.random.default_rng(2)
    events = 1500
    table = pa.table(
        {
            "user_id": rng.integers(0, USERS, events),
            "item_id": rng.integers(0, ITEMS, events),
            "timestamp": rng.integers(0, 1000, events),
        }
    )
    return build_sequences(table, None, split={"use": "leave_last_out", "test": 1, "valid": 0, "rl": 0})


def joins_of(tmp_path) -> StoreJoins:
    return StoreJoins(
        {
            "item": Join(use=stored(tmp_path, "item", ITEMS, 0), columns=["item_at"]),
            "user": Join(use=stored(tmp_path, "user", USERS, 1), columns=["user_at"]),
        }
    )


def test_no_event_sees_a_value_that_is_not_older_than_itself(tmp_path):
    seq, items = sequences()
    joined = add_joins(seq, joins_of(tmp_path), items["item_id"].to_numpy())
    sids = np.zeros((len(items), 1), np.int32)
    rows = np.arange(len(seq))
    windows = cut_target_windows(joined, rows, history=20, stage="s", epoch=0, seed=1, target=None)
    batches = [make_window_batch(joined, sids, windows, stage="s", epoch=0, target=None)]
    batches.append(make_prompt_batch(joined, sids, rows, joined.lengths - 1, history=20, stage="s"))
    for batch in batches:
        for name in ("item_at", "user_at"):
            seen = batch.context[name].values
            there = seen != np.iinfo(np.int64).min
            assert (seen[there] < batch.time.values[there]).all()
            assert there.any()
            assert not there.all()  # what is absent is not zero


def test_beams_get_columns_as_of_their_prompt_and_none_where_there_is_no_beam(tmp_path):
    joins = joins_of(tmp_path)
    rng = np.random.default_rng(4)
    item = rng.integers(0, ITEMS, (50, 6))
    valid, times = rng.random((50, 6)) < 0.8, rng.integers(0, 1100, 50)
    columns = joins.read_beam_columns(["item_at", "user_at"], item, valid, rng.integers(0, USERS, 50), times)
    assert columns["item_at"].shape == (50, 6)
    assert columns["user_at"].shape == (50,)
    assert np.isnan(columns["item_at"][~valid]).all()
    assert not (columns["item_at"] >= times[:, None]).any()
    assert not (columns["user_at"] >= times).any()
    assert np.isfinite(columns["item_at"]).any()


def test_a_chain_joins_a_column_and_a_list_column(tmp_path):
    address = stored(tmp_path, "item", ITEMS, 0)
    table = pa.table(
        {
            "item_id": [1, 2, 39],
            "t": [500, 500, 500],
            "items": [[1, 2], [], [39]],
            "times": [[500, 0], [], [7]],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    stream = read(tmp_path / "rows.parquet")
    one = next(iter(stream.join(address, on="item_id", columns={"seen": "item_at"}, as_of="t")))
    assert "join(" in stream.join(address, on="item_id", columns=["item_at"]).explain()
    seen = one["seen"].numpy()
    assert (seen[:2] < 500).all()
    assert np.isnan(seen[2])
    many = next(iter(stream.join(address, on="items", columns=["item_at"], as_of="times")))["item_at"]
    assert torch.equal(many.offsets, torch.tensor([0, 2, 2, 3]))
    assert np.isfinite(many.values.numpy()).tolist() == [True, False, False]


def test_a_join_that_cannot_be_names_its_key(tmp_path):
    store = PackedStore.create(tmp_path / "s", pa.schema([("price", pa.float64())]), key=pa.int64())
    store.put([1], pa.table({"price": [1.0]}))
    with pytest.raises(ConfigError, match=r"data\.join\.item: .* cannot be read as_of: time"):
        Join(use=str(tmp_path / "s"), columns=["price"], as_of="time").open("item")
    with pytest.raises(ConfigError, match=r"data\.join\.item: .* no column 'prise'"):
        Join(use=str(tmp_path / "s"), columns=["prise"]).open("item")


PAGES = Path(__file__).parents[3] / "docs"
EXAMPLE = re.compile(r"use: \"?([\w+]+:[^,\s\"]+)(?:[^{}]|\{[^{}]*\})*?options: (\{[^{}]*\})")


def test_stores_have_the_options_that_pages_and_the_scenario_reference_name():
    examples = [
        (use, yaml.safe_load(options))
        for page in sorted(PAGES.rglob("*.md"))
        for use, options in EXAMPLE.findall(page.read_text(encoding="utf-8"))
    ]
    description = Join.model_fields["options"].description or ""
    named = description.partition(": ")[2].partition(", and those")[0].split(", ")
    examples += [(use, dict.fromkeys(named, 2)) for use in ("redis://a:1/b", "hbase://a:1/b")]
    assert len(examples) >= 6
    for use, options in examples:
        Join(use=use, columns=["a"], options=options)


def test_joins_count_what_they_looked_up_and_found_since_they_were_last_asked(tmp_path):
    joins = joins_of(tmp_path)
    columns = joins.read_event_columns(np.arange(ITEMS), np.arange(ITEMS) % USERS, np.full(ITEMS, 500))
    found = int((columns["item_at"] != np.iinfo(np.int64).min).sum())
    counts = joins.pop_counts()
    assert 0 < found < ITEMS
    assert (counts["item"]["rows"], counts["item"]["found"]) == (ITEMS, found)
    assert counts["user"]["rows"] == ITEMS
    assert joins.pop_counts()["item"]["rows"] == 0
