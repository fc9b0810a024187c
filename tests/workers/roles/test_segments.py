"""Segments of held-out events, what lists are like, the model without its memory: what an evaluation tells beside accuracy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from ring_world import Ring

from nonet.models.generation import corpus
from nonet.models.generation.exhaustive import select_top_items
from nonet.models.ranking.kinds import ItemCategories
from nonet.models.ranking.lists import ListQuality
from nonet.samples.batches.prompt_rows import (
    gather_masked_items,
    gather_seen_items,
    list_prompts,
    locate_events,
)
from nonet.samples.sequences import CountOptions, Transitions
from nonet.samples.sequences.sequences import TEST, TRAIN
from nonet.samples.tokenised import read_items
from nonet.types import Jagged
from nonet.workers.roles.evaluation import evaluator as evaluators
from nonet.workers.roles.evaluation.cold import ColdRanking
from nonet.workers.roles.evaluation.evaluator import Evaluator
from nonet.workers.roles.evaluation.model_of_commit import load_recommender
from nonet.workers.roles.evaluation.options import Evaluate
from nonet.workers.roles.evaluation.segments import EventSegments

METRICS = ("recall@2", "ndcg@5")


class Histories:
    """Sequences of which segments read the training events of each user."""

    def __init__(self, *lengths):
        self.train_lengths = np.array(lengths)


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring"))


@pytest.fixture(scope="module")
def remembering(ring, tmp_path_factory):
    """Make a run with a memory, and its checkpoint."""
    world = ring.world("model.memory=on")
    world.train("pretrain", 0, 9)
    return world.run, world.save(tmp_path_factory.mktemp("commit") / "commit")


def _evaluator(run, ring, folder, metrics=METRICS):
    made = Evaluator(replace(run, target=None), Evaluate(metrics=list(metrics), width=4))
    made.open(ring.folders, str(folder))
    return made


def test_users_are_split_at_the_median_and_items_by_the_thirds_of_training_events_that_they_make_up():
    occurs, order = np.array([1, 6, 0, 2, 3]), np.array([3, 0, 4, 2, 1])  # 12 events: 6 | 3, 2 | 1, 0
    segments, seq = EventSegments(occurs, order), Histories(5, 40, 9, 1000)
    users, target = np.array([0, 0, 1, 2]), np.array([1, 4, 0, 2])  # nobody asks about user 3
    groups = segments.group_events(seq, users, np.zeros(4, np.int64), target)
    assert {name: np.flatnonzero(member).tolist() for name, member in groups.items()} == {
        "short histories": [0, 1, 3],
        "long histories": [2],
        "head items": [0],
        "middle items": [1],
        "tail items": [2, 3],
        "users of 0 events": [],
        "users of 1 to 4 events": [],
        "users of 5 to 19 events": [0, 1, 3],
        "users of 20 or more events": [2],
        "items of 0 events": [3],
        "items of 1 to 4 events": [1, 2],
        "items of 5 to 19 events": [0],
        "items of 20 or more events": [],
    }
    facts = segments.describe(seq, users, groups)
    assert facts["short histories"] == {"events": 3, "users": 2, "most": 9.0}
    assert facts["long histories"] == {"events": 1, "users": 1, "above": 9.0}
    assert [facts[name]["items"] for name in ("head items", "middle items", "tail items")] == [1, 1, 3]
    assert facts["items of 1 to 4 events"] == {"events": 2, "items": 3}
    assert facts["items of 0 events"] == {"events": 1, "items": 1}
    assert facts["users of 5 to 19 events"] == {"events": 3, "users": 2}


@pytest.mark.parametrize("strict", [False, True])
def test_pairs_are_those_of_the_newest_item_and_counted_directly_over_one_item_or_not_at_all(ring, strict):
    there = ring.corpus()
    seq, occurs = replace(there.seq, strict=strict), np.ones(len(there.items))
    table = Transitions.fit(seq, len(occurs), CountOptions(reach=1))
    segments = EventSegments(occurs, np.arange(len(occurs)), table)
    users, positions = list_prompts(seq, TEST)
    target = seq.item[locate_events(seq, users, positions)].astype(np.int64)
    target[::3] = (target[::3] + 7) % len(occurs)
    groups = segments.group_events(seq, users, positions, target)
    follows = np.zeros((len(occurs), len(occurs)))
    for item in range(len(occurs)):
        follows[item, table.item[table.row[item] : table.row[item + 1]]] = 1
    names = ("pairs of training", "pairs two steps apart", "new pairs")
    newest = [items[-1] if len(items) else None for items in gather_seen_items(seq, users, positions)]
    for index, (before, item) in enumerate(zip(newest, target, strict=True)):
        steps = (
            2
            if before is None
            else 0
            if follows[before, item]
            else 1
            if (follows @ follows)[before, item]
            else 2
        )
        assert [bool(groups[name][index]) for name in names] == [name == names[steps] for name in names]
    facts = segments.describe(seq, users, groups)
    assert [facts[name]["steps"] for name in names] == [1, 2, 0]
    assert all(facts[name]["events"] for name in names)


def test_cold_items_are_ranked_among_themselves_and_their_chance_is_that_of_a_draw():
    draw, names = np.random.default_rng(3), list("abcde")
    kinds = [[n for n in names if draw.random() < 0.3] for _ in range(60)]
    categories = ItemCategories.from_column(pa.array(kinds))
    is_cold, tie = draw.random(60) < 0.5, draw.permutation(60)
    scores, target = draw.integers(0, 9, (40, 60)).astype(np.float32), draw.integers(0, 60, 40)
    seen = [draw.choice(60, 4, replace=False) for _ in range(40)]
    masked = [np.setdiff1d(items, target[row]) for row, items in enumerate(seen)]
    masked[1], target[1] = np.append(masked[1], np.flatnonzero(is_cold)[0]), np.flatnonzero(is_cold)[0]
    jagged = [Jagged(np.concatenate(rows), np.cumsum([0, *map(len, rows)])) for rows in (masked, seen)]
    parts = [ColdRanking(is_cold, tie, categories), ColdRanking(is_cold, tie, categories)]
    parts[0].add(scores[:30], target[:30], *(Jagged(j.values, j.offsets[:31]) for j in jagged))
    parts[1].add(scores[30:], target[30:], *(Jagged(j.values, j.offsets[30:]) for j in jagged))
    parts[0].absorb(parts[1])
    hits, chances = [], []
    for row in np.flatnonzero(is_cold[target]):
        others = [i for i in np.flatnonzero(is_cold) if i not in masked[row]]
        order = sorted(others, key=lambda i: (-scores[row, i], tie[i]))
        hits.append(target[row] in order[:10])
        known = {kind for item in seen[row] for kind in kinds[item]}
        alike = [i for i in others if known & set(kinds[i])]
        chances.append(min(1, 10 / len(alike)) if target[row] in alike else 0)
    assert parts[0].summarise() == {
        "items": is_cold.sum(),
        "events": len(hits),
        "recall@10": pytest.approx(np.mean(hits)),
        "random recall@10": pytest.approx(np.mean(chances)),
    }
    assert 0 < np.mean(hits) < 1
    assert ColdRanking(is_cold, tie, None).summarise() == {}


def test_every_event_is_of_one_segment_of_users_and_one_of_items(ring, tmp_path):
    result = _evaluator(ring.world().run, ring, tmp_path).evaluate_baseline("popularity")
    detail, facts = result["detail"]["test"]["exhaustive"], result["segments"]
    pairs = ("pairs of training", "pairs two steps apart", "new pairs")
    for names in (("short histories", "long histories"), ("head items", "middle items", "tail items"), pairs):
        there = [name for name in names if name in detail]
        events = np.array([facts[name]["events"] for name in there])
        of_parts = events @ np.array([detail[name]["recall@2"] for name in there]) / events.sum()
        assert of_parts == pytest.approx(detail["all"]["recall@2"])
        assert events.sum() == ring.corpus().seq.count_events()["test"]


@pytest.mark.parametrize("metrics", [METRICS, (*METRICS, "coverage", "coverage@20")])
def test_the_first_ten_of_each_test_list_are_looked_at_whatever_the_metrics(ring, tmp_path, metrics):
    evaluator = _evaluator(ring.world().run, ring, tmp_path, metrics)
    result, there = evaluator.evaluate_baseline("popularity"), ring.corpus()
    users, positions = list_prompts(there.seq, TEST)
    occurs = np.bincount(there.seq.item[there.seq.split == TRAIN], minlength=len(there.items))
    by_hand = ListQuality(occurs, 10, ItemCategories.from_column(there.items["categories"]))
    scores = torch.from_numpy(np.tile(occurs.astype(np.float32), (len(users), 1)))
    lists = select_top_items(
        scores, 10, gather_masked_items(there.seq, users, positions), evaluator.ranker.tie
    )
    by_hand.add(lists.numpy(), gather_seen_items(there.seq, users, positions))
    assert result["lists"] == pytest.approx(by_hand.summarise())
    assert {"coverage@10", "diversity@10", "calibration@10"} <= set(result["lists"])


def test_items_without_categories_leave_diversity_and_calibration_out(ring, tmp_path, monkeypatch):
    monkeypatch.setattr(
        corpus, "read_items", lambda folders: read_items(folders).drop_columns(["categories"])
    )
    lists = _evaluator(ring.world().run, ring, tmp_path).evaluate_baseline("popularity")["lists"]
    assert set(lists) == {"coverage@10", "gini@10", "novelty@10"}


def test_a_model_with_a_memory_is_also_ranked_alone_and_the_gain_is_what_differs(
    ring, remembering, tmp_path, monkeypatch
):
    run, commit = remembering
    result = _evaluator(run, ring, tmp_path / "both").evaluate("pretrain", str(commit))
    assert set(result["detail"]["test"]) == {"exhaustive", "beam", "model alone"}
    assert set(result["detail"]["valid"]) == {"exhaustive", "beam"}
    with_memory, alone = (result["detail"]["test"][how]["all"] for how in ("exhaustive", "model alone"))
    assert with_memory != alone
    memory = load_recommender(run, ring.corpus(), commit).model.memory.tolist()
    assert [result["memory"][weight] for weight in "lbc"] == pytest.approx(memory)
    for metric, gain in result["memory"]["gain"].items():
        assert gain["diff"] == pytest.approx(with_memory[metric] - alone[metric])
        assert gain["low"] <= gain["diff"] <= gain["high"]

    def without_votes(*given):
        made = load_recommender(*given)
        made.voters = None
        return made

    monkeypatch.setattr(evaluators, "load_recommender", without_votes)
    forgetful = _evaluator(run, ring, tmp_path / "alone").evaluate("pretrain", str(commit))
    assert forgetful["detail"]["test"]["exhaustive"] == result["detail"]["test"]["model alone"]
    assert "memory" not in forgetful
    assert "model alone" not in forgetful["detail"]["test"]


def test_baselines_see_the_histories_in_which_events_of_equal_time_are_shuffled(ring, tmp_path, monkeypatch):
    """A baseline that saw the order of the file would have a shuffled target in its history."""
    options = Evaluate(metrics=list(METRICS), width=4, shuffle_ties=True)
    evaluator = Evaluator(replace(ring.world().run, target=None), options)
    evaluator.open(ring.folders, str(tmp_path))
    seq = evaluator.corpus.seq
    evaluator.set_events(replace(seq, time=np.zeros_like(seq.time)))
    histories = []

    class Recorder:
        def scores(self, seq, users, positions):
            histories.append((seq.item.tobytes(), evaluator.ranker.corpus.seq.item.tobytes()))
            return np.zeros((len(users), len(evaluator.corpus.items)))

    monkeypatch.setattr(evaluator._fitting, "fit_part", lambda name: Recorder())
    assert "shuffled" in evaluator.evaluate_baseline("popularity")["detail"]
    assert all(given == ranked for given, ranked in histories)
    assert len(set(histories)) == 2


def test_other_users_are_split_at_their_own_median(ring, tmp_path):
    evaluator, seq = _evaluator(ring.world().run, ring, tmp_path), ring.corpus().seq
    users, _ = list_prompts(seq, TEST)
    few = np.unique(users)[:5]
    keep = np.isin(seq.user, few) | (seq.split != TEST)
    evaluator.set_events(replace(seq, split=np.where(keep, seq.split, TRAIN).astype(np.int8)))
    facts = evaluator.evaluate_baseline("popularity")["segments"]
    asked = evaluator.corpus.seq
    events = locate_events(asked, *list_prompts(asked, TEST))
    assert facts["short histories"]["most"] == np.median(asked.train_lengths[few])
    assert facts["short histories"]["events"] + facts.get("long histories", {"events": 0})["events"] == len(
        events
    )
