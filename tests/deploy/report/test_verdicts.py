import pytest

from nonet.deploy.report.scores import format_number, list_metrics, select_scores
from nonet.deploy.report.summaries import format_summary
from nonet.deploy.report.tables import build_score_table
from nonet.deploy.report.verdicts import (
    collect_findings,
    find_strongest_baseline,
    get_reward_direction,
    get_verdict,
)


def compared(diff, low, high, left="finetune", right="popularity", **others):
    """Make a report with one comparison in recall@10, and in other metrics as {metric: (diff, low, high)}."""
    found = {"recall@10": (diff, low, high), **others}
    pairs = {
        metric: dict(zip(("diff", "low", "high"), values, strict=True)) for metric, values in found.items()
    }
    return {
        "baselines": {"popularity": {"recall@10": 0.1}},
        "stages": {"finetune": {"recall@10": 0.1 + diff}, "rl": {"recall@10": 0.1 + 2 * diff}},
        "paired": {f"{left}-{right}": pairs},
    }


def test_a_difference_whose_interval_leaves_out_zero_is_told_as_better_or_worse():
    assert get_verdict(compared(0.1, 0.05, 0.15)) == [
        "Finetune beats popularity: recall@10 0.2000 against 0.1000, 2.0 times as much "
        "(+0.1000, 95 % interval +0.0500 to +0.1500)."
    ]
    assert get_verdict(compared(-0.02, -0.03, -0.01)) == [
        "Finetune loses to popularity: recall@10 0.0800 against 0.1000 "
        "(−0.0200, 95 % interval −0.0300 to −0.0100)."
    ]


@pytest.mark.parametrize(("diff", "words", "tone"), [(-0.1, "beats", 1), (0.1, "loses to", -1)])
def test_a_stage_with_less_of_what_should_be_low_is_the_better_one(diff, words, tone):
    report = {
        "lower_is_better": ["log_loss"],
        "baselines": {"regression": {"log_loss": 0.6}, "prior": {"log_loss": 0.7}},
        "stages": {"pretrain": {"log_loss": 0.6 + diff}},
        "paired": {
            f"pretrain-{name}": {"log_loss": {"diff": diff, "low": diff - 0.01, "high": diff + 0.01}}
            for name in ("regression", "prior")
        },
    }
    assert find_strongest_baseline(report, ["regression", "prior"]) == ["regression"]
    findings = [(finding.text.partition(":")[0], finding.tone) for finding in collect_findings(report)]
    assert (f"Pretrain {words} regression", tone) in findings
    table = build_score_table(report, "test", "exhaustive", "")
    best = [str(row[0].text) for row in table.rows if row[1].bold]
    assert best == (["pretrain"] if diff < 0 else ["regression"])


@pytest.mark.parametrize(("low", "high"), [(-0.01, 0.09), (0.0, 0.08), (-0.08, 0.0)])
def test_a_difference_whose_interval_holds_zero_is_called_not_significant(low, high):
    (sentence,) = get_verdict(compared(0.04, low, high))
    assert sentence.startswith("Finetune against popularity: the difference is not significant: recall@10")
    assert "beats" not in sentence
    assert collect_findings(compared(0.04, low, high))[0].tone == 0


@pytest.mark.parametrize(
    ("diff", "low", "high", "words", "tone"),
    [
        (0.01, 0.004, 0.016, "RL improves on finetune: ", 1),
        (-0.01, -0.016, -0.004, "RL is worse than finetune: ", -1),
        (
            0.01,
            -0.002,
            0.02,
            "RL made no significant difference against finetune: ",
            0,
        ),
    ],
)
def test_rl_against_the_stage_before_helped_or_hurt_or_neither(diff, low, high, words, tone):
    (found,) = collect_findings(compared(diff, low, high, left="rl", right="finetune"))
    assert found.text.startswith(words)
    assert found.tone == tone


def test_a_stage_against_the_one_before_improves_on_it_or_is_worse():
    stages = {"pretrain": {"recall@10": 0.1}, "finetune": {"recall@10": 0.2}}
    (up,) = collect_findings(
        compared(0.1, 0.05, 0.15, left="finetune", right="pretrain") | {"stages": stages}
    )
    assert up.text.startswith("Finetune improves on pretrain: recall@10")
    assert up.tone == 1
    (down,) = collect_findings(
        compared(-0.1, -0.15, -0.05, left="finetune", right="pretrain") | {"stages": stages}
    )
    assert down.text.startswith("Finetune is worse than pretrain: recall@10")
    assert down.tone == -1


