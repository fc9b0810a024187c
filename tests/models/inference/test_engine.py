"""Answers of many questions at once are those of each alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from served_run import TrainedRun, events_of

from nonet.models.inference import InferenceEngine, Question, pack_questions
from nonet.samples.batches import make_prompt_batch

MANY = 24


@pytest.fixture(scope="module", params=[True, False], ids=["memory", "no memory"])
def world(request, tmp_path_factory):
    served = TrainedRun(tmp_path_factory.mktemp("served"), memory=request.param)
    served.commit(6)
    run = served.open()
    return run, InferenceEngine(run.load_recommender(run.publish_newest()), 1)


def question(seq, user, **options):
    events = events_of(seq, user).select_last(1 + user % 8)
    options = {"width": 10, "top": 5 + user % 4, "hidden": np.unique(events.item)} | options
    return Question(events, int(seq.user_key[user]), str(user), **options)


def mixed(run):
    """Questions of different histories, widths and kinds."""
    seq = run.corpus.seq
    questions = [question(seq, user, width=10 if user % 3 else 20) for user in range(MANY)]
    questions[5] = question(seq, 5, asked=np.array([3, 1, 39]))
    questions[7] = question(seq, 7, asked=np.arange(40), explain=True)
    questions[9] = Question(events_of(seq, 0, 0), 17, top=4, width=10)
    questions[11] = question(seq, 11, explain=True)
    return questions


def test_merged_answers_are_those_of_each_question_alone(world):
    run, engine = world
    questions = mixed(run)
    for one, merged in zip(questions, engine.answer(questions), strict=True):
        alone = engine.answer([one])[0]
        np.testing.assert_array_equal(merged.item, alone.item)
        np.testing.assert_allclose(merged.score, alone.score, atol=1e-5)  # rounding of larger products
        if one.explain:
            np.testing.assert_allclose(merged.own, alone.own, atol=1e-5)
            np.testing.assert_allclose(merged.vote, alone.vote, atol=1e-5)


def test_lists_are_legal_distinct_hidden_from_and_as_long_as_asked(world):
    run, engine = world
    for one, answer in zip(mixed(run), engine.answer(mixed(run)), strict=True):
        if one.asked is None:
            assert len(set(answer.item.tolist())) == len(answer.item) == one.top
            assert not set(answer.item.tolist()) & set(one.hidden.tolist())
            assert (np.diff(answer.score) <= 0).all()


def test_the_score_of_a_listed_item_is_the_one_it_gets_when_it_is_asked_for(world):
    run, engine = world
    one = question(run.corpus.seq, 3)
    listed = engine.answer([one])[0]
    asked = engine.answer([question(run.corpus.seq, 3, asked=listed.item)])[0]
    np.testing.assert_allclose(asked.score, listed.score, atol=1e-5)


def test_with_few_items_left_the_list_is_shorter_and_with_none_it_is_empty(world):
    run, engine = world
    seq = run.corpus.seq
    few, none = (question(seq, 1, hidden=np.arange(hidden)) for hidden in (38, 40))
    assert sorted(engine.answer([few, none])[0].item.tolist()) == [38, 39]
    assert not len(engine.answer([few, none])[1].item)


def test_the_engine_ranks_as_the_evaluator_does(world):
    run, engine = world
    recommender = run.load_recommender(run.registry.read_version(1))
    seq = run.corpus.seq
    users = np.arange(6)
    positions = seq.lengths[users] - 1
    beams = recommender.generate_beams(recommender.batch(users, positions), 10, users, positions)
    for user in users.tolist():
        events = events_of(seq, user, int(positions[user]))
        one = Question(
            events.select_last(run.setup.history),
            int(seq.user_key[user]),
            top=5,
            width=10,
            hidden=np.unique(events.item),
        )
        if seq.repeats == "allow":
            one = Question(one.events, one.user_key, top=5, width=10)
        if recommender.voters is None:
            np.testing.assert_array_equal(engine.answer([one])[0].item, beams.item[user, :5].numpy())


def test_features_online_are_the_bytes_of_those_offline(world):
    run, _ = world
    seq, history = run.corpus.seq, run.setup.history
    users = np.tile(np.arange(len(seq)), 17)[:1000]
    positions = np.arange(1000) % (seq.lengths[users] - 1)
    offline = make_prompt_batch(seq, run.corpus.sids, users, positions, history=history, stage="serve")
    questions = [
        Question(events_of(seq, user, position).select_last(history), int(seq.user_key[user]))
        for user, position in zip(users.tolist(), positions.tolist(), strict=True)
    ]
    made = pack_questions(questions, seq.slice_users(0, 0))
    rows = np.arange(len(questions))
    online = make_prompt_batch(made, run.corpus.sids, rows, made.lengths - 1, history=history, stage="serve")
    for name in ("item", "time", "event"):
        assert torch.equal(getattr(online, name).values, getattr(offline, name).values)
        assert torch.equal(getattr(online, name).offsets, getattr(offline, name).offsets)
    assert torch.equal(online.sid, offline.sid)
    assert online.context.keys() == offline.context.keys()
    for name, value in online.context.items():
        other = offline.context[name]
        pairs = [(value, other)] if isinstance(value, torch.Tensor) else [(value.values, other.values)]
        assert all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in pairs), name
