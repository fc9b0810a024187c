import copy
import json
import os
import re
from html.parser import HTMLParser

import pytest

from nonet.controller.record import RunFolder
from nonet.deploy.report.curves import read_curves
from nonet.deploy.report.page import render_page
from nonet.deploy.report.report import write_report
from nonet.deploy.report.summaries import format_summary
from nonet.deploy.report.tables import build_run_tables
from nonet.deploy.verbs.questions import print_summary
from nonet.errors import ConfigError


def scores(recall):
    return {"recall@5": recall * 0.6, "recall@10": recall, "ndcg@5": recall * 0.4, "ndcg@10": recall * 0.5}


def difference(diff, half, ndcg=None):
    low, high = ndcg or (diff / 2 - half / 2, diff / 2 + half / 2)
    return {
        "recall@10": {"diff": diff, "low": diff - half, "high": diff + half},
        "ndcg@10": {"diff": diff / 2, "low": low, "high": high},
    }


def detail(recall, beam):
    searches = {"exhaustive": {"all": scores(recall), "target": scores(recall * 1.1)}}
    if beam:
        searches["beam"] = {"all": scores(recall * 0.95), "target": scores(recall)}
    return {"test": searches, "valid": copy.deepcopy(searches)}


BASELINES = {"popularity": 0.045, "transition_counter": 0.118}
STAGES = {"pretrain": 0.121, "finetune": 0.135, "rl": 0.137}


def report(**changes):
    """Make the example report with some of its top keys replaced; None removes a key."""
    made = {
        "run": "quickstart-20261120-184301-a3f1",
        "name": "quickstart",
        "seed": 7,
        "command": "nonet run quickstart",
        "data": {
            "users": 671,
            "items": 3496,
            "events": 90000,
            "held_out": {"test": 3355, "test_target": 1700, "valid": 671, "rl": 3355},
            "notice": "MovieLens, Harper & Konstan <2015>",
        },
        "stages": {name: scores(recall) for name, recall in STAGES.items()},
        "baselines": {name: scores(recall) for name, recall in BASELINES.items()},
        "detail": {name: detail(recall, name in STAGES) for name, recall in {**BASELINES, **STAGES}.items()},
        "paired": {
            "finetune-popularity": difference(0.09, 0.02),
            "finetune-transition_counter": difference(0.017, 0.018),
            "finetune-pretrain": difference(0.014, 0.012),
            "rl-finetune": difference(0.002, 0.006),
        },
        "rewards": {"hit": [0.012, 0.015], "novelty": [0.45, 0.41], "total": [0.1, 0.11]},
        "rewards_on": "671 prompts of 134 users that RL never trained on",
        "tokenizer": {
            "levels": 4,
            "codes": [64, 64, 64, 3],
            "used": [64, 60, 64, 3],
            "perplexity": [58.2, 44.0, 60.0, 1.3],
            "unique_before_collisions": 0.906,
        },
        "users": [
            {
                "user_id": 42,
                "history": [f"Film {number}" for number in range(20)],
                "target": ["Heat (1995)", "<script>alert(1)</script>"],
                "recommended": {
                    "popularity": ["Up (2009)", "Heat (1995)"],
                    "finetune": ["Up (2009)", "Alien & Aliens"],
                    "rl": ["<script>alert(1)</script>", "Alien & Aliens", "Big (1988)"],
                },
            }
        ],
        "wall_s": {"start": 8.1, "tokenise": 9.2, "pretrain": 60.1, "rl": 104.3, "total": 250.1},
        "rows": {"pretrain": 90088},
        "peak_rss_bytes": 3 * 2**30,
        "weights": {"parameters": 440_000, "sparse_rows": 4167},
        "versions": {"nonet": "0.1.0", "ray": "2.60.0", "torch": "2.13.0"},
    }
    made.update(copy.deepcopy(changes))
    return {key: value for key, value in made.items() if value is not None}


class Page(HTMLParser):
    """Open tags are closed in order, nothing is fetched, and `text` holds what a reader sees."""

    VOID = ("meta", "br", "img", "link", "input", "hr")

    def __init__(self, markup):
        super().__init__()
        self.open, self.tags, self.text, self.fetched = [], [], "", []
        self.feed(markup)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "data", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data + " "


