import pickle

import numpy as np
import pytest

from nonet.errors import ConfigError, DataError
from nonet.models.ranking.kinds import ListCatalogue
from nonet.models.ranking.kinds.coverage import CoverageCounter
from nonet.models.ranking.metrics import (
    MISSED,
    compare_paired,
    compute_per_event,
    is_significant,
    list_depth,
    make_tie_order,
    parse_metric,
    rank_of_target_np,
    select_event_metrics,
    summarise,
)
from nonet.plugins import LocatedName
from nonet.types import Jagged


def _jagged(*rows):
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return Jagged(np.array([x for row in rows for x in row], np.int64), offsets)


def test_rank_counts_unseen_items_that_score_higher():
    scores = np.array([[0.9, 0.1, 0.5, 0.3], [0.9, 0.1, 0.5, 0.3]], np.float32)
    ranks = rank_of_target_np(scores, np.array([3, 3]), _jagged([], [0, 0, 2]))
    assert ranks.tolist() == [2, 0]


def test_a_masked_target_is_missed_however_well_it_scores():
    scores = np.array([[0.9, 0.1, 0.5], [0.9, 0.1, 0.5]], np.float32)
    ranks = rank_of_target_np(scores, np.array([0, 0]), _jagged([2, 0, 0], [2]))
    assert ranks.tolist() == [MISSED, 0]
    found = summarise(ranks, ["recall@3", "ndcg@3", "mrr@3"])
    assert found == {"recall@3": 0.5, "ndcg@3": 0.5, "mrr@3": 0.5}


def test_a_target_outside_the_catalogue_is_missed():
    scores = np.array([[-np.inf, -np.inf, 0.5]], np.float32)
    assert rank_of_target_np(scores, np.array([1]), _jagged([])).tolist() == [MISSED]


def test_equal_scores_stand_by_popularity_then_by_chance_never_by_index():
    popularity = np.array([1, 5, 1, 5, 9, 1])
    tie = make_tie_order(popularity, seed=3)
    order = np.argsort(tie)
    assert popularity[order].tolist() == [9, 5, 5, 1, 1, 1]
    assert len({tuple(np.argsort(make_tie_order(popularity, seed))) for seed in range(30)}) > 6
    assert make_tie_order(popularity, 3).tolist() == tie.tolist()
    scores = np.zeros((6, 6), np.float32)
    ranks = rank_of_target_np(scores, np.arange(6), _jagged(*[[]] * 6), tie)
    np.testing.assert_array_equal(ranks, tie)


def test_a_model_that_says_nothing_gets_the_rank_of_chance():
    n = 2000
    ranks = rank_of_target_np(np.zeros((n, n), np.float32), np.arange(n), _jagged(*[[]] * n))
    assert sorted(ranks.tolist()) == list(range(n))
    assert summarise(ranks, ["recall@10"])["recall@10"] == pytest.approx(10 / n)


@pytest.mark.parametrize("seed", range(5))
def test_ranks_equal_a_sort_of_every_row(seed):
    rng = np.random.default_rng(seed)
    prompts, items = 40, 30
    scores = rng.integers(0, 6, (prompts, items)).astype(np.float32)
    scores[rng.random((prompts, items)) < 0.1] = -np.inf
    seen = [rng.integers(0, items, rng.integers(0, 12)).tolist() for _ in range(prompts)]
    target, tie = rng.integers(0, items, prompts), make_tie_order(rng.integers(0, 4, items), seed)
    ranks = rank_of_target_np(scores, target, _jagged(*seen), tie)
    for i in range(prompts):
        left = [x for x in range(items) if x not in seen[i] and scores[i, x] > -np.inf]
        left.sort(key=lambda x: (-scores[i, x], tie[x]))
        assert ranks[i] == (left.index(target[i]) if target[i] in left else MISSED)


def test_scores_that_are_nan_are_refused_with_their_count():
    scores = np.zeros((3, 4), np.float32)
    scores[1, 2] = np.nan
    with pytest.raises(DataError, match="1 of 3 prompts have a score that is NaN, the first: 1"):
        rank_of_target_np(scores, np.zeros(3, int), _jagged([], [], []))


def test_metrics_of_known_ranks():
    ranks = np.array([0, 1, 4, 5, 100])
    assert compute_per_event("recall@5", ranks).tolist() == [1, 1, 1, 0, 0]
    np.testing.assert_allclose(compute_per_event("ndcg@5", ranks), [1, 1 / np.log2(3), 1 / np.log2(6), 0, 0])
    np.testing.assert_allclose(compute_per_event("mrr@10", ranks), [1, 0.5, 0.2, 1 / 6, 0])
    assert summarise(ranks, ["recall@1", "recall@10"]) == {"recall@1": 0.2, "recall@10": 0.8}


def test_coverage_counts_distinct_recommended_items():
    lists = np.array([[0, 1, -1], [1, 2, 3]])
    catalogue = ListCatalogue(np.zeros(10))
    whole, parts = CoverageCounter(catalogue), CoverageCounter(catalogue)
    whole.add(lists)
    for row in lists:
        parts.add(row[None])
    for reach in (whole, parts):
        assert [reach.compute(k) for k in (None, 1, 2, 3)] == [0.4, 0.2, 0.3, 0.4]
    assert summarise(np.array([0]), ["coverage@2"], {"coverage": whole}) == {"coverage@2": 0.3}
    assert CoverageCounter(catalogue).compute(None) == 0


