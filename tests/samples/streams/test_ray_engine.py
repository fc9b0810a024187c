"""The engine on Ray Data gives the rows of the local one, in the same order and with the same account; so do errors."""

from __future__ import annotations

from itertools import islice

import pytest

from nonet.errors import DataError
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