def metrics(path):
    """Write a metrics.jsonl of two ranks, with a resumed step and an incomplete last line."""
    records = []
    for step in range(1, 41):
        for rank in (0, 1):
            for name, value, unit in (
                ("loss", 9 - step / 10 + rank, "nats"),
                ("rows/s", 100.0 + step, "rows/s"),
            ):
                record = {"t": 1.0, "run": "r", "stage": "pretrain", "step": step, "role": "trainer"}
                records.append({**record, "rank": rank, "name": name, "value": value, "unit": unit})
    records.append({**records[-4], "value": 99.0})
    lines = [json.dumps(record) for record in records]
    path.write_text("\n".join([*lines, '{"t": 1.0, "ru']))


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(report()))
    (tmp_path / "scenario.yaml").write_text("name: quickstart # <&>\n")
    metrics(tmp_path / "metrics.jsonl")
    return tmp_path


def test_the_report_is_one_file_that_fetches_nothing_and_runs_no_script(run_dir):
    written = write_report(run_dir)
    assert written == run_dir / "report.html"
    markup = written.read_text()
    shown = Page(markup)
    assert shown.fetched == []
    assert not {"script", "link", "img", "iframe"} & set(shown.tags)
    assert "url(" not in markup
    assert "@import" not in markup
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "metrics.jsonl",
        "report.html",
        "report.json",
        "scenario.yaml",
    ]


def test_the_verdict_stands_first_and_every_section_is_there(run_dir):
    text = Page(write_report(run_dir).read_text()).text
    titles = [
        "Verdict",
        "Stages and baselines",
        "Significance of the differences",
        "Rewards before and after RL",
        "Examples of recommendations",
        "Curves",
        "Semantic ids",
        "How it was made",
        "To reproduce",
        "nonet run quickstart",
        "Resolved scenario",
        "name: quickstart # <&>",
    ]
    places = [text.index(title) for title in titles]
    assert places == sorted(places)
    assert "Finetune beats popularity: recall@10 0.1350 against 0.0450, 3.0 times as much" in text
    for number in (
        "671 users",
        "3.00 GiB",
        "440,000",
        "4,167",
        "90.6 %",
        "4 min 10 s",
    ):
        assert number in text


def test_the_stage_table_holds_both_searches_and_both_kinds_of_events(run_dir):
    text = Page(write_report(run_dir).read_text()).text
    assert text.count("all held-out events (3,355)") == 2
    assert text.count("events that match the finetuning target (1,700)") == 2
    for value in (0.135, 0.135 * 1.1, 0.135 * 0.95, 0.118, 0.045):
        assert f"{value:.4f}" in text


def test_texts_of_the_run_are_escaped_and_hits_are_marked():
    markup = render_page(report(), scenario="<b>&")
    assert "<script>" not in markup
    assert '<li class="hit">&lt;script&gt;alert(1)&lt;/script&gt;' in markup
    assert '<li class="hit">Heat (1995)' in markup
    assert "<li>Alien &amp; Aliens</li>" in markup
    assert markup.count("<small>new</small>") == 2
    assert "<li>Big (1988)&nbsp;<small>new</small></li>" in markup
    assert "Konstan &lt;2015&gt;" in markup
    assert "&lt;b&gt;&amp;" in markup


def test_users_after_the_third_are_folded_away():
    users = [{"user_id": number, "recommended": {"rl": ["Up (2009)"]}} for number in range(5)]
    markup = render_page(report(users=users))
    assert markup.index("User 2<") < markup.index("2 more users") < markup.index("User 3<")


def test_a_single_point_is_no_curve():
    from nonet.deploy.report.curves import Curve

    scored = Curve("evaluate", "rl/recall@10", "1", {(0.0, "evaluator", 0): 0.1})
    assert "Curves" not in Page(render_page(report(), curves=[scored])).text


def test_a_long_history_shows_its_newest_items():
    text = Page(render_page(report())).text
    assert "12 earlier" in text
    assert "Film 19" in text
    assert "Film 11" not in text


