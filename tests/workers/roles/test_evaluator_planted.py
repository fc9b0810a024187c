"""Evaluator with models whose every answer is known: what is masked, what is counted, and on which events."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from ring_world import Ring

from nonet.errors import DataError
from nonet.models.baselines.kinds import BaselineOptions, SparseVotes
from nonet.models.generation.beams import Beams
from nonet.models.ranking.metrics import rank_of_target_np
from nonet.samples.batches.prompt_rows import gather_seen_items, list_prompts, locate_events
from nonet.samples.sequences.sequences import RL, TEST, TRAIN, VALID
from nonet.types import Jagged
from nonet.workers.roles.artifacts import write_sequences
from nonet.workers.roles.evaluation import evaluator as evaluators
from nonet.workers.roles.evaluation.evaluator import Evaluator
from nonet.workers.roles.evaluation.model_of_commit import ModelScores
from nonet.workers.roles.evaluation.options import Evaluate
from nonet.workers.validation import TargetNats, select_validation_events

# Shapes: P prompts, I items, W beams.
METRICS = ("recall@1", "recall@2", "ndcg@2")


class Planted:
    """A model that gives every prompt the scores of a function (users [P], positions [P]) -> [P, I], and beams by them."""

    voters = None  # no memory

    def __init__(self, corpus, scores):
        self.corpus, self.answer = corpus, scores

    def batch(self, users, positions):
        return users, positions

    def chunks(self, users, positions, size):
        for start in range(0, len(users), size):
            part = slice(start, start + size)
            yield (users[part], positions[part]), users[part], positions[part]

    def score_catalogue(self, batch, users, positions):
        return torch.from_numpy(self.answer(*batch).astype(np.float32))

    def generate_beams(self, batch, width, users, positions):
        item = self.score_catalogue(batch, users, positions).argsort(dim=1, descending=True, stable=True)[
            :, :width
        ]
        nothing = torch.zeros(*item.shape, 1)
        return Beams(item, nothing.long(), nothing, torch.ones_like(item, dtype=torch.bool))


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring"))


@pytest.fixture
def evaluator(ring, tmp_path):
    """Make an evaluator of the ring; its folder of artifacts and its name mark where its ranks go."""

    def made(folders=ring.folders, name="results", target=None, **options):
        run = replace(ring.world().run, target=target)
        made = Evaluator(run, Evaluate(**{"metrics": list(METRICS), "width": 4} | options))
        made.open(folders, str(tmp_path / name))
        return made

    return made


@pytest.fixture
def planted(monkeypatch):
    """Have an evaluator evaluate a planted model; the detail of its answer."""

    def evaluated(evaluator, scores, name="planted"):
        monkeypatch.setattr(
            evaluators, "load_recommender", lambda run, corpus, *_: Planted(corpus, scores(corpus.seq))
        )
        return evaluator.evaluate(name, "no commit")["detail"]

    return evaluated


def behind_what_was_seen(seq):
    """Rank the target best except for everything that its user has seen."""

    def scores(users, positions):
        values = np.zeros((len(users), seq.item.max() + 1))
        history = gather_seen_items(seq, users, positions)
        for row in range(len(users)):
            values[row, history[row]] = 2.0
        values[np.arange(len(users)), seq.item[locate_events(seq, users, positions)]] = 1.0
        return values

    return scores


def right_where_liked(seq):
    """Rank the target first where it was rated 4 or more, else last."""

    def scores(users, positions):
        asked = locate_events(seq, users, positions)
        values = np.zeros((len(users), seq.item.max() + 1))
        values[np.arange(len(users)), seq.item[asked]] = np.where(
            seq.columns["rating"][asked] >= 4, 1.0, -1.0
        )
        return values

    return scores


def test_a_target_just_behind_what_its_user_has_seen_is_found_because_seen_items_are_masked(
    evaluator, planted
):
    there = evaluator()
    detail = planted(there, behind_what_was_seen)
    for split in ("valid", "test"):
        assert detail[split]["exhaustive"]["all"]["recall@1"] == 1.0
        assert detail[split]["exhaustive"]["all"]["ndcg@2"] == 1.0
    seq = there.corpus.seq
    users, positions = list_prompts(seq, TEST)
    unmasked = rank_of_target_np(
        behind_what_was_seen(seq)(users, positions),
        seq.item[locate_events(seq, users, positions)].astype(np.int64),
        Jagged(np.empty(0, np.int64), np.zeros(len(users) + 1, np.int64)),
    )
    assert (unmasked == 0).mean() < 0.1  # what the test would measure, were nothing masked


def test_a_beam_counts_by_its_place_and_what_is_in_no_beam_is_a_miss(evaluator, planted):
    def second(seq):
        def scores(users, positions):
            target = seq.item[locate_events(seq, users, positions)].astype(np.int64)
            values = np.zeros((len(users), seq.item.max() + 1))
            values[np.arange(len(users)), target] = np.where(
                users % 2, 1.0, -1.0
            )  # even users: never in the beam
            values[np.arange(len(users)), (target + 1) % values.shape[1]] = 2.0
            return values

        return scores

    beam = planted(evaluator(), second)["test"]["beam"]["all"]
    assert beam["recall@1"] == 0.0
    assert beam["recall@2"] == pytest.approx(0.5)  # every user has one test event
    assert beam["ndcg@2"] == pytest.approx(0.5 / np.log2(3))


def test_a_target_just_behind_the_beam_is_a_miss_by_beam_and_a_hit_in_the_whole_catalogue(evaluator, planted):
    """The target is at place `width` + 1; coverage counts `width` places of each beam."""
    listed: set[int] = set()

    def behind(seq):
        def scores(users, positions):
            target = seq.item[locate_events(seq, users, positions)]
            values = np.zeros((len(users), seq.item.max() + 1))
            for row, history in enumerate(
                map(gather_seen_items(seq, users, positions).__getitem__, range(len(users)))
            ):
                values[row, history] = -1.0
                others = np.setdiff1d(np.arange(values.shape[1]), [*history, target[row]])[:4]
                values[row, others] = 4.0 - np.arange(4) / 10
                values[row, target[row]] = 2.0
                listed.update(others.tolist())
            return values

        return scores

    asked = ["recall@4", "recall@5", "coverage"]
    test = planted(evaluator(metrics=asked, width=4), behind)["test"]
    assert test["exhaustive"]["all"]["recall@4"] == 0.0
    assert test["exhaustive"]["all"]["recall@5"] == 1.0
    assert test["beam"]["all"]["recall@5"] == 0.0
    assert len(listed) < 20
    assert 0 < test["beam"]["all"]["coverage"] <= len(listed) / 40


def test_the_target_column_is_of_the_events_that_match_and_all_is_of_all(evaluator, planted):
    there = evaluator(target="finetune")
    detail = planted(there, right_where_liked)["test"]
    seq = there.corpus.seq
    liked = (seq.columns["rating"][seq.split == TEST] >= 4).mean()
    assert 0 < liked < 1
    for how in ("exhaustive", "beam"):
        assert detail[how]["target"]["recall@1"] == 1.0
        assert detail[how]["all"]["recall@1"] == pytest.approx(liked)
    assert "target" not in planted(evaluator(), right_where_liked)["test"]["exhaustive"]


def test_with_ties_shuffled_everybody_is_asked_in_another_order_and_then_in_the_first_again(
    ring, evaluator, planted, tmp_path
):
    """All events of a user at one time: what the planted model says of the file's order is wrong of another."""
    corpus = ring.corpus()
    folder = tmp_path / "one time"
    folder.mkdir()
    one_time = replace(corpus.seq, time=np.zeros_like(corpus.seq.time))
    write_sequences(folder, one_time, pq.read_table(f"{ring.folders['sequences']}/items.parquet"))
    there = evaluator({**ring.folders, "sequences": str(folder)}, shuffle_ties=True)

    def right_in_the_file(seq):
        def scores(users, positions):
            answer = np.zeros((len(users), len(there.corpus.items)))
            answer[np.arange(len(users)), one_time.item[locate_events(one_time, users, positions)]] = 1
            return answer

        return scores

    for name in ("first", "second"):
        detail = planted(there, right_in_the_file, name)
        assert detail["test"]["exhaustive"]["all"]["recall@1"] == 1.0
        assert 0.2 < detail["shuffled"]["exhaustive"]["all"]["recall@1"] < 0.9
        assert set(detail["shuffled"]) == {"exhaustive"}
    for name in ("popularity", "transition_counter"):
        assert "shuffled" in there.evaluate_baseline(name)["detail"]
    assert "shuffled" not in planted(evaluator(), right_in_the_file)