def test_ndcg_is_told_where_it_judges_differently():
    (agree,) = get_verdict(compared(0.1, 0.05, 0.15, **{"ndcg@10": (0.05, 0.02, 0.08)}))
    (differ,) = get_verdict(compared(0.1, -0.05, 0.15, **{"ndcg@10": (0.05, 0.02, 0.08)}))
    assert "ndcg" not in agree
    assert differ == (
        "Finetune against popularity depends on the metric: recall@10 0.2000 against 0.1000, 2.0 times as much (+0.1000, 95 % "
        "interval −0.0500 to +0.1500), not significant; in ndcg@10 it is significantly better (+0.0500, 95 % interval +0.0200 "
        "to +0.0800)."
    )
    (both,) = get_verdict(compared(-0.1, -0.15, -0.05, **{"ndcg@10": (0.05, 0.02, 0.08)}))
    assert both.startswith("Finetune loses to popularity: recall@10")
    assert both.endswith(
        "; in ndcg@10 it is significantly better (+0.0500, 95 % interval +0.0200 to +0.0800)."
    )


def test_every_task_of_a_click_model_is_judged_as_the_target_is():
    report = {
        "stages": {"train": {"auc": 0.7, "auc@order": 0.6}},
        "baselines": {"popularity": {"auc": 0.6, "auc@order": 0.65}},
        "lower_is_better": ["log_loss", "log_loss@order"],
        "paired": {
            "train-popularity": {
                "auc": {"diff": 0.1, "low": 0.05, "high": 0.15},
                "log_loss": {"diff": -0.1, "low": -0.15, "high": -0.05},
                "auc@order": {"diff": -0.05, "low": -0.08, "high": -0.02},
                "log_loss@order": {"diff": 0.0, "low": -0.1, "high": 0.1},
            }
        },
    }
    target, order = collect_findings(report)
    assert target.text.startswith("Train beats popularity: auc 0.7000 against 0.6000")
    assert "log_loss" not in target.text
    assert order.text.startswith("Train loses to popularity: auc@order 0.6000 against 0.6500")
    assert "in log_loss@order the difference is not significant" in order.text
    assert order.tone == -1


def test_a_bound_that_is_not_zero_is_not_written_as_zero():
    (sentence,) = get_verdict(compared(-0.0014, -0.0028, -0.00002))
    assert sentence.endswith("(−0.001400, 95 % interval −0.002800 to −0.000020).")
    (level,) = get_verdict(compared(0.0, -0.0028, 0.0))
    assert level.endswith("(0.000000, 95 % interval −0.002800 to 0.000000).")


def test_the_trained_reward_is_told_with_its_objectives_and_where():
    rewards = {"hit": [0.01, 0.015], "novelty": [0.4, 0.3], "rank": [0.2, 0.2], "total": [0.1, 0.12]}
    made = {**compared(0.1, 0.05, 0.15), "rewards": rewards, "rewards_on": "9 prompts; mean score a beam"}
    assert collect_findings(made)[-1].tone == 1
    assert get_verdict(made)[-1] == (
        "The trained reward rose from 0.1000 to 0.1200 (+20 %) on 9 prompts: "
        "hit rose from 0.0100 to 0.0150 (+50 %); "
        "novelty fell from 0.4000 to 0.3000 (−25 %); rank stayed at 0.2000."
    )
    made["rewards"] = {"total": [0.00093, 0.00141]}
    assert "rose from 0.000930 to 0.001410 (+52 %)" in get_verdict(made)[-1]
    made["rewards"] = {"total": [0.12, 0.1]}
    assert get_verdict(made)[-1] == "The trained reward fell from 0.1200 to 0.1000 (−17 %) on 9 prompts."
    assert collect_findings(made)[-1].tone == -1


def test_a_reward_with_an_interval_that_holds_zero_is_not_called_up():
    made = {**compared(0.1, 0.05, 0.15), "rewards": {"total": [0.1, 0.12, -0.01, 0.05]}}
    assert collect_findings(made)[-1].tone == 0
    assert (
        "did not change significantly (0.1000 to 0.1200, 95 % interval −0.0100 to +0.0500)"
        in get_verdict(made)[-1]
    )
    made["rewards"] = {"total": [0.1, 0.12, 0.01, 0.03]}
    assert collect_findings(made)[-1].tone == 1


