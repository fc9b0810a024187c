"""RL's events as supervised targets: what a control of RL learns from."""

from __future__ import annotations

import numpy as np
import pytest
from ring_world import Ring

from nonet.samples.batches.prompt_rows import find_rl_events
from nonet.samples.sequences.sequences import RL
from nonet.samples.sources._prompts import select_held_out_users
from nonet.samples.sources._target_windows import RlTargets
from nonet.samples.sources.base import SampleRequest


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring")).corpus()


def source(corpus, history=8, rows=7):
    return RlTargets(
        SampleRequest(
            "c",
            5,
            "users",
            rows,
            history,
            None,
            4096,
            (),
            lambda: corpus.seq,
            lambda: corpus.items,
            corpus.sids,
        )
    )


def taught(batch):
    """(user key, item, time) of every target of a batch."""
    where = np.flatnonzero(batch.loss_mask.values.numpy())
    row = np.searchsorted(batch.loss_mask.offsets.numpy(), where, side="right") - 1
    user = batch.context["user"].numpy()[row]
    return list(
        zip(
            user.tolist(),
            batch.item.values.numpy()[where].tolist(),
            batch.time.values.numpy()[where].tolist(),
            strict=True,
        )
    )


@pytest.mark.parametrize("history", [2, 8])
def test_an_epoch_teaches_every_rl_event_of_users_that_rl_trains_on_once(corpus, history):
    made, seq = source(corpus, history), corpus.seq
    steps = -(-made.rows // 7)
    found = [
        each
        for step in range(steps)
        for rank in (0, 1)
        for make in made.batch(step, rank, 2)
        for each in taught(make())
    ]
    events = find_rl_events(seq, ~np.isin(seq.user, select_held_out_users(seq, 5)))
    user = seq.get_user_keys(seq.find_users(events)).tolist()
    wanted = list(zip(user, seq.item[events].tolist(), seq.time[events].tolist(), strict=True))
    assert sorted(found) == sorted(wanted)
    assert len(wanted) < int((seq.split == RL).sum()), "some users are kept out"


def test_a_target_sees_the_events_before_it_and_nothing_later(corpus):
    made, seq = source(corpus), corpus.seq
    for make in made.batch(0, 0, 1):
        batch = make()
        for row in range(len(batch.item)):
            times = batch.time[row].numpy()
            assert (np.diff(times) > 0).all()
            assert len(times) <= 8 + 1
            assert bool(batch.loss_mask[row][-1]), "a window ends with its last target"
            assert len(times) > 2, "and has history"
    assert seq.strict is False