class Turned:
    """A baseline of the user's own that answers with a row an item."""

    def __init__(self, n_items):
        self.n_items = n_items

    def fit(self, seq, splits=(TRAIN,)):
        return self

    def scores(self, seq, users, positions):
        return np.zeros((self.n_items, len(users)), np.float32)


def test_a_baseline_of_the_users_own_is_rehearsed_as_the_evaluator_opens(evaluator):
    with pytest.raises(
        DataError, match=r"^baseline 'mine': scores are float32 \[\d+, 4\]; wanted float32 \[4, "
    ):
        evaluator(baselines=[BaselineOptions(use=f"{__name__}:Turned", name="mine")])


def test_a_baseline_that_does_not_fit_the_items_is_refused_as_the_evaluator_opens(evaluator, monkeypatch):
    monkeypatch.setattr("nonet.models.baselines.kinds.ease.MAX_ITEMS", 3)
    with pytest.raises(DataError, match=r"^evaluate\.baselines: ease: \d+ items, and it allows at most 3"):
        evaluator(baselines=[BaselineOptions(use="ease")])


class Unsure(Turned):
    """A baseline of the user's own whose votes are NaN, although its scores are numbers."""

    def scores(self, seq, users, positions):
        return np.zeros((len(users), self.n_items), np.float32)

    def votes(self, seq, users, positions):
        cell = np.arange(len(users))
        return SparseVotes(np.zeros(self.n_items), cell, 0 * cell, np.full(len(cell), np.nan))


