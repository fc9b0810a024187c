"""Rungs, the ledger and what is asked, without a run: scores are a function of the values."""

from __future__ import annotations

import json

import pytest

from nonet.deploy.tune.halving import SuccessiveHalving, TrialResult, compute_rung_shares
from nonet.deploy.tune.ledger import SearchLedger
from nonet.deploy.tune.picture import compute_importances, draw_search
from nonet.deploy.tune.results import format_progress, format_search_result, select_last_rungs
from nonet.deploy.tune.sampler import sample_values
from nonet.deploy.tune.space import SearchKey, SearchSpace
from nonet.errors import ConfigError

SPACE = SearchSpace(
    (
        SearchKey("stages.pretrain.lr", "log", (), 1e-4, 1e-1),
        SearchKey("model.width", "int", (), 16, 64, 16),
        SearchKey("model.block", "choice", (["a"], "b", True, 1)),
        SearchKey("model.dropout", "range", (), 0.0, 0.5),
    ),
    None,
    "space.yaml",
)


def _score(values, rung):
    """Best at lr 1e-2, width 48; a longer rung adds a little."""
    import math

    return (
        -abs(math.log10(values["stages.pretrain.lr"]) + 2) - abs(values["model.width"] - 48) / 100 + rung / 10
    )


def _halving(trials=12, parallel=1, lower=False, ask=None):
    rungs = compute_rung_shares(trials, lambda share: share)
    ask = ask or (lambda number, told: sample_values(SPACE, 7, trials, lower, number, told))
    return SuccessiveHalving(trials, len(rungs), lower, parallel, ask)


def _finish(halving, results=(), score=_score, last_first=False):
    """Run all jobs; within a batch in their order or the other way round."""
    results = list(results)
    while jobs := halving.list_jobs(results):
        for job in reversed(jobs) if last_first else jobs:
            value = score(job.values, job.rung)
            results.append(
                TrialResult(job.number, job.rung, job.values, value, None if value is not None else "NaN")
            )
    return results


def test_small_searches_have_fewer_rungs_and_equal_ones_are_one():
    assert [str(share) for share in compute_rung_shares(12, lambda share: share)] == ["1/4", "1/2", "1"]
    assert [str(share) for share in compute_rung_shares(8, lambda share: share)] == ["1/4", "1/2", "1"]
    assert [str(share) for share in compute_rung_shares(7, lambda share: share)] == ["1/2", "1"]
    assert [str(share) for share in compute_rung_shares(3, lambda share: share)] == ["1"]
    assert [str(share) for share in compute_rung_shares(1, lambda share: share)] == ["1"]
    epochs = lambda share: -(-2 * share.numerator // share.denominator)  # noqa: E731  of a stage of two epochs
    assert [str(share) for share in compute_rung_shares(12, epochs)] == ["1/2", "1"]


def test_the_better_half_goes_on_and_the_winner_trained_longest():
    halving = _halving()
    assert halving.compute_sizes() == [12, 6, 3]
    results = _finish(halving)
    by_rung = [[each for each in results if each.rung == rung] for rung in range(3)]
    assert [len(each) for each in by_rung] == [12, 6, 3]
    for rung in (1, 2):
        worst = min(
            each.score for each in by_rung[rung - 1] if each.number in {e.number for e in by_rung[rung]}
        )
        assert all(
            each.score <= worst
            for each in by_rung[rung - 1]
            if each.number not in {e.number for e in by_rung[rung]}
        )
    winner = halving.find_winner(results)
    assert winner is not None
    assert winner.rung == 2
    assert winner.score == max(each.score for each in by_rung[2])


def test_of_equals_the_lower_number_goes_on_and_less_can_be_better():
    halving = _halving(4, ask=lambda number, told: {"n": number})
    assert [each.number for each in _finish(halving, score=lambda values, rung: 1.0)][4:] == [0, 1]
    lower = _halving(4, lower=True, ask=lambda number, told: {"n": number})
    results = _finish(lower, score=lambda values, rung: float(values["n"]))
    assert [each.number for each in results][4:] == [0, 1]
    assert lower.find_winner(results).number == 0  # type: ignore[union-attr]


def test_a_search_that_was_cut_anywhere_goes_on_as_it_would_have():
    halving = _halving()
    whole = _finish(halving)
    for cut in range(len(whole)):
        assert _finish(halving, whole[:cut]) == whole
    other = _finish(
        SuccessiveHalving(
            12, 3, False, 1, lambda number, told: sample_values(SPACE, 8, 12, False, number, told)
        )
    )
    assert other != whole


def test_with_trials_at_once_the_order_of_their_ends_decides_nothing():
    halving = _halving(parallel=3)
    key = lambda each: (each.rung, each.number)  # noqa: E731
    assert sorted(_finish(halving), key=key) == sorted(_finish(halving, last_first=True), key=key)
    begun = halving.list_jobs([])
    assert [job.number for job in begun] == [0, 1, 2]
    before = [each for each in _finish(halving) if each.rung == 0][:9]
    batch = halving.list_jobs(before)
    one = TrialResult(10, 0, batch[1].values, 0.5)
    assert halving.list_jobs([*before, one]) == [batch[0], batch[2]]


def test_a_failed_trial_loses_and_ends_nothing():
    def score(values, rung):
        return None if values["model.width"] == 48 else _score(values, rung)

    halving = _halving()
    results = _finish(halving, score=score)
    failed = {each.number for each in results if each.score is None}
    assert failed
    assert not failed & {each.number for each in results if each.rung}
    assert halving.find_winner(results) is not None
    none = _finish(halving, score=lambda values, rung: None)
    assert len(none) == 12
    assert halving.find_winner(none) is None
    late = _finish(halving, score=lambda values, rung: None if rung == 2 else _score(values, rung))
    assert halving.find_winner(late).rung == 1  # type: ignore[union-attr]


def test_proposals_stay_in_the_space_and_learn():
    results = _finish(_halving(24))
    first = [each for each in results if each.rung == 0]
    for each in first:
        values = each.values
        assert 1e-4 <= values["stages.pretrain.lr"] <= 1e-1
        assert values["stages.pretrain.lr"] == float(f"{values['stages.pretrain.lr']:.4g}")
        assert values["model.width"] in (16, 32, 48, 64)
        assert any(values["model.block"] is choice for choice in SPACE.keys[2].choices)
    means = [sum(each.score for each in part) / len(part) for part in (first[:8], first[16:])]
    assert means[1] > means[0]


# --- the ledger -----------------------------------------------------------------------------------------------------


def test_a_ledger_keeps_results_and_refuses_another_search(tmp_path):
    ledger = SearchLedger(tmp_path, {"trials": 4, "scenario": {"name": "a"}})
    assert not ledger.begun
    results = [
        TrialResult(1, 0, {"x": 0.1, "y": [1]}, 0.25, None, 0.5),
        TrialResult(0, 0, {"x": 1e-5, "y": None}, None, "NaN"),
    ]
    for each in results:
        ledger.add(each)
    again = SearchLedger(tmp_path, {"trials": 4, "scenario": {"name": "a"}})
    assert again.begun
    assert again.results == results[::-1]
    with pytest.raises(
        ConfigError,
        match=r"another search, which differs in trials \(there 4, here 5\), scenario; use the original options",
    ):
        SearchLedger(tmp_path, {"trials": 5, "scenario": {"name": "b"}})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Invalid JSON"),
        ("[]", "should be an object"),
        ("{}", "search: Field required"),
        ('{"search": {}, "results": [3]}', "results.0"),
        ('{"search": {}, "results": [{"number": 0}]}', "results.0.rung"),
        (
            '{"search": {}, "results": [{"number": 0, "rung": 0, "values": {}, "score": 1, "x": 1}]}',
            "results.0.x",
        ),
    ],
)
def test_a_damaged_ledger_is_one_line_that_says_where(tmp_path, content, reason):
    (tmp_path / "tune.json").write_text(content)
    with pytest.raises(ConfigError, match="is not the ledger of a search: ") as refused:
        SearchLedger(tmp_path, {})
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