def test_without_paired_differences_nothing_is_called_better():
    made = compared(0.1, 0.05, 0.15)
    del made["paired"]
    (sentence,) = get_verdict(made)
    assert sentence == (
        "recall@10: popularity 0.1000, finetune 0.2000, RL 0.3000. "
        "No pairs were compared, so no stage is called better."
    )


@pytest.mark.parametrize("made", [{}, {"baselines": {"popularity": {"recall@10": 0.1}}}, {"stages": {}}])
def test_a_report_without_stages_says_that_there_is_nothing_to_compare(made):
    assert get_verdict(made) == ["No stage has been evaluated, so there is nothing to compare."]


def test_of_many_comparisons_the_verdict_tells_the_ones_that_decide():
    names = ["pretrain", "finetune", "rl"]
    baselines = {"popularity": {"recall@10": 0.04}, "transition_counter": {"recall@10": 0.12}}
    interval = {"recall@10": {"diff": 0.01, "low": 0.005, "high": 0.015}}
    pairs = {f"{left}-{right}": interval for left in names for right in baselines}
    pairs |= {
        "rl-pretrain": interval,
        "rl-finetune": interval,
        "finetune-pretrain": interval,
        "mine-other": interval,
    }
    made = {"baselines": baselines, "stages": {name: {"recall@10": 0.13} for name in names}, "paired": pairs}
    assert [sentence.partition(":")[0] for sentence in get_verdict(made)] == [
        "Finetune beats popularity",
        "Finetune beats transition counter",
        "Finetune improves on pretrain",
        "RL improves on finetune",
        "RL beats transition counter",
        "Mine beats other",
    ]


def test_a_stage_whose_name_holds_a_hyphen_is_still_found_in_its_pair():
    made = {
        "baselines": {"popularity": {}},
        "stages": {"fine-tune": {"recall@10": 0.2}, "warm-up": {"recall@10": 0.1}},
        "paired": {"fine-tune-warm-up": {"recall@10": {"diff": 0.1, "low": 0.05, "high": 0.15}}},
    }
    assert get_verdict(made)[0].startswith("Fine-tune improves on warm-up: recall@10 0.2000 against 0.1000")


def test_the_stage_table_lists_baselines_first_and_takes_details_over_the_summary():
    made = {
        "stages": {"pretrain": {"recall@10": 0.2}, "rl": {"recall@10": 0.3}},
        "baselines": {"popularity": {"recall@10": 0.1}},
        "detail": {"rl": {"test": {"exhaustive": {"all": {"recall@10": 0.31, "ndcg@10": 0.2}}, "beam": {}}}},
    }
    rows = select_scores(made)
    assert [(row.name, row.kind) for row in rows] == [
        ("popularity", "baseline"),
        ("pretrain", "stage"),
        ("rl", "stage"),
    ]
    assert [row.scores["recall@10"] for row in rows] == [0.1, 0.2, 0.31]
    assert list_metrics(rows) == ["recall@10", "ndcg@10"]
    assert select_scores(made, search="beam") == []
    assert select_scores(made, split="valid") == []


def test_numbers_have_fixed_digits_and_a_dash_for_what_is_missing():
    assert format_number(0.12345) == "0.1235"
    assert format_number(-0.5, 2, sign=True) == "−0.50"
    assert [format_number(value) for value in (None, float("nan"), float("inf"), "x", True)] == ["–"] * 5


def repeats(policy, chosen_by="data", **share):
    return {"repeats": {"policy": policy, "chosen_by": chosen_by, "share": share}}


def test_what_repeats_mean_is_told_where_there_are_some():
    made = compared(0.1, 0.05, 0.15)
    assert len(get_verdict(made | {"data": repeats("mask", train=0.0, test=0.0)})) == 1
    assert get_verdict(made | {"data": repeats("allow", train=0.2213, test=0.4459)})[-1] == (
        "Seen items may be recommended again (data.repeats: allow, chosen by the data): "
        "44.6 % of the test events return to one, 22.1 % of the training events."
    )
    immediate = repeats("allow", train=0.2213, test=0.4459)
    immediate["repeats"]["immediate"] = 0.38
    assert get_verdict(made | {"data": immediate})[-1].endswith(
        " 38.0 % of the test events are of the item of the event right before, which any list that begins with the newest item "
        "finds; `data.events: {compress: ...}` makes one event of them."
    )
    immediate["repeats"]["immediate"] = 0.09
    assert "right before" not in get_verdict(made | {"data": immediate})[-1]
    assert get_verdict(made | {"data": repeats("mask", "scenario", train=0.2, test=0.4459)})[-1] == (
        "Seen items are not recommended again (data.repeats: mask, set by the scenario); "
        "44.6 % of the test events return to one and are missed by every model."
    )
    few = get_verdict(made | {"data": repeats("mask", train=0.0, test=0.0001)})[-1]
    assert "less than 0.1 % of the test events return" in few