def test_votes_that_are_nan_name_the_baseline(evaluator):
    there = evaluator(baselines=[BaselineOptions(use=f"{__name__}:Unsure", name="unsure")])
    with pytest.raises(DataError, match=r"^baseline 'unsure': scores of \d+ of \d+ prompts are NaN"):
        there.evaluate_baseline("unsure")


def test_a_baseline_that_was_trained_says_how(evaluator):
    there = evaluator(baselines=ALL_BASELINES)
    assert there.evaluate_baseline("sasrec") == {"fitting": 1}  # an epoch: others may ask in between
    trained = there.evaluate_baseline("sasrec")["trained"]
    assert {"epochs", "trials", "seconds", "loss"} <= set(trained)
    assert "trained" not in evaluator(baselines=ALL_BASELINES).evaluate_baseline("popularity")


ALL_BASELINES = [
    BaselineOptions(use="popularity"),
    BaselineOptions(use="transition_counter"),
    BaselineOptions(use="sasrec", epochs=1),  # of several, validation would choose one
]


@pytest.mark.parametrize("name", [each.title for each in ALL_BASELINES])
def test_baselines_learn_nothing_from_events_that_are_held_out(name, ring, evaluator, tmp_path):
    """Half of the users have other items held out: nothing that is asked of the other half changes."""
    corpus = ring.corpus()
    seq, half = corpus.seq, corpus.seq.user < len(corpus.seq) // 2
    other = seq.item.copy()
    for split in (RL, VALID, TEST):
        some = half & (seq.split == split)
        other[some] = 7  # one item that would become popular
    folder = tmp_path / "other"
    folder.mkdir()
    write_sequences(
        folder, replace(seq, item=other), pq.read_table(f"{ring.folders['sequences']}/items.parquet")
    )
    ranks = {}
    for which, folders in (("as it is", ring.folders), ("other", {**ring.folders, "sequences": str(folder)})):
        there = evaluator(folders, which, baselines=ALL_BASELINES)
        while "fitting" in there.evaluate_baseline(name):
            pass
        ranks[which] = np.load(tmp_path / which / f"{name}.npz")
    for split in (VALID, TEST):
        key = f"{['train', 'rl', 'valid', 'test'][split]}.exhaustive"
        rest = ~half[seq.split == split]
        assert rest.any()
        assert np.array_equal(ranks["as it is"][key][rest], ranks["other"][key][rest])


