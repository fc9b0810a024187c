"""`nonet new FILE --data DIR`: what it finds, what it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nonet.controller.scenario import load_scenario
from nonet.controller.setup import make_data_setup, preflight
from nonet.samples.preparation import EventLog
from nonet.samples.sequences import TEST
from nonet.samples.tables import read_items


def log(users: int = 80, each: int = 8, items: int = 30, **columns) -> pa.Table:
    draw = np.random.default_rng(1)
    table = {
        "uid": np.repeat(np.arange(users), each),
        "sku": (np.arange(users * each) * 7 + draw.integers(0, 3, users * each)) % items,
        "ts": np.tile(np.arange(each) * 3600, users) + 1_600_000_000,
    }
    return pa.table(table | columns)


def catalogue(items: int = 30, name: str = "sku") -> pa.Table:
    return pa.table(
        {
            name: np.arange(items),
            "name": [f"thing {i} of {i % 4}" for i in range(items)],
            "price": np.ones(items),
        }
    )


def as_csv(table: pa.Table, path: str, mark: str = ",") -> None:
    rows = [table.column_names, *zip(*table.to_pydict().values(), strict=True)]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("\n".join(mark.join(map(str, row)) for row in rows) + "\n", encoding="utf-8")


def runs(path: str = "mine.yaml", changes: list[str] | None = None):
    """Return the scenario after all checks that precede a run."""
    scenario, folder = load_scenario(path, changes)
    preflight.check(scenario, folder)
    return scenario


def test_parquet_tables_are_used_where_they_are_with_their_columns_named(new):
    Path("data").mkdir()
    pq.write_table(log(), "data/events.parquet")
    pq.write_table(catalogue(), "data/things.parquet")
    code, out, err = new("mine.yaml", "--data", "data")
    assert code == 0, err
    assert "user = uid, item = sku, time = ts" in out
    scenario = runs()
    assert scenario.data.interactions == "data/events.parquet"
    assert scenario.data.columns == {"user": "uid", "item": "sku", "time": "ts", "title": "name"}
    assert scenario.tokenizer.get_options()["vectors"] == ["title", "cooccurrence"]
    assert list(scenario.stages) == ["pretrain"]
    assert not Path("mine-data").exists()


def test_a_csv_is_imported_beside_the_scenario_and_ratings_get_a_finetune(new):
    as_csv(log(stars=np.arange(640) % 5 + 1), "raw/clicks.tsv", "\t")
    code, out, err = new("sub/mine.yaml", "--data", "raw/clicks.tsv")
    assert code == 0, err
    assert "rating = stars" in out
    scenario = runs("sub/mine.yaml")
    assert scenario.data.interactions == "mine-data/interactions.parquet"
    assert list(scenario.stages) == ["pretrain", "finetune"]
    assert scenario.stages["finetune"].target == "rating >= 3"  # type: ignore[attr-defined]


def test_the_rl_stage_runs_when_its_comments_go(new):
    pq.write_table(log(), "events.parquet")
    assert new("my-feed.yaml", "--data", "events.parquet")[0] == 0
    lines = Path("my-feed.yaml").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("  # rl:"))
    Path("my-feed.yaml").write_text(
        "\n".join([*lines[:start], *(line.replace("# ", "", 1) for line in lines[start:])])
    )
    scenario = runs("my-feed.yaml")
    assert list(scenario.stages["rl"].rewards) == ["hit", "my_feed"]  # type: ignore[attr-defined]


def test_sequences_and_movielens_folders_are_known_by_their_files(new):
    Path("seq").mkdir()
    lines = [f"{u} " + " ".join(str((u + i) % 20) for i in range(8)) for u in range(60)]
    Path("seq/sequences.txt").write_text("\n".join(lines))
    code, out, _ = new("a.yaml", "--data", "seq")
    assert code == 0
    assert "read as sequences" in out
    assert "none: the place in the user's history stands for it" in out
    runs("a.yaml")
    ratings = log(rating=np.full(640, 4.0)).rename_columns(["userId", "movieId", "timestamp", "rating"])
    as_csv(ratings, "ml/ratings.csv")
    as_csv(pa.table({"movieId": range(30), "title": ["x"] * 30, "genres": ["A|B"] * 30}), "ml/movies.csv")
    code, out, _ = new("b.yaml", "--data", "ml")
    assert code == 0
    assert "read as movielens" in out
    assert list(runs("b.yaml").stages) == ["pretrain"]  # one rating for everything tells nothing apart


def test_recbole_s_files_are_a_pair(new):
    inter = log().rename_columns(["user_id:token", "item_id:token", "timestamp:float"])
    as_csv(inter, "rb/x.inter", "\t")
    as_csv(catalogue().rename_columns(["item_id:token", "title:token_seq", "price:float"]), "rb/x.item", "\t")
    as_csv(pa.table({"user_id:token": range(80), "age:float": [3] * 80}), "rb/x.user", "\t")
    assert new("mine.yaml", "--data", "rb")[0] == 0
    assert runs().tokenizer.get_options()["vectors"] == ["title", "cooccurrence"]


def test_tables_that_call_the_item_differently_are_written_anew(new):
    Path("data").mkdir()
    pq.write_table(log(), "data/events.parquet")
    pq.write_table(catalogue(name="item_id"), "data/items.parquet")
    assert new("mine.yaml", "--data", "data")[0] == 0
    assert runs().data.items == "mine-data/items.parquet"


@pytest.mark.parametrize("text_table", ["log", "items"])
def test_one_table_may_be_text_and_the_other_parquet(new, text_table):
    items = catalogue()
    items = items.set_column(0, "sku", items["sku"].cast(pa.int32())).append_column(
        "shelves", pa.array([[f"shelf {i % 3}", f"room {i % 2}"] for i in range(30)])
    )
    if text_table == "log":
        as_csv(log(), "log.csv")
        pq.write_table(items, "items.parquet")
        code, out, err = new("mine.yaml", "--data", "log.csv", "--items", "items.parquet")
        assert "log.csv is read as csv, items.parquet as parquet" in out
        assert "categories = shelves" in out
    else:
        pq.write_table(log(), "log.parquet")
        as_csv(items.drop(["shelves"]), "items.csv")
        code, out, err = new("mine.yaml", "--data", "log.parquet", "--items", "items.csv")
        assert "log.parquet is read as parquet, items.csv as csv" in out
    assert code == 0, err
    scenario = runs()
    written = read_items("mine-data/items.parquet", scenario.data.table_format)
    assert written.schema.field("item_id").type == pa.int64()
    if text_table == "log":
        assert written["categories"][0].as_py() == ["shelf 0", "room 0"]


def test_a_csv_keeps_the_names_of_columns_and_the_unit_of_times_that_later_files_have(new):
    table = log(name=np.arange(640))
    as_csv(table.set_column(2, "ts", pa.array(table["ts"].to_numpy() * 1000)), "log.csv")
    as_csv(catalogue(), "items.csv")
    assert new("mine.yaml", "--data", "log.csv")[0] == 0
    assert runs().data.columns == {"user": "uid", "item": "sku", "time": "ts"}
    assert EventLog("mine-data/interactions.parquet", runs().data.table_format).find_time_unit() == "ms"
    assert new("both.yaml", "--data", "log.csv", "--items", "items.csv")[0] == 0
    # Both tables have a column `name`, which is a title in one of them only, so they get Nonet's names.
    assert runs("both.yaml").data.columns == {}


def test_a_list_of_texts_that_recur_is_the_categories_of_items_and_other_lists_are_named(new):
    words = pa.array([[f"shelf {i % 3}", f"room {i % 2}"] for i in range(30)])
    items = catalogue().append_column("shelves", words)
    pq.write_table(log(), "events.parquet")
    pq.write_table(items, "items.parquet")
    code, out, _ = new("one.yaml", "--data", "events.parquet", "--items", "items.parquet")
    assert code == 0
    assert runs("one.yaml").tokenizer.get_options()["vectors"] == ["title", "categories", "cooccurrence"]
    pq.write_table(items.append_column("parts", words), "items.parquet")
    code, out, _ = new("two.yaml", "--data", "events.parquet", "--items", "items.parquet")
    assert code == 0
    assert "note: the lists shelves, parts of the items are not used" in out
    assert "--column categories=shelves" in out
    sentences = pa.array([[f"a sentence about {i}"] for i in range(30)])
    pq.write_table(catalogue().append_column("bullets", sentences), "items.parquet")
    code, out, _ = new("three.yaml", "--data", "events.parquet", "--items", "items.parquet")
    assert code == 0
    assert "note: the lists bullets of the items are not used" in out


def test_times_in_milliseconds_are_not_said_to_be_exact_to_the_second(new):
    table = log()
    finer = pa.array(table["ts"].to_numpy() * 1000 + np.arange(len(table)) % 1000)
    pq.write_table(table.set_column(2, "ts", finer), "events.parquet")
    code, out, _ = new("mine.yaml", "--data", "events.parquet")
    assert code == 0
    assert ", in milliseconds; 0.0% of neighbouring events of a user share a second" in out


def test_dangerous_data_are_told_with_numbers(new):
    short = log(users=60, each=2)
    long = log(users=20, each=5)
    both = pa.concat_tables([short, long.set_column(0, "uid", pa.array(np.repeat(np.arange(100, 120), 5)))])
    day = pa.array(np.full(len(both), 1_600_000_000))
    pq.write_table(both.set_column(2, "ts", day), "events.parquet")
    code, out, _ = new("mine.yaml", "--data", "events.parquet")
    assert code == 0
    assert "users have under 3 events: they are trained on and not tested" in out
    assert "warning: 100% of neighbouring events of a user share a timestamp" in out


def test_what_cannot_be_used_is_one_line_and_leaves_nothing(refused):
    Path("d").mkdir()
    assert "has no table" in refused("mine.yaml", "--data", "d")
    assert "no such file" in refused("mine.yaml", "--data", "nowhere")
    as_csv(log().slice(0, 0), "d/log.csv")
    assert "empty" in refused("mine.yaml", "--data", "d")
    as_csv(log().drop(["ts"]), "d/log.csv")
    assert "no column looks like the time; it has uid, sku" in refused("mine.yaml", "--data", "d")
    as_csv(log(users=500, each=1), "d/log.csv")
    assert "each of the 500 users has one event" in refused("mine.yaml", "--data", "d")
    words = pa.array(["next tuesday"] * 640)
    as_csv(log().set_column(2, "time", words), "d/log.csv")
    assert "wanted a timestamp" in refused("mine.yaml", "--data", "d")
    as_csv(log(), "d/log.csv")
    as_csv(log(), "d/log2.csv")
    assert "2 tables have users, items and times (log.csv, log2.csv)" in refused("mine.yaml", "--data", "d")
    assert "no table of d/log.csv has this column" in refused(
        "mine.yaml", "--data", "d/log.csv", "--column", "user=nobody"
    )


def test_columns_of_a_separate_file_of_items_can_be_named(refused, new):
    as_csv(log(), "plays.csv")
    pq.write_table(catalogue().rename_columns(["sku", "label", "price"]), "films.parquet")
    words = ("mine.yaml", "--data", "plays.csv", "--items", "films.parquet", "--column")
    assert "no table of plays.csv and films.parquet has this column" in refused(*words, "title=lable")
    code, out, _ = new("untitled.yaml", *words[1:-1])
    assert "no column of the items looks like a title: --column title=label" in out
    code, out, err = new(*words, "title=label")
    assert code == 0, err
    assert "looks like a title" not in out
    assert "title = label" in out
    assert runs().data.columns["title"] == "label"


def test_a_file_of_items_without_a_known_id_is_told_what_to_call_it(refused, new):
    as_csv(log(), "log.csv")
    as_csv(catalogue(name="faa"), "airports.csv")
    words = ("mine.yaml", "--data", "log.csv", "--items", "airports.csv")
    advice = "no column looks like the item; it has faa, name, price. Call the column of its ids sku there, as log.csv does"
    assert advice in refused(*words)
    as_csv(catalogue(name="sku"), "airports.csv")
    assert new(*words)[0] == 0


def test_words_that_do_not_fit_together_and_files_that_are_there_are_refused(refused):
    pq.write_table(log(), "events.parquet")
    assert "needs SCENARIO FILE, or FILE --data DIR" in refused("mine.yaml")
    assert "needs SCENARIO FILE, or FILE --data DIR" in refused(
        "quickstart", "m.yaml", "--data", "events.parquet"
    )
    assert "need --data" in refused("quickstart", "m.yaml", "--column", "user=uid")
    assert "must be a .yaml file" in refused("mine", "--data", "events.parquet")
    Path("mine.yaml").write_text("name: other\n")
    assert "already exists" in refused("mine.yaml", "--data", "events.parquet")


def shop_log(kinds: list[str]) -> pa.Table:
    """Each user looks at eight items a minute after another, and does something more with each of them."""
    table = log()
    twice = table.take(pa.array(np.repeat(np.arange(len(table)), 2)))
    seconds = twice["ts"].to_numpy() + np.arange(len(twice)) % 2 * 20
    return twice.set_column(2, "ts", pa.array(seconds)).append_column("action", pa.array(kinds * len(table)))


def test_views_and_orders_of_one_item_that_follow_each_other_become_one_event(new):
    pq.write_table(shop_log(["view", "order"]), "log.parquet")
    code, out, err = new("mine.yaml", "--data", "log.parquet", "--column", "event=action")
    assert code == 0, err
    assert (
        "note: 50% of the events are of the item of the user's event right before, such as an order after a view"
        in out
    )
    scenario = runs(changes=["stages.finetune.target=event == 'order'"])
    assert scenario.data.events.compress == 86400
    sequences = make_data_setup(scenario, Path.cwd()).build_with_facts().sequences
    assert sequences.measure_immediate_repeats(TEST) == 0
    assert sequences.targets["finetune"].all(), "each item was ordered"


@pytest.mark.parametrize("kinds", [["view", "view"], None])
def test_repeats_of_one_kind_stay_as_they_are(new, kinds):
    table = shop_log(kinds or ["view", "order"])
    pq.write_table(table if kinds else table.drop_columns("action"), "log.parquet")
    code, out, err = new(
        "mine.yaml", "--data", "log.parquet", *(["--column", "event=action"] if kinds else [])
    )
    assert code == 0, err
    assert runs().data.events is None
    assert "warning: 50% of the events are of the item" in out


@pytest.mark.parametrize("name", ["count", "span", "kinds"])
def test_a_log_with_a_column_that_compression_would_add_is_left_as_it_is(new, name):
    table = shop_log(["view", "order"])
    pq.write_table(table.append_column(name, pa.array(range(len(table)))), "log.parquet")
    code, _, err = new("mine.yaml", "--data", "log.parquet", "--column", "event=action")
    assert code == 0, err
    assert runs().data.events is None