def test_a_run_whose_only_metric_is_coverage_has_a_verdict():
    made = {
        "baselines": {"popularity": {"coverage@10": 0.05}},
        "stages": {"finetune": {"coverage@10": 0.5}},
        "paired": {"finetune-popularity": {}},
    }
    assert get_verdict(made) == [
        "coverage@10: popularity 0.0500, finetune 0.5000. No pairs were compared, so no stage is "
        "called better."
    ]


def validated(*points, best=2, ran=3, steps=3):
    """Make a report whose pretrain was validated: (validation's nats, training loss) by step."""
    history = [
        {"step": step, "metrics": {"ndcg@10": 0.1 * step}, "nats": nats, "loss": loss, "events": 9}
        for step, (nats, loss) in enumerate(points, 1)
    ]
    found = {"metric": "ndcg@10", "best": best, "ran": ran, "steps": steps, "history": history}
    return compared(0.1, 0.05, 0.15) | {"validation": {"pretrain": found}}


def test_which_commit_went_on_is_told_and_where_the_stage_stopped():
    assert get_verdict(validated((7.0, 7.5), (6.0, 6.5), (6.1, 6.2), steps=9))[1:] == [
        "Pretrain was best at step 2 of 9 by ndcg@10 of validation (0.2000); stopped after 3; its last 1 steps are not used."
    ]
    assert get_verdict(validated((7.0, 7.5), (6.0, 6.5), (6.1, 6.2), best=3))[1:] == [
        "Pretrain was best at step 3 of 3 by ndcg@10 of validation (0.3000)."
    ]


def test_a_stage_overfits_where_validation_rises_while_the_training_loss_lies_far_below_it():
    (*_, told) = collect_findings(validated((7.0, 7.5), (6.0, 6.0), (6.5, 4.0)))
    assert told.tone == -1
    assert told.text == (
        "Pretrain overfits: validation is 6.50 nats per event at step 3, 6.00 at step 2, while the training loss fell to 4.00; "
        "more data, dropout or a smaller model may help; more steps will not."
    )


@pytest.mark.parametrize(
    "points",
    [
        [(7.0, 7.5), (6.0, 6.0), (6.1, 4.0)],  # it rose by less than 3 %
        [(7.0, 7.5), (6.0, 6.0), (6.5, 5.5)],  # the training loss is not 15 % below the lowest
        [(7.0, 7.5), (6.0, 6.0), (5.0, 2.0)],  # it fell to the end
        [(None, 7.5), (6.0, None), (6.5, None)],  # nobody knows
        [(6.0, 4.0)],
    ],
)
def test_what_does_not_rise_or_is_not_far_below_is_not_called_overfitting(points):
    assert not [found for found in collect_findings(validated(*points)) if "overfits" in found.text]


def test_a_floor_is_told_by_users_that_rl_never_trained_on():
    floor = {"at_least": 0.33, "mean": 0.34, "multiplier": 0.1, "steps": 12, "held": True}

    def told(facts):
        found = [
            each.text
            for each in collect_findings(compared(0.1, 0.05, 0.15) | {"floors": {"rl.novelty": facts}})
        ]
        return next(text for text in found if text.startswith("The floor"))

    assert told(floor | {"held_out": [0.29, 0.335]}) == (
        "The floor of rl.novelty held: at least 0.3300; 0.3350 for users that RL never trained on (0.2900 before), 0.3400 in "
        "the last 12 steps (multiplier 0.1000)."
    )
    alone = told(floor | {"held": False})
    assert alone.startswith("The floor of rl.novelty was not held: at least 0.3300; 0.3400 in the last 12")