def test_popularity_counts_training_events_and_answers_everybody_alike(evaluator, monkeypatch):
    monkeypatch.setattr("nonet.workers.roles.evaluation.ranker.SHOWN_USERS", 2)
    monkeypatch.setattr("nonet.workers.roles.evaluation.ranker.SHOWN_ITEMS", 3)
    there = evaluator()
    seq = there.corpus.seq
    count = np.bincount(seq.item[seq.split == TRAIN], minlength=len(there.corpus.items))
    titles = there.corpus.items["title"].to_pylist()
    for user, (row, best) in enumerate(
        zip(there.list_shown_users(), there.evaluate_baseline("popularity")["shown"], strict=True)
    ):
        shown = there.ranker.select_shown_users()
        users, positions = shown.users, shown.positions
        unseen = np.setdiff1d(np.arange(len(titles)), gather_seen_items(seq, users, positions)[user])
        assert [count[titles.index(title)] for title in best] == sorted(count[unseen], reverse=True)[:3]
        assert not {titles[i] for i in gather_seen_items(seq, users, positions)[user]} & set(best)
        assert row["history"] == [titles[i] for i in gather_seen_items(seq, users, positions)[user]][-8:]
        assert row["target"] == [titles[seq.item[seq.offsets[users[user] + 1] - 1]]]


def test_comparisons_are_left_minus_right_over_test_events(evaluator, planted):
    there = evaluator()
    planted(there, behind_what_was_seen, "good")
    planted(there, lambda seq: lambda *asked: -behind_what_was_seen(seq)(*asked), "bad")
    paired = there.compare([("good", "bad"), ("bad", "good")])
    assert paired["good-bad"]["recall@1"]["diff"] > 0.9
    assert paired["good-bad"]["recall@1"]["low"] > 0
    assert paired["bad-good"]["recall@1"]["diff"] == -paired["good-bad"]["recall@1"]["diff"]
    assert set(paired["good-bad"]) == set(METRICS)


def test_validation_and_test_are_told_apart(evaluator, planted):
    def right_on_test(seq):
        def scores(users, positions):
            asked = locate_events(seq, users, positions)
            values = np.zeros((len(users), seq.item.max() + 1))
            values[np.arange(len(users)), seq.item[asked]] = np.where(seq.split[asked] == TEST, 1.0, -1.0)
            return values

        return scores

    detail = planted(evaluator(), right_on_test)
    recall = {split: detail[split]["exhaustive"]["all"]["recall@1"] for split in detail}
    assert recall == {"valid": 0.0, "test": 1.0}


def test_equal_scores_stand_by_popularity_as_in_training(evaluator, planted, tmp_path):
    there = evaluator()
    planted(there, lambda seq: lambda users, positions: np.zeros((len(users), seq.item.max() + 1)), "silent")
    there.evaluate_baseline("popularity")
    silent, popular = (np.load(tmp_path / "results" / f"{name}.npz") for name in ("silent", "popularity"))
    for split in ("valid", "test"):
        assert np.array_equal(silent[f"{split}.exhaustive"], popular[f"{split}.exhaustive"])


# --- the model of a commit, and beams ---------------------------------------------------------------------------------


