"""The engine on Ray Data gives the rows of the local one, in the same order and with the same account; so do errors."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.errors import DataError
from nonet.samples.batches.graphs import Graph, Graphs
from nonet.samples.sequences import build_sequences
from nonet.samples.streams.stream import read

pytestmark = pytest.mark.slow  # Ray Data takes seconds to start each data set


class Doubled:
    """A map that is made once a worker."""

    def __call__(self, rows):
        import pyarrow as pa

        return rows.append_column("twice", pa.array(2 * rows.column("user").to_numpy()))


def drained(stream, engine):
    feed = stream.open(rows=40, step_rows=100, engine=engine)
    ledger, found = feed.make_ledger(), []
    slices = (part for step in range(feed.steps.steps_per_epoch) for part in feed.get_slices(step))
    for batch in feed.iterate_batches(slices, ledger):
        found.append(
            (batch.slice, batch["user"].tolist(), batch["twice"].tolist(), batch["items"].values.tolist())
        )
        feed.apply_batch(batch, ledger)
    return found, ledger.count_rows()


@pytest.mark.usefixtures("ray_local")
def test_both_engines_give_the_same_rows_in_the_same_order(files):
    plain = read(str(files), where="label == 1").shuffle(6).map(Doubled, workers=2).take(700)
    assert drained(plain, "ray") == drained(plain, "local")
    mixed = plain.take(300).mix({read(str(files / "part-0.parquet")).map(Doubled): 0.3})
    assert drained(mixed, "ray") == drained(mixed, "local")


@pytest.mark.usefixtures("ray_local")
def test_an_error_on_ray_is_our_own(files):
    def broken(rows):
        raise ValueError("no such thing")

    with pytest.raises(DataError, match=r"map\(broken.*no such thing; in a slice of"):
        drained(read(str(files)).map(broken), "ray")


@pytest.mark.usefixtures("ray_local")
def test_a_rank_s_share_of_epochs_is_the_same_on_both_engines(files):
    stream = read(str(files)).shuffle(6).map(Doubled)
    feeds = [stream.open(rows=40, step_rows=100, engine=engine) for engine in ("ray", "local")]
    of_epoch = [
        [batch["user"].tolist() for batch in feed.iterate_epoch(1, rank=1, world=3, first_step=2)]
        for feed in feeds
    ]
    assert of_epoch[0] == of_epoch[1]
    count = feeds[0].steps.steps_per_epoch + 5  # into a second epoch
    endless = [list(islice(feed.iterate_batches(feed.iterate_steps(2, 0, 2)), count)) for feed in feeds]
    assert [(batch.slice, batch["user"].tolist()) for batch in endless[0]] == [
        (batch.slice, batch["user"].tolist()) for batch in endless[1]
    ]


class NeighbourColumn:
    """A map that adds the neighbours of each row's user and item as of the row's time."""

    def __init__(self, graphs):
        self.graphs = graphs

    def __call__(self, rows):
        user, item, time = (rows.column(name).to_numpy() for name in ("user_id", "item_id", "timestamp"))
        found = self.graphs.find_neighbours(["near", "near_2hop"], user, item, time)["near"]
        lists = pa.ListArray.from_arrays(found.drawn.offsets.astype("i4"), found.drawn.values)
        return rows.append_column("near", lists).append_column("hops", pa.array(found.two_hops))


@pytest.mark.usefixtures("ray_local")
def test_neighbours_as_of_a_time_are_the_same_on_both_engines_and_in_one_call(tmp_path):
    draw = np.random.default_rng(0)
    log = pa.table(
        {
            "user_id": np.r_[np.arange(20), draw.integers(0, 20, 880)],
            "item_id": np.r_[np.arange(20), draw.integers(0, 20, 880)],
            "timestamp": draw.integers(0, 300, 900),
        }
    )
    for part in range(3):
        pq.write_table(log.slice(300 * part, 300), tmp_path / f"{part}.parquet", row_group_size=110)
    seq, _ = build_sequences(log, None, split={"use": "leave_last_out", "test": 1})
    graphs = Graphs.build({"near": Graph(edges="item-item", k=4, half_life=40)}, seq, 20, {}, 7)
    stream = read(str(tmp_path)).shuffle(6).map(NeighbourColumn(graphs), workers=2)
    found = {}
    for engine in ("ray", "local"):
        feed = stream.open(rows=70, step_rows=100, engine=engine)
        found[engine] = [
            (
                batch["near"].offsets.tolist(),
                batch["near"].values.tolist(),
                batch["hops"].tolist(),
                batch["timestamp"].tolist(),
            )
            for batch in feed.iterate_epoch(0)
        ]
    assert found["ray"] == found["local"]
    whole = NeighbourColumn(graphs)(log.to_batches()[0])
    hops = sorted(zip(whole["timestamp"].to_pylist(), whole["hops"].to_pylist(), strict=True))
    assert (
        sorted(
            (time, count)
            for *_, counts, times in found["ray"]
            for time, count in zip(times, counts, strict=True)
        )
        == hops
    )
    assert len({count for _, count in hops}) > 50
