"""A feed where half of the users come back, asked by the roles of a run in this process."""

import numpy as np
import pytest

from nonet.bench.runs.feed import ITEMS, FeedWorld, compute_hits
from nonet.models.ranking.metrics import MISSED
from nonet.samples.batches.prompt_rows import list_prompts
from nonet.samples.sequences.sequences import RL, TEST

WIDE = f"evaluate={{metrics: [recall@10, recall@40, coverage@3], width: {ITEMS}}}"


def made(tmp_path_factory, repeats):
    changes = [WIDE] if repeats is None else [WIDE, f"data.repeats={repeats}"]
    return FeedWorld(tmp_path_factory.mktemp("feed"), changes)


@pytest.fixture(scope="module")
def allowing(tmp_path_factory):
    """As the data choose."""
    return made(tmp_path_factory, None)


@pytest.fixture(scope="module")
def masking(tmp_path_factory):
    return made(tmp_path_factory, "mask")


def ranks(feed, subject, how="test.exhaustive"):
    if subject == "model":
        feed.evaluate()
    else:
        feed.evaluator.evaluate_baseline(subject)
    return np.load(feed.folder / "results" / f"{subject}.npz")[how]


def returning(feed, users, positions):
    seq = feed.evaluator.corpus.seq
    return np.array([seq.item[e] in seq.item[seq.offsets[u] : e] for u, e in _events(seq, users, positions)])


def _events(seq, users, positions):
    return zip(users.tolist(), (seq.offsets[users] + positions).tolist(), strict=True)


def test_where_people_come_back_beam_and_exhaustive_ranks_are_the_same(allowing):
    assert allowing.facts["data"]["repeats"]["policy"] == "allow"
    exhaustive, beam = ranks(allowing, "model"), ranks(allowing, "model", "test.beam")
    assert returning(allowing, *list_prompts(allowing.evaluator.corpus.seq, TEST)).mean() == 0.5
    assert beam.max() < ITEMS, "a beam as wide as the catalogue holds every target"
    # Two items may score the same to a float's last bit; exhaustive ranks then go by popularity, beams by code.
    assert (exhaustive == beam).mean() > 0.95


def test_where_people_come_back_a_beam_hits_and_rl_has_a_gradient(allowing):
    beams = allowing.generate_beams(*allowing.rollout.draw_held_out_prompts())
    back = returning(allowing, beams["user"], beams["position"])
    assert back.any()
    assert compute_hits(beams)[back].any()
    flat, groups = allowing.reinforce(3)
    assert flat < groups == 24


def test_rewards_are_told_the_whole_history_whatever_is_masked(allowing, masking):
    for feed in (allowing, masking):
        beams, seq = feed.generate_beams(*feed.rollout.draw_held_out_prompts()), feed.evaluator.corpus.seq
        lengths = np.diff(beams["history"].offsets)
        assert lengths.tolist() == beams["position"].tolist()
        first = slice(seq.offsets[beams["user"][0]], seq.offsets[beams["user"][0]] + beams["position"][0])
        ids = feed.evaluator.corpus.item_id[seq.item[first]]
        assert beams["history"].values[: lengths[0]].tolist() == ids.tolist()


@pytest.mark.parametrize("subject", ["popularity", "transition_counter", "model"])
def test_under_mask_a_seen_target_is_missed_by_everybody_and_no_other_is(masking, subject):
    seq = masking.evaluator.corpus.seq
    back = returning(masking, *list_prompts(seq, TEST))
    assert 0 < back.sum() < len(back)
    for how in ("exhaustive", "beam") if subject == "model" else ("exhaustive",):
        found = ranks(masking, subject, f"test.{how}")
        assert ((found == MISSED) == back).all(), how


def test_under_mask_rl_and_its_probe_never_ask_for_a_seen_item(masking, allowing):
    for feed, expected in ((masking, 0.0), (allowing, 0.5)):
        seq = feed.evaluator.corpus.seq
        steps = [feed.rollout.lease("rl", step, 16) for step in range(20)]
        asked = [np.concatenate(part) for part in zip(*steps, strict=True)]
        assert returning(feed, *asked).mean() == pytest.approx(expected, abs=0.1)
        assert returning(feed, *feed.rollout.draw_held_out_prompts()).mean() == pytest.approx(
            expected, abs=0.2
        )
        assert (seq.split[seq.offsets[asked[0]] + asked[1]] == RL).all()


def test_a_run_says_what_holds_who_chose_it_and_how_many_events_return(allowing, masking):
    said = allowing.facts["data"]["repeats"]
    assert (said["policy"], said["chosen_by"]) == ("allow", "data")
    assert said["share"] == pytest.approx({"train": 14 / 18 / 2, "rl": 0.5, "valid": 0.5, "test": 0.5})
    assert masking.facts["data"]["repeats"] == {**said, "policy": "mask", "chosen_by": "scenario"}


class Planted:
    """Recommends every user of an even row item 0, 1, 2, to others 3, 4, 5."""

    def __init__(self, n_items):
        self.popularity = np.zeros(n_items)

    def fit(self, seq):
        return self

    def scores(self, seq, users, positions):
        scores = np.zeros((len(users), len(self.popularity)), np.float32)
        for place in range(3):
            scores[np.arange(len(users)), place + 3 * (users % 2)] = 3 - place
        return scores


def test_coverage_is_the_part_of_the_catalogue_in_anybodys_list(allowing, monkeypatch):
    monkeypatch.setitem(allowing.evaluator._fitting._configs, "planted", {"use": f"{__name__}:Planted"})
    found = allowing.evaluator.evaluate_baseline("planted")["detail"]["test"]["exhaustive"]["all"]
    assert list(found) == ["recall@10", "recall@40", "coverage@3"]
    assert found["coverage@3"] == 6 / ITEMS
    model = allowing.evaluate()["detail"]["test"]
    users, positions = list_prompts(allowing.evaluator.corpus.seq, TEST)
    batch = allowing.rollout._recommender.batch(users, positions)
    best = allowing.rollout._recommender.generate_beams(batch, ITEMS, users, positions).item[:, :3]
    for how in ("exhaustive", "beam"):
        assert model[how]["all"]["coverage@3"] == len(set(best.flatten().tolist())) / ITEMS, how


def test_nobody_is_compared_in_coverage(allowing):
    for name in ("popularity", "transition_counter"):
        allowing.evaluator.evaluate_baseline(name)
    pairs = allowing.evaluator.compare([("popularity", "transition_counter")])
    assert list(pairs["popularity-transition_counter"]) == ["recall@10", "recall@40"]