def test_beams_never_hold_what_the_user_has_seen(ring):
    world = ring.world()
    corpus = world.trainer.corpus
    beams = world.beams(width=30)  # of 40 items: without a mask most seen ones would be among them
    for row, (user, position) in enumerate(zip(beams["user"], beams["position"], strict=True)):
        history = set(
            corpus.seq.item[corpus.seq.offsets[user] : corpus.seq.offsets[user] + position].tolist()
        )
        found = beams["item"][row][beams["valid"][row]].tolist()
        assert len(found) == len(set(found)) == min(30, 40 - len(history))
        assert not history & set(found)


def test_a_commit_is_evaluated_with_its_weights_and_its_rows(ring, evaluator, tmp_path):
    world = ring.world()
    world.train("pretrain", 0, 12)
    world.save(tmp_path / "commit")
    asked = evaluators.load_recommender(world.run, ring.corpus(), tmp_path / "commit")
    users, positions = list_prompts(asked.corpus.seq, TEST)
    live = world.rollout._recommender
    expected = live.score_catalogue(live.batch(users, positions), users, positions)
    assert torch.equal(asked.score_catalogue(asked.batch(users, positions), users, positions), expected)
    detail = evaluator(metrics=["recall@5"], width=30).evaluate("pretrain", str(tmp_path / "commit"))[
        "detail"
    ]
    seq = asked.corpus.seq
    ranks = rank_of_target_np(
        expected.numpy(),
        seq.item[locate_events(seq, users, positions)].astype(np.int64),
        gather_seen_items(seq, users, positions),
    )
    recall = detail["test"]["exhaustive"]["all"]["recall@5"]
    assert recall == pytest.approx((ranks < 5).mean())
    assert (
        recall == detail["test"]["beam"]["all"]["recall@5"]
    )  # a beam as wide as what is left misses nothing


def test_rollouts_on_the_wire_tell_rewards_of_the_same_prompt_row_by_row(ring):
    world = ring.world()
    seq, item_id = world.trainer.corpus.seq, world.trainer.corpus.item_id
    beams = world.beams(step=2)
    assert (beams["weights_version"] == 1).all()
    assert (beams["step"] == 2).all()
    for row, (user, position) in enumerate(zip(beams["user"], beams["position"], strict=True)):
        first = seq.offsets[user]
        assert seq.split[first + position] == RL
        assert beams["user_id"][row] == seq.user_id[user]
        assert beams["target"][row].tolist() == [item_id[seq.item[first + position]]]
        assert beams["history"][row].tolist() == item_id[seq.item[first : first + position]].tolist()
        assert beams["uid"][row] == f"rl/0/{user}:{position}"
    assert np.array_equal(beams["item_id"], item_id[beams["item"]])
    assert np.array_equal(beams["sid"], world.trainer.corpus.sids[beams["item"]])
    total = beams["logp"].sum(-1)
    assert (np.diff(total, axis=1) <= 0).all()  # best first
    asked = world.rollout._recommender
    asked_prompts = beams["user"], beams["position"]
    every = asked.score_catalogue(asked.batch(*asked_prompts), *asked_prompts).numpy()
    np.testing.assert_allclose(total, np.take_along_axis(every, beams["item"], 1), rtol=1e-4)


def test_validation_ranks_validation_events_alone_and_tells_what_they_cost(evaluator, monkeypatch):
    there = evaluator()
    seq, asked = there.corpus.seq, []

    def scores(users, positions):
        asked.append(locate_events(seq, users, positions))
        values = np.full((len(users), seq.item.max() + 1), -3.0)
        values[np.arange(len(users)), seq.item[asked[-1]]] = -0.5
        return values

    monkeypatch.setattr(evaluators, "load_recommender", lambda *_: Planted(there.corpus, scores))
    found = there.validate("pretrain", "no commit")
    assert (seq.split[np.concatenate(asked)] == VALID).all()
    assert found["events"] == len(np.concatenate(asked)) == (seq.split == VALID).sum()
    assert found["metrics"]["recall@1"] == 1.0
    assert found["nats"] == pytest.approx(0.5)