def test_curves_average_ranks_add_throughputs_and_take_a_resumed_steps_last_value(run_dir):
    from nonet.deploy.report.curves import read_curves

    (loss, speed), unread = read_curves(run_dir / "metrics.jsonl")
    assert unread == 1
    assert (loss.stage, loss.name, loss.unit) == ("pretrain", "loss", "nats")
    assert loss.points[0] == (1.0, pytest.approx(9.4))
    assert speed.points[0] == (1.0, 202.0)
    assert loss.points[-1] == (40.0, pytest.approx((99.0 + 6.0) / 2))
    text = Page(write_report(run_dir).read_text()).text
    assert "could not be read: 1." in text


@pytest.mark.parametrize("missing", sorted(report()))
def test_a_report_without_any_one_part_is_still_a_page(missing):
    shown = Page(render_page(report(**{missing: None})))
    assert "Verdict" in shown.text
    assert not re.search(r"\b(None|nan)\b", shown.text)


def test_a_run_that_only_pretrained_has_its_page_too():
    only = report(
        stages={"pretrain": scores(0.12)},
        paired=None,
        rewards=None,
        rewards_on=None,
        users=None,
        detail=None,
    )
    text = Page(render_page(only)).text
    assert "recall@10: popularity 0.0450, transition counter 0.1180, pretrain 0.1200" in text
    assert "Significance of the differences" not in text
    assert "Rewards before" not in text


def test_each_of_two_rl_stages_shows_its_own_rewards_under_its_name():
    on = "40 prompts of 8 users that RL never trained on"
    first = {"rewards": {"hit": [0.021, 0.034]}, "rewards_on": on}
    second = {"rewards": {"novelty": [0.51, 0.62]}, "rewards_on": on}
    markup = render_page(report(**second, stage_rewards={"rl": first, "rl_long": second}))
    tables = re.findall(r"<table>.*?</table>", markup, re.DOTALL)
    named = {
        caption[1]: Page(table).text
        for table in tables
        if (caption := re.search(r"<caption>(rl.*?|RL)<", table))
    }
    assert list(named) == ["RL", "rl long"]
    assert "0.0340" in named["RL"]
    assert "novelty" not in named["RL"]
    assert "0.6200" in named["rl long"]
    assert "hit" not in named["rl long"]
    assert Page(markup).text.count(on) == 3  # beside each table, and in the verdict


def test_one_rl_stage_needs_no_name_above_its_rewards():
    only = {"rewards": {"hit": [0.021, 0.034]}, "rewards_on": "40 prompts"}
    assert render_page(report(**only, stage_rewards={"rl": only})) == render_page(report(**only))


def test_an_empty_report_is_a_page_that_says_so():
    assert "No stage has been evaluated" in Page(render_page({})).text


def test_numbers_that_are_missing_or_not_finite_show_as_a_dash():
    holes = report(
        stages={"finetune": {"recall@10": float("nan"), "ndcg@10": 0.07}},
        detail=None,
        paired={"finetune-popularity": {"recall@10": {"diff": None, "low": 0.1, "high": 0.2}}},
        tokenizer={"codes": [64, 64], "used": [64], "perplexity": []},
        rewards={"hit": [float("nan"), 0.1]},
    )
    text = Page(render_page(holes)).text
    assert not re.search(r"\b(None|nan)\b", text)
    assert "–" in text


def test_the_same_report_gives_the_same_bytes(run_dir):
    first = write_report(run_dir).read_bytes()
    assert write_report(run_dir).read_bytes() == first


