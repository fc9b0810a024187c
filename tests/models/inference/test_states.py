"""What is kept of a user: only new events are computed, and answers are those of computing all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from served_run import TrainedRun, events_of

from nonet.models.inference import InferenceEngine, PrefixStates, Question


@pytest.fixture(scope="module", params=["mlp", "attention"])
def run(request, tmp_path_factory):
    served = TrainedRun(tmp_path_factory.mktemp("served"), changes=[f"model.depth={request.param}"])
    served.commit(6)
    opened = served.open()
    opened.publish_newest()
    return opened


def engines(run):
    with_states = InferenceEngine(run.load_recommender(run.registry.read_version(1)), 1, PrefixStates())
    return with_states, InferenceEngine(run.load_recommender(run.registry.read_version(1)), 1)


def question(run, user, stop, start=0):
    seq = run.corpus.seq
    events = events_of(seq, user, stop)
    return Question(events.select_last(stop - start), int(seq.user_key[user]), str(user), top=5, width=10)


def same(answers, others):
    for answer, other in zip(answers, others, strict=True):
        np.testing.assert_array_equal(answer.item, other.item)
        np.testing.assert_allclose(answer.score, other.score, atol=1e-5)  # rounding of other products


def test_users_who_come_back_get_the_answers_of_computing_all_again(run):
    kept, plain = engines(run)
    counts = []
    for stop in (0, 1, 4, 5, 5, 8):
        asked = [question(run, user, min(8, stop + user % 3)) for user in range(9)]
        asked.append(question(run, 20 + stop, 6))  # somebody new beside them
        same(kept.answer(asked), plain.answer(asked))
        counts.append(kept.states.hits)
    assert counts[0] == 0
    assert counts[-1] == 46  # one of the new ones came twice
    assert kept.states.nbytes == sum(each.prefix.nbytes for each in kept.states._kept.values())


def test_only_new_events_are_computed(run):
    kept, _ = engines(run)
    rows = []
    recommender = kept._recommender
    reading = recommender.read_rows
    recommender.read_rows = lambda batch: rows.append(len(batch.item.values)) or reading(batch)
    for stop in (5, 6, 6, 8):
        kept.answer([question(run, 3, stop)])
    assert rows == [5, 1, 0, 2]


def test_a_window_that_moved_or_events_that_changed_begin_anew(run):
    kept, plain = engines(run)
    first = question(run, 3, 6)
    kept.answer([first])
    moved = question(run, 3, 7, start=1)
    events = first.events
    changed = replace(first, events=replace(events, item=np.flip(events.item).copy()))
    other = replace(first, user_key=77)
    for asked in (moved, changed, other):
        hits = kept.states.hits
        same(kept.answer([asked]), plain.answer([asked]))
        assert kept.states.hits == hits


def test_memory_is_bounded_and_the_oldest_go_first(run):
    engine, _ = engines(run)
    engine.answer([question(run, 0, 6)])
    engine.states._most_bytes = 3 * engine.states.nbytes
    for user in range(1, 8):
        engine.answer([question(run, user, 6)])
    assert list(engine.states._kept) == ["5", "6", "7"]
    engine.answer([Question(question(run, 9, 6).events, 3, top=5, width=10)])  # nobody: not remembered
    assert len(engine.states) == 3


def test_hstu_computes_everything(tmp_path):
    served = TrainedRun(tmp_path, changes=["model.block=hstu"])
    served.commit(1)
    opened = served.open()
    engine = InferenceEngine(opened.load_recommender(opened.publish_newest()), 1, PrefixStates())
    assert engine.states is None
    assert torch.isfinite(torch.from_numpy(engine.answer([question(opened, 1, 5)])[0].score)).all()