def test_copies_of_events_and_items_that_share_codes_are_part_of_the_verdict():
    scores = {"stages": {"pretrain": {"recall@10": 0.1}}, "baselines": {}}
    unknown = {"events": 161, "of": 3361, "items": 3}
    data = {"events": 3200, "items": 60, "duplicates": 1600, "unknown_items": unknown}
    said = " ".join(get_verdict({**scores, "data": data, "tokenizer": {"largest_collision": 50}}))
    assert "1,600 of 3,200 events are duplicates" in said
    assert "161 of 3,361 interactions name one of 3 items" in said
    assert "50 of 60 items (83.3 %) share the same codes" in said or "50 of 60 items (83" in said
    assert "tokenizer.vectors" in said
    few = {"events": 3200, "items": 200, "duplicates": 32}
    said = " ".join(get_verdict({**scores, "data": few, "tokenizer": {"largest_collision": 19}}))
    assert "twice" not in said
    assert "share" not in said
    assert "share" not in " ".join(
        get_verdict({**scores, "data": {"events": 5, "items": 12}, "tokenizer": {"largest_collision": 9}})
    )


def test_the_verdict_counts_labels_that_found_no_event_and_warns_of_many():
    scores = {"stages": {"pretrain": {"recall@10": 0.5}}}
    found = {"rows": 200, "no_event": 0, "too_late": 0}
    few = {"bought": {**found, "too_late": 10}, "carted": found}
    (said,) = [one for one in find_all(scores, few) if "Labels" in one.text]
    assert said.text == (
        "Labels that found no event: 10 of 200 rows of bought (0 have no earlier event of their user and item that "
        "data.where leaves, 10 came after the window)."
    )
    assert said.tone == 0
    many = {"bought": {**found, "no_event": 11}, "carted": found}
    (said,) = [one for one in find_all(scores, many) if "Labels" in one.text]
    assert said.tone == -1
    assert not [one for one in find_all(scores, {"bought": found}) if "Labels" in one.text]


def find_all(scores, labels):
    """Return the findings of a report on data with these counts of labels."""
    return collect_findings({**scores, "data": {"label_files": labels}})


def test_the_verdict_says_what_the_memory_adds_to_the_model_of_the_last_stage():
    scores = {"recall@10": 0.5775}
    detail = {"test": {"exhaustive": {"all": scores}, "model alone": {"all": {"recall@10": 0.22}}}}
    gain = {"recall@10": {"diff": 0.3575, "low": 0.3, "high": 0.41}}
    report = {
        "stages": {"pretrain": scores},
        "detail": {"pretrain": detail},
        "memory": {"pretrain": {"gain": gain}},
    }
    said = [text for text in get_verdict(report) if "memory" in text]
    assert said == [
        "Pretrain without its memory, the model alone, has recall@10 0.2200, with its memory 0.5775: the difference is "
        "significant and up (+0.3575, 95 % interval +0.3000 to +0.4100)."
    ]
    del detail["test"]["model alone"]
    assert not [text for text in get_verdict(report) if "memory" in text]


def test_the_verdict_says_that_a_run_was_resumed_and_what_it_lost():
    report = {
        "stages": {"pretrain": {"recall@10": 0.5}},
        "interruptions": [
            {"time": 100.0, "why": "resumed", "seconds": 25.2},
            {"time": 120.0, "why": "trainer-0 died during train"},
        ],
    }
    assert get_verdict(report)[-2:] == [
        "The run was resumed once, after 25 s of work; all times include that.",
        "The run continued from a checkpoint after a loss: trainer-0 died during train.",
    ]
    assert "over 2 parts of the run" in format_summary(report | {"wall_s": {"total": 40.0}})


def test_a_reward_whose_interval_touches_zero_did_not_change():
    assert get_reward_direction([0.1, 0.12, 0.0, 0.05]) == 0
    assert get_reward_direction([0.1, 0.08, -0.05, 0.0]) == 0


@pytest.mark.parametrize(("l", "b", "said"), [(0.54, 0.0, True), (0.54, 0.5, False), (0.1, 0.0, False)])
def test_a_memory_that_keeps_rl_from_changing_the_lists_is_told(l, b, said):  # noqa: E741
    report = compared(0.1, 0.05, 0.15) | {
        "stage_rewards": {"rl": {"rewards": {"total": [0.1, 0.1]}}},
        "memory": {"rl": {"l": l, "b": b, "c": 1.0}},
    }
    sentence = (
        "RL trains the model alone: the memory has 54 % of the policy's probability and hardly follows the model, so lists and "
        "rewards change less than the model does."
    )
    assert (sentence in get_verdict(report)) == said
