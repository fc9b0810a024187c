"""Tables beyond accuracy, and the page of several seeds."""

from __future__ import annotations

from nonet.deploy.report.beyond import (
    build_cold_table,
    build_list_table,
    build_memory_table,
    build_part_table,
    build_segment_table,
    format_list_note,
    format_sampled_note,
    format_segment_note,
)
from nonet.deploy.report.page import render_page
from nonet.deploy.report.several import render_seeds_page

LISTS = {"coverage@10": 0.01, "gini@10": 0.99, "novelty@10": 9.5}


def ranked(recall, **groups):
    return {
        "test": {
            "exhaustive": {"all": {"recall@10": recall}} | {g: {"recall@10": v} for g, v in groups.items()}
        }
    }


def report():
    tail = {"tail items": 0.02, "short histories": 0.2, "pairs of training": 0.3}
    stage = ranked(0.3, **{"tail items": 0.07, "short histories": 0.25, "pairs of training": 0.5})
    stage["test"] |= {
        "model alone": {"all": {"recall@10": 0.21}},
        "without similarity": {"all": {"recall@10": 0.28}},
    }
    return {
        "data": {"share_only_trained": 0.125},
        "baselines": {"popularity": {"recall@10": 0.1}, "transition_counter": {"recall@10": 0.2}},
        "stages": {"pretrain": {"recall@10": 0.3}},
        "detail": {
            "popularity": ranked(0.1, **tail),
            "transition_counter": ranked(0.2, **tail),
            "pretrain": stage,
        },
        "lists": {"popularity": LISTS, "pretrain": LISTS | {"diversity@10": 0.8, "calibration@10": 0.4}},
        "segments": {
            "short histories": {"events": 50, "users": 10, "most": 42.0},
            "long histories": {"events": 0, "users": 0, "above": 42.0},
            "tail items": {"events": 20, "items": 1234},
            "pairs of training": {"events": 30, "steps": 1},
        },
        "memory": {
            "pretrain": {
                "l": 0.25,
                "b": 0.5,
                "c": 1.2,
                "gain": {"recall@10": {"diff": 0.09, "low": 0.05, "high": 0.12}},
                "parts": {"without similarity": {"recall@10": {"diff": 0.02, "low": -0.01, "high": 0.05}}},
            }
        },
    }


def texts(table):
    return [[cell if isinstance(cell, str) else cell.text for cell in row] for row in table.rows]


def test_lists_have_a_row_a_subject_and_a_dash_where_nothing_was_measured():
    table = build_list_table(report())
    assert table.head == ["", "coverage@10", "gini@10", "novelty@10", "diversity@10", "calibration@10"]
    assert texts(table) == [
        ["popularity", "0.010", "0.990", "9.500", "–", "–"],
        ["pretrain", "0.010", "0.990", "9.500", "0.800", "0.400"],
    ]
    assert "calibration" in format_list_note(report())
    assert "calibration" not in format_list_note({"lists": {"popularity": LISTS}})


def test_segments_set_the_last_stage_beside_the_strongest_baseline_and_leave_empty_ones_out():
    table = build_segment_table(report())
    assert table.head == ["", "test events", "pretrain", "transition counter"]
    assert texts(table) == [
        ["short histories", "50", "0.2500", "0.2000"],
        ["tail items", "20", "0.0700", "0.0200"],
        ["pairs of training", "30", "0.5000", "0.3000"],
    ]
    assert table.rows[2][0].small == "counted"
    assert "over one other item" in format_segment_note(report())
    assert table.rows[1][0].small == "1,234 items"
    assert "(42)" in format_segment_note(report())
    assert "12.5 % of the users have no test event" in format_segment_note(report())


def test_a_memory_has_one_row_a_stage_with_its_weights_and_what_it_adds():
    table = build_memory_table(report())
    assert texts(table) == [["pretrain", "0.250", "0.500", "1.200", "0.3000", "0.2100", "+0.0900"]]
    assert table.rows[0][-1].tone == 1


def test_each_part_of_a_memory_has_a_row_with_what_it_adds():
    table = build_part_table(report())
    assert texts(table) == [["pretrain", "without similarity", "0.2800", "+0.0200"]]
    assert table.rows[0][-1].tone != 1
    old = report()
    del old["memory"]["pretrain"]["parts"]
    assert not build_part_table(old)
    assert "Gain from each part" in render_page(report())
    assert "Gain from each part" not in render_page(old)


def test_cold_items_have_a_row_a_subject_with_their_recall_among_all_items_and_among_such_items():
    cold = report()
    cold["detail"]["pretrain"]["test"]["exhaustive"]["items of 0 events"] = {"recall@10": 0.05}
    cold["cold"] = {
        "popularity": {"items": 30, "events": 7, "recall@10": 0.2, "random recall@10": None},
        "pretrain": {"items": 30, "events": 7, "recall@10": 0.6, "random recall@10": 0.25},
    }
    rows = [["popularity", "–", "0.2000", "–"], ["pretrain", "0.0500", "0.6000", "0.2500"]]
    assert texts(build_cold_table(cold)) == rows
    page = render_page(cold)
    assert "7 test events are of the 30 items without training events" in page
    assert "Items without training events" not in render_page(report())


def test_the_page_shows_them_and_a_report_without_them_has_no_such_section():
    markup = render_page(report())
    for text in (
        "Beyond accuracy",
        "Properties of lists",
        "By segment",
        "Gain from the memory",
        "model alone",
    ):
        assert text in markup
    voters = report()
    next(iter(voters["memory"].values()))["m"] = 0.25
    with_share = build_memory_table(voters)
    assert with_share.head[:5] == ["", "l", "b", "c", "m"]
    assert with_share.rows[0][4] == "0.250"
    plain = {key: value for key, value in report().items() if key not in ("lists", "segments", "memory")}
    assert "Beyond accuracy" not in render_page(plain)


def test_the_page_of_seeds_tells_means_what_is_certain_and_where_each_seed_is():
    row = {"recall@10": {"mean": 0.3, "sd": 0.01, "values": [0.29, 0.31]}}
    markup = render_seeds_page(
        {
            "name": "<ring>",
            "command": "nonet run ring --seeds 7,8",
            "seeds": [7, 8],
            "stages": ["pretrain"],
            "events": 1000,
            "subjects": {
                "popularity": {"recall@10": {"mean": 0.1, "sd": 0.0, "values": [0.1, 0.1]}},
                "pretrain": row,
            },
            "paired": {"pretrain-popularity": {"recall@10": {"diff": 0.2, "low": 0.15, "high": 0.25}}},
        }
    )
    assert "Pretrain beats popularity: recall@10 0.3000 against 0.1000" in markup
    assert "± 0.0100" in markup
    assert "0.2900" in markup
    assert '<a href="seed-8/report.html">' in markup
    assert "&lt;ring&gt;" in markup
    assert "<script" not in markup


def test_a_report_of_drawn_users_says_how_many_and_what_that_leaves_uncertain():
    assert format_sampled_note(report()) == ""
    drawn = {"users": 20_000, "of": 4_861_193, "half_width": {"recall@10": 0.0041}}
    whole = {**report(), "sampled": {"popularity": drawn, "pretrain": drawn}}
    assert "20,000 of 4,861,193 test users" in format_sampled_note(whole)
    assert "recall@10 ± 0.0041" in render_page(whole)
