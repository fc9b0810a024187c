"""The chain: what it gives, that it is lazy, and that its rows and order are the same however it is run."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

import nonet
from nonet.errors import ConfigError, DataError
from nonet.samples.streams.stream import read
from nonet.types import Jagged


def users(feed, slices):
    return [batch["user"].tolist() for batch in feed.iterate_batches(slices)]


def all_slices(feed, world=1):
    return [
        part
        for step in range(feed.steps.steps_per_epoch)
        for rank in range(world)
        for part in feed.get_slices(step, rank, world)
    ]


def test_rows_become_tensors_without_padding(files):
    batches = list(nonet.samples.read(str(files)))
    assert sum(map(len, batches)) == 900
    first = batches[0]
    assert isinstance(first["items"], Jagged)
    assert first["items"].values.dtype == first["items"].offsets.dtype == torch.int64
    assert first["items"][4].tolist() == [4, 5, 6, 7]
    assert isinstance(first["name"], pa.Array)
    assert [(r.file, r.start, r.stop) for batch in batches for r in batch.rows][:3] == [
        (0, 0, 110),
        (0, 110, 220),
        (0, 220, 300),
    ]


def test_a_chain_reads_nothing_until_it_is_opened_and_changes_no_other():
    base = read("/nowhere/*.parquet")
    chain = base.map(len).shuffle(3).take(5)
    assert base.operators == () != chain.operators
    with pytest.raises(DataError, match=r"no file matches"):
        chain.open()


def test_it_explains_itself(files):
    text = (
        read(str(files), columns=["user"], where="user < 200")
        .map(len, workers=2)
        .shuffle(3)
        .take(50)
        .explain()
    )
    assert "3 files" in text
    assert "statistics rule out 7 groups" in text
    assert "row groups shuffled by seed 3, and rows inside each" in text
    assert "map(len, batch=4096, workers=2)" in text


def test_maps_filters_and_packing_see_every_row_once(files):
    stream = (
        read(str(files), where="label == 1")
        .shuffle(4)
        .map(lambda rows: rows.append_column("twice", _twice(rows)), batch=7)
    ).filter(lambda rows: rows.column("user").to_numpy() % 2 == 0)
    feed = stream.pack(40, column="items").open(rows=64, step_rows=128)
    ledger = feed.make_ledger()
    found = []
    for batch in feed.iterate_batches(all_slices(feed), ledger):
        assert int(batch["items"].offsets[-1]) <= 40
        assert batch["twice"].tolist() == [2 * user for user in batch["user"].tolist()]
        found += batch["user"].tolist()
        feed.apply_batch(batch, ledger)
    assert sorted(found) == [user for user in range(900) if user % 6 == 0]
    assert ledger.count_rows() == {"epochs": 1, "done": 900, "skipped": 0, "filtered": 750, "leased": 0}


def test_tokens_are_looked_up_in_semantic_ids(files):
    sids = np.arange(2000, dtype=np.int32).reshape(1000, 2)
    batch = next(iter(read(str(files), columns=["user", "items"]).tokenize(sids, column="items")))
    assert batch["sid"].values.shape == (len(batch["items"].values), 2)
    assert torch.equal(batch["sid"].values[:, 0].long(), 2 * batch["items"].values)
    with pytest.raises(
        DataError,
        match=r"items have no semantic id, the first: 5; in a slice of .*part-0.parquet, row group 0",
    ):
        list(read(str(files)).tokenize(sids[:5], column="items"))


def test_an_artifacts_folder_with_codes_of_two_tokenizers_is_refused(files, tmp_path):
    for digest in ("aa", "bb"):
        (tmp_path / f"sequences-{digest}").mkdir()
    with pytest.raises(ConfigError, match="holds sequences-aa, sequences-bb; it must hold one sequences-"):
        list(read(str(files)).tokenize(tmp_path, column="items"))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_every_world_reads_the_same_global_steps(files, world):
    feed = read(str(files)).shuffle(9).open(rows=16, step_rows=64)
    one = [feed.compute_row_ids(part).tolist() for part in all_slices(feed)]
    steps = range(feed.steps.steps_per_epoch)
    shares = [
        [(part.step, part.part, ids) for part, ids in _read(feed, steps, rank, world)]
        for rank in range(world)
    ]
    assert [ids for _, _, ids in sorted(entry for share in shares for entry in share)] == one
    assert sorted(id_ for ids in one for id_ in ids) == sorted(feed.manifest.compute_row_ids(g, np.arange(n)).tolist()[i]
        for g, n in enumerate(feed.manifest.group_rows) for i in range(n))  # fmt: skip


def test_threads_and_no_threads_give_the_same(files):
    stream = read(str(files)).shuffle(2).map(lambda rows: rows, workers=3)
    feed, still = stream.open(rows=50), stream.prefetch(0).open(rows=50)
    assert users(feed, all_slices(feed)) == users(still, all_slices(still))


def test_an_epoch_can_begin_anywhere(files):
    feed = read(str(files)).shuffle(2).open(rows=32)
    whole = [batch["user"].tolist() for batch in feed.iterate_epoch(1)]
    assert [batch["user"].tolist() for batch in feed.iterate_epoch(1, first_step=20)] == whole[20:]


def test_a_path_named_twice_is_two_epochs_worth(files):
    part = str(files / "part-0.parquet")
    found = [user for batch in read([part, part]).shuffle(1) for user in batch["user"].tolist()]
    assert sorted(found) == sorted([*range(300), *range(300)])


def test_mixtures_keep_their_shares_and_go_round(files):
    a, b = (
        read(str(files / "part-0.parquet")).shuffle(1),
        read(str(files / "part-[12].parquet")).filter("label == 1"),
    )
    mixed = a.mix({a: 0.75, b: 0.25})
    feed = mixed.open(rows=100)
    assert feed.rows == 2400  # 600 rows at a quarter
    batches = list(feed.iterate_batches(all_slices(feed)))
    of_a = [user for batch in batches for user in batch["user"].tolist() if user < 300]
    assert sorted(of_a) == sorted([*range(300)] * 6)
    assert all(sum(user < 300 for user in batch["user"].tolist()) == 75 for batch in batches)
    assert sorted(u for batch in batches for u in batch["user"].tolist() if u >= 300) == list(
        range(300, 900, 3)
    )


def test_what_makes_no_sense_is_refused(files):
    with pytest.raises(ConfigError, match=r"pack must be the last operation of a chain"):
        read(str(files)).pack(10).map(len)
    with pytest.raises(ConfigError, match=r"shares must be above 0 and sum to 1"):
        read(str(files)).mix({read(str(files)): 1.5})
    with pytest.raises(ConfigError, match=r"no column 'usr'; it has .* Did you mean 'user'"):
        read(str(files), columns=["usr"]).open()


def test_an_error_of_a_map_names_the_rows(files):
    def broken(rows):
        raise ValueError("no such thing")

    with pytest.raises(
        DataError, match=r"map\(broken.*ValueError: no such thing; in a slice of .* row group 0, row 0"
    ):
        list(read(str(files)).map(broken))


def _twice(rows):
    return pa.array(2 * rows.column("user").to_numpy())


def _read(feed, steps, rank, world):
    for step in steps:
        for part in feed.get_slices(step, rank, world):
            yield part, feed.compute_row_ids(part).tolist()


def test_the_ray_engine_plans_an_epoch_by_its_row_groups_without_cutting_steps(files, monkeypatch):
    from nonet.samples.ledger import EpochSteps
    from nonet.samples.streams.ray_engine import plan_tasks

    feed = read(str(files)).shuffle(6).open(rows=7, step_rows=33)
    cuts, cut = [], EpochSteps.cut_slices
    monkeypatch.setattr(EpochSteps, "cut_slices", lambda self, step: cuts.append(step) or cut(self, step))
    epoch = next(feed.iterate_steps(3, 1, 2).iterate_epochs())
    tasks = plan_tasks(feed, epoch)
    assert not cuts
    assert len(tasks) <= len(feed.leaves[0].groups)
    assert [part for task in tasks for part in task()] == list(epoch)


@pytest.mark.parametrize("rows", [4, 64])
def test_an_epoch_decodes_each_row_group_once_however_small_the_slices_are(files, monkeypatch, rows):
    from nonet.samples.streams.leaf import StreamLeaf

    decoded, decode = [], StreamLeaf.read
    monkeypatch.setattr(StreamLeaf, "read", lambda self, at: decoded.append(at) or decode(self, at))
    feed = read(str(files)).shuffle(6).open(rows=rows, step_rows=64)
    assert sum(len(batch) for batch in feed.iterate_epoch(0)) == 900
    assert sorted(decoded) == list(range(len(feed.leaves[0].groups)))