# --- what is shown --------------------------------------------------------------------------------------------------


def _search(halving):
    return {
        "trials": halving.trials,
        "metric": "ndcg@10",
        "lower": False,
        "stage": "pretrain",
        "rungs": ["1/4", "1/2", "1"],
        "sizes": halving.compute_sizes(),
        "space": {key.path: {} for key in SPACE.keys},
    }


def test_the_table_has_each_trial_once_best_first_and_says_why_one_failed():
    halving = _halving()
    results = _finish(halving)
    results[0] = TrialResult(0, 0, results[0].values, None, "its validation is not a number")
    rows = select_last_rungs([each for each in results if each.number or not each.rung], lower=False)
    assert [each.number for each in rows][-1] == 0
    assert sorted(each.number for each in rows) == list(range(12))
    found = {
        "search": _search(halving),
        "results": json.loads(json.dumps([_plain(each) for each in results])),
        "best": _plain(halving.find_winner(results)),
        "scenario": "best.yaml",
        "picture": "tune.svg",
    }
    text = format_search_result(found)
    assert "12 with 1/4, 6 with 1/2, 3 with all" in text
    assert "best       trial" in text
    assert "1/4 of the length" in format_progress(results[1], found["search"], 1, 21)


def _plain(result):
    from dataclasses import asdict

    return asdict(result)


def test_the_key_that_scores_follow_has_the_importance():
    halving = _halving(24)
    results = _finish(
        halving, score=lambda values, rung: {16: 0.0, 32: 1.0, 48: 4.0, 64: 9.0}[values["model.width"]]
    )
    found = compute_importances(SPACE, results)
    assert found["model.width"] == max(found.values()) > 0.7
    assert all(0 <= share <= 1 for share in found.values())
    assert compute_importances(SPACE, results[:1]) == dict.fromkeys(found, 0.0)


def test_the_picture_is_whole_svg_and_marks_the_best():
    from xml.etree import ElementTree

    halving = _halving()
    results = _finish(halving)
    results.append(TrialResult(99, 0, results[0].values, None, "failed"))
    svg = draw_search(SPACE, results, _search(halving))
    tags = [each.tag.rpartition("}")[2] for each in ElementTree.fromstring(svg).iter()]
    assert tags.count("circle") == 21 * len(SPACE.keys)
    assert svg.count("dot best") == len(SPACE.keys)