def test_a_folder_without_a_report_is_named_and_left_alone(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path)) + " has no report.json"):
        write_report(tmp_path)
    (tmp_path / "report.json").write_text('{"run": ')
    with pytest.raises(ConfigError, match=r"report\.json is damaged"):
        write_report(tmp_path)
    (tmp_path / "report.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold an object, got list"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": "text"},
        {"stages": {"rl": "text"}},
        {"data": ["text"]},
        {"paired": "text"},
        {"rewards": {"x": "text"}},
        {"wall_s": 3},
        {"users": 3},
        {"peak_rss_bytes": "text"},
    ],
)
def test_a_report_with_a_text_for_a_number_or_a_map_is_damaged(tmp_path, changes):
    (tmp_path / "report.json").write_text(json.dumps(report() | changes))
    with pytest.raises(ConfigError, match=r"report\.json is damaged") as caught:
        print_summary(RunFolder(tmp_path), write_report(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["report.json", "metrics.jsonl", "scenario.yaml"])
def test_a_report_waits_for_no_pipe(tmp_path, name):
    (tmp_path / "report.json").write_text(json.dumps(report()))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name} is no regular file"):
        write_report(tmp_path)


def test_lines_of_metrics_with_other_values_than_numbers_are_counted_and_left_out(tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(report()))
    good = {"name": "loss", "stage": "rl", "step": 1, "value": 2.0, "rank": 0}
    bad = ({"rank": "x"}, {"step": 10**400}, {"value": float("nan")}, {"step": float("inf")}, {"rank": [1]})
    lines = [json.dumps(line) for line in (good, *({**good, **changes} for changes in bad))]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, "[" * 200_000, "3"]))
    curves, unread = read_curves(tmp_path / "metrics.jsonl")
    assert (len(curves), unread) == (1, 7)


def test_the_page_says_what_holds_of_seen_items_and_in_how_many_events_it_matters():
    data = report()["data"]
    assert "Full ranking of the catalogue. The best value of each column" in Page(render_page(report())).text
    share = {"train": 0.2213, "rl": 0.3486, "test": 0.4459}
    found = {"repeats": {"policy": "allow", "chosen_by": "data", "share": share}}
    text = Page(render_page(report(data=data | found))).text
    assert text.count("Seen items may be recommended again (data.repeats: allow, chosen by the data)") == 2
    for split, told in (("train", "22.1 %"), ("rl", "34.9 %"), ("test", "44.6 %")):
        assert re.search(rf"{split} events of an item seen before\s+{told}", text)


def test_coverage_stands_in_the_stage_table_beside_the_other_metrics_and_alone():
    for others in ({}, {"recall@10": 0.1}):
        rows = {name: others | {"coverage@10": value} for name, value in (("popularity", 0.01), ("rl", 0.77))}
        made = report(
            baselines={"popularity": rows["popularity"]},
            stages={"rl": rows["rl"]},
            detail={name: {"test": {"exhaustive": {"all": row}}} for name, row in rows.items()},
            paired={"rl-popularity": {}},
        )
        text = Page(render_page(made)).text
        assert "coverage@10" in text
        assert "0.7700" in text


def test_the_machine_of_every_stage_is_a_table():
    shares = {"data wait": 0.1, "dense": 0.7, "other": 0.2}
    stage = {
        "mfu": 0.25,
        "flops_per_s": 5e9,
        "matmul_flops_per_s": 2e10,
        "tokens_per_s": 1234.5,
        "shares": shares,
    }
    (table,) = build_run_tables({"machine": {"pretrain": stage}})
    assert table.rows == [["pretrain", "25.0 %", "5 of 20", "1,234", "10.0 %", "70.0 %", "20.0 %"]]


def test_a_report_says_how_many_rows_each_join_found():
    trainer = {"rows": 1000, "found": 800, "seconds": 0.5}
    joins = {"item": {"trainer": trainer, "evaluator": {"rows": 500, "found": 100, "seconds": 0.1}}}
    (table,) = build_run_tables({"joins": joins})
    assert [row[:5] for row in table.rows] == [
        ["item", "trainer", "1,000", "800", "80.0 %"],
        ["item", "evaluator", "500", "100", "20.0 %"],
    ]
    assert "join item: found 900 of 1,500 rows (60.0%)" in format_summary({"joins": joins})


def test_the_page_of_a_model_without_lists_speaks_of_predictions_and_not_of_a_ranking():
    text = Page(render_page(report(lists={}))).text
    assert "The label of every test event is predicted. The best value of each column" in text
    assert "ranking of the catalogue" not in text