def test_a_target_outside_the_catalogue_has_no_nats():
    scores = np.array([[-1.0, -np.inf], [-np.inf, -np.inf]])
    nats = TargetNats(lambda *_: scores, lambda *_: np.array([0, 1]))
    assert nats.mean is None
    nats(np.array([0, 1]), np.array([0, 0]))
    assert nats.mean == 1.0


def test_of_many_users_some_are_validated_with_all_their_events_and_the_same_each_time():
    users = np.repeat(np.arange(100), 3)
    few = select_validation_events(users, 7, max_users=10)
    assert len(np.unique(users[few])) == 10
    assert few.sum() == 30
    np.testing.assert_array_equal(few, select_validation_events(users, 7, max_users=10))
    assert (few != select_validation_events(users, 8, max_users=10)).any()
    assert select_validation_events(users, 7).all()


def test_drawn_users_are_the_seeds_and_all_of_their_events_are_ranked(evaluator):
    whole, some, again = evaluator(), evaluator(users=20, name="some"), evaluator(users=20, name="again")
    for split in ("valid", "test"):
        asked, drawn = whole.ranker.prompts[split], some.ranker.prompts[split]
        assert len(np.unique(drawn[0])) == 20
        assert np.array_equal(drawn[0], again.ranker.prompts[split][0])
        mine = np.isin(asked[0], drawn[0])
        assert np.array_equal(asked[1][mine], drawn[1])
    assert np.array_equal(*(np.unique(some.ranker.prompts[split][0]) for split in ("valid", "test")))


def test_a_catalogue_that_is_not_scored_is_ranked_by_beam_and_compared_with_baselines(evaluator, planted):
    made = evaluator(exhaustive="off")
    detail = planted(made, right_where_liked, name="beamed")
    assert set(detail["test"]) == {"beam"}
    made.evaluate_baseline("popularity")
    assert set(made.compare([("beamed", "popularity")])["beamed-popularity"]) == set(METRICS)


def test_a_baselines_votes_rank_as_its_dense_scores(evaluator):
    sparse = evaluator(name="sparse").evaluate_baseline("transition_counter")
    dense = evaluator(name="dense")
    counter = dense._fitting.fit_part("transition_counter")
    scores = dense.ranker.rank_share(
        lambda users, positions: counter.scores(dense.corpus.seq, users, positions)
    )
    answer, _ = dense.ranker.combine_shares([scores])
    assert answer["detail"] == sparse["detail"]
    assert answer["lists"] == sparse["lists"]
    assert answer["shown"] == sparse["shown"]


def test_shares_of_several_workers_add_up_to_what_one_finds(evaluator, planted):
    made = evaluator(metrics=[*METRICS, "coverage"], shuffle_ties=True)
    whole = planted(made, right_where_liked)
    model = evaluators.load_recommender(made.run, made.corpus)
    alone, ranks = made.ranker.combine_shares([made.ranker.rank_share(ModelScores(model), model)])
    parts = [made.ranker.rank_share(ModelScores(model), model, share, 3) for share in range(3)]
    assert all(len(part.boards["test"]["beam"]) for part in parts)
    for part in parts:  # as they come from another process
        part.quality._shown_I.flags.writeable = False
        for accumulators in part.boards["test"]["exhaustive"]._lists.values():
            accumulators["coverage"]._best_rank_I.flags.writeable = False
    answer, ranks_of_parts = made.ranker.combine_shares(parts)
    assert answer["detail"] == alone["detail"] == whole
    assert answer["segments"] == alone["segments"]
    assert answer["shown"] == alone["shown"]
    assert answer["lists"] == pytest.approx(alone["lists"])
    assert set(ranks) == set(ranks_of_parts)
    assert all(np.array_equal(ranks[name], ranks_of_parts[name]) for name in ranks)
