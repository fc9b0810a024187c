"""`nonet recommend` over a run's folder that was made in this process, without Ray."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ring_world import Ring
from run_folders import commit, folder_of

from nonet.deploy.after.recommend import format_columns, recommend_for
from nonet.errors import ConfigError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Make a run that has only pretrained: (folder, corpus, world)."""
    ring = Ring(tmp_path_factory.mktemp("ring"))
    run = folder_of(ring, tmp_path_factory.mktemp("run"))
    world = ring.world()
    world.train("pretrain")
    commit(run, world)
    return run, ring.corpus(), world


def titles(corpus):
    return corpus.items["title"].to_pylist()


def test_a_user_s_history_is_whole_and_nothing_of_it_is_recommended(run):
    folder, corpus, _ = run
    answer = recommend_for(str(folder.path), [], "103", 30)
    own = corpus.seq.item[corpus.seq.offsets[3] : corpus.seq.offsets[4]]
    assert answer["history"] == [titles(corpus)[i] for i in own]
    assert set(answer["columns"]) == {"popularity", "transition_counter", "pretrain"}
    for best in answer["columns"].values():
        assert len(best) == len(set(best)) == min(30, 40 - len(set(own.tolist())))
        assert not set(best) & set(answer["history"])


def test_the_model_s_column_is_that_of_its_commit(run):
    folder, _, _ = run
    answer = recommend_for(str(folder.path), ["item b1", "item c2"], None, 5)
    assert answer["history"] == ["item b1", "item c2"]
    assert {"item b1", "item c2"}.isdisjoint(answer["columns"]["pretrain"])
    ranked = {}
    for like in (["item b1", "item c2"], ["item h7", "item i8"]):
        ranked[tuple(like)] = recommend_for(str(folder.path), like, None, 5)["columns"]["transition_counter"]
    assert (
        len(set(map(tuple, ranked.values()))) == 2
    )  # the counter hears the history; on the ring the next items come next
    assert "item d3" in ranked["item b1", "item c2"]
    assert "item j9" in ranked["item h7", "item i8"]


def test_the_order_is_that_of_popularity_for_the_popular(run):
    folder, corpus, _ = run
    best = recommend_for(str(folder.path), ["item a0"], None, 40)["columns"]["popularity"]
    events = corpus.items["events"].to_numpy()
    counts = [events[titles(corpus).index(title)] for title in best]
    assert counts == sorted(counts, reverse=True)
    assert len(best) == 39
    assert np.sum(events) == 720


def test_the_answer_is_a_table_of_text(run):
    folder, _, _ = run
    text = format_columns(recommend_for(str(folder.path), ["item b1", "item c2"], None, 3))
    lines = text.splitlines()
    assert lines[0] == "after 2 events, the newest: item b1; item c2"
    assert [line.split()[0] for line in lines[3:]] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("like", "user", "said"),
    [
        ([], None, "give either --like"),
        (["item b1"], "103", "give either --like"),
        (["nothing of the kind"], None, "no item is called"),
        (["1003"], None, "it is the id of an item, which --items takes"),
        ([], "no such user", "there is no user"),
    ],
)
def test_a_question_that_cannot_be_asked_is_one_line(run, like, user, said):
    with pytest.raises(ConfigError, match=said):
        recommend_for(str(run[0].path), like, user, 5)


def test_several_ids_may_follow_the_option(run, command):
    folder = run[0].path
    lists = [
        json.loads(command("recommend", folder, "--items", 1001, *words, "--top", 3, "--json")[1])
        for words in ((1002,), ("--items", 1002))
    ]
    assert lists[0] == lists[1]
    assert lists[0]["history"] == ["item b1", "item c2"]
