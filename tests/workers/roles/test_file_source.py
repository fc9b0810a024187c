"""Trainers that read a user's own Parquet files: they learn, their commits hold the rows, other worlds go on from them."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ring_world import Ring

from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.setup.worker_setup import make_stage_setups
from nonet.errors import CheckpointError, ConfigError
from nonet.samples.sources.base import SampleRequest, open_source


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    made = Ring(tmp_path_factory.mktemp("ring"))
    seq, items = made.corpus().seq, np.array(made.corpus().items["item_id"].to_pylist())
    lists = pa.ListArray.from_arrays(pa.array(seq.offsets.astype(np.int32)), pa.array(items[seq.item]))
    made.file = made.scenario.parent / "own.parquet"
    pq.write_table(pa.table({"user_id": seq.user_id, "item_id": lists}), made.file, row_group_size=16)
    return made


def changes(ring, *more):
    return f"data.source={{use: parquet, path: {ring.file}}}", "stages.pretrain.batch.users=10", *more


def test_a_trainer_learns_from_files_and_goes_on_where_its_commit_says(ring, tmp_path):
    world = ring.world(*changes(ring))
    records = world.train("pretrain", 0, 7)
    assert records[-1]["loss"] < records[0]["loss"]
    world.save(tmp_path)
    ledger = json.loads((tmp_path / "samples" / "ledger.json").read_text())
    assert ledger["whole"] == [0]
    assert ledger["manifest"]["files"][0]["groups"] == [16, 16, 16, 12]
    other = ring.world(*changes(ring))
    other.load(tmp_path, "pretrain")
    assert other.train("pretrain", 7, 9) == world.train("pretrain", 7, 9)
    with pytest.raises(CheckpointError, match="were learned from before; each row counts once"):
        other.train("pretrain", 3, 4)


def test_a_commit_of_other_files_says_what_changed(ring, tmp_path):
    world = ring.world(*changes(ring))
    world.train("pretrain", 0, 2)
    world.save(tmp_path / "commit")
    shorter = tmp_path / "shorter.parquet"
    pq.write_table(pq.read_table(ring.file).slice(0, 50), shorter)
    other = ring.world(f"data.source={{use: parquet, path: {shorter}}}", "stages.pretrain.batch.users=10")
    with pytest.raises(
        CheckpointError, match=r"was trained on other data: file 0, .*shorter.parquet: \d+ bytes then"
    ):
        other.load(tmp_path / "commit", "pretrain")


def test_ranks_share_the_slices_of_a_step(ring):
    corpus = ring.corpus()
    ask = SampleRequest(
        "pretrain",
        5,
        "users",
        20,
        8,
        None,
        1 << 14,
        ("item", "user"),
        lambda: corpus.seq,
        lambda: corpus.items,
        corpus.sids,
    )
    config = {"use": "parquet", "path": str(ring.file)}

    def users(world):
        sources = [open_source(config, ask) for _ in range(world)]
        makes = [make for rank, source in enumerate(sources) for make in source.batch(0, rank, world)]
        return sorted({int(user) for make in makes for user in make().context["user"]})

    assert users(1) == users(2) == users(3)
    assert len(users(1)) == 20


def test_an_epoch_is_the_rows_of_the_files_and_the_engine_must_read_them(ring):
    scenario, _ = load_scenario(ring.scenario, list(changes(ring, "data.engine=local")))
    assert make_stage_setups(scenario, 10_000, 700)["pretrain"].steps % 6 == 0
    with pytest.raises(ConfigError, match="ray does not read the source 'shuffled'"):
        load_scenario(ring.scenario, ["data.engine=ray"])
    with pytest.raises(ConfigError, match="is relative; give a whole path"):
        load_scenario(ring.scenario, ["data.source={use: parquet, path: own.parquet}"])