def test_metrics_say_how_long_lists_they_need_and_which_of_them_an_event_has():
    names = ["recall@10", "coverage@5", "coverage@3"]
    assert list_depth(names, 20) == 5
    assert list_depth([*names, "coverage"], 20) == 20
    assert list_depth(["recall@10"], 20) == 0
    assert select_event_metrics([*names, "coverage"]) == ["recall@10"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "recal@5",
            "unknown metric 'recal@5'; there are coverage@k, mrr@k, ndcg@k, recall@k. Did you mean 'recall'",
        ),
        ("recall", "'recall' needs a number of items, at least 1, such as recall@10"),
        ("ndcg@0", "needs a number"),
        ("ndcg@-5", "unknown metric"),
        ("", "unknown metric ''"),
    ],
)
def test_unknown_metric_lists_those_there_are(name, says):
    with pytest.raises(ConfigError, match=says):
        parse_metric(name)


def test_coverage_of_ranks_alone_and_an_empty_evaluation_are_refused():
    with pytest.raises(ConfigError, match="needs the recommended items"):
        summarise(np.array([1]), ["coverage"])
    with pytest.raises(ConfigError, match="a metric of whole lists"):
        compute_per_event("coverage@5", np.array([1]))
    with pytest.raises(DataError, match="no held-out event"):
        summarise(np.array([], int), ["recall@5"])


def test_bootstrap_is_paired_seeded_and_brackets_the_difference():
    rng = np.random.default_rng(0)
    user = np.repeat(np.arange(300), 5)
    hard = rng.random(1500)
    a, b = (hard < 0.30).astype(float), (hard < 0.25).astype(float)
    found = compare_paired(a, b, user, seed=7)
    assert found == compare_paired(a, b, user, seed=7) != compare_paired(a, b, user, seed=8)
    assert found["diff"] == pytest.approx((a - b).mean())
    assert found["low"] < found["diff"] < found["high"]
    assert is_significant(found)
    assert not is_significant(compare_paired(a, a, user, seed=7))
    back = compare_paired(b, a, user, seed=7)
    assert back["low"] == pytest.approx(-found["high"])


def test_bootstrap_draws_users_so_repeated_events_do_not_shrink_the_interval():
    rng = np.random.default_rng(1)
    gain = rng.normal(0.0, 1.0, 200)
    once = compare_paired(gain, np.zeros(200), np.arange(200), seed=0)
    many = compare_paired(np.repeat(gain, 50), np.zeros(10_000), np.repeat(np.arange(200), 50), seed=0)
    assert many["high"] - many["low"] == pytest.approx(once["high"] - once["low"], rel=1e-9)


def test_interval_covers_the_true_difference_about_95_times_in_100():
    rng = np.random.default_rng(2)
    inside = 0
    for seed in range(300):
        user = np.arange(150)
        found = compare_paired(rng.normal(0.2, 1.0, 150), np.zeros(150), user, seed=seed)
        inside += found["low"] <= 0.2 <= found["high"]
    assert (
        270 <= inside <= 297
    )  # binomial(300, 0.95) is 285 +- 3.8; a percentile interval runs a little short


def test_unlike_lengths_are_refused():
    with pytest.raises(ValueError, match="one value per event"):
        compare_paired(np.zeros(3), np.zeros(2), np.zeros(3), seed=0)


OWN = """
from nonet.plug import EventMetric, ListMetric

class Short:
    def __init__(self, catalogue): ...
    def add(self, lists_PW): ...
    def compute(self, k): ...

HIT = EventMetric(lambda ranks, k: (ranks < k) * 1.0)
SHORT = ListMetric(Short)
NO_K = EventMetric(lambda ranks: ranks)
"""


def test_a_metric_from_a_file_is_named_with_its_number_of_items(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert parse_metric("own.py:HIT@3") == ("own.py:HIT", 3)
    assert summarise(np.array([0, 2, 5]), ["own.py:HIT@3"]) == {"own.py:HIT@3": pytest.approx(2 / 3)}
    monkeypatch.chdir("/")
    located = pickle.loads(pickle.dumps(LocatedName("own.py:HIT@3", f"{tmp_path}/own.py:HIT@3")))
    assert select_event_metrics([located]) == ["own.py:HIT@3"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("SHORT@3", r"own.py\): class Short has no absorb; see docs/how-to/extend.md"),
        ("NO_K@3", r"own.py\): compute does not accept \(ranks: .*; see docs/how-to/extend.md"),
        ("GONE@3", "there is no 'GONE' in own.py"),
        ("HIT", "needs a number of items, at least 1, such as own.py:HIT@10"),
    ],
)
def test_a_metric_that_breaks_its_contract_is_refused_in_one_line(tmp_path, monkeypatch, name, said):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said) as refused:
        parse_metric(f"own.py:{name}")
    assert "\n" not in str(refused.value)
